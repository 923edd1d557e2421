"""One recipe trained to its end in both precisions: `python -m scripts.studies.precision`.

It goes on where it stopped. Both trainings take as many threads as PyTorch chooses; on a machine
with other work, compare `cpu_seconds`, which doesn't count pauses.
"""

from dataclasses import replace
from typing import Any

import torch

from scripts import runs_folder
from scripts.book.command import GOES_ON
from scripts.book.records import load_record
from scripts.core.checkpoints import saved_states
from scripts.core.settings import PRESETS, require_bf16
from scripts.fast.losses import resolved
from scripts.fast.run import run
from scripts.studies.runner import Run
from scripts.studies.subject import SaveOptions, record_command

KEPT = ("command", "commit", "date", "device", "parameters", "weights_sha256", "chosen_by_val_bleu")
KEPT += ("history", "test")
CPU = torch.device("cpu")


def trained_in(precision: str) -> Run:
    """The record of the training in `precision`; trains, or goes on, if there is none yet."""
    name = f"multi30k-{precision}"
    changes = {"corpus": "multi30k", "precision": precision, "device": "cpu", "name": name}
    config, folder = resolved(replace(PRESETS["small"], **changes), CPU), runs_folder() / name
    typed = "--preset small " + " ".join(f"--{key} {value}" for key, value in changes.items())
    if (folder / "record.json").is_file():
        return load_record("record", folder)
    return run(config, bool(saved_states(folder)), typed.split())


def both_runs(_: SaveOptions) -> dict[str, Any]:
    """What the record says of the two trainings."""
    require_bf16(CPU)  # emulating its products takes days
    runs = {kind: trained_in(kind) for kind in ("float32", "bf16")}
    return {
        "corpus": "multi30k",
        "preset": "small",
        "runs": {kind: {key: run[key] for key in KEPT} for kind, run in runs.items()},
    }


MODULE = "scripts.studies.precision"
main = record_command(MODULE, "precision-multi30k", both_runs, interrupted=GOES_ON)

if __name__ == "__main__":
    raise SystemExit(main())
