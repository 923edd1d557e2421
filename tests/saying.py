"""A chapter's variables after it has run: tests check its sentences against them."""

import functools
import os
import runpy
import tempfile
from types import SimpleNamespace

import pytest
import torch

from scripts import ROOT

HIDDEN = ("DISPLAY", "WAYLAND_DISPLAY", "MULTI30K_DIR", "RANK")  # from a chapter's script
NO_NETWORK = dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")


@functools.cache
def ran(chapter: str) -> SimpleNamespace:
    """The variables of the chapter's script after it ran headless, once in each process.

    No display, no network, no file left behind.
    """
    (path,) = (ROOT / "scripts").glob(f"{chapter}_*.py")
    kind, threads = torch.get_default_dtype(), torch.get_num_threads()
    with tempfile.TemporaryDirectory() as desk, pytest.MonkeyPatch.context() as patch:
        patch.chdir(desk)
        for name in HIDDEN:
            patch.delenv(name, raising=False)
        for name, value in NO_NETWORK.items():
            patch.setenv(name, value)
        try:
            names = runpy.run_path(str(path), run_name="__main__")
        finally:
            torch.set_default_dtype(kind)
            torch.set_num_threads(threads)
        assert not os.listdir(desk), "a show leaves files in the working directory"
    return SimpleNamespace(**names)
