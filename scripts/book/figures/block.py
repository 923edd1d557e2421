"""Drawings of chapter 22: today's block and its parts, and losses over learning rates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from scripts import Late
from scripts.book.charts import lines, long, named, rounded, titled
from scripts.book.figures.diagram import Diagram
from scripts.book.look import GREY, INK, LOG, PALETTE, colored, row_axis

alt, pd = Late("altair"), Late("pandas")


def todays_block() -> alt.TopLevelMixin:
    """The block's two halves, each part with what stood there in 2017."""
    diagram, left, right = Diagram(640, 280), 150, 490
    for x, below, above in ((left, "x", "y"), (right, "y", "z")):
        diagram.word(x, 12, f"{below} (B, T, D)")
        diagram.arrow((x, 256), (x, 278))
        diagram.word(x + 8, 272, f"{above} (B, T, D)", "beside")
        diagram.box(x, 38, "RMSNorm", "blue", 110, 38, "in 2017: LayerNorm, after the sum")
        diagram.arrow((x, 22), (x, 36))
        diagram.word(x, 246, "+", "times")
        diagram.arrow((x, 28), (x + 140, 28), (x + 140, 246), (x + 12, 246))  # around
    diagram.box(120, 104, "QK-norm, rotary turn", "blue", 80, 38, "in 2017: neither")
    diagram.box(left, 170, "grouped queries", "blue", 110, 38, "in 2017: keys and values per head")
    diagram.box(right, 104, "SwiGLU", "blue", 110, 38, "in 2017: ReLU")
    diagram.arrow((120, 76), (120, 102))
    diagram.word(127, 89, "queries, keys", "beside")
    diagram.arrow((120, 142), (120, 168))
    diagram.arrow((225, 76), (225, 168))
    diagram.word(232, 123, "values", "beside")
    diagram.arrow((left, 208), (left, 234))
    diagram.arrow((right, 76), (right, 102))
    diagram.arrow((right, 142), (right, 234))
    return titled(
        diagram.chart(),
        "Two residual sums, as in 2017; every box is new",
        "Read the left half upwards, then the right half. Values are not normed and not turned. "
        "Today's linear layers have no biases.",
    )


def turning_chart(pairs: Mapping[str, Mapping[str, float]]) -> alt.TopLevelMixin:
    """A panel for each pair of words: query and key as arrows, `angle` (radians) of each."""
    panels, tip = {}, 0.92  # the middle of a tip, whose point lies on the circle
    look = {"scale": alt.Scale(domain=(-1.2, 1.2), nice=False), "axis": None}
    x, y = alt.X("x:Q", **look), alt.Y("y:Q", **look)
    for name, angles in pairs.items():
        ends = [
            {"of": of, "x": tip * math.cos(a), "y": tip * math.sin(a), "turn": 90 - math.degrees(a)}
            for of, a in angles.items()
        ]
        low, high = sorted(angles.values())
        turns = [low + (high - low) * i / 20 for i in range(21)]
        arc = [{"x": 0.4 * math.cos(a), "y": 0.4 * math.sin(a), "order": a} for a in turns]
        color = colored("of", dict(zip(angles, PALETTE, strict=False)), title=None)
        base = alt.Chart(rounded(pd.DataFrame(ends)))
        face = alt.Chart(alt.InlineData([{"x": 0, "y": 0}])).encode(x, y)
        between = alt.Chart(rounded(pd.DataFrame(arc))).mark_line(color=GREY, strokeWidth=1.5)
        layers = [
            face.mark_point(size=(2 * 170 / 2.4) ** 2, color=GREY, strokeWidth=0.5),
            between.encode(x, y, order="order:Q"),
            base.mark_rule(strokeWidth=3).encode(x, y, color, x2=alt.datum(0), y2=alt.datum(0)),
            base.mark_point(shape="triangle-up", filled=True, size=130, opacity=1).encode(
                x, y, color, angle=alt.Angle("turn:Q", scale=None)
            ),
        ]
        panels[name] = alt.layer(*layers).properties(width=170, height=170)
    return alt.hconcat(*named(panels))


def shared_heads_chart(h: int = 4) -> alt.TopLevelMixin:
    """Three layers side by side: h heads of queries, over h, two and one of keys and values."""
    diagram = Diagram(700, 170)
    kinds = {h: "2017: G = H", 2: "grouped-query: G = 2", 1: "multi-query: G = 1"}
    for number, (groups, name) in enumerate(kinds.items()):
        left, width = 245 * number, 210 / groups
        diagram.word(left + 105, 162, name, "name")
        for group in range(groups):
            diagram.box(left + width * (group + 0.5), 30, "k, v", "orange", 22, 30)
        for head in range(h):
            place = left + 210 / h * (head + 0.5)
            middle = left + width * (head * groups // h + 0.5)
            diagram.box(place, 110, "q", "blue", 22, 30)
            diagram.arrow((place, 108), (middle + (place - middle) / 6, 64))
        diagram.word(left + 105, 8, f"kept of a token: {2 * groups}d numbers")
    return titled(
        diagram.chart(),
        "The more heads share a key and a value, the less is kept",
        "q: the query of a head. k, v: a key and a value, of d numbers each, in the cache.",
    )


def gates_chart(z: Tensor, curves: Mapping[str, Tensor]) -> alt.TopLevelMixin:
    """A hidden unit over z, for each way to make one."""
    frame = pd.DataFrame({"z": z.numpy(), **{name: y.numpy() for name, y in curves.items()}})
    frame = frame.melt("z", var_name="unit", value_name="y").replace("-", "−", regex=True)
    chart = lines(frame, "z", "y", "unit", y_title="hidden unit", height=200)
    return titled(
        chart,
        "SwiGLU can flip the sign; ReLU can't",
        "z is what W_g gives, and SiLU(z) is the gate. SwiGLU multiplies it by what W_1 gives, "
        "here 2, 1 or −1. ReLU has one map; it cuts z at 0.",
    )


def rates_chart(
    measures: Mapping[str, pd.DataFrame], title: str, caption: str
) -> alt.TopLevelMixin:
    """A panel for each measure over the peak learning rate (log scale): every run, and the means.

    A measure's frame has a row for each (rate, seed), a column for each curve; 0 is in each panel.
    """
    names = list(dict.fromkeys(name for frame in measures.values() for name in frame))
    legend = alt.Legend(title=None, symbolType="stroke", symbolSize=300)
    color = colored("part", dict(zip(names, PALETTE, strict=False)), legend=legend)
    panels = []
    for measure, frame in measures.items():
        rates = sorted(set(frame.index.get_level_values("rate")))
        x = alt.X("rate:Q", title="peak learning rate").axis(values=rates, format="~g", grid=False)
        x = x.scale(domain=[0.93 * rates[0], 1.07 * rates[-1]], **LOG)
        runs = frame.melt(var_name="part", value_name="y", ignore_index=False)
        runs = runs.dropna().reset_index()
        means = runs.groupby(["part", "rate"], sort=False, as_index=False)["y"].mean()
        look = {"y_title": measure, "zero": True, "width": 460 // len(measures), "height": 240}
        curves = lines(means, "rate", "y", "part", **look).encode(x, color=color)
        dots = alt.Chart(rounded(runs[["part", "rate", "y"]])).mark_circle(
            size=16, opacity=1, fillOpacity=0.5
        )
        level = alt.Chart(alt.InlineData([{"y": 0}])).mark_rule(color=INK).encode(y="y:Q")
        panels.append(level + curves + dots.encode(x, curves.encoding.y, color))
    return titled(alt.hconcat(*panels), title, caption)


def parts_chart(runs: pd.DataFrame, rows: Sequence[str], title: str) -> alt.TopLevelMixin:
    """BLEU of every run of `rows`, best row on top; a line at the mean of the first of them."""
    runs = runs[runs["row"].isin(rows)][["row", "bleu"]]
    means = runs.groupby("row")["bleu"].mean().sort_values(ascending=False)
    kinds = {rows[0]: "2017's block", "one": "one part changed", "today": "today's block"}
    kind = [kinds.get(row, kinds["today" if "today" in row else "one"]) for row in runs["row"]]
    x = alt.X("bleu:Q", title="validation BLEU, beam of 4").scale(zero=False, padding=10)
    y = row_axis("row", [*means.index], labelLimit=260)
    color = colored("kind", dict(zip(kinds.values(), (GREY, *PALETTE), strict=False)), title=None)
    dots = alt.Chart(rounded(runs.assign(kind=kind))).mark_circle(size=70).encode(x, y, color)
    ticks = alt.Chart(rounded(means.reset_index())).mark_tick(thickness=2, size=18, color=INK)
    base = alt.Chart(rounded(pd.DataFrame({"bleu": [means[rows[0]]]})))
    layers = [base.mark_rule(color=GREY, strokeDash=[4, 3]).encode(x), ticks.encode(x, y), dots]
    return titled(
        alt.layer(*layers).properties(width=340, height=26 * len(rows)),
        title,
        f"Each point is a run, the tick a row's mean, the dashed line the mean of {rows[0]}.",
    )


def spectrum_chart(values: Mapping[str, Tensor], title: str) -> alt.TopLevelMixin:
    """How large several matrices are along the same directions, on a log scale."""
    table = {name: dict(enumerate(own.tolist(), start=1)) for name, own in values.items()}
    frame = long(table, "matrix", "direction", "size along it")
    chart = lines(frame, "direction", "size along it", "matrix", height=200)
    chart.encoding.y["scale"] = alt.Scale(type="log")
    chart.encoding.y["axis"] = alt.Axis(values=[10.0**-i for i in range(7)], format="~g")
    return titled(
        chart,
        title,
        "Size along the gradient's own directions (log scale); the gradient's and its sign's are "
        "divided by their size along the first.",
    )
