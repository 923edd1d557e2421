"""All that is owed on a GPU, as one command: `python -m scripts.gpu --minutes 9`.

It does what has no record yet, in order of worth, within the minutes it is given; the same command
goes on from there. `--list` says what is owed. `--device cpu --tiny` tries it without a GPU.

For a machine without a network, `--pack build/gpu` writes what that one lacks. There, in the
repository's folder, `build/gpu/start --minutes 9 --out FOLDER` does the work; `--collect FOLDER` at
home puts in place what came back.
"""

if __name__ == "__main__":  # first, so that Ctrl-C while libraries load is answered, too
    from scripts.book.command import launch

    raise SystemExit(launch("scripts.gpu"))

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from scripts.bench.carry import LARGEST, MODEL, bundle, collect, pack
from scripts.book.command import GOES_ON, Command
from scripts.book.records import load_record
from scripts.studies.agenda import Item, Log, Settings, at_hand, is_done, listing, serve
from scripts.studies.items import SMALLS, agenda, sum_up
from scripts.studies.ladder import val_bleu

RESERVE = 0.75  # minutes at the end for the scores of a training that is just over


def best_model(names: Sequence[str], settings: Settings) -> str:
    """The one of these items whose model validates best, may ship, and can travel; "" if none."""
    scores = {}
    for name in names:
        record = load_record("record", settings.folder(name))
        weights = settings.folder(name) / MODEL[0]
        ships = {"test", "chosen_by_val_bleu"} <= record.keys() and weights.is_file()
        if ships and weights.stat().st_size <= LARGEST:
            scores[name] = val_bleu(record)
    return max(scores, key=scores.get, default="")


def bring(items: Sequence[Item], settings: Settings, out: str) -> None:
    """Sum up the seeds; write what was made on this machine, and the best model, to `out`."""
    here = [item.name for item in items if is_done(item, settings) and at_hand(item.name, settings)]
    records = {f"gpu-{name}": load_record(f"gpu-{name}", settings.records) for name in here}
    if set(here) & set(SMALLS):
        records["gpu-small"] = sum_up(settings)
    if not out:
        return
    best = best_model(here, settings)
    told = {"tiny": settings.tiny, "device": settings.device.type, "model": best}
    model = [settings.folder(best) / name for name in MODEL if best]
    bundle(Path(out), told | {"records": records}, Log(settings).text(), model)


@dataclass
class GpuOptions:
    """How long, what, and where."""

    minutes: float = 9.0
    """When to end. What isn't done then goes on in the next call."""
    only: str = ""
    """Names of items, with commas between them; else all that are owed."""
    device: Literal["cuda", "cpu"] = "cuda"
    """A CPU's records stay below runs/, and say what they lack."""
    out: str = ""
    """A folder for what must come home: records.json, log.txt, the best model."""
    pack: str = ""
    """Only write what a bare machine lacks into this folder, such as build/gpu."""
    collect: str = ""
    """Only put in place what --out wrote into this folder."""
    tiny: bool = False
    list: bool = False

    def __post_init__(self):
        if not self.minutes > 0:
            raise ValueError("minutes must be more than 0")
        names = [item.name for item in agenda()]
        for name in self.names:
            if name not in names:
                raise ValueError(f"unknown item {name!r}: choose from {', '.join(names)}")

    @property
    def names(self):
        """The items asked for; none means all."""
        return [name for name in self.only.split(",") if name]


def run_agenda(options: GpuOptions) -> int:
    """What the options ask for. Raises ValueError where the GPU for it is missing."""
    items, settings = agenda(), Settings(torch.device(options.device), options.tiny)
    if options.list:
        print(listing(items, settings))
    elif options.pack:
        print(f"{options.pack}: {pack(Path(options.pack)) / 2**20:.1f} MiB; run its start there")
    elif options.collect:
        print(collect(Path(options.collect), [item.name for item in items]))
    elif options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("this machine has no usable GPU: --device cpu --tiny tries all of it")
    else:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read at the first product
        after = partial(bring, items, settings, options.out)
        return serve(items, options.names, settings, options.minutes, RESERVE, after)
    return 0


main = Command(
    __name__,
    GpuOptions,
    run_agenda,
    "Do what is owed on a GPU.",
    flags={
        "list": "Only say what is owed, and how long it takes.",
        "tiny": "All of it at tiny size, on the sample corpus.",
    },
    interrupted=GOES_ON,
)
