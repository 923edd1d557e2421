"""Drawings of part I: the model, its stacks and layers, attention by hand, positions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from scripts import Late
from scripts.book.charts import heatmap, named, rounded
from scripts.book.figures.diagram import Diagram, drawn
from scripts.book.look import GREY, INK, PALE, PALETTE, bar_axis, colored

alt, pd = Late("altair"), Late("pandas")


def architecture_chart() -> alt.LayerChart:
    """The whole Transformer, encoder left and decoder right (the paper's Figure 1)."""
    return drawn("architecture").chart()


def exchange_chart(means: pd.DataFrame) -> alt.LayerChart:
    """A row for each exchange, a dot for each column of `means`: the gap on either side of 0."""
    frame = means.rename_axis("exchanged").reset_index()
    frame = rounded(frame.melt("exchanged", var_name="caption with", value_name="gap"))
    colors = dict(zip(means.columns, (PALETTE[1], PALETTE[0]), strict=True))
    x = alt.X("gap:Q", title="gap: log p(wearing) − log p(carrying)")
    x = x.axis(values=[-2, 0, 2, 4], grid=False)
    y = bar_axis("exchanged", list(means.index), grid=True).title("exchanged rows")
    dots = alt.Chart(frame).mark_circle(size=110, opacity=1, aria=False)
    border = alt.Chart(pd.DataFrame({"gap": [0.0]})).mark_rule(strokeDash=[5, 4], aria=False)
    layers = [border.encode(x), dots.encode(x, y, colored("caption with", colors))]
    return alt.layer(*layers).properties(width=430, height=alt.Step(26))


def matrices_chart(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    value: Tensor,
    output: Tensor,
    asking: Sequence[str],
    asked: Sequence[str],
) -> alt.VConcatChart:
    """Attention as matrices with their sizes: Q (T, 2) · Kᵀ = scores, then weights · V = output.

    `asking` (T) are the names of the places that look, `asked` (S) of those that are looked at.
    """
    letters = [chr(ord("a") + i) for i in range(value.size(1))]
    scores = query @ key.T

    def matrix(name: str, table: Tensor, rows: Sequence[str], columns: Sequence[str], **look):
        chart = heatmap(table, rows, columns, cell=33, **look)
        chart.layer[0].encoding.color.legend = None
        size = ", ".join(map(str, table.shape))
        return chart.properties(title=alt.Title(f"{name} ({size})", fontSize=13))

    def sign(text: str) -> alt.Chart:
        mark = alt.Chart(pd.DataFrame({"text": [text]})).mark_text(fontSize=22)
        return mark.encode(text="text:N").properties(width=18, height=165)

    blank, name = ["", ""], f"softmax(QKᵀ / √{query.size(1)})"
    limit = max(table.abs().max().item() for table in (query, key, scores))
    signed = {"scheme": "diverging", "domain": (-limit, limit), "digits": 0}
    shares = {"domain": (0, 1), "digits": 2}
    above = [
        matrix("Q", query, asking, blank, **signed),
        sign("×"),
        matrix("Kᵀ", key.T, blank, asked, **signed),
        sign("="),
        matrix("QKᵀ", scores, asking, asked, **signed),
    ]
    below = [
        matrix(name, weights, asking, asked, **shares),
        sign("×"),
        matrix("V", value, asked, letters, digits=0),
        sign("="),
        matrix("result", output, asking, letters, **shares),
    ]
    lines = [alt.hconcat(*row, spacing=6, center=True) for row in (above, below)]
    return alt.vconcat(*lines, spacing=18).resolve_scale(color="independent")


def order_maps(
    maps: Mapping[str, Tensor], rows: Mapping[str, Sequence[str]], columns: Sequence[str]
) -> alt.HConcatChart:
    """Weights (T, S) side by side, each map with its own names for its rows."""
    charts = {}
    for name, table in maps.items():
        look = {"column_title": "looked at", "row_title": "" if charts else "written"}
        look |= {"cell": 30, "digits": 1, "domain": (0, 1)}
        charts[name] = heatmap(table.round(decimals=1), rows[name], columns, **look)
        charts[name].layer[0].encoding.color.legend = None
    return alt.hconcat(*named(charts), spacing=14)


def saturation_chart(scores: Tensor, names: Sequence[str], spread: float) -> alt.LayerChart:
    """Softmax of `scores` (S), which have spread 1, stretched to a slider's spread.

    The slider begins at `spread`, which the picture shows.
    """
    bind = alt.binding_range(min=0.1, max=32, step=0.1, name="spread of the scores ")
    slider = alt.param(name="spread", value=spread, bind=bind)
    keys = alt.Chart(rounded(pd.DataFrame({"letter": names, "score": scores.numpy()})))
    keys = keys.transform_calculate(power="exp(spread * datum.score)")
    keys = keys.transform_joinaggregate(total="sum(power)")
    keys = keys.transform_calculate(weight="datum.power / datum.total")
    x = alt.X("weight:Q", title="weight").scale(domain=[0, 1.15], nice=False)
    bars = keys.encode(x.axis(values=[0, 0.5, 1]), bar_axis("letter", list(names)))
    number = bars.mark_text(align="left", dx=5).encode(text=alt.Text("weight:Q", format=".2f"))
    both = (bars.mark_bar(color=PALETTE[0]) + number).properties(width=400, height=alt.Step(34))
    return both.add_params(slider)


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
