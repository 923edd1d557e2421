"""Drawings of part III: where time goes, what the fast path is worth, races, two graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from scripts import Late
from scripts.book.charts import bars, rounded, titled
from scripts.book.figures.diagram import drawn
from scripts.book.look import GREY, INK, LOG, PALE, PALETTE, bar_axis, colored

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


def roofline_chart(record: dict[str, Any]) -> alt.TopLevelMixin:
    """Speed over arithmetic intensity of the recorded operations, under the machine's two roofs."""
    x = alt.X("intensity:Q", title="arithmetic intensity: FLOPs per byte")
    x = x.scale(domain=[0.02, 300], **LOG).axis(values=[0.1, 1, 10, 100], format="~g")
    y = alt.Y("speed:Q", title="speed: billion FLOP/s")
    y = y.scale(domain=[0.2, 1000], **LOG).axis(values=[1, 10, 100, 1000], format="~g")
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
        alt.Chart(rounded(roof)).mark_line(color=GREY).encode(x, y),
        dots.encode(x, y, tooltip=["operation", "intensity", "speed"]),
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
        layers.append(text.encode(x, y, text="label:N"))
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


def race_frame(reports: Mapping[str, Any]) -> pd.DataFrame:
    """Each program's time over that of ours: the median of its rounds, and their range."""
    rows = {}
    for name, report in reports.items():
        rounds = report["rounds"] or [1.0]  # ours is the measure: it has none
        mib = round(report["peak_bytes"] / 2**20)
        rows[name] = [report["times"], min(rounds), max(rounds), mib]
    names = ["times as long as ours", "lowest", "highest", "peak MiB"]
    return pd.DataFrame.from_dict(rows, orient="index", columns=names)


def duel_frame(both: Mapping[str, Mapping[str, Any]], how_sure: Callable) -> pd.DataFrame:
    """What each part is worth in either precision, and `how_sure(rounds, control)` that is."""
    frames = {}
    for precision, reports in both.items():
        frame = race_frame(reports).filter(like="without ", axis=0).round(3)
        frame.loc["ours again"] = race_frame(reports).loc["ours again"].round(3)
        control = reports["ours again"]["rounds"]
        frame["how sure"] = [how_sure(reports[name]["rounds"], control) for name in frame.index]
        frame.loc["ours again", "how sure"] = "control"
        frames[precision] = frame.rename(lambda name: name.removeprefix("without "))
    duels = pd.concat(frames, names=["precision", "part"]).swaplevel().drop(columns="peak MiB")
    return duels.rename(columns={"times as long as ours": "times as long without it"})


def switches_chart(duels: pd.DataFrame) -> alt.TopLevelMixin:
    """What each part is worth: a dot and its range, a panel for either precision.

    Columns: part, precision, times as long without it, lowest, highest, how sure. The control's
    range, where two equal programs raced, is a grey band.
    """
    frame = duels.rename(columns={"times as long without it": "times", "how sure": "sure"})
    order = frame.groupby("part")["times"].mean().sort_values(ascending=False).index.tolist()
    shades = {"clear": PALETTE[0], "likely": PALETTE[5], "can't tell": "#9A9A9A", "control": INK}
    color = colored("sure", shades).legend(title=None, orient="bottom")
    span = alt.Scale(domain=[0.93, 1.68], nice=False)
    x = alt.X("lowest:Q", title="times as long without it", scale=span)
    x = x.axis(values=[1.0, 1.2, 1.4, 1.6], format=".1f")
    equal = alt.Chart(pd.DataFrame({"lowest": [1.0]})).mark_rule(color=GREY)
    panels = []
    for precision, rows in frame.groupby("precision", sort=False):
        y = bar_axis("part", order, grid=False, labels=not panels)  # names at the first alone
        base = alt.Chart(rows).encode(y, color)
        control = alt.Chart(rows[rows["sure"] == "control"]).mark_rect(color=PALE)
        layers = [
            control.encode(x, x2="highest:Q"),
            equal.encode(x),
            base.mark_rule(strokeWidth=2).encode(x, x2="highest:Q"),
            base.mark_circle(size=80, opacity=1).encode(alt.X("times:Q", scale=span)),
        ]
        drawn = alt.layer(*layers).properties(width=215, height=alt.Step(24))
        panels.append(drawn.properties(title=alt.Title(precision, fontSize=13)))
    return titled(
        alt.hconcat(*panels, spacing=15),
        "Most parts are worth their code, and in bf16 five are worth more",
        "Time of a step without each part, over ours: median and range of five rounds. The grey "
        "band is the control, where two equal programs raced: clear lines lie wholly outside it.",
    )


def two_graphs() -> alt.TopLevelMixin:
    """The encoder's graph, run once, and the step's graph, which the host runs again and again."""
    return titled(
        drawn("two_graphs").chart(),
        "Two graphs, and a loop that belongs to neither",
        "Read upwards. Left: once for a batch. Right: once for every token. Two things go round: "
        "the token, which the host chooses, and past, which is the last step's present. Blue and "
        "orange: graphs. Pink: the host. Green: keys and values. R = B, or more with a beam.",
    )
