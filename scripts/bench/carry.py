"""What travels to a bare machine with a GPU (`pack`), and what comes back (`bring`, `collect`).

The machine has Python, PyTorch, NumPy and the repository, and no network. What is packed
isn't an installation: it serves `scripts.gpu` alone, and lies outside the repository there.
"""

import shutil
import subprocess
import sys
from collections.abc import Collection
from importlib.metadata import version
from pathlib import Path

from scripts import ROOT
from scripts.book.files import write_whole
from scripts.book.records import git_commit, load_record, save_record, sha256
from scripts.corpora.multi30k import MULTI30K_SHA256, multi30k_text
from scripts.ladder.agenda import Settings, at_hand, is_done, log_text
from scripts.ladder.rungs import val_bleu

# What the agenda, and pytest for it, import besides PyTorch and NumPy; a test blocks all else.
WHEELS = (
    *("sentencepiece", "safetensors", "sacrebleu", "regex", "portalocker", "tabulate", "colorama"),
    *("lxml", "jsonargparse", "docstring-parser", "PyYAML", "tqdm"),
    *("pytest", "pluggy", "iniconfig", "packaging", "Pygments"),
)
PIP = "--quiet --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.12"
PIP += " --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64"  # the bare machine's
MODEL = ("model.safetensors", "tokenizer.model", "config.json")
LARGEST = 16 * 2**20  # bytes of a file that may come back


def pack(folder: Path) -> int:
    """Write what a bare machine lacks into `folder`: wheels, corpus, commit, the script `start`.

    Returns the bytes in all. Raises ValueError if pip has no such wheels.
    """
    for part in ("wheels", "corpus"):
        shutil.rmtree(folder / part, ignore_errors=True)  # two versions of one wheel stop pip
        (folder / part).mkdir(parents=True)
    command = [sys.executable, "-m", "pip", "download", *PIP.split(), "--dest", f"{folder}/wheels"]
    command += [f"{name}=={version(name)}" for name in WHEELS]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip() or "no reason given").splitlines()[-1]
        raise ValueError(f"pip could not download the wheels: {last}")
    for name in MULTI30K_SHA256:
        (folder / "corpus" / name).write_bytes(multi30k_text(name))
    write_whole(folder / "commit", git_commit().encode())
    shutil.copyfile(ROOT / "scripts/bench/start.sh", folder / "start")
    (folder / "start").chmod(0o755)
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def best_model(names: Collection[str], settings: Settings) -> str:
    """The one of these items whose model validates best, may ship, and can travel; "" if none."""
    scores = {}
    for name in names:
        record = load_record("record", settings.folder(name))
        weights = settings.folder(name) / MODEL[0]
        ships = {"test", "chosen_by_val_bleu"} <= record.keys() and weights.is_file()
        if ships and weights.stat().st_size <= LARGEST:
            scores[name] = val_bleu(record)
    return max(scores, key=scores.get, default="")


def bring(names: Collection[str], settings: Settings, out: str) -> None:
    """Write what the items `names` made on this machine into `out`; nothing if that is "".

    That is records.json, log.txt, and the best model.
    """
    if not out:
        return
    here = [name for name in names if is_done(name, settings) and at_hand(name, settings)]
    best = best_model(here, settings)
    told = {"tiny": settings.tiny, "device": settings.device.type, "model": best}
    told["records"] = {f"gpu-{name}": load_record("record", settings.folder(name)) for name in here}
    save_record("records", told, Path(out))
    write_whole(Path(out, "log.txt"), log_text(settings).encode())
    for name in MODEL if best else ():
        write_whole(Path(out, name), (settings.folder(best) / name).read_bytes())


def collect(folder: Path, names: Collection[str]) -> str:
    """Put in place what `bring` wrote: the records of items `names`, and a model.

    Returns the log. Raises FileNotFoundError or ValueError for what `bring` didn't write.
    """
    told = load_record("records", folder)
    if not {"tiny", "device", "model", "records"} <= {*told}:
        raise ValueError(f"{folder / 'records.json'} isn't one of the agenda's")
    settings = Settings(told["device"], tiny=told["tiny"])
    home = settings.folder(told["model"])
    ours, theirs = home / MODEL[0], folder / MODEL[0]
    if told["model"] in names and ours.is_file() and sha256(ours) != sha256(theirs):
        raise ValueError(f"{home} holds another model: move it away")
    for name in {f"gpu-{name}" for name in names} & told["records"].keys():
        save_record(name, told["records"][name], settings.records)
    if told["model"] in names:
        home.mkdir(parents=True, exist_ok=True)
        for name in MODEL:
            write_whole(home / name, (folder / name).read_bytes())
    return (folder / "log.txt").read_text("utf-8").rstrip()
