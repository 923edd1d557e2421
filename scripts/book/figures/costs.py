"""Drawings of costs: where FLOPs go, the roofline, a step's account, and how cost grows."""

from __future__ import annotations

from typing import Any

from scripts import Late
from scripts.book.charts import GREY, PALETTE, bars, rounded, titled

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


def _axes() -> dict[str, Any]:
    """The two logarithmic axes that every roofline here has."""
    return {
        "x": alt.X(
            "intensity:Q",
            title="arithmetic intensity: FLOPs per byte",
            scale=alt.Scale(type="log", domain=[0.02, 300], nice=False),
            axis=alt.Axis(values=[0.1, 1, 10, 100], format="~g"),
        ),
        "y": alt.Y(
            "speed:Q",
            title="speed: billion FLOP/s",
            scale=alt.Scale(type="log", domain=[0.2, 1000], nice=False),
            axis=alt.Axis(values=[1, 10, 100, 1000], format="~g"),
        ),
    }


def _roof(rate: float, bandwidth: float) -> alt.Chart:
    """The two straight lines under which a machine's operations lie."""
    roof = pd.DataFrame({"intensity": [0.02, rate / bandwidth, 300.0]})
    roof["speed"] = (roof["intensity"] * bandwidth).clip(upper=rate) / 1e9
    return alt.Chart(rounded(roof)).mark_line(color=GREY).encode(**_axes())


def _labels(frame: pd.DataFrame, **look: Any) -> alt.Chart:
    """Text at places of a roofline: columns intensity, speed and label; "\\n" breaks a line."""
    text = alt.Chart(rounded(frame)).mark_text(**{"lineBreak": "\n", "fontSize": 12} | look)
    return text.encode(**_axes(), text="label:N")


def roofline_chart(record: dict[str, Any]) -> alt.TopLevelMixin:
    """Speed over arithmetic intensity of the recorded operations, under the machine's two roofs."""
    frame = pd.DataFrame(record["operations"])
    frame["intensity"] = frame["flops"] / frame["bytes"]
    frame["speed"] = frame["flops"] / frame["seconds"] / 1e9
    crowd = {"Q, K, V": "", "feed-forward, out": "", "feed-forward, back": "Q, K, V; feed-forward"}
    frame["label"] = frame["operation"].replace(crowd)
    shown = rounded(frame[["operation", "label", "intensity", "speed"]])
    dots = alt.Chart(shown).mark_point(filled=True, size=70, opacity=1, color=PALETTE[0])
    layers = [_roof(record["matrix_rate"], record["bandwidth"])]
    layers.append(dots.encode(**_axes(), tooltip=["operation", "intensity", "speed"]))
    high = shown["label"].str.startswith("Q, K, V")
    right = (shown["intensity"] > 10) & ~high  # labels stay inside the picture
    above = shown["speed"] > 1.5 * shown["intensity"] * record["bandwidth"] / 1e9
    for rows, place in (
        (high, {"align": "right", "dx": 24, "dy": -14}),
        (right, {"align": "right", "dx": -9, "dy": 6}),
        (above, {"align": "right", "dx": 6, "dy": -14}),
        (~right & ~high & ~above, {"align": "left", "dx": 9, "dy": 6}),
    ):
        layers.append(_labels(shown[rows], **place))
    return titled(
        alt.layer(*layers).properties(width=520, height=340),
        "Products reach 30 to 60% of the roof; dropout and the loss stay far below it",
        "Operations of our step, each alone, on the record's machine. Dots above the sloping line "
        "moved more bytes a second than memory does by our measurement.",
    )


def step_account_chart(account: dict[str, float], floors: dict[str, float]) -> alt.TopLevelMixin:
    """Seconds of a step by kind of operation, with the floor of those kinds that have one."""
    frame = pd.DataFrame(account.items(), columns=["kind", "seconds"])
    frame = rounded(frame.sort_values("seconds", ascending=False), 3)
    y = alt.Y("kind:N", sort=list(frame["kind"]), title=None)
    y.axis = alt.Axis(ticks=False, labelPadding=8)
    scale = alt.Scale(domain=[0, 1.18 * frame["seconds"].max()], nice=False)
    x = alt.X("seconds:Q", scale=scale, axis=alt.Axis(grid=False, tickCount=5))
    base = alt.Chart(frame).encode(x=x, y=y)
    least = rounded(pd.DataFrame(floors.items(), columns=["kind", "seconds"]), 3)
    layers = [
        base.mark_bar(color=PALETTE[0], height=18),
        base.mark_text(align="left", dx=5).encode(text=alt.Text("seconds:Q", format=".3f")),
        alt.Chart(least)
        .mark_tick(color=PALETTE[1], thickness=4, height=24, opacity=1)
        .encode(x=x, y=y),
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
    color = alt.Color("cost:N", sort=list(used["cost"].unique()), title=None)
    panels = []
    for axis, along in used.groupby("axis", sort=False):
        values = sorted(along["value"].unique().tolist())
        log = {"type": "log", "base": 2, "nice": False}
        x = alt.X(
            "value:Q",
            title=GROWTH_AXES[axis],
            scale=alt.Scale(domain=[values[0], values[-1]], padding=12, **log),
            axis=alt.Axis(values=values, grid=False, format=","),
        )
        y = alt.Y(
            "times:Q",
            title="times as much",
            scale=alt.Scale(domain=[0.9, 70], **log),
            axis=alt.Axis(values=[1, 2, 4, 8, 16, 32, 64]),
        )
        steady = pd.DataFrame({"value": [values[0], values[-1]]})
        steady["times"] = steady["value"] / values[0]
        grey = alt.Chart(steady).mark_line(color=GREY, strokeWidth=1.5, strokeDash=[5, 4])
        chart = alt.Chart(along).mark_line(point={"filled": True, "size": 40})
        layers = [grey.encode(x=x, y=y), chart.encode(x=x, y=y, color=color)]
        panels.append(alt.layer(*layers).properties(width=230, height=170))
    return titled(
        alt.concat(*panels, columns=2),
        "At a fixed number of tokens length costs little; time grows most with width",
        "The textbook's step, as multiples of its cost at each axis's smallest value. Both axes "
        "of each panel are logarithmic: a straight line is a power. Dashed: slope 1.",
    )
