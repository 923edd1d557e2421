"""One recipe trained to its end in both precisions: `python -m scripts.studies.precision`.

It goes on where it stopped. Both trainings take as many threads as PyTorch chooses; on a machine
with other work, compare `cpu_seconds`, which doesn't count pauses.
"""

from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal

import torch

from scripts import runs_folder
from scripts.book.command import GOES_ON, Command, as_typed
from scripts.book.records import recorded
from scripts.core.checkpoints import saved_states
from scripts.core.settings import PRESETS, require_bf16
from scripts.fast.losses import resolved
from scripts.fast.run import run
from scripts.studies.runner import Run, on_record

PRESET = "small"
KEPT = ("command", "commit", "date", "device", "parameters", "weights_sha256", "chosen_by_val_bleu")
KEPT += ("history", "test")
CLOCKS = ("seconds", "cpu_seconds")


@dataclass
class PairOptions:
    """What is trained twice."""

    corpus: Literal["sample", "multi30k"] = "multi30k"
    """What to learn from."""
    save: bool = False
    """Write results/precision-CORPUS.json."""


def trained_in(precision: str, corpus: str) -> Run:
    """The record of the training in `precision`; trains, or goes on, if there is none yet."""
    name = f"{corpus}-{precision}"
    changes = {"corpus": corpus, "precision": precision, "device": "cpu", "name": name}
    config = resolved(replace(PRESETS[PRESET], **changes), torch.device("cpu"))
    words = ["--preset", PRESET, *chain(*((f"--{key}", value) for key, value in changes.items()))]
    folder = runs_folder() / name
    record = on_record(folder / "record.json", config)
    return record or run(config, bool(saved_states(folder)), words)


def run_pair(options: PairOptions) -> Run:
    """Train one recipe in both precisions.

    Raises ValueError on a processor without bfloat16 products: emulating them takes days.
    """
    require_bf16(torch.device("cpu"))

    def measure() -> Run:
        runs = {kind: trained_in(kind, options.corpus) for kind in ("float32", "bf16")}
        plain, half = (
            {clock: sum(row[clock] for row in run["history"]) for clock in CLOCKS}
            for run in runs.values()
        )
        return {
            "corpus": options.corpus,
            "preset": PRESET,
            "times_as_fast": {clock: round(plain[clock] / half[clock], 3) for clock in CLOCKS},
            "runs": {kind: {key: run[key] for key in KEPT} for kind, run in runs.items()},
        }

    command = as_typed("scripts.studies.precision", options)
    return recorded(f"precision-{options.corpus}", command, measure, options.save)


main = Command("scripts.studies.precision", PairOptions, run_pair, interrupted=GOES_ON)

if __name__ == "__main__":
    raise SystemExit(main())
