"""Drawings of chapter 12: lines of code against speed, the waterfall, memory, a GPU's launches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from scripts import Late
from scripts.book.charts import lines, long, rounded, titled
from scripts.book.look import GREY, INK, LOG, PALE, PALETTE, bar_axis, colored

alt, pd = Late("altair"), Late("pandas")


def race_frame(reports: Mapping[str, Any]) -> pd.DataFrame:
    """Each program's time over that of ours: the median of its rounds, and their range; sorted."""
    rows = {}
    for name, report in reports.items():
        rounds = report["rounds"] or [1.0]  # ours is the measure: it has none
        mib = round(report.get("peak_bytes", 0) / 2**20)
        rows[name] = [report["times"], min(rounds), max(rounds), mib]
    names = ["times as long as ours", "lowest", "highest", "peak MiB"]
    return pd.DataFrame.from_dict(rows, orient="index", columns=names).sort_values(names[0])


def stairs_frame(record: Mapping[str, Any]) -> pd.DataFrame:
    """The steps from the bottom up: `time` as a multiple of the last one's.

    `speed` is what all steps so far are worth, `code` their lines.
    """
    frame = race_frame(record["reports"]).loc[[*record["lines"]]].rename_axis("step")
    same = record["reports"]["the same again"]["rounds"]
    frame = frame.rename(columns={"times as long as ours": "time"})
    frame["speed"] = frame["time"].iloc[0] / frame["time"]
    frame.attrs["control"] = "{:.2f} to {:.2f}".format(*sorted(same)[:: len(same) - 1])
    return frame.assign(code=pd.Series(record["lines"]).cumsum())


def lines_chart(frame: pd.DataFrame) -> alt.TopLevelMixin:
    """How fast the program is after so many lines of code: `stairs_frame`'s columns."""
    (few, fast), (most, fastest) = frame.loc[
        ["dropout from 16 bits", "C"], ["code", "speed"]
    ].values
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


def waterfall_chart(frame: pd.DataFrame) -> alt.TopLevelMixin:
    """The time that is left after each step from sorting on, and what the step took away."""
    ends = frame.loc[["sorted by length", "dropout from 16 bits", "C"]]
    (few, many), (gain, rest) = ends["code"].diff()[1:], ends["speed"].pct_change()[1:] + 1
    used = rounded(frame.loc["sorted by length":].reset_index(), 3)
    used["before"] = used["time"].rolling(2, min_periods=1).max()  # a step may take nothing away
    used["label"] = [f"{time:.2f}" for time in used["time"]]
    x = alt.X("time:Q", title="time for a token, as a multiple of the last step's").axis(grid=False)
    y = bar_axis("step", used["step"].tolist())
    base = alt.Chart(used).encode(y)
    layers = [
        base.mark_bar(color=PALETTE[0], height=18).encode(x),
        base.mark_bar(color=PALE, stroke=GREY, height=18).encode(x, x2="before:Q"),
        base.mark_rule(color=INK, strokeWidth=2).encode(alt.X("lowest:Q"), x2="highest:Q"),
        base.mark_text(align="left", dx=6, color="white").encode(x=alt.value(0), text="label:N"),
    ]
    return titled(
        alt.layer(*layers).properties(width=440, height=alt.Step(28)),
        f"{few:.0f} lines bring {gain:.1f} times, {round(many, -2):.0f} more bring {rest:.1f}",
        "Batches are sorted by length already. Blue: the time that is left. Pale: what this step "
        "took away from the one above it. Black: the range of the rounds. The last step against "
        f"itself: {frame.attrs['control']}.",
    )


def memory_chart(curves: Mapping[str, Sequence[int]], title: str) -> alt.TopLevelMixin:
    """Bytes alive after each operation of a loss and its backward pass, by way of computing it."""
    table = {
        name: {100 * i / len(curve): size / 2**20 for i, size in enumerate(curve, start=1)}
        for name, curve in curves.items()
    }
    frame = long(table, "loss", "done", "MiB")
    chart = lines(frame, "done", "MiB", "loss", x_title="operations done, %", zero=True)
    return titled(
        chart,
        title,
        "MiB that the loss's own tensors take, operation by operation, forward and backward; "
        "1,024 rows, ours in chunks of 256.",
    )


def launches_chart(eager: float, recorded: float, title: str) -> alt.TopLevelMixin:
    """Ten kernels, launched one by one and as one recording, from a step's milliseconds."""
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
        "A scheme of ten kernels; lengths are the record's, shared out evenly, as if a recorded "
        "step were all kernels. Above, launches follow without a gap, and each kernel waits for "
        "its own. Below, the CPU launches a recording once.",
    )
