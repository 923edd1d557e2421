"""What all tests share."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # spinning threads starve a shared machine

ROOT = Path(__file__).resolve().parent.parent
CHAPTERS = sorted((ROOT / "scripts").glob("ch[0-9][0-9]_*.py"))
MODULES = sorted((ROOT / "scripts").rglob("*.py"))  # the chapters and all beside them


@pytest.fixture(autouse=True)
def default_dtype():
    """No test leaves another default dtype behind."""
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


@pytest.fixture
def float64(default_dtype):
    """Equal means equal to twelve digits; and the seed is the same for every test."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository's top folder."""
    return ROOT


@pytest.fixture(scope="session")
def site(tmp_path_factory) -> Path:
    """The site, built once for all workers."""
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared
    target = shared / "book/html"
    with open(shared / "book.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (target / "searchindex.js").exists():
            command = [sys.executable, str(ROOT / "docs/build.py"), str(target)]
            done = subprocess.run(command, capture_output=True, text=True, cwd=shared)
            assert done.returncode == 0, done.stderr[-4000:]
    return target
