"""Drawings of learning from models: the recipes, and the rungs of the ladder."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from scripts import Late
from scripts.book.charts import GREY, INK, rounded, titled
from scripts.book.figures.rivals import rival_dots

alt, pd = Late("altair"), Late("pandas")


def recipe_chart(runs: pd.DataFrame, to_beat: Mapping[str, str]) -> alt.TopLevelMixin:
    """BLEU of every run: above, the rows that know all pairs; below, those that know a part.

    `runs` has the columns row and bleu; `to_beat` names each row's rival.
    """
    shown = runs[runs["row"].isin([*to_beat, *to_beat.values()])]
    part = shown["row"].str.startswith("a part")
    panels = [rival_dots(family, to_beat) for family in (shown[~part], shown[part])]
    return titled(
        alt.vconcat(*panels),
        "Two recipes gain BLEU, and one loses some",
        "Each point is a run, the tick a row's mean, the open diamond the mean that it has to "
        "beat. Mind the axes: they differ, and don't begin at 0.",
        wrap=80,
    )


def ladder_chart(rows: Sequence[Mapping[str, Any]]) -> alt.TopLevelMixin:
    """Validation BLEU of each run of the ladder's rungs, except those that translate back."""
    shown = [row for row in rows if row["gain"] is not None]
    order = [row["about"] for row in shown]
    runs = [{"rung": row["about"], "BLEU": bleu} for row in shown for bleu in row["each"]]
    frame = rounded(pd.DataFrame(runs))
    ends = [math.floor(frame["BLEU"].min()), math.ceil(frame["BLEU"].max())]
    axis = alt.X("BLEU:Q", scale=alt.Scale(domain=ends), title="validation BLEU, greedy")
    y = alt.Y("rung:N", sort=order, title=None)
    dots = alt.Chart(frame).mark_circle(size=75, color=INK).encode(x=axis, y=y)
    first = pd.DataFrame({"BLEU": [shown[0]["val_bleu"]]})
    rule = alt.Chart(first).mark_rule(color=GREY, strokeDash=[4, 4]).encode(x=axis)
    best = max(shown, key=lambda row: row["val_bleu"])
    return titled(
        alt.layer(rule, dots).properties(width=420, height=28 * len(order)),
        f"Highest by greedy decoding: {best['about']}",
        "Each point is a whole training of the small model. Dashed: the recipe that ships, in 16 "
        "bits.",
    )
