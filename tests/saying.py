"""What a chapter's variables hold when it has run: tests hold its sentences to them."""

import functools
import runpy
from types import SimpleNamespace

import torch

from scripts import ROOT


@functools.cache
def ran(chapter: str) -> SimpleNamespace:
    """The names of the chapter's script after it ran, once in each process."""
    (path,) = (ROOT / "scripts").glob(f"{chapter}_*.py")
    kind, threads = torch.get_default_dtype(), torch.get_num_threads()
    try:
        return SimpleNamespace(**runpy.run_path(str(path)))
    finally:
        torch.set_default_dtype(kind)
        torch.set_num_threads(threads)
