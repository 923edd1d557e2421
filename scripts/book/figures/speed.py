"""Drawings of speed: the roofline, accounts of a step, switches, races, and how cost grows."""

from __future__ import annotations

from typing import Any

from scripts import Late
from scripts.book.charts import GREY, PALETTE, bars, rounded, titled

alt, pd = Late("altair"), Late("pandas")


def flops_chart(shares: dict[str, float]) -> alt.TopLevelMixin:
    """Which products a step's operations go to."""
    frame = pd.DataFrame(shares.items(), columns=["products", "share"])
    return titled(
        bars(frame, "products", "share", number_format=".1%", value_title="share of operations"),
        "Where the multiplications are",
        "A step of 128 pairs of 16 tokens. Attention's own products, the only ones whose cost "
        "grows with the square of the length, hardly count at this length.",
    )


def roofline_chart(record: dict[str, Any]) -> alt.TopLevelMixin:
    """Speed over arithmetic intensity of the recorded operations, under the machine's two roofs."""
    frame = pd.DataFrame(record["operations"])
    frame["intensity"] = frame["flops"] / frame["bytes"]
    frame["speed"] = frame["flops"] / frame["seconds"] / 1e9
    crowd = {"Q, K, V": "", "feed-forward, out": "", "feed-forward, back": "Q, K, V; feed-forward"}
    frame["label"] = frame["operation"].replace(crowd)
    bend = record["matrix_rate"] / record["bandwidth"]
    roof = pd.DataFrame({"intensity": [0.05, bend, 300.0]})
    slope = roof["intensity"] * record["bandwidth"]
    roof["speed"] = slope.clip(upper=record["matrix_rate"]) / 1e9
    x = alt.X(
        "intensity:Q",
        title="operations per byte",
        scale=alt.Scale(type="log", domain=[0.05, 300], nice=False),
        axis=alt.Axis(values=[0.1, 0.3, 1, 3, 10, 30, 100]),
    )
    y = alt.Y(
        "speed:Q",
        title="billion operations a second",
        scale=alt.Scale(type="log", domain=[0.2, 600], nice=False),
        axis=alt.Axis(values=[0.3, 1, 3, 10, 30, 100, 300]),
    )
    line = alt.Chart(rounded(roof)).mark_line(color=GREY).encode(x=x, y=y)
    shown = rounded(frame[["operation", "label", "intensity", "speed"]])
    dots = alt.Chart(shown).mark_point(filled=True, size=70, opacity=1, color=PALETTE[0])
    layers = [line, dots.encode(x=x, y=y, tooltip=["operation", "intensity", "speed"])]
    right = shown["intensity"] > 10  # labels stay inside the picture
    for rows, place in (
        (right, {"align": "right", "dx": -9}),
        (~right, {"align": "left", "dx": 9}),
    ):
        text = alt.Chart(shown[rows]).mark_text(fontSize=11, dy=6, **place)
        layers.append(text.encode(x=x, y=y, text="label:N"))
    return titled(
        alt.layer(*layers).properties(width=520, height=320),
        "The roofline of this machine, and our operations under it",
        "Left of the bend memory is the limit, right of it the multipliers. Both axes are "
        "logarithmic.",
    )


def account_chart(
    accounts: dict[str, dict[str, float]], title: str, caption: str
) -> alt.TopLevelMixin:
    """Seconds of a step by kind of operation, for one path or several."""
    rows = [
        {"kind": kind, "path": path, "seconds": seconds}
        for path, account in accounts.items()
        for kind, seconds in account.items()
    ]
    frame = rounded(pd.DataFrame(rows), 3)
    kinds = list(next(iter(accounts.values())))
    y = alt.Y("kind:N", sort=kinds, title=None, axis=alt.Axis(ticks=False, labelPadding=8))
    base = alt.Chart(frame).encode(
        x=alt.X(
            "seconds:Q",
            title="seconds",
            axis=alt.Axis(grid=False, tickCount=5),
            scale=alt.Scale(domainMax=1.15 * frame["seconds"].max()),
        ),
        y=y,
        yOffset=alt.YOffset("path:N", sort=list(accounts)),
    )
    several = alt.Color("path:N", sort=list(accounts), title=None) if len(accounts) > 1 else None
    mark = base.mark_bar(color=PALETTE[0])
    drawn = mark.encode(color=several) if several else mark
    numbers = base.mark_text(align="left", dx=4, fontSize=11).encode(
        text=alt.Text("seconds:Q", format=".3f")
    )
    return titled(
        alt.layer(drawn, numbers).properties(width=420, height=alt.Step(18)), title, caption
    )


def switches_frame(record: dict[str, Any]) -> pd.DataFrame:
    """How many times as long a step takes without each part, in both precisions, with its range."""
    rows = []
    for precision, reports in (
        ("float32", record["reports"]),
        ("bfloat16", record["half"]["reports"]),
    ):
        for name, report in reports.items():
            if name.startswith("without "):
                low, high = min(report["rounds"]), max(report["rounds"])
                row = {"without": name.removeprefix("without "), "precision": precision}
                rows.append(row | {"times": report["times"], "low": low, "high": high})
    return pd.DataFrame(rows)


def switches_chart(record: dict[str, Any]) -> alt.TopLevelMixin:
    """What each part is worth: a dot and its range for either precision."""
    frame = rounded(switches_frame(record))
    order = frame[frame["precision"] == "float32"].sort_values("times", ascending=False)["without"]
    y = alt.Y("without:N", sort=list(order), title=None, axis=alt.Axis(grid=True))
    x = alt.X("times:Q", title="times as long", scale=alt.Scale(zero=False, nice=False, padding=12))
    color = alt.Color("precision:N", sort=["float32", "bfloat16"], title=None)
    offset = alt.YOffset("precision:N", sort=["float32", "bfloat16"])
    base = alt.Chart(frame).encode(y=y, yOffset=offset, color=color)
    one = alt.Chart(pd.DataFrame({"x": [1.0]})).mark_rule(color=GREY).encode(x="x:Q")
    ranges = base.mark_rule(strokeWidth=2).encode(
        x=alt.X("low:Q", title="times as long"), x2="high:Q"
    )
    dots = base.mark_circle(size=70, opacity=1).encode(
        x=x, tooltip=["without", "times", "low", "high"]
    )
    return titled(
        alt.layer(one, ranges, dots).properties(width=420, height=alt.Step(14)),
        "How much longer a step takes without each part",
        "Right of the grey line the part pays. Where the range holds 1, it can't be told from "
        "noise.",
    )


def peers_frame(record: dict[str, Any]) -> pd.DataFrame:
    """A row for each contender: program, precision, setting, time, speed, memory, utilisation."""
    rows = []
    for name, report in record["reports"].items():
        program, precision, *kept = name.split(", ")
        setting = "memory kept" if kept or program == "ours" else "as it comes"
        row = {"program": program, "precision": precision, "setting": setting}
        rounds = report["rounds"] or [1.0]
        row |= {"times as long": report["times"], "low": min(rounds), "high": max(rounds)}
        row["target tokens a second"] = round(report["tokens_per_second"])
        row["peak MiB"] = round(report["peak_bytes"] / 2**20)
        row["share of matrix rate"] = f"{report['mfu']:.0%}"
        rows.append(row)
    return pd.DataFrame(rows)


def peers_chart(record: dict[str, Any]) -> alt.TopLevelMixin:
    """How many times as long each program's step takes as ours in 16 bits, by precision."""
    frame = peers_frame(record)
    frame = rounded(frame[(frame["setting"] == "memory kept")])
    order = ["ours", *[name for name in frame["program"].unique() if name != "ours"]]
    y = alt.Y("program:N", sort=order, title=None, axis=alt.Axis(ticks=False))
    x = alt.X(
        "times as long:Q", scale=alt.Scale(domainMin=0), title="times as long as ours in bf16"
    )
    color = alt.Color("precision:N", sort=["float32", "bf16"], title=None)
    offset = alt.YOffset("precision:N", sort=["float32", "bf16"])
    base = alt.Chart(frame).encode(y=y, yOffset=offset)
    drawn = base.mark_bar().encode(x=x, color=color)
    ranges = base.mark_rule(color="black").encode(x=alt.X("low:Q"), x2="high:Q")
    numbers = base.mark_text(align="left", dx=5, fontSize=11).encode(
        x="high:Q", text=alt.Text("times as long:Q", format=".2f")
    )
    return titled(
        alt.layer(drawn, ranges, numbers).properties(width=420, height=alt.Step(18)),
        "The same training step, five programs, two precisions",
        "Freed memory kept for all. Bars are medians of the ratio to ours, black lines go from "
        "the lowest to the highest round.",
    )


def growth_chart(record: dict[str, Any]) -> alt.TopLevelMixin:
    """Seconds of a step along the four axes, by both paths."""
    frame = rounded(pd.DataFrame(record["points"])[["axis", "value", "path", "seconds"]])
    titles = {
        "length": "length (2,048 tokens a side)",
        "tokens": "tokens a side",
        "width": "d_model (d_ff = 4 × d_model)",
        "depth": "layers on either side",
    }
    colour = alt.Color("path:N", sort=["textbook", "ours"], title=None)
    panels = []
    for axis, along in frame.groupby("axis", sort=False):
        values = sorted(along["value"].unique().tolist())
        log = {"type": "log", "nice": False}
        x = alt.X(
            "value:Q",
            title=titles[axis],
            scale=alt.Scale(domain=[values[0], values[-1]], padding=12, **log),
            axis=alt.Axis(values=values, grid=False, format=","),
        )
        y = alt.Y(
            "seconds:Q",
            scale=alt.Scale(domain=[0.1, 6], **log),
            axis=alt.Axis(values=[0.1, 0.2, 0.5, 1, 2, 5]),
        )
        chart = alt.Chart(along).mark_line(point={"filled": True, "size": 45})
        panels.append(chart.encode(x=x, y=y, color=colour).properties(width=250, height=170))
    return titled(
        alt.concat(*panels, columns=2),
        "How a step grows",
        "Both axes of each panel are logarithmic: a straight line is a power, and its slope the "
        "exponent.",
    )
