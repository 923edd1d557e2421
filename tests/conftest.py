"""What all tests share."""

import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # spinning threads starve a shared machine

ROOT = Path(__file__).resolve().parent.parent
CHAPTERS = sorted((ROOT / "scripts").glob("ch[0-9][0-9]_*.py"))


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository's top folder."""
    return ROOT
