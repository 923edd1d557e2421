"""Drawings of chapter 26: words and their translation, who acts, what fine-tuning changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from scripts import Late
from scripts.book.charts import rounded, titled
from scripts.book.look import GREY, PALETTE, colored

alt, pd = Late("altair"), Late("pandas")

BEFORE = "before fine-tuning"


def alignment(
    source: Sequence[str], target: Sequence[str], links: Sequence[tuple[int, int]]
) -> alt.LayerChart:
    """Two rows of words with a line for each link, from a source word's place to a target's.

    Words without a link are grey.
    """
    sides = {1: source, 0: target}
    step = {row: 1 / len(words) for row, words in sides.items()}
    linked = {1: {i for i, _ in links}, 0: {j for _, j in links}}
    words = [
        {"x": (i + 0.5) * step[row], "y": row, "word": word, "linked": i in linked[row]}
        for row, side in sides.items()
        for i, word in enumerate(side)
    ]
    ends = [
        {"x": (i + 0.5) * step[1], "y": 0.87, "x2": (j + 0.5) * step[0], "y2": 0.13}
        for i, j in links
    ]
    x = alt.X("x:Q", axis=None).scale(domain=[0, 1])
    y = alt.Y("y:Q", axis=None).scale(domain=[-0.1, 1.1])
    rules = alt.Chart(rounded(pd.DataFrame(ends))).mark_rule(color=GREY, strokeWidth=2)
    texts = alt.Chart(rounded(pd.DataFrame(words))).mark_text(fontSize=15)
    opacity = alt.when("datum.linked").then(alt.value(1)).otherwise(alt.value(0.4))
    named = texts.encode(x, y, text="word", opacity=opacity)
    drawn = rules.encode(x, y, x2="x2", y2="y2") + named
    return drawn.properties(width=560, height=120)


def actors_chart(
    mine: Mapping[tuple[str, str, str], Mapping[str, float]],
    runs: Sequence[Mapping[str, Mapping[str, Mapping[str, float]]]],
) -> alt.TopLevelMixin:
    """How often the true actor acts, by who has a capital letter and who is first: a run a point.

    `runs` have shares by form, kind of object and actor, `mine` by (kind, capital, first). Raises
    ValueError if `mine` is more than 0.3 beyond all runs, or if a run contradicts the title.
    """
    rows = [
        {"object": kind, "capital": capital, "first": first.removesuffix(" first")} | shares
        for run in runs
        for form, kinds in run.items()
        for capital, first in [form.split("; ")]
        for kind, shares in kinds.items()
    ]
    frame = pd.DataFrame(rows)
    true = frame.groupby(["object", "capital", "first"], sort=False)["the true actor"]
    low, high = true.min() - 0.3, true.max() + 0.3
    if not all(low[form] <= row["the true actor"] <= high[form] for form, row in mine.items()):
        raise ValueError("this model reads otherwise than the recorded ones")
    beings = frame[frame["object"] == "a being"]
    decides = beings["capital"].mask(beings["capital"].isin(["both", "neither"]), beings["first"])
    expected = beings["the true actor"].where(decides == "the actor", beings["the object"])
    if expected.min() < 0.55:
        raise ValueError("the outputs don't say what the title says")
    frame["share"] = 100 * frame["the true actor"]
    colors = dict(zip(frame["first"].unique(), PALETTE, strict=False))
    x = alt.X("share:Q", title="outputs in which the true actor acts (%)")
    axes = {"a being": alt.Axis(title="who has a capital letter", domain=False), "a thing": None}
    legend = alt.Legend(orient="bottom", title="first in the sentence", values=[*colors])
    points = (
        alt.Chart(rounded(frame[["object", "capital", "first", "share"]]))
        .mark_circle(size=70, opacity=0.6)
        .encode(
            x.scale(domain=[-4, 104], nice=False).axis(values=[0, 50, 100]),
            colored("first", colors, legend=legend),
            yOffset=alt.YOffset("first:N", sort=[*colors]),
        )
    )
    panels = [
        points.encode(alt.Y("capital:N", sort=None, axis=axis))
        .transform_filter(alt.datum.object == kind)
        .properties(width=215, height=150, title=f"the object is {kind}")
        for kind, axis in axes.items()
    ]
    return titled(
        alt.hconcat(*panels).resolve_scale(y="shared"),
        "Between beings the capital letter decides who acts; on a tie, the order",
        f"The true actor should act in all. A point is one of {len(runs)} seeds.",
    )


def tuning_chart(runs: Sequence[Mapping[str, Any]]) -> alt.TopLevelMixin:
    """A point for each model: exactly right of the old sentences, and of the negated ones.

    `runs` have them under "tuned", by name.
    """
    rows = [
        {"trained on": name, "old": 100 * shares["old"], "negated": 100 * shares["negated"]}
        for run in runs
        for name, shares in run["tuned"].items()
    ]
    frame = rounded(pd.DataFrame(rows))
    names = frame["trained on"].unique()
    colors = dict(zip(names, PALETTE, strict=False))
    old = alt.X("old:Q", title="old test sentences that are exactly right (%)")
    negated = alt.Y("negated:Q", title="negated sentences that are exactly right (%)")
    whole = {"domain": [-4, 104], "nice": False}  # no mark is cut by the frame
    percent = {"values": [*range(0, 101, 20)]}
    x, y = old.scale(**whole).axis(**percent), negated.scale(**whole).axis(**percent)
    color = colored("trained on", colors, legend=None)
    places = frame.groupby("trained on", as_index=False).max()  # of the names: above the points
    named = {"align": "right", "dx": 6, "dy": -14, "fontSize": 13}
    texts = alt.Chart(places).mark_text(**named).encode(x, y, color, text="trained on")
    drawn = alt.Chart(frame).mark_circle(size=80, opacity=0.6).encode(x, y, color) + texts
    lowest, before = (frame[frame["trained on"] == name].min() for name in ("mixed", BEFORE))
    if lowest["negated"] < 40 or lowest["old"] < before["old"] - 1:
        raise ValueError("the mixed training forgets, or teaches too little for the title")
    title = "Mixed with old sentences, fifty negations teach and little is forgotten"
    return titled(drawn, title, f"A point is one of {len(runs)} seeds; 200 sentences on each axis.")
