"""Drawings of learning from models: the recipes, and the rungs of the ladder."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from scripts import Late
from scripts.book.charts import PALETTE, rounded, titled
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
    order, kinds = [row["rung"] for row in shown], {"each": "greedy", "each_beam": "beam of 5"}
    frame = pd.DataFrame(
        {"rung": row["rung"], "search": kind, "BLEU": bleu}
        for row in shown
        for name, kind in kinds.items()
        for bleu in row[name]
    )
    ends = [math.floor(frame["BLEU"].min()), math.ceil(frame["BLEU"].max())]
    x = alt.X("BLEU:Q", title="validation BLEU").scale(domain=ends)
    fill = alt.Fill("search:N").legend(title=None, orient="top", symbolStrokeColor=PALETTE[0])
    fill = fill.scale(domain=[*kinds.values()], range=["transparent", PALETTE[0]])
    points = alt.Chart(rounded(frame)).mark_point(shape="circle", size=75, stroke=PALETTE[0])
    greedy, beam = (max(shown, key=lambda row: row[by])["rung"] for by in ("val_bleu", "beam"))
    return titled(
        points.encode(x, alt.Y("rung:N", sort=order, title=None), fill).properties(
            width=420, height=28 * len(order)
        ),
        f"Highest on average: {greedy} by greedy decoding, {beam} with a beam",
        "Two marks for each run: its texts by greedy decoding, and by a beam with α = 0.6.",
    )
