"""Drawings of chapter 26: words beside their translation, and what fine-tuning gives and takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from scripts import Late
from scripts.book.charts import rounded
from scripts.book.look import GREY, PALETTE, colored

alt, pd = Late("altair"), Late("pandas")

BEFORE = "before fine-tuning"


def alignment(
    source: Sequence[str], target: Sequence[str], links: Sequence[tuple[int, int]]
) -> alt.LayerChart:
    """Two rows of words with a line for each link, from a source word's place to a target's.

    Words without a link are grey.
    """
    sides = {1: source, 0: target}
    step = {row: 1 / len(words) for row, words in sides.items()}
    linked = {1: {i for i, _ in links}, 0: {j for _, j in links}}
    words = [
        {"x": (i + 0.5) * step[row], "y": row, "word": word, "linked": i in linked[row]}
        for row, side in sides.items()
        for i, word in enumerate(side)
    ]
    ends = [
        {"x": (i + 0.5) * step[1], "y": 0.87, "x2": (j + 0.5) * step[0], "y2": 0.13}
        for i, j in links
    ]
    x = alt.X("x:Q", axis=None).scale(domain=[0, 1])
    y = alt.Y("y:Q", axis=None).scale(domain=[-0.1, 1.1])
    rules = alt.Chart(rounded(pd.DataFrame(ends))).mark_rule(color=GREY, strokeWidth=2)
    texts = alt.Chart(rounded(pd.DataFrame(words))).mark_text(fontSize=15)
    opacity = alt.when("datum.linked").then(alt.value(1)).otherwise(alt.value(0.4))
    named = texts.encode(x, y, text="word", opacity=opacity)
    drawn = rules.encode(x, y, x2="x2", y2="y2") + named
    return drawn.properties(width=560, height=120)


def tuning_chart(runs: Sequence[Mapping[str, Any]]) -> alt.Chart:
    """A point for each model: exactly right of the old sentences, and of the negated ones."""
    rows = [
        {"trained on": name, "old": 100 * shares["old"], "negated": 100 * shares["negated"]}
        for run in runs
        for name, shares in run["tuned"].items()
    ]
    colors = dict(zip(dict.fromkeys(row["trained on"] for row in rows), PALETTE, strict=False))
    old = alt.X("old:Q", title="old test sentences that are exactly right (%)")
    negated = alt.Y("negated:Q", title="negated ones (%)")
    chart = alt.Chart(rounded(pd.DataFrame(rows))).mark_point(filled=True, opacity=0.8)
    color = colored("trained on", colors, legend=alt.Legend(title=None))
    before = f"datum['trained on'] == '{BEFORE}'"  # eight in one place
    size = alt.when(before).then(alt.value(220)).otherwise(alt.value(80))
    return chart.encode(
        old.scale(domain=[0, 100]), negated.scale(domain=[0, 100]), color, size=size
    )
