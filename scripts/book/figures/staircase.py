"""Drawings and tables of chapter 12: lines of code against speed, memory, a GPU's launches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from torch import Tensor

from scripts import Late
from scripts.book.charts import lines, long, rounded, titled
from scripts.book.instruments import alive_bytes
from scripts.book.look import GREY, LOG, PALETTE, bar_axis, colored

alt, pd = Late("altair"), Late("pandas")


def spread(ratios: pd.Series) -> str:
    """The median and the range of the rounds' ratios."""
    return f"{ratios.median():.2f} ({ratios.min():.2f} to {ratios.max():.2f})"


def gains(reports: Mapping[str, Any], steps: Sequence[str]) -> pd.DataFrame:
    """Round by round, the time of the step before over this one's: a column for each but one."""
    rounds = {name: reports[name]["rounds"] for name in steps}
    return pd.DataFrame({b: np.divide(rounds[a], rounds[b]) for a, b in pairwise(steps)})


LAST = "C, and what calls it"  # what the pages call the stair "C"


def own_lines(record: Mapping[str, Any]) -> dict[str, int]:
    """Each stair's lines of code. The files of the last one hold the stair below it, too."""
    code = dict(record["lines"])
    code["C"] -= code["products by hand"]
    return code


def stairs_table(record: Mapping[str, Any]) -> pd.DataFrame:
    """Each stair's lines of code and gain over the one below, and the control.

    A gain is seen if each round's is above the control's range.
    """
    reports, code = record["reports"], own_lines(record) | {"the same again": 0}
    gained = gains(reports, [*record["lines"]])
    gained["the same again"] = gains(reports, ["C", "the same again"])["the same again"]
    seen = (gained > gained["the same again"].max()).all()
    most = {*gained.median().nlargest(3).index}
    assert most == {"padded to the longest", "sorted by length", "autocast"}, "the text says so"
    columns = {
        "lines": pd.Series(code)[gained.columns],
        "gain at full size": gained.apply(spread),
        "seen": np.where(seen, "a gain", "no"),
    }
    return pd.DataFrame(columns).rename({"C": LAST})


TRICKS = {  # of the race that takes each out of the finished program: the record's names and ours
    "without dropout from 16 bits": "dropout in C",
    "without attention by hand": "attention in C",
    "without LayerNorm in one kernel": "LayerNorm in C",
    "without loss in chunks": "loss in chunks",
    "without rows": "rows, C's attention",
    "without the fused Adam": "fused Adam",
    "without freed memory kept": "memory kept",
    "without oneDNN's products": "oneDNN's products",
    "ours again": "the same again",
}


def savings(record: Mapping[str, Any]) -> pd.DataFrame:
    """What each trick gains over what else would run, in 32 bits and in 16, and the control.

    A factor is the median of ratios within rounds, with their range, and the milliseconds are what
    it comes to for the finished step.
    """
    saved, faster, medians = {}, {}, {}
    for bits, race in {32: record, 16: record["half"]}.items():
        rounds = pd.DataFrame(
            {words: race["reports"][name]["rounds"] for name, words in TRICKS.items()}
        )
        finished = 1000 * race["reports"]["ours"]["seconds_per_step"]
        medians[bits] = rounds.median()
        saved[f"ms, {bits}"] = (finished * (medians[bits] - 1)).round().astype(int)
        faster[f"times, {bits} bits"] = rounds.apply(spread)
    grows = medians[16] > medians[32]
    assert grows.iloc[:4].all() and not grows["oneDNN's products"], "the text says so"
    return pd.DataFrame(saved | faster)


def peers_table(peers: Mapping[str, Any], compiled: Mapping[str, Any]) -> pd.DataFrame:
    """How many times as long as ours a step of each program takes, in 16 bits, and its memory."""
    ways = {
        "as it comes": (peers, ""),
        "memory kept": (peers, ", memory kept"),
        "compiled, too": (compiled, ", memory kept, compiled"),
    }
    rows = {}
    for program in ("textbook", "nn.Transformer", "MarianMTModel", "x-transformers"):
        raced = {
            way: (record["reports"][f"{program}, bf16{name}"], record["reports"]["ours, bf16"])
            for way, (record, name) in ways.items()
        }
        times = {("time", way): other["times"] for way, (other, _) in raced.items()}
        memory = {
            ("memory", way): other["peak_bytes"] / ours["peak_bytes"]
            for way, (other, ours) in raced.items()
            if way != "as it comes"
        }
        rows[program] = times | memory
    return pd.DataFrame(rows).T.map("{:.2f}".format)


def lines_chart(record: Mapping[str, Any]) -> alt.TopLevelMixin:
    """How fast the program is after so many lines of code, stair by stair."""
    times = pd.Series({name: record["reports"][name]["times"] for name in record["lines"]})
    frame = pd.DataFrame({"code": pd.Series(own_lines(record)).cumsum()}).rename_axis("step")
    frame["speed"] = times.iloc[0] / times
    (few, fast), (most, fastest) = frame.loc[["dropout from 16 bits", "C"]].values
    assert (few, round(fast), round(fastest / fast, 1)) == (55, 15, 1.4), "the text says so"
    used = rounded(frame.rename({"C": LAST}).reset_index()[["step", "code", "speed"]])
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
    flat = used["speed"].pct_change() < 0.05  # near each other: one label for all, below them
    plateau = used[flat].head(1).assign(step=" · ".join(used["step"][flat]))
    autocast = used["step"] == "autocast"
    for rows, place in (
        (used[used["code"] == 0], {"align": "left", "dx": 26, "dy": -9}),  # beside the riser
        (used[used["code"] == 1], {"align": "left", "dx": 6, "dy": -9}),
        (used[(used["code"] > 1) & ~flat & ~autocast], {"align": "right", "dx": -9, "dy": -4}),
        (used[autocast], {"align": "right", "dx": -9, "dy": 10}),
        (plateau, {"align": "left", "dx": -4, "dy": 16}),
    ):
        text = alt.Chart(rows).mark_text(fontSize=11, **place)
        layers.append(text.encode(x, y, text="step:N"))
    return titled(
        alt.layer(*layers).properties(width=560, height=360),
        f"{few:.0f} lines make training {fast:.0f} times as fast, "
        f"the next {round(most - few, -1):,.0f} add a factor of {fastest / fast:.1f}",
        "Each dot is a stair, measured at full size. Across: the lines of code that it needs, "
        "added up. Upwards, by factors: real tokens trained in a second.",
    )


def passes_of(loss: Callable[[], Tensor]) -> Callable[[], None]:
    """Forward and backward."""
    return lambda: loss().backward()


def memory_chart(losses: Mapping[str, Callable[[], Tensor]], logits: int) -> alt.TopLevelMixin:
    """Bytes alive after each operation of a loss and its backward pass, by way of computing it.

    `logits` is the size of all logits, in bytes.
    """
    forward = {name: alive_bytes(loss) for name, loss in losses.items()}
    curves = {name: alive_bytes(passes_of(loss)) for name, loss in losses.items()}
    tensors = [max(curve) / logits for curve in curves.values()]
    assert [*map(round, tensors[:2])] == [5, 3] and tensors[2] < 1, "the title says so"
    table = {
        name: {100 * i / len(curve): size / logits for i, size in enumerate(curve, start=1)}
        for name, curve in curves.items()
    }
    frame = long(table, "loss", "done", "tensors")
    chart = lines(
        frame,
        "done",
        "tensors",
        "loss",
        x_title="operations done, % (of each program's own)",
        y_title="tensors of the logits' size",
        zero=True,
    )
    chart = chart.mark_line(interpolate="step-after")
    chart.encoding.y["axis"] = alt.Axis(values=[*range(6)])
    turns = {name: 100 * len(curve) / len(curves[name]) for name, curve in forward.items()}
    ends = pd.DataFrame(
        {"loss": name, "done": done, "tensors": curves[name][len(forward[name]) - 1] / logits}
        for name, done in turns.items()
    )
    dots = alt.Chart(rounded(ends)).mark_circle(size=70, opacity=1)
    dots = dots.encode(x="done:Q", y="tensors:Q", color=chart.encoding.color)
    return titled(
        chart + dots,
        "The textbook's loss holds five tensors of the logits' size; in chunks, less than one",
        "Memory of the loss's own tensors, operation by operation, forward and backward. All "
        f"logits of the 1,024 rows take {logits / 2**20:.0f} MiB; a chunk has 256 rows. At its dot "
        "a loss begins its backward pass.",
    )


def stages_table(stages: Mapping[str, Any]) -> pd.DataFrame:
    """A GPU's stages: ms per step, and each round's time of the stage before over this one's."""
    names = ["textbook", "16 bits", "fused parts, nothing waits", "few shapes", "recorded"]
    times = [round(1000 * stage["seconds_per_step"], 2) for stage in stages.values()]
    gained = gains(stages, [*stages]).apply(spread)
    columns = {"ms per step": times, "times as fast, round by round": ["", *gained]}
    return pd.DataFrame(columns, index=names)


def launches_chart(stages: pd.DataFrame) -> alt.TopLevelMixin:
    """Ten kernels, launched one by one and as one recording: `stages_table`'s last two rows."""
    eager, recorded = stages["ms per step"].iloc[-2:]
    assert 9 <= eager / recorded < 10, "the title says so"
    rows = [("recorded", "CPU prepares", 0.0, recorded)]
    for i in range(10):
        begin, end = i * eager, (i + 1) * recorded
        rows.append(("one by one", "CPU prepares", begin, begin + eager))
        rows.append(("one by one", "GPU computes", begin + eager, begin + eager + recorded))
        rows.append(("recorded", "GPU computes", end, end + recorded))
    frame = rounded(pd.DataFrame(rows, columns=["way", "who", "start", "end"]))
    shades = {"CPU prepares": PALETTE[1], "GPU computes": PALETTE[0]}
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
        "One by one, the GPU works at most a ninth of the time",
        "A scheme of ten kernels. Above, the CPU prepares each one: Python, bookkeeping, launch. "
        "Below, it launches all ten at once. Bars are a tenth of the measured steps, without a "
        "recording and with one. Assumed: equal kernels, no gaps below, the length of that launch.",
    )
