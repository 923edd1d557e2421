"""Chapter 4's small model without a part of it: `python -m scripts.studies.parts`.

Each part is taken out alone, in three trainings, and then all those at once that could be spared.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from scripts.ch04_encoder_decoder import PARTS, share_reversed, train_to_reverse, without
from scripts.studies.runner import Plan, Run, study_command, these

SEEDS = (0, 1, 2)  # that of chapter 4's page is the first


@dataclass(frozen=True)
class Setting:
    """What all trainings share."""

    corpus: str = "reversal"
    early: int = 800
    """Steps after which the model is judged, and goes on."""
    late: int = 1_600
    """All steps."""
    words: int = 1_000
    """New words of each length."""


def spared(runs: Sequence[Run], share: float = 0.95) -> list[str]:
    """The parts without which every training ends with so many of the ten-letter words right."""
    shares = {
        part: [run["late"]["right"]["10"] for run in these(runs, without=[part])] for part in PARTS
    }
    return [part for part in PARTS if shares[part] and min(shares[part]) > share]


def plan_runs(plan: Plan) -> None:
    """The whole model, each part out alone, and then what can be spared out at once."""
    rows = [[], *([part] for part in PARTS)]
    plan += [{"without": parts, "seed": seed} for seed in SEEDS for parts in rows]
    if all(these(plan.runs, **run) for run in plan):
        parts = spared(plan.runs)
        plan += [{"without": parts, "seed": seed} for seed in SEEDS]


def work(setting: Mapping[str, Any], task: Run) -> Run:
    """One training: the mean of 50 losses, and the share of words right by length, twice."""
    torch.set_default_dtype(torch.float64)  # as in chapter 4: so it draws the same numbers
    model, judged = without(*task["without"], seed=task["seed"]), {}

    def watch(step: int) -> None:
        if step in (setting["early"], setting["late"]):
            shares = {str(n): share_reversed(model, n, setting["words"]) for n in range(4, 11)}
            judged[step] = {name: round(share, 4) for name, share in shares.items()}

    losses = train_to_reverse(model, setting["late"], task["seed"], watch)
    found = {}
    for name in ("early", "late"):
        last = losses[max(0, setting[name] - 50) : setting[name]]
        loss = float(f"{sum(last) / len(last):.3g}")
        found[name] = {"loss": loss, "right": judged[setting[name]]}
    return task | found


main = study_command("scripts.studies.parts", Setting(), plan_runs, work)

if __name__ == "__main__":
    raise SystemExit(main())
