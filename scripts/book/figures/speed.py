"""Tables of races, and the drawing of chapter 12: what each part of the fast path is worth."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from scripts import Late
from scripts.book.charts import GREY, INK, PALE, PALETTE, bar_axis, titled

alt, pd = Late("altair"), Late("pandas")


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
    color = alt.Color("sure:N").legend(title=None, orient="bottom")
    color = color.scale(domain=list(shades), range=list(shades.values()))
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
