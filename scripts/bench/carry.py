"""What travels to a bare machine with a GPU (`pack`), and what comes back (`bundle`, `collect`).

The machine has Python, PyTorch, NumPy and the repository, and no network. This is no installation:
what is packed serves `scripts.gpu` alone, and lies outside of the repository there.
"""

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from scripts.book.files import write_whole
from scripts.book.records import git_commit, load_record, save_record
from scripts.corpora.multi30k import MULTI30K_SHA256, multi30k_file
from scripts.studies.agenda import Settings
from scripts.studies.items import sum_up

# What the agenda, and pytest for it, import beside PyTorch and NumPy; a test blocks all else.
WHEELS = (
    *("sentencepiece", "safetensors", "sacrebleu", "regex", "portalocker", "tabulate", "colorama"),
    *("lxml", "jsonargparse", "docstring-parser", "PyYAML", "tqdm"),
    *("pytest", "pluggy", "iniconfig", "packaging", "Pygments"),
)
LINUXES = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014", "manylinux1")
MODEL = ("model.safetensors", "tokenizer.model", "config.json")
LARGEST = 16 * 2**20  # bytes of a file that may come back

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
    how = "--quiet --disable-pip-version-check --no-deps --only-binary=:all:"
    machine = "--python-version 3.12 --implementation cp"  # the bare one's
    machine += "".join(f" --platform {linux}_x86_64" for linux in LINUXES)
    command = [sys.executable, "-m", "pip", "download", *how.split(), *machine.split()]
    command += ["--dest", str(folder), *(f"{name}=={version(name)}" for name in WHEELS)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip() or "no word").splitlines()[-1]
        raise ValueError(f"pip could not download the wheels: {last}")


def pack(folder: Path) -> int:
    """Write what a bare machine lacks into `folder`: wheels, corpus, and the script `start`.

    Returns the bytes in all.
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
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def bundle(out: Path, told: dict[str, Any], log: str, model: Sequence[Path]) -> None:
    """Write what comes back into `out`: records.json, log.txt, and the files of a model."""
    out.mkdir(parents=True, exist_ok=True)
    save_record("records", told, out)
    write_whole(out / "log.txt", log.encode())
    for path in model:
        write_whole(out / path.name, path.read_bytes())


def collect(folder: Path, names: Sequence[str]) -> str:
    """Put in place what `bundle` wrote: the records of items `names`, of the seeds, and a model.

    Returns the log. Raises FileNotFoundError or ValueError for what isn't a bundle's.
    """
    told = load_record("records", folder)
    if not {"tiny", "device", "model", "records"} <= set(told):
        raise ValueError(f"{folder / 'records.json'} is none of the agenda's")
    settings = Settings(torch.device(told["device"]), told["tiny"])
    for name in {f"gpu-{name}" for name in names} & told["records"].keys():
        save_record(name, told["records"][name], settings.records)
    sum_up(settings)
    if told["model"] in names:
        home = settings.folder(told["model"])
        home.mkdir(parents=True, exist_ok=True)
        for name in MODEL:
            write_whole(home / name, (folder / name).read_bytes())
    return (folder / "log.txt").read_text("utf-8").rstrip()
