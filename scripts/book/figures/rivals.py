"""Rows of a study, each beside the row that it has to beat."""

from __future__ import annotations

import math
from collections.abc import Mapping

from scripts import Late
from scripts.book.charts import GREY, INK, PALETTE, rounded, row_axis

alt, pd = Late("altair"), Late("pandas")


def rival_dots(
    runs: pd.DataFrame, to_beat: Mapping[str, str], title: str = "validation BLEU, greedy"
) -> alt.LayerChart:
    """Every run a dot, a tick at each row's mean, a diamond at the mean that it has to beat.

    `runs` has the columns row and bleu; `to_beat` names each row's rival. Rivals that have none
    come first.
    """
    means = runs.groupby("row", sort=False)["bleu"].mean()
    first = [row for row in to_beat.values() if row not in to_beat]
    rows = [row for row in dict.fromkeys((*first, *to_beat)) if row in means.index]
    ends = [math.floor(runs["bleu"].min()), math.ceil(runs["bleu"].max())]
    x = alt.X("bleu:Q", title=title).scale(domain=ends, nice=False, padding=10).axis(tickCount=6)
    y = row_axis("row", rows, labelLimit=260)
    dots = alt.Chart(rounded(runs[["row", "bleu"]])).mark_circle(size=70, color=PALETTE[0])
    ticks = alt.Chart(rounded(means.reset_index())).mark_tick(thickness=2, size=18, color=INK)
    rivals = [{"row": row, "bleu": means[to_beat[row]]} for row in rows if row in to_beat]
    diamonds = alt.Chart(rounded(pd.DataFrame(rivals))).mark_point(shape="diamond", color=GREY)
    layers = [layer.encode(x, y) for layer in (diamonds, ticks, dots)]
    return alt.layer(*layers).properties(width=380, height=28 * len(rows))
