"""Recorded runs: a JSON file each in `results/`, with the provenance that lets anyone repeat it."""

import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from scripts import ROOT
from scripts.book.files import write_whole

RESULTS = ROOT / "results"
ARCHIVE = RESULTS / "archive"  # their `repeat` begins with the commit that has the command
RECORDED = ("torch", "sacrebleu", "sentencepiece", "safetensors", "numpy")


def git_commit() -> str:
    """The code's commit, with "+changes" if scripts/ differs, or "unknown".

    For a copy of the code outside its repository, $SERIES_COMMIT says it.
    """

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()

    if commit := os.environ.get("SERIES_COMMIT"):
        return commit
    try:
        return git("rev-parse", "HEAD") + ("+changes" if git("status", "-s", "scripts") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def device_name(device: torch.device | str) -> str:
    """What a run ran on, in words."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU ({platform.machine()}), {torch.get_num_threads()} of {os.cpu_count()} threads"


def provenance(command: str, device: torch.device | str = "cpu") -> dict[str, Any]:
    """Command, commit, date, device and versions: what every record starts with.

    `command` is history. `repeat` is the same thing in today's words: it follows when a command
    is renamed.
    """
    return {
        "command": command,
        "repeat": command,
        "commit": git_commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device_name(device),
        "python": platform.python_version(),
        "versions": {package: version(package) for package in RECORDED},
    }


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hex."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def save_record(name: str, record: dict[str, Any], folder: Path = RESULTS) -> Path:
    """Write `results/NAME.json`, whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    write_whole(path, (json.dumps(record, indent=1, ensure_ascii=False) + "\n").encode())
    return path


def record_names(pattern: str = "*") -> list[str]:
    """The names of records that fit, those in the archive among them, in alphabetical order."""
    return sorted(path.stem for at in (RESULTS, ARCHIVE) for path in at.glob(f"{pattern}.json"))


def load_record(name: str, folder: Path = RESULTS) -> dict[str, Any]:
    """The record NAME.json of `folder`; of results/ also one whose command is gone."""
    path = folder / f"{name}.json"
    if folder == RESULTS and not path.is_file():
        path = ARCHIVE / path.name
    return json.loads(path.read_text(encoding="utf-8"))


def recorded(
    name: str, command: str, measure: Callable[[], Mapping[str, Any]], save: bool
) -> dict[str, Any]:
    """The record of what `measure()` finds, with its provenance: kept as `name`, or else printed.

    Raises ValueError, before it measures, if it would replace what another command made.
    """
    path = RESULTS / f"{name}.json"
    if save and path.is_file() and (repeat := load_record(name)["repeat"]) != command:
        raise ValueError(f"{path} is what `{repeat}` makes: move it away, or leave --save out")
    record = {**provenance(command), **measure()}  # first names the code that runs
    if save:
        save_record(name, record)
    else:
        print(json.dumps(record, indent=1, ensure_ascii=False))
    return record
