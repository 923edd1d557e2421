"""What travels to a bare machine with a GPU (`pack`), and what comes back (`bundle`, `collect`)."""

import hashlib
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from scripts.book.files import write_whole
from scripts.book.records import git_commit, load_record, save_record
from scripts.corpora.multi30k import MULTI30K_SHA256, multi30k_file

# What the agenda imports beside PyTorch and NumPy; a test blocks everything else.
WHEELS = (
    "sentencepiece",
    "safetensors",
    "sacrebleu",
    "regex",
    "portalocker",
    "tabulate",
    "colorama",
    "lxml",
    "jsonargparse",
    "docstring-parser",
    "PyYAML",
    "tqdm",
)
PYTHON = "3.12"  # of the bare machine
LINUXES = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014", "manylinux1")
HEAVIEST = 25 * 2**20  # bytes that may travel there
MODEL = ("model.safetensors", "tokenizer.model", "config.json")
LARGEST, MOST = 16 * 2**20, 8  # bytes of a file that may come back, and how many files

START = """#!/bin/sh
# Run this in the repository's folder: it does what is owed on a GPU. Its options are those of
# `python -m scripts.gpu`. What comes with it is installed outside the repository.
set -e
here=$(cd "$(dirname "$0")" && pwd)
test -f scripts/gpu.py || {{ echo "run this in the repository's folder" >&2; exit 2; }}
site="${{XDG_CACHE_HOME:-${{HOME:-/tmp}}/.cache}}/from-attention-to-translation/wheels-{wheels}"
if [ ! -d "$site" ]; then
  rm -rf "$site.partial"
  python3 -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile \\
    --target "$site.partial" "$here"/wheels/*.whl
  mv "$site.partial" "$site"
fi
export PYTHONPATH="$site${{PYTHONPATH:+:$PYTHONPATH}}"
export MULTI30K_DIR="$here/corpus"
export SERIES_COMMIT="{commit}"
export CUBLAS_WORKSPACE_CONFIG=:4096:8  # or its sums differ from call to call
export PYTHONUNBUFFERED=1 TQDM_MININTERVAL=30  # what is said is seen; bars say little
exec python3 -m scripts.gpu "$@"
"""


def download(folder: Path) -> None:
    """Fetch the wheels, in the versions installed here. Raises ValueError where pip can't."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary=:all:", "--python-version", PYTHON]
    command += ["--implementation", "cp"]
    for linux in LINUXES:
        command += ["--platform", f"{linux}_x86_64"]
    command += ["--dest", str(folder), *(f"{name}=={version(name)}" for name in WHEELS)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip() or "no word").splitlines()[-1]
        raise ValueError(f"pip could not download the wheels: {last}")


def pack(folder: Path) -> int:
    """Write what a bare machine lacks into `folder`: wheels, corpus, and the script `start`.

    Returns the bytes in all. Raises ValueError where they are too many.
    """
    for part in ("wheels", "corpus"):
        shutil.rmtree(folder / part, ignore_errors=True)  # two versions of one wheel stop pip
        (folder / part).mkdir(parents=True)
    download(folder / "wheels")
    for name in MULTI30K_SHA256:
        shutil.copyfile(multi30k_file(name), folder / "corpus" / name)
    wheels = " ".join(sorted(path.name for path in (folder / "wheels").iterdir()))
    filled = {"wheels": hashlib.sha256(wheels.encode()).hexdigest()[:12], "commit": git_commit()}
    write_whole(folder / "start", START.format(**filled).encode())
    (folder / "start").chmod(0o755)
    total = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    if total > HEAVIEST:
        raise ValueError(f"{folder} has {total:,} bytes: {HEAVIEST:,} may travel")
    return total


def bundle(out: Path, told: dict[str, Any], log: str, models: Sequence[Path] = ()) -> list[str]:
    """Write what comes back into `out`: records.json, log.txt, and the files in `models`.

    Returns the names of those that are too large, which are left out. Raises ValueError where
    `out` would hold too many files.
    """
    out.mkdir(parents=True, exist_ok=True)
    sizes = {path.name: path.stat().st_size for path in models}
    left = [name for name, size in sizes.items() if size > LARGEST]
    for path in models:
        if path.name not in left:
            write_whole(out / path.name, path.read_bytes())
    save_record("records", told, out)
    write_whole(out / "log.txt", log.encode())
    files = [path for path in out.iterdir() if path.is_file()]
    if len(files) > MOST or any(path.stat().st_size > LARGEST for path in files):
        raise ValueError(f"{out} holds more than can come back: empty it first")
    return left


def bundled(folder: Path) -> dict[str, Any]:
    """What `bundle` told. Raises FileNotFoundError or ValueError for what isn't a bundle's."""
    if not (folder / "records.json").is_file():
        raise FileNotFoundError(f"{folder} holds no records.json: name what --out named")
    told = load_record("records", folder)
    names = told.get("records", [""]) if isinstance(told, dict) else [""]
    if any(not re.fullmatch(r"gpu-[a-z0-9][a-z0-9.-]*", name) for name in names):
        raise ValueError(f"{folder / 'records.json'} is none of the agenda's")
    return told


def collect(folder: Path, records: Path, runs: Path) -> list[str]:
    """Put the records of a bundle into `records` and its model into `runs`; a line for each."""
    told = bundled(folder)
    said = []
    records.mkdir(parents=True, exist_ok=True)
    for name, record in told["records"].items():
        old = load_record(name, records) if (records / f"{name}.json").is_file() else None
        save_record(name, record, records)
        said.append(f"{name}: {'new' if old is None else 'as before' if old == record else 'anew'}")
    said += [f"{name}: failed: {one['failed']}" for name, one in told["failed"].items()]
    if told["model"] and (folder / "model.safetensors").is_file():
        home = runs / Path(told["model"]).name
        home.mkdir(parents=True, exist_ok=True)
        for name in MODEL:
            write_whole(home / name, (folder / name).read_bytes())
        said.append(f"{home}: the model")
    return said
