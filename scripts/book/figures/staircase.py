"""Drawings and tables of chapter 12: lines of code against speed, memory, a GPU's launches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from scripts import Late
from scripts.book.charts import lines, long, rounded, titled
from scripts.book.look import GREY, LOG, PALETTE, bar_axis, colored

alt, pd = Late("altair"), Late("pandas")


def steps_table(record: Mapping[str, Any], live: Mapping[str, float]) -> pd.DataFrame:
    """Each step's lines of code, its `live` duel, and its gain at full size; then the control's.

    A gain is the time of the step before over this one's, the median of the rounds. It is seen if
    it lies outside the control's range.
    """
    rounds = {name: report["rounds"] for name, report in record["reports"].items()}
    duels = {after: (before, after) for before, after in pairwise(record["lines"])}
    duels["the same again"] = ("the same again", "C")
    columns = ["full size", "lowest", "highest"]
    table = pd.DataFrame(index=[*duels], columns=["lines", "live duel", *columns])
    for name, (before, after) in duels.items():
        ratios = pd.Series(rounds[before]) / pd.Series(rounds[after])
        table.loc[name, columns] = [ratios.median(), ratios.min(), ratios.max()]
    table["lines"] = pd.Series(record["lines"]).reindex(table.index, fill_value=0)
    table["live duel"] = pd.Series(live)
    seen = ~table["full size"].between(*table.loc["the same again", columns[1:]])
    shown = table.iloc[:, 1:].map(lambda ratio: "" if pd.isna(ratio) else f"{ratio:.2f}")
    return table[["lines"]].join(shown).assign(seen=seen.map({True: "yes", False: "no"}))


def lines_chart(record: Mapping[str, Any]) -> alt.TopLevelMixin:
    """How fast the program is after so many lines of code, step by step."""
    times = pd.Series({name: record["reports"][name]["times"] for name in record["lines"]})
    frame = pd.DataFrame({"code": pd.Series(record["lines"]).cumsum()}).rename_axis("step")
    frame["speed"] = times.iloc[0] / times
    (few, fast), (most, fastest) = frame.loc[["dropout from 16 bits", "C"]].values
    used = rounded(frame.reset_index()[["step", "code", "speed"]])
    scale = {"type": "symlog", "constant": 5, "nice": False}
    x = alt.X("code:Q", title="lines of code, all steps so far").scale(domain=[0, 1600], **scale)
    x = x.axis(values=[0, 10, 30, 100, 300, 1000], labelExpr="format(datum.value, ',')")
    y = alt.Y("speed:Q", title="times as fast as the textbook, padded to 72")
    y = y.scale(domain=[0.9, 1.3 * used["speed"].max()], **LOG).axis(values=[1, 2, 5, 10, 20])
    base = alt.Chart(used).encode(x, y)
    layers = [
        base.mark_line(interpolate="step-after", color=GREY),
        base.mark_circle(size=60, color=PALETTE[0], opacity=1),
    ]
    early, flat = used["code"] < 20, used["speed"].pct_change() < 0.05
    for rows, place in (
        (early, {"align": "left", "dx": 26, "dy": -9}),
        (flat, {"align": "left", "dx": 6, "dy": 9, "angle": 60}),
        (~early & ~flat, {"align": "right", "dx": -7, "dy": -8}),
    ):
        text = alt.Chart(used[rows]).mark_text(fontSize=11, **place)
        layers.append(text.encode(x, y, text="step:N"))
    return titled(
        alt.layer(*layers).properties(width=560, height=360),
        f"{few:.0f} lines make it {fast:.0f} times as fast, {round(most - few, -2):.0f} more "
        f"{fastest / fast:.1f} times",
        "Each dot is a step, measured at full size. Across: the lines of code that "
        "it needs, added up. Upwards, by factors: how fast a real token passes.",
    )


def memory_chart(curves: Mapping[str, Sequence[int]], title: str) -> alt.TopLevelMixin:
    """Bytes alive after each operation of a loss and its backward pass, by way of computing it."""
    table = {
        name: {100 * i / len(curve): size / 2**20 for i, size in enumerate(curve, start=1)}
        for name, curve in curves.items()
    }
    frame = long(table, "loss", "done", "MiB")
    chart = lines(frame, "done", "MiB", "loss", x_title="operations done, %", zero=True)
    chart = chart.mark_line(interpolate="step-after")
    return titled(
        chart,
        title,
        "MiB that the loss's own tensors take, operation by operation, forward and backward; "
        "1,024 rows, ours in chunks of 256.",
    )


def stages_frame(stages: Mapping[str, Any]) -> pd.DataFrame:
    """A GPU's stages: the time of a step as a multiple of the last stage's, and in ms."""
    names = ["textbook", "16 bits", "fused parts, nothing waits", "few shapes", "recorded"]
    rows = [(stage["times"], 1000 * stage["seconds_per_step"]) for stage in stages.values()]
    return pd.DataFrame(rows, index=names, columns=["times", "ms per step"])


def launches_chart(stages: pd.DataFrame, title: str) -> alt.TopLevelMixin:
    """Ten kernels, launched one by one and as one recording: `stages_frame`'s last two rows."""
    eager, recorded = stages["ms per step"].iloc[-2:]
    rows = [("recorded", "CPU launches", 0.0, eager)]
    for i in range(10):
        begin, end = i * eager, eager + i * recorded
        rows.append(("one by one", "CPU launches", begin, begin + eager))
        rows.append(("one by one", "GPU computes", begin + eager, begin + eager + recorded))
        rows.append(("recorded", "GPU computes", end, end + recorded))
    frame = rounded(pd.DataFrame(rows, columns=["way", "who", "start", "end"]))
    shades = {"CPU launches": PALETTE[1], "GPU computes": PALETTE[0]}
    chart = alt.Chart(frame).mark_bar(height=16, stroke="white", strokeWidth=1)
    chart = chart.encode(
        alt.X("start:Q", title="time →").axis(labels=False, ticks=False, grid=False),
        bar_axis("who", [*shades]),
        x2="end:Q",
        color=colored("who", shades, legend=None),
        row=alt.Row("way:N", title=None, sort=["one by one", "recorded"]),
    )
    return titled(
        chart.properties(width=560, height=alt.Step(24)),
        title,
        "A scheme of ten kernels. Bar lengths: a tenth of the measured step, with and without a "
        "recording. Above, launches follow without a gap, and each kernel waits for "
        "its own. Below, the CPU launches a recording once.",
    )
