"""What good and bad aligners are worth together, chapter 16: `python -m scripts.studies.aligners`.

The four heads of each layer of cross-attention that align our captions best, and the four worst,
are silenced together: on the whole validation split, and on each half of it.
"""

from typing import Any

from scripts.ch16_intervening import group_costs
from scripts.core.models import Trained
from scripts.studies.heads import Judge, caption_aligners
from scripts.studies.subject import Corpus, subject_command


def silence_aligners(trained: Trained, corpus: Corpus) -> dict[str, Any]:
    """All that the record says: the groups, and a row for each part of the split."""
    groups = caption_aligners(trained)
    val = corpus["val"]
    parts = {"validation": val, "its even lines": val[::2], "its odd lines": val[1::2]}
    rows = []
    for part, pairs in parts.items():
        judge = Judge(trained, pairs)
        lost = {name: judge.losses(heads) - judge.whole for name, heads in groups.items()}
        row = {name: round(cost, 5) for name, cost in group_costs(lost, judge.tokens).items()}
        rows.append({"part": part, "pairs": len(pairs)} | row)
    names = {
        name: [f"cross {n + 1}.{h + 1}" for _, n, h in heads] for name, heads in groups.items()
    }
    return {"splits": {"val": len(val)}, "groups": names, "lost": rows}


main = subject_command("scripts.studies.aligners", "aligners", silence_aligners)

if __name__ == "__main__":
    raise SystemExit(main())
