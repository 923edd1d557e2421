"""What cross-attention is worth in parts, chapter 16: `python -m scripts.studies.aligners`.

The chapter's changes of cross-attention, on the whole validation split. Among them the four heads
of each layer that align our captions best are silenced together, and the four worst.
"""

from typing import Any

import torch

from scripts.ch16_intervening import CROSS_CHANGES, cost_per_token
from scripts.core.models import Trained
from scripts.studies.heads import Judge, caption_aligners, heads_by_kind
from scripts.studies.subject import Corpus, subject_command


def change_aligners(trained: Trained, corpus: Corpus) -> dict[str, Any]:
    """All that the record says: what each change costs, in nats a token, with standard errors."""
    chosen = caption_aligners(trained)
    groups = heads_by_kind(trained.model) | chosen
    judge = Judge(trained, corpus["val"])
    torch.manual_seed(0)  # noise
    lost = {
        name: judge.losses(groups[group], change) - judge.whole
        for name, (group, change) in CROSS_CHANGES.items()
    }
    costs = {name: cost_per_token(each, judge.tokens) for name, each in lost.items()}
    difference = lost["12 best aligners silent"] - lost["12 worst aligners silent"]
    return {
        "splits": {"val": len(corpus["val"])},
        "groups": {k: [f"cross {n + 1}.{h + 1}" for _, n, h in v] for k, v in chosen.items()},
        "costs": {name: round(cost, 5) for name, (cost, _) in costs.items()},
        "errors": {name: round(error, 5) for name, (_, error) in costs.items()},
        "best less worst": [round(x, 5) for x in cost_per_token(difference, judge.tokens)],
    }


main = subject_command("scripts.studies.aligners", "aligners", change_aligners)

if __name__ == "__main__":
    raise SystemExit(main())
