"""One recipe trained to its end in both precisions: `python -m scripts.studies.precision`.

It goes on where it stopped. Both trainings take as many threads as PyTorch chooses; on a machine
with other work, compare `cpu_seconds`, which doesn't count pauses.
"""

from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal

import torch

from scripts import runs_folder
from scripts.book.command import GOES_ON, Command, as_typed
from scripts.book.records import provenance, save_record
from scripts.core.checkpoints import saved_states
from scripts.core.settings import PRESETS, require_bf16
from scripts.fast.losses import resolved
from scripts.fast.run import run
from scripts.studies.runner import on_record

PRESET = "small"
KEPT = ("command", "commit", "date", "device", "parameters", "weights_sha256", "best_epoch")
KEPT += ("chosen_by_val_bleu", "history", "test")


@dataclass
class PairOptions:
    """What is trained twice."""

    corpus: Literal["sample", "multi30k"] = "multi30k"
    """What to learn from."""
    save: bool = False
    """Write results/precision-CORPUS.json."""


def one_run(options: PairOptions, precision: str) -> dict[str, Any]:
    """The record of the training in `precision`; trains, or goes on, if there is none yet."""
    name = f"{options.corpus}-{precision}"
    changes = {"corpus": options.corpus, "precision": precision, "device": "cpu", "name": name}
    config = resolved(replace(PRESETS[PRESET], **changes), torch.device("cpu"))
    words = ["--preset", PRESET, *chain(*((f"--{key}", value) for key, value in changes.items()))]
    folder = runs_folder() / name
    found = on_record(folder / "record.json", config)
    return found or run(config, bool(saved_states(folder)), words)


def run_pair(options: PairOptions) -> dict[str, Any]:
    """Both trainings as one record, which is saved if the options say so.

    Raises ValueError on a processor without bfloat16 products: emulating them takes days.
    """
    require_bf16(torch.device("cpu"))
    made = provenance(
        as_typed("scripts.studies.precision", options)
    )  # first: names the code that runs
    runs = {precision: one_run(options, precision) for precision in ("float32", "bf16")}

    def total(clock: str, precision: str) -> float:
        return sum(row[clock] for row in runs[precision]["history"])

    clocks = ("seconds", "cpu_seconds")
    record = {
        **made,
        "corpus": options.corpus,
        "preset": PRESET,
        "times_as_fast": {c: round(total(c, "float32") / total(c, "bf16"), 3) for c in clocks},
        "runs": {name: {key: one[key] for key in KEPT} for name, one in runs.items()},
    }
    if options.save:
        save_record(f"precision-{options.corpus}", record)
    for name, one in runs.items():
        best = one["chosen_by_val_bleu"]["best epoch"]
        cpu = total("cpu_seconds", name)
        print(f"{name}: {cpu:,.0f} processor seconds, validation BLEU {best:.2f}")
    return record


main = Command("scripts.studies.precision", PairOptions, run_pair, interrupted=GOES_ON)

if __name__ == "__main__":
    raise SystemExit(main())
