"""Drawings of learning from models: every run of the recipes, beside what it has to beat."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from scripts import Late
from scripts.book.charts import GREY, INK, rounded, titled

alt, pd = Late("altair"), Late("pandas")


def recipe_chart(record: dict[str, Any]) -> alt.TopLevelMixin:
    """BLEU and chrF of every run of a record of `studies.learning`, side by side."""
    against = {name: row["against"] for name, row in record["rows"].items() if row["against"]}
    kinds = {name: row["recipe"] for name, row in record["rows"].items()}
    kinds |= dict.fromkeys(against.values(), "ordinary training")  # what others have to beat
    runs = [
        {"row": name, "recipe": kinds[name], "BLEU": run["bleu"], "chrF": run["chrf"]}
        for name, row in record["rows"].items()
        for run in row["runs"]
    ]
    frame = pd.DataFrame(runs)
    panels = [
        recipe_panel(frame, against, score, names=score == "BLEU") for score in ("BLEU", "chrF")
    ]
    share = record["options"]["share"]
    return titled(
        alt.hconcat(*panels),
        "On BLEU, two rows differ from what they have to beat by more than noise",
        "Each point is a run, the tick a row's mean, the open diamond the mean that it has to "
        f"beat. “A part” is 1/{share} of the {record['train_pairs']:,} pairs, passed over {share} "
        "times as often.",
        wrap=100,
    )


def recipe_panel(
    frame: pd.DataFrame, against: Mapping[str, str], score: str, names: bool
) -> alt.LayerChart:
    """One score of every run: points, a tick at each row's mean, a diamond at its rival's."""
    order = list(dict.fromkeys(frame["row"]))
    room = 0.08 * (frame[score].max() - frame[score].min()) or 1.0
    ends = [round(frame[score].min() - room, 2), round(frame[score].max() + room, 2)]
    scale = alt.Scale(domain=ends, nice=False)
    x = alt.X(f"{score}:Q", scale=scale, title=f"validation {score}", axis=alt.Axis(tickCount=6))
    axis = alt.Axis(grid=True, domain=False, ticks=False, labels=names)
    y = alt.Y("row:N", sort=order, title=None, axis=axis)
    legend = alt.Legend(title=None, orient="bottom")
    color = alt.Color("recipe:N", sort=list(dict.fromkeys(frame["recipe"])), legend=legend)
    dots = alt.Chart(rounded(frame)).mark_circle(size=75, opacity=0.8).encode(x=x, y=y, color=color)
    means = rounded(frame.groupby("row", as_index=False)[score].mean())
    ticks = alt.Chart(means).mark_tick(thickness=2, size=18, color=INK).encode(x=x, y=y)
    of_row = means.set_index("row")[score]
    rivals = pd.DataFrame([{"row": row, score: of_row[rival]} for row, rival in against.items()])
    diamonds = alt.Chart(rivals).mark_point(shape="diamond", size=70, color=GREY).encode(x=x, y=y)
    return alt.layer(diamonds, ticks, dots).properties(width=240, height=28 * len(order))


def ladder_chart(rows: Sequence[Mapping[str, Any]]) -> alt.TopLevelMixin:
    """Validation BLEU of each run of the ladder's rungs, but for those of another direction."""
    shown = [row for row in rows if row["gain"] is not None]
    order = [row["about"] for row in shown]
    runs = [{"rung": row["about"], "BLEU": bleu} for row in shown for bleu in row["each"]]
    frame = rounded(pd.DataFrame(runs))
    ends = [math.floor(frame["BLEU"].min()), math.ceil(frame["BLEU"].max())]
    axis = alt.X("BLEU:Q", scale=alt.Scale(domain=ends), title="validation BLEU, greedy")
    y = alt.Y("rung:N", sort=order, title=None, axis=alt.Axis(labelLimit=240))
    dots = alt.Chart(frame).mark_circle(size=75, color=INK).encode(x=axis, y=y)
    first = pd.DataFrame({"BLEU": [shown[0]["val_bleu"]]})
    rule = alt.Chart(first).mark_rule(color=GREY, strokeDash=[4, 4]).encode(x=axis)
    best = max(shown, key=lambda row: row["val_bleu"])
    return titled(
        alt.layer(rule, dots).properties(width=420, height=28 * len(order)),
        f"Highest by greedy decoding: {best['about']}",
        "Each point is a whole training of the small model. Dashed: the recipe that ships, in 16 "
        "bits.",
    )
