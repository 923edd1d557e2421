"""Drawings of chapter 22: today's block and its parts, and losses over learning rates."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from scripts import Late
from scripts.book.charts import lines, long, named, rounded, titled
from scripts.book.figures.diagram import Diagram
from scripts.book.look import GREY, LOG, PALETTE, colored

alt, pd = Late("altair"), Late("pandas")


def todays_block() -> alt.TopLevelMixin:
    """The block's two halves, each part with what stood there in 2017."""
    diagram = Diagram(640, 240)
    halves = {
        150: [("RMSNorm", "LayerNorm"), ("QK-norm, rotary turn", "neither")],
        470: [("RMSNorm", "LayerNorm"), ("SwiGLU", "ReLU")],
    }
    halves[150].append(("grouped queries", "keys for each head"))
    for x, parts in halves.items():
        for number, (name, old) in enumerate(parts):
            diagram.box(x, 38 + 54 * number, name, "blue", 95, 38, f"in 2017: {old}")
            diagram.arrow((x, 22 + 54 * number), (x, 36 + 54 * number))
        diagram.arrow((x, 22 + 54 * len(parts)), (x, 200))
        diagram.word(x, 210, "+", "times")
        diagram.arrow((x, 28), (x + 120, 28), (x + 120, 210), (x + 12, 210))  # around
    diagram.arrow((150, 218), (150, 234), (310, 234), (310, 8), (470, 8), (470, 36))
    diagram.arrow((470, 218), (470, 238))
    diagram.word(150, 12, "x (B, T, D)")
    return titled(
        diagram.chart(),
        "The plan of 2017, with other parts",
        "Today's block, from bottom to top: the left half, then the right half. Around each goes "
        "x itself, as in chapter 4.",
    )


def turning_chart(pairs: Mapping[str, Mapping[str, float]]) -> alt.TopLevelMixin:
    """A panel for each pair of words: query and key as arrows, `angle` (radians) of each."""
    panels = {}
    for name, angles in pairs.items():
        ends = [
            {"of": of, "x": math.cos(angle), "y": math.sin(angle), "turn": 90 - math.degrees(angle)}
            for of, angle in angles.items()
        ]
        look = {"scale": alt.Scale(domain=(-1.2, 1.2), nice=False), "axis": None}
        x, y = alt.X("x:Q", **look), alt.Y("y:Q", **look)
        color = colored("of", dict(zip(angles, PALETTE, strict=False)), title=None)
        base = alt.Chart(rounded(pd.DataFrame(ends)))
        face = alt.Chart(alt.InlineData([{"x": 0, "y": 0}])).encode(x, y)
        layers = [
            face.mark_point(size=(2 * 170 / 2.4) ** 2, color=GREY, strokeWidth=0.5),
            base.mark_rule(strokeWidth=3).encode(x, y, color, x2=alt.datum(0), y2=alt.datum(0)),
            base.mark_point(shape="triangle-up", filled=True, size=130, opacity=1).encode(
                x, y, color, angle=alt.Angle("turn:Q", scale=None)
            ),
        ]
        panels[name] = alt.layer(*layers).properties(width=170, height=170)
    return alt.hconcat(*named(panels))


def shared_heads_chart(h: int = 4, groups: int = 2) -> alt.TopLevelMixin:
    """Heads of queries above, and the groups of keys and values that they share."""
    diagram = Diagram(120 * h, 130)
    for group in range(groups):
        each = h // groups
        middle = 120 * each * (group + 0.5)
        diagram.box(middle, 0, f"key and value {group}", "orange", 75, 36)
        for head in range(each * group, each * (group + 1)):
            place = 120 * (head + 0.5)
            diagram.box(place, 94, f"query {head}", "blue", 50, 36)
            diagram.arrow((place, 92), (middle + (place - middle) / 2, 40))
    return titled(
        diagram.chart(),
        "Neighbouring heads share a key and a value",
        f"{h} heads of queries in {groups} groups: the cache is {h // groups} times smaller.",
    )


def gates_chart(z: Tensor, curves: Mapping[str, Tensor]) -> alt.TopLevelMixin:
    """What each function makes of z."""
    frame = pd.DataFrame({"z": z.numpy(), **{name: y.numpy() for name, y in curves.items()}})
    frame = frame.melt("z", var_name="function", value_name="y")
    chart = lines(frame, "z", "y", "function", y_title="what becomes of z", height=180)
    return titled(
        chart,
        "Below 0 ReLU is flat, and SiLU is not",
        "The gate's curve. SwiGLU multiplies it by a second map of the same input.",
    )


def rates_chart(
    frame: pd.DataFrame, title: str, caption: str, y: str = "loss"
) -> alt.TopLevelMixin:
    """`y`, loss or sharpness, over the peak learning rate (log scale), a curve for each `part`."""
    y_title = {"loss": "loss, nats a piece", "sharpness": "largest attention weight"}[y]
    chart = lines(frame, "rate", y, "part", y_title=y_title, points=True, zero=y != "loss")
    rates = sorted(set(frame["rate"]))
    x = alt.X("rate:Q", title="peak learning rate").axis(values=rates, format="~g", grid=False)
    return titled(chart.encode(x.scale(domain=[rates[0], rates[-1]], **LOG)), title, caption)


def spectrum_chart(values: Mapping[str, Tensor], title: str) -> alt.TopLevelMixin:
    """Singular values of several matrices, in order."""
    table = {name: dict(enumerate(own.tolist(), start=1)) for name, own in values.items()}
    frame = long(table, "matrix", "direction", "singular value")
    return titled(
        lines(frame, "direction", "singular value", "matrix", zero=True, height=200),
        title,
        "Singular values of a real gradient, divided by the largest, and of the step made from it. "
        "The last one was almost 0.",
    )
