"""Drawings of part I: the model, its stacks and layers, attention by hand, positions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
from torch import Tensor

from scripts import Late
from scripts.book.charts import heatmap, lines, named, rounded
from scripts.book.figures.diagram import Diagram, drawn
from scripts.book.look import GREY, INK, LOG, PALE, PALETTE

alt, pd = Late("altair"), Late("pandas")


def architecture_chart() -> alt.LayerChart:
    """The whole Transformer, encoder left and decoder right (the paper's Figure 1)."""
    return drawn("architecture").chart()


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
    offsets = {"value (in)": {"align": "left", "dx": 8, "dy": -9}, "output (mixed)": {"dy": 16}}
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
    layers = [edge.encode(x, y, order="order:Q"), dots.mark_point(filled=True, size=90, opacity=1)]
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
    x = alt.X("spread:Q", title="spread of the scores (log scale)").scale(domain=[0.1, 32], **LOG)
    x = x.axis(values=[0.1, 0.3, 1, 3, 10, 30], format="~g")
    sharp = lines(long, "spread", "weight", "key", width=270)
    learning = lines(slopes, "spread", "slope", y_title="slope left, Σ w(1 − w)", width=270)
    curves = [sharp, learning.encode(color=alt.value(PALETTE[-1]))]

    marks = pd.DataFrame({"spread": [1.0, wide], "label": ["divided", "not divided"]})
    rule = alt.Chart(rounded(marks)).encode(x="spread:Q")
    dashes = rule.mark_rule(strokeDash=[5, 4], color=GREY)
    label = rule.mark_text(align="right", dx=-5, dy=4, color=GREY, baseline="top")
    label = label.encode(text="label:N")
    panels = []
    for chart, height in zip(curves, (30, 0), strict=True):  # where no curve passes
        panels.append(chart.encode(x) + dashes + label.encode(y=alt.value(height)))
    return alt.hconcat(*panels)


WORD_LOOKS = {  # in the drawing of a layer
    "label": {"fontSize": 13, "color": INK},
    "power": {"fontSize": 9, "color": INK},
    "shape": {"fontSize": 12, "color": GREY, "align": "left"},
    "step": {"fontSize": 13, "color": INK, "align": "left", "fontStyle": "italic"},
}


def layer_diagram(heads: int = 4) -> alt.LayerChart:
    """Multi-head attention, step by step from top to bottom; each head has its colour."""
    boxes, words, arrows, rails = [], [], [], []

    def write(x: float, y: float, text: str, kind: str = "label") -> None:
        words.append((x, y, text, kind))

    def row(x: float, width: float, y: float, text: str, gap: float = 0) -> None:
        step = (width + gap) / heads
        for i in range(heads):
            boxes.append((x + i * step, x + (i + 1) * step - gap, y, y + 28, PALETTE[i]))
            write(x + i * step + (step - gap) / 2, y + 14, text.format(i))

    def matrix(x: float, y: float, name: str) -> None:
        boxes.append((x - 48, x + 48, y, y + 28, PALE))
        write(x - 26, y + 14, "W")
        write(x - 15, y + 9, name, "power")
        write(x + 14, y + 14, "(D, D)")

    def arrow(x: float, y: float, shape: str) -> None:
        arrows.append((x, y + 1, y + 32))
        write(x + 7, y + 18, shape, "shape")

    def rail(y: float, head_end: float) -> None:
        """A line along all heads, tied to each: what touches it belongs to every head."""
        middles = [280 + (i - (heads - 1) / 2) * 362 / heads for i in range(heads)]
        rails.append((middles[0], middles[-1], y, y))
        rails.extend((x, x, y, head_end) for x in middles)

    columns = (150, "Q", "query", "T"), (280, "K", "key", "S"), (410, "V", "value", "S")
    for x, name, role, length in columns:
        write(x, 8, role)
        arrow(x, 18, f"(B, {length}, D)")
        matrix(x, 58, name)
        arrow(x, 86, f"(B, {length}, D)")
        row(x - 48, 96, 126, "{}")
        arrow(x, 154, f"(B, H, {length}, D/H)")
    rail(190, 202)
    row(102, 356, 202, "head {}", gap=6)
    rail(242, 230)
    arrow(280, 242, "(B, H, T, D/H)")
    row(232, 96, 282, "{}")
    arrow(280, 310, "(B, T, D)")
    matrix(280, 350, "O")
    arrow(280, 378, "(B, T, D)")
    write(280, 426, "output")
    for y, step in ((72, "project"), (140, "split"), (216, "attend"), (296, "join"), (364, "mix")):
        write(0, y, step, "step")

    y, y2 = (alt.Y(f"{name}:Q", scale=None, axis=None) for name in ("y", "y2"))
    x = alt.X("x:Q", scale=None, axis=None)
    fill = alt.Color("color:N", scale=None)
    squares = alt.Chart(pd.DataFrame(boxes, columns=["x", "x2", "y", "y2", "color"]))
    shafts = alt.Chart(pd.DataFrame(arrows, columns=["x", "y", "y2"]))
    ties = alt.Chart(pd.DataFrame(rails, columns=["x", "x2", "y", "y2"]))
    texts = alt.Chart(pd.DataFrame(words, columns=["x", "y", "text", "kind"]))
    tip = {"shape": "triangle-down", "size": 60, "filled": True, "opacity": 1, "color": GREY}
    layers = [
        squares.mark_rect(opacity=0.45, stroke="white").encode(x, y, fill, x2="x2", y2="y2"),
        shafts.mark_rule(color=GREY).encode(x, y, y2="y2"),
        ties.mark_rule(color=GREY).encode(x, y, x2="x2", y2="y2"),
        shafts.mark_point(**tip).encode(x, y2),
    ]
    for kind, look in WORD_LOOKS.items():
        chosen = texts.transform_filter(alt.datum.kind == kind)
        layers.append(chosen.mark_text(baseline="middle", **look).encode(x, y, text="text:N"))
    return alt.layer(*layers).properties(width=490, height=435)


def lookup(one_hot: Tensor, table: Tensor, vectors: Tensor, names: list[str]) -> alt.HConcatChart:
    """One-hot rows (T, V) times a table (V, D) are vectors (T, D); `names` are the tokens'."""
    limit = table.abs().max().item()
    look = {"scheme": "diverging", "domain": (-limit, limit), "cell": (32, 22)}
    rows = [f"row {i}" for i in range(len(table))]
    ones = [["1" if hit else "" for hit in row] for row in one_hot]
    panels = {
        "one-hot (T, V)": heatmap(one_hot, names, range(len(table)), cell=(21, 22), texts=ones),
        "table × √D (V, D)": heatmap(table, rows, numbers=True, digits=1, **look),
        "vectors (T, D)": heatmap(vectors, names, digits=1, **look),
    }
    for chart in panels.values():
        chart.layer[0].encoding.color.legend = None
    return alt.hconcat(*named(panels)).resolve_scale(color="independent")


CLOCK_FACE = (2 * 150 / 2.8) ** 2  # a point's size is its diameter squared, in pixels


def clocks(speeds: Tensor, hands: Sequence[int], length: int, step: int) -> alt.FacetChart:
    """Where some `hands` stand at positions 0 to `length` − 1; each `step`-th has its number."""
    rows, names = [], [f"hand {i}: {math.degrees(speeds[i]):.1f}° a step" for i in hands]
    for name, speed in zip(names, speeds[list(hands)].tolist(), strict=True):
        apart = step * speed > 0.15  # numbers that would overlap give way to the first
        for pos in range(length):
            sin, cos = math.sin(pos * speed), math.cos(pos * speed)
            label = str(pos) if pos == 0 or (apart and pos % step == 0) else ""
            spot = [round(value, 4) for value in (sin, cos, 1.25 * sin, 1.25 * cos)]
            rows.append((pos, label, name, *spot))
    columns = ["position", "label", "hand", "sin", "cos", "label x", "label y"]
    look = {"scale": alt.Scale(domain=(-1.4, 1.4), nice=False), "axis": alt.Axis(values=[-1, 0, 1])}
    x, y = alt.X("sin:Q", title="sin", **look), alt.Y("cos:Q", title="cos", **look)
    color = alt.Color("position:Q", legend=None).scale(scheme="viridis")
    base = alt.Chart(pd.DataFrame(rows, columns=columns))
    labelled = base.transform_filter("datum.label")
    face = base.transform_filter("datum.position == 0").encode(x=alt.datum(0), y=alt.datum(0))
    layers = [
        face.mark_point(size=CLOCK_FACE, color=PALE, strokeWidth=2, opacity=1, aria=False),
        labelled.mark_rule(color=GREY, aria=False).encode(x, y, x2=alt.datum(0), y2=alt.datum(0)),
        base.mark_circle(size=70, opacity=1, aria=False).encode(x, y, color),
        labelled.mark_text().encode(x="label x:Q", y="label y:Q", text="label:N"),
    ]
    drawn = alt.layer(*layers).properties(width=150, height=150)
    return drawn.facet(facet=alt.Facet("hand:N", title=None, sort=names), columns=len(hands))


def stacks(N: int = 6) -> alt.LayerChart:
    """The two stacks of N layers each, and the memory that every decoder layer reads (Figure 1)."""
    top = 40 + 34 * N  # where the last layer is
    diagram = Diagram(490, top + 104)
    for x, side, ids, fill in (
        (85, "encoder", "source ids (B, S)", "blue"),
        (405, "decoder", "target ids (B, T)", "orange"),
    ):
        diagram.box(x, 0, ids, "grey")
        diagram.box(x, 40, "embedding + position", "grey")
        diagram.arrow((x, 22), (x, 38))
        for n in range(1, N + 1):
            diagram.box(x, 40 + 34 * n, f"{side} layer {n}", fill)
            diagram.arrow((x, 28 + 34 * n), (x, 38 + 34 * n))
        diagram.arrow((x, top + 22), (x, top + 32))
    diagram.box(85, top + 34, "memory (B, S, D)", "green")
    for n in range(1, N + 1):
        diagram.arrow((165, top + 45), (245, top + 45), (245, 51 + 34 * n), (322, 51 + 34 * n))
    diagram.box(405, top + 34, "generator", "grey")
    diagram.box(405, top + 74, "logits (B, T, V)", "grey")
    diagram.arrow((405, top + 56), (405, top + 72))
    return diagram.chart()


def wirings() -> alt.LayerChart:
    """An encoder layer in post-norm and in pre-norm: each sublayer, its norm, and the road of x."""
    return drawn("wirings").chart()


def decades(
    frame: pd.DataFrame, x: str, y: str, color: str, powers: Iterable[int], places: Iterable[int]
) -> alt.LayerChart:
    """Lines of `y` over `x` on a log axis with ticks at `powers` of ten, named at their ends."""
    base = alt.Chart(rounded(frame)).encode(
        alt.X(f"{x}:Q").axis(values=list(places), grid=False),
        alt.Y(f"{y}:Q").axis(values=[10.0**n for n in powers], format=".0e").scale(type="log"),
        alt.Color(f"{color}:N", sort=None, legend=None),
    )
    ends = base.transform_filter(alt.datum[x] == int(frame[x].max()))
    names = ends.mark_text(align="left", dx=8).encode(text=f"{color}:N")
    return alt.layer(base.mark_line(point={"size": 45}), names).properties(width=480, height=240)


def layer_lines(frame: pd.DataFrame, columns: list[str], color: str) -> alt.HConcatChart:
    """Columns side by side over the layers E1, …, D1, …; encoder and decoder are separate lines."""
    frame = rounded(frame[["layer", color, *columns]].assign(side=frame.layer.str[0]))
    base = alt.Chart(frame).mark_line(point={"size": 45}).properties(width=245, height=210)
    base = base.encode(
        alt.X("layer:N", sort=None, title="layer").axis(labelAngle=0),
        alt.Color(f"{color}:N", sort=None).legend(title=None, orient="top"),
        detail="side:N",
    )
    return alt.hconcat(*[base.encode(alt.Y(f"{name}:Q").axis(tickCount=5)) for name in columns])
