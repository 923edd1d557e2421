"""Drawings of costs: where FLOPs go, the roofline, a step's account, and how cost grows."""

from __future__ import annotations

from typing import Any

from scripts import Late
from scripts.book.charts import GREY, LOG, PALETTE, bar_axis, bars, rounded, titled

alt, pd = Late("altair"), Late("pandas")


def flops_chart(shares: dict[str, float]) -> alt.TopLevelMixin:
    """Which products a step's FLOPs go to."""
    frame = pd.DataFrame(shares.items(), columns=["products", "share"])
    return titled(
        bars(frame, "products", "share", number_format=".0%", value_title="share of FLOPs"),
        "At 16 tokens attention's own products are 1% of the FLOPs",
        "A step of 128 pairs of 16 tokens. The last bar holds the only products whose cost grows "
        "with the square of the length.",
    )


def _axes() -> list[alt.X | alt.Y]:
    """The two logarithmic axes that every roofline here has."""
    x = alt.X("intensity:Q", title="arithmetic intensity: FLOPs per byte")
    x = x.scale(domain=[0.02, 300], **LOG).axis(values=[0.1, 1, 10, 100], format="~g")
    y = alt.Y("speed:Q", title="speed: billion FLOP/s")
    y = y.scale(domain=[0.2, 1000], **LOG).axis(values=[1, 10, 100, 1000], format="~g")
    return [x, y]


def roofline_chart(record: dict[str, Any]) -> alt.TopLevelMixin:
    """Speed over arithmetic intensity of the recorded operations, under the machine's two roofs."""
    rate, bandwidth = record["matrix_rate"], record["bandwidth"]
    roof = pd.DataFrame({"intensity": [0.02, rate / bandwidth, 300.0]})
    roof["speed"] = (roof["intensity"] * bandwidth).clip(upper=rate) / 1e9
    frame = pd.DataFrame(record["operations"])
    frame["intensity"] = frame["flops"] / frame["bytes"]
    frame["speed"] = frame["flops"] / frame["seconds"] / 1e9
    crowd = {"Q, K, V": "", "feed-forward, out": "", "feed-forward, back": "Q, K, V; feed-forward"}
    frame["label"] = frame["operation"].replace(crowd)
    shown = rounded(frame[["operation", "label", "intensity", "speed"]])
    dots = alt.Chart(shown).mark_point(filled=True, size=70, opacity=1, color=PALETTE[0])
    layers = [
        alt.Chart(rounded(roof)).mark_line(color=GREY).encode(*_axes()),
        dots.encode(*_axes(), tooltip=["operation", "intensity", "speed"]),
    ]
    high = shown["label"].str.startswith("Q, K, V")
    right = (shown["intensity"] > 10) & ~high  # labels stay inside the picture
    above = shown["speed"] > 1.5 * shown["intensity"] * bandwidth / 1e9
    for rows, place in (
        (high, {"align": "right", "dx": 24, "dy": -14}),
        (right, {"align": "right", "dx": -9, "dy": 6}),
        (above, {"align": "right", "dx": 6, "dy": -14}),
        (~right & ~high & ~above, {"align": "left", "dx": 9, "dy": 6}),
    ):
        text = alt.Chart(rounded(shown[rows])).mark_text(lineBreak="\n", fontSize=12, **place)
        layers.append(text.encode(*_axes(), text="label:N"))
    return titled(
        alt.layer(*layers).properties(width=520, height=340),
        "Products reach 30 to 60% of the roof; dropout and the loss stay far below it",
        "Operations of our step, each alone, on the record's machine. Dots above the sloping line "
        "moved more bytes a second than memory does by our measurement.",
    )


def step_account_chart(account: dict[str, float], floors: dict[str, float]) -> alt.TopLevelMixin:
    """Seconds of a step by kind of operation, with the floor of those kinds that have one."""
    spent, least = (
        rounded(pd.DataFrame(seconds.items(), columns=["kind", "seconds"]), 3)
        for seconds in (account, floors)
    )
    spent = spent.sort_values("seconds", ascending=False)
    x = alt.X("seconds:Q").axis(grid=False, tickCount=5)
    x = x.scale(domain=[0, 1.18 * spent["seconds"].max()], nice=False)
    y = bar_axis("kind", list(spent["kind"]))
    base = alt.Chart(spent).encode(x, y)
    ticks = alt.Chart(least).mark_tick(color=PALETTE[1], thickness=4, height=24, opacity=1)
    layers = [
        base.mark_bar(color=PALETTE[0], height=18),
        base.mark_text(align="left", dx=5).encode(text=alt.Text("seconds:Q", format=".3f")),
        ticks.encode(x, y),
    ]
    return titled(
        alt.layer(*layers).properties(width=380, height=alt.Step(28)),
        "Most of the step's time has no place in the floor",
        "Seconds of a step of the textbook path, by kind of operation, as the profiler books them. "
        "Orange: the floor. Kinds without a mark have a floor of zero.",
    )


GROWTH_AXES = {
    "length": "length (2,048 tokens a side)",
    "tokens": "tokens a side",
    "width": "d_model (d_ff = 4 × d_model)",
    "depth": "layers on either side",
}


def growth_chart(frame: pd.DataFrame, costs: list[str]) -> alt.TopLevelMixin:
    """Costs along the four axes, as multiples of the smallest: columns axis, value and `costs`."""
    used = frame.melt(["axis", "value"], costs, "cost", "times")
    used["times"] /= used.groupby(["axis", "cost"])["times"].transform("first")
    used = rounded(used)
    y = alt.Y("times:Q", title="times as much").axis(values=[1, 2, 4, 8, 16, 32, 64])
    y = y.scale(domain=[0.9, 70], base=2, **LOG)
    color = alt.Color("cost:N", sort=list(used["cost"].unique()), title=None)
    panels = []
    for axis, along in used.groupby("axis", sort=False):
        values = sorted(along["value"].unique().tolist())
        ends = [values[0], values[-1]]
        x = alt.X("value:Q", title=GROWTH_AXES[axis]).axis(values=values, grid=False, format=",")
        x = x.scale(domain=ends, padding=12, base=2, **LOG)
        steady = pd.DataFrame({"value": ends, "times": [1.0, ends[1] / ends[0]]})
        grey = alt.Chart(steady).mark_line(color=GREY, strokeWidth=1.5, strokeDash=[5, 4])
        chart = alt.Chart(along).mark_line(point={"filled": True, "size": 40})
        layers = [grey.encode(x, y), chart.encode(x, y, color)]
        panels.append(alt.layer(*layers).properties(width=230, height=170))
    return titled(
        alt.concat(*panels, columns=2),
        "At a fixed number of tokens length costs little; time grows most with width",
        "The textbook's step, as multiples of its cost at each axis's smallest value. Both axes "
        "of each panel are logarithmic: a straight line is a power. Dashed: slope 1.",
    )
