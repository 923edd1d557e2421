"""English guessed without a source (chapter 21): `python -m scripts.studies.english`.

Counting models of English pieces, from the targets of all pairs and from those of the part that
back-translation knows; nats a piece on the validation captions, as in `scripts.studies.recipes`.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from scripts.studies.recipes import ALL, BASE, PART, SHARE
from scripts.studies.rows import data_of
from scripts.studies.runner import Plan, Run, study_command

DISCOUNT = 0.75  # taken off every count, for the shorter context (Ney et al. 1994)
ORDERS = (1, 2, 3, 4)


class Counted:
    """The next piece's probability from counts of up to `order` pieces in a row, interpolated."""

    def __init__(self, rows: Sequence[Sequence[int]], order: int, vocab: int):
        self.order, self.vocab = order, vocab
        self.after: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
        for row in rows:
            for i in range(1, len(row)):
                for start in range(max(0, i - order + 1), i + 1):
                    self.after[tuple(row[start:i])][row[i]] += 1

    def probability(self, piece: int, context: tuple[int, ...]) -> float:
        """p(piece | context), of which the last `order` − 1 pieces count."""
        shorter = self.probability(piece, context[1:]) if context else 1 / self.vocab
        if context not in self.after:
            return shorter
        counts = self.after[context]
        kept = max(counts[piece] - DISCOUNT, 0.0)
        return (kept + DISCOUNT * len(counts) * shorter) / counts.total()

    def nats(self, row: Sequence[int]) -> float:
        """−log p of a row of pieces, its first one given."""
        contexts = (tuple(row[max(0, i - self.order + 1) : i]) for i in range(1, len(row)))
        return -sum(
            math.log(self.probability(piece, context))
            for piece, context in zip(row[1:], contexts, strict=True)
        )


def plan_runs(plan: Plan) -> None:
    """Every order, on the part's English and on all of it. Nothing is drawn: one seed."""
    plan += [{"row": row, "order": n, "seed": 1} for row in (PART, ALL) for n in ORDERS]


def work(setting: Mapping[str, Any], task: Run) -> Run:
    """One counting model."""
    data = data_of(setting["corpus"], setting["vocab"], SHARE if task["row"] == PART else 1)
    model = Counted([e.tgt for e in data.train], task["order"], len(data.tokenizer))
    pieces = sum(len(e.tgt) - 1 for e in data.val)
    return {"loss": round(sum(model.nats(e.tgt) for e in data.val) / pieces, 4)}


main = study_command("scripts.studies.english", replace(BASE, name="english"), plan_runs, work)

if __name__ == "__main__":
    raise SystemExit(main())
