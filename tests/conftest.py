"""What all tests share."""

import fcntl
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # spinning threads starve a shared machine

ROOT = Path(__file__).resolve().parent.parent
CHAPTERS = sorted((ROOT / "scripts").glob("ch[0-9][0-9]_*.py"))
MODULES = sorted((ROOT / "scripts").rglob("*.py"))  # the chapters and all other modules
SLOW_FILES = re.compile(
    r"test_(browser|ch09|gpu|house_faults|living|races|site|steps|studies|translate)"
)
THREADS = torch.get_num_threads()


@pytest.fixture(autouse=True)
def torch_as_it_came():
    """Each test begins and ends with PyTorch's own number of threads and default dtype."""
    torch.set_num_threads(THREADS)  # CTranslate2, for one, sets it for the whole process
    before = torch.get_default_dtype()
    yield
    torch.set_num_threads(THREADS)
    torch.set_default_dtype(before)


@pytest.fixture
def float64(torch_as_it_came):
    """In float64, equal means to twelve digits; and every test gets the same seed."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def once(tmp_path_factory):
    """once(name, make) is a folder that all workers share; the first to ask has `make` fill it."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def folder_of(name: str, make: Callable[[Path], Any]) -> Path:
        folder, ready = shared / name, shared / f"{name}.ready"
        with open(shared / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not ready.exists():
                shutil.rmtree(folder, ignore_errors=True)  # another worker's failed attempt
                folder.mkdir()
                make(folder)
                ready.touch()
        return folder

    return folder_of


@pytest.fixture(scope="session")
def forty_pairs():
    """Forty pairs of the sample corpus, eight to validate, in the shipped model's pieces."""
    from scripts.ch07_multi30k import encode_pairs
    from scripts.core.data import TrainingData
    from scripts.core.models import load_model
    from scripts.corpora.load import load_corpus

    tokenizer = load_model(ROOT / "models" / "sample-de-en").tokenizer
    pairs = load_corpus("sample")["train"][:40]
    corpus = {"train": pairs, "val": pairs[:8]}
    encoded = [encode_pairs(corpus[split], tokenizer) for split in ("train", "val")]
    return TrainingData(corpus, tokenizer, *encoded)


@pytest.fixture(scope="module")
def trained():
    """The model that chapters 15 and 16 look into, in float64."""
    from scripts.core.models import STUDIED, load_model

    loaded = load_model(STUDIED)
    loaded.model.double()
    return loaded


@pytest.fixture(scope="module")
def park(trained):
    """Its pass over a caption about a park."""
    from scripts.ch15_looking_inside import look_at
    from scripts.corpora.captions import aligned_pairs

    return look_at(trained, aligned_pairs()[2].texts[0])


@pytest.fixture
def tiny():
    """A very small model in float64, with dropout, all its weights random."""
    from scripts.book.instruments import scramble
    from scripts.ch04_encoder_decoder import make_model

    torch.manual_seed(0)
    model = make_model(30, 30, N=2, d_model=16, d_ff=32, h=4, dropout=0.1, norm_first=True).double()
    scramble(model)
    return model


def pytest_collection_modifyitems(items):
    """What takes minutes comes first, so that no worker is left alone with it at the end.

    `make check` leaves out the files that start many processes, or train, and all tests that run a
    whole chapter.
    """
    items.sort(key=lambda item: item.path.name != "test_browser.py")
    for item in items:
        runs_a_chapter = "ran" in getattr(item, "function", item).__code__.co_names
        if runs_a_chapter or SLOW_FILES.match(item.path.name):
            item.add_marker("slow")


def pytest_sessionfinish(session):
    """What `once` made takes more than a gigabyte: it is removed when all workers are done."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        base = session.config._tmp_path_factory.getbasetemp()
        for ready in base.glob("*.ready"):
            shutil.rmtree(ready.with_suffix(""), ignore_errors=True)


@pytest.fixture(scope="session")
def site(once) -> Path:
    """The built site."""

    def build(folder: Path) -> None:
        command = [sys.executable, str(ROOT / "docs/build.py"), str(folder / "html")]
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
        assert done.returncode == 0, done.stderr[-4000:]

    return once("book", build) / "html"
