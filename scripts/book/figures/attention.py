"""Chapter 1's drawings: attention by hand, and what a softmax does to wide scores."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from scripts import Late
from scripts.book.charts import GREY, PALETTE, heatmap, lines, rounded

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
    left = heatmap(weights, words, words, value_title="weight", domain=(0, 1), cell=64, **look)
    kinds = ["value (in)", "output (mixed)"]
    points = pd.concat(
        pd.DataFrame(rows, columns=["x", "y"]).assign(word=words, what=kind)
        for rows, kind in zip((values, outputs), kinds, strict=True)
    )
    outline = points[: len(words)].iloc[[*range(len(words)), 0]].assign(order=range(len(words) + 1))
    top = math.ceil(values.max())
    room = alt.Scale(domain=[-0.1 * top, 1.15 * top], nice=False)
    axis = alt.Axis(values=list(range(top + 1)), format="d")
    place = {
        "x": alt.X("x:Q", title=axes[0], scale=room, axis=axis),
        "y": alt.Y("y:Q", title=axes[1], scale=room, axis=axis),
    }
    color = alt.Color("what:N", title=None, scale=alt.Scale(domain=kinds, range=PALETTE[:2]))
    dots = alt.Chart(rounded(points)).encode(color=color, **place)
    offsets = ({"align": "left", "dx": 8, "dy": -9}, {"dy": 16})
    labels = [
        dots.transform_filter(alt.datum.what == kind).mark_text(**offset).encode(text="word:N")
        for kind, offset in zip(kinds, offsets, strict=True)
    ]
    edge = alt.Chart(outline).mark_line(color="#BBBBBB", strokeWidth=1.5)
    right = alt.layer(
        edge.encode(order="order:Q", **place),
        dots.mark_point(filled=True, size=90, opacity=1),
        *labels,
    ).properties(width=250, height=250)
    return alt.hconcat(left, right, spacing=50).resolve_scale(color="independent")


def saturation_chart(
    spread: Tensor, weights: Tensor, slope: Tensor, wide: float
) -> alt.HConcatChart:
    """Softmax's four weights (N, 4) and its slope (N) over the scores' spread (N).

    Dashed lines mark the spreads 1 and `wide`.
    """
    names = ["highest score", "second", "third", "lowest"]
    frame = pd.DataFrame(weights.numpy(), columns=names).assign(spread=spread.numpy())
    marks = pd.DataFrame({"spread": [1.0, wide], "label": ["divided", "not divided"]})
    rule = alt.Chart(rounded(marks)).encode(x="spread:Q")
    dashes = rule.mark_rule(strokeDash=[5, 4], color=GREY)
    label = rule.mark_text(align="right", dx=-5, dy=4, color=GREY, baseline="top")
    label = label.encode(text="label:N")
    look = {"x_title": "spread of the scores (log scale)", "width": 270}
    long = frame.melt("spread", var_name="key", value_name="weight")
    left = lines(long, "spread", "weight", "key", **look)
    right = lines(
        frame.assign(slope=slope.numpy()),
        "spread",
        "slope",
        y_title="slope left, Σ w(1 − w)",
        **look,
    ).encode(color=alt.value(PALETTE[-1]))
    for chart in (left, right):
        chart.encoding.x.scale = alt.Scale(type="log", domain=[0.1, 32], nice=False)
        chart.encoding.x.axis = alt.Axis(values=[0.1, 0.3, 1, 3, 10, 30], format="~g")
    named = [label.encode(y=alt.value(at)) for at in (30, 0)]  # where no curve passes
    return alt.hconcat(left + dashes + named[0], right + dashes + named[1])
