"""All that is owed on a GPU, as one command: `python -m scripts.gpu --minutes 9`.

It does what has no record yet, in order of worth, within the minutes it is given; the same command
goes on from there. `--list` says what is owed. `--device cpu --tiny` tries it without a GPU.

For a machine without a network, `--pack build/gpu` writes what it lacks. There, in the
repository's folder, `build/gpu/start --minutes 9 --out FOLDER` does the work; `--collect FOLDER` at
home puts in place what came back.
"""

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from scripts.bench.carry import bring, collect, pack
from scripts.bench.items import agenda
from scripts.book.command import GOES_ON, Command
from scripts.core.models import without_model
from scripts.ladder.agenda import Clock, Settings, listing, serve


@dataclass
class GpuOptions(Settings):
    """How long, what, and where."""

    minutes: float = 9.0
    """When to end. The next call goes on with what isn't done by then."""
    out: str = ""
    """A folder for what must come home: records.json, log.txt, the best model."""
    pack: str = ""
    """Only write what a bare machine lacks into this folder, such as build/gpu."""
    collect: str = ""
    """Only put in place what --out wrote into this folder."""

    def __post_init__(self):
        super().__post_init__()
        self.check([item.name for item in agenda()])


def run_agenda(options: GpuOptions) -> int:
    """Do what the options ask for. Raises ValueError if the GPU for it is missing."""
    items = agenda()
    names = [item.name for item in items]
    if options.list:
        print(listing(items, options))
    elif options.pack:
        print(f"{options.pack}: {pack(Path(options.pack)) / 2**20:.1f} MiB; run its start there")
    elif options.collect:
        print(collect(Path(options.collect), names))
    elif options.device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("this machine has no usable GPU: --device cpu --tiny tries all of it")
    else:
        if options.out and not Path(options.out, "records.json").is_file():
            without_model(Path(options.out))
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read at the first product
        clock = Clock(options.minutes, options.takes(options.reserve))
        return serve(items, options, clock, partial(bring, names, options, options.out))
    return 0


FLAGS = {
    "list": "Only say what is owed, and how long it takes.",
    "tiny": "All of it at tiny size, on a few pairs of the sample corpus.",
}
main = Command("scripts.gpu", GpuOptions, run_agenda, interrupted=GOES_ON)

if __name__ == "__main__":
    raise SystemExit(main())
