"""Drawings and tables of chapter 12: lines of code against speed, memory, a GPU's launches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from scripts import Late
from scripts.book.charts import lines, long, rounded, titled
from scripts.book.look import GREY, LOG, PALETTE, bar_axis, colored

alt, pd = Late("altair"), Late("pandas")


TAKEN_OUT = {  # names of the stairs in the race of the finished program without one of them
    "memory kept": "without freed memory kept",
    "fused parts": "without LayerNorm in one kernel",
    "dropout from 16 bits": "without dropout from 16 bits",
    "loss in chunks": "without loss in chunks",
    "rows": "without rows",
    "C": "without small things in C",
    "the same again": "ours again",
}


def spread(ratios: pd.Series) -> str:
    """The median and the range of the rounds' ratios."""
    return f"{ratios.median():.2f} ({ratios.min():.2f} to {ratios.max():.2f})"


def stairs_table(
    record: Mapping[str, Any], finished: Mapping[str, Any], live: Mapping[str, float]
) -> pd.DataFrame:
    """Each stair's lines of code, its `live` duel, and its worth at both ends; then the control's.

    Added: the time of the stair before over this one's. Taken out: the time of the `finished`
    program without it over that with it. A stair is seen if, added, its median lies outside the
    control's range.
    """
    rounds = pd.DataFrame({name: report["rounds"] for name, report in record["reports"].items()})
    stairs = [*record["lines"]]
    added = pd.DataFrame({name: rounds[last] / rounds[name] for last, name in pairwise(stairs)})
    added["the same again"] = control = rounds["the same again"] / rounds["C"]
    taken = {name: finished["reports"][without]["rounds"] for name, without in TAKEN_OUT.items()}
    seen = ~added.median().between(control.min(), control.max())
    columns = {
        "lines": pd.Series(record["lines"] | {"the same again": 0}),
        "live duel": pd.Series(live).map("{:.2f}".format),
        "added": added.apply(spread),
        "seen": seen.map({True: "yes", False: "no"}),
        "taken out": pd.DataFrame(taken).apply(spread),
    }
    return pd.DataFrame(columns, index=added.columns).fillna("")


def lines_chart(record: Mapping[str, Any]) -> alt.TopLevelMixin:
    """How fast the program is after so many lines of code, stair by stair."""
    times = pd.Series({name: record["reports"][name]["times"] for name in record["lines"]})
    frame = pd.DataFrame({"code": pd.Series(record["lines"]).cumsum()}).rename_axis("step")
    frame["speed"] = times.iloc[0] / times
    (few, fast), (most, fastest) = frame.loc[["dropout from 16 bits", "C"]].values
    used = rounded(frame.reset_index()[["step", "code", "speed"]])
    scale = {"type": "symlog", "constant": 5, "nice": False}
    x = alt.X("code:Q", title="lines of code, all stairs so far").scale(domain=[0, 1600], **scale)
    x = x.axis(values=[0, 10, 30, 100, 300, 1000], labelExpr="format(datum.value, ',')")
    y = alt.Y("speed:Q", title="times as fast as the textbook, padded to 72")
    y = y.scale(domain=[0.9, 1.3 * used["speed"].max()], **LOG).axis(values=[1, 2, 5, 10, 20])
    base = alt.Chart(used).encode(x, y)
    layers = [
        base.mark_line(interpolate="step-after", color=GREY),
        base.mark_circle(size=60, color=PALETTE[0], opacity=1),
    ]
    flat = used["speed"].pct_change() < 0.05  # too near each other for a label each
    names = used.assign(step=used["step"].mask(flat, ", ".join(used.loc[flat, "step"])))
    for rows, place in (
        (used["code"] == 0, {"align": "left", "dx": 26, "dy": -9}),  # beside the riser
        (used["code"] == 1, {"align": "left", "dx": 6, "dy": -9}),
        (flat & (flat.cumsum() == 1), {"align": "left", "dx": -4, "dy": 16}),
        ((used["code"] > 1) & ~flat, {"align": "right", "dx": -7, "dy": -8}),
    ):
        text = alt.Chart(names[rows]).mark_text(fontSize=11, **place)
        layers.append(text.encode(x, y, text="step:N"))
    return titled(
        alt.layer(*layers).properties(width=560, height=360),
        f"{few:.0f} lines make it {fast:.0f} times as fast, {round(most - few, -2):.0f} more "
        f"{fastest / fast:.1f} times",
        "Each dot is a stair, measured at full size. Across: the lines of code that "
        "it needs, added up. Upwards, by factors: how fast a real token passes.",
    )


def memory_chart(curves: Mapping[str, Sequence[int]], logits: int) -> alt.TopLevelMixin:
    """Bytes alive after each operation of a loss and its backward pass, by way of computing it.

    `logits` is the size of all logits, in bytes.
    """
    tensors = [max(curve) / logits for curve in curves.values()]
    assert [*map(round, tensors[:2])] == [5, 3] and tensors[2] < 1, "the title says so"
    table = {
        name: {100 * i / len(curve): size / 2**20 for i, size in enumerate(curve, start=1)}
        for name, curve in curves.items()
    }
    frame = long(table, "loss", "done", "MiB")
    chart = lines(frame, "done", "MiB", "loss", x_title="operations done, %", zero=True)
    chart = chart.mark_line(interpolate="step-after")
    return titled(
        chart,
        "The textbook's loss holds five tensors of logits, F.cross_entropy three, chunks less "
        "than one",
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
