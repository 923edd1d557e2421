"""Chapter 1's drawings: attention by hand, and what a softmax does to wide scores."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from scripts import Late
from scripts.book.charts import GREY, LOG, PALETTE, heatmap, lines, rounded

alt, pd = Late("altair"), Late("pandas")


def hand_chart(
    weights: np.ndarray,
    values: np.ndarray,
    outputs: np.ndarray,
    words: Sequence[str],
    axes: tuple[str, str],
) -> alt.HConcatChart:
    """Weights (S, S) as a map; beside it values (S, 2) as corners and outputs (S, 2) among them."""
    look = {"row_title": "who looks (query)", "column_title": "at whom (key)"}
    who_looks = heatmap(weights, words, words, value_title="weight", domain=(0, 1), cell=64, **look)
    offsets = {
        "value (in)": {"align": "left", "dx": 8, "dy": -9},
        "output (mixed)": {"dy": 16},
    }
    points = pd.concat(
        pd.DataFrame(rows, columns=["x", "y"]).assign(word=words, what=kind)
        for rows, kind in zip((values, outputs), offsets, strict=True)
    )
    outline = points[: len(words)].iloc[[*range(len(words)), 0]].assign(order=range(len(words) + 1))
    top = math.ceil(values.max())
    place = {"scale": alt.Scale(domain=[-0.1 * top, 1.15 * top], nice=False)}
    place["axis"] = alt.Axis(values=list(range(top + 1)), format="d")
    x, y = alt.X("x:Q", title=axes[0], **place), alt.Y("y:Q", title=axes[1], **place)
    color = alt.Color("what:N", title=None).scale(domain=list(offsets), range=PALETTE[:2])
    dots = alt.Chart(rounded(points)).encode(x, y, color)
    edge = alt.Chart(outline).mark_line(color="#BBBBBB", strokeWidth=1.5)
    layers = [
        edge.encode(x, y, order="order:Q"),
        dots.mark_point(filled=True, size=90, opacity=1),
    ]
    for kind, offset in offsets.items():
        own = dots.transform_filter(alt.datum.what == kind)
        layers.append(own.mark_text(**offset).encode(text="word:N"))
    corners = alt.layer(*layers).properties(width=250, height=250)
    return alt.hconcat(who_looks, corners, spacing=50).resolve_scale(color="independent")


def saturation_chart(
    spread: Tensor, weights: Tensor, slope: Tensor, wide: float
) -> alt.HConcatChart:
    """Softmax's four weights (N, 4) and its slope (N) over the scores' spread (N).

    Dashed lines mark the spreads 1 and `wide`.
    """
    names = ["highest score", "second", "third", "lowest"]
    frame = pd.DataFrame(weights.numpy(), columns=names).assign(spread=spread.numpy())
    long = frame.melt("spread", var_name="key", value_name="weight")
    slopes = frame.assign(slope=slope.numpy())
    look = {"x_title": "spread of the scores (log scale)", "width": 270}
    curves = [
        lines(long, "spread", "weight", "key", **look),
        lines(slopes, "spread", "slope", y_title="slope left, Σ w(1 − w)", **look),
    ]
    curves[1] = curves[1].encode(color=alt.value(PALETTE[-1]))

    marks = pd.DataFrame({"spread": [1.0, wide], "label": ["divided", "not divided"]})
    rule = alt.Chart(rounded(marks)).encode(x="spread:Q")
    dashes = rule.mark_rule(strokeDash=[5, 4], color=GREY)
    label = rule.mark_text(align="right", dx=-5, dy=4, color=GREY, baseline="top")
    label = label.encode(text="label:N")
    panels = []
    for chart, height in zip(curves, (30, 0), strict=True):  # where no curve passes
        chart.encoding.x.scale = alt.Scale(domain=[0.1, 32], **LOG)
        chart.encoding.x.axis = alt.Axis(values=[0.1, 0.3, 1, 3, 10, 30], format="~g")
        panels.append(chart + dashes + label.encode(y=alt.value(height)))
    return alt.hconcat(*panels)
