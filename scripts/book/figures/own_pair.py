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
    mine: Mapping[tuple[str, str], Mapping[str, float]],
    runs: Sequence[Mapping[str, Mapping[str, Mapping[str, float]]]],
) -> alt.TopLevelMixin:
    """Who acts in a form of sentence, for each kind of object: bars of the runs' mean shares.

    `runs` have the shares by form, kind and actor, `mine` by (kind, form). Raises ValueError if one
    of `mine` is more than 0.3 beyond all runs, or if a mean contradicts the title.
    """
    rows = [
        {"object": kind, "form": form, "who acts": who, "share": share}
        for run in runs
        for form, kinds in run.items()
        for kind, shares in kinds.items()
        for who, share in shares.items()
    ]
    ends = pd.DataFrame(rows).groupby(["object", "form", "who acts"])["share"].agg(["min", "max"])
    for (kind, form), shares in mine.items():
        for who, share in shares.items():
            low, high = ends.loc[kind, form, who]
            if not low - 0.3 <= share <= high + 0.3:
                raise ValueError("this model reads otherwise than the recorded ones")
    whole, both = ["object", "form", "who acts"], "first, capital"
    means = (100 * pd.DataFrame(rows).groupby(whole, sort=False)["share"].mean()).round(1)
    alone = [means[kind, form, "the true actor"] for kind, form, _ in means.index if form != both]
    together = [means[kind, both, "the true actor"] for kind in ("a being", "a thing")]
    if min(alone) < 90 or max(together) > 35:
        raise ValueError("the outputs don't say what the title says")
    frame = means.reset_index()
    frame["order"] = frame["who acts"].map({"the true actor": 0, "the object": 1, "another": 2})
    colors = dict(zip(frame["who acts"].unique(), PALETTE, strict=False)) | {"another": GREY}
    x = alt.X("share:Q", title="outputs (%)").scale(domain=[0, 100]).axis(values=[0, 50, 100])
    y = alt.Y("form:N", sort=None, title=None).axis(labelLimit=220)
    legend = alt.Legend(orient="bottom", title="who acts", values=[*colors])
    bars = (
        alt.Chart(rounded(frame))
        .mark_bar(height=20)
        .encode(x, y, colored("who acts", colors, legend=legend), order="order:Q")
    )
    panels = [
        bars.transform_filter(alt.datum.object == kind).properties(
            width=215, height=120, title=f"the object is {kind}"
        )
        for kind in ("a thing", "a being")
    ]
    return titled(
        alt.hconcat(*panels).resolve_scale(y="shared"),
        "Neither place nor letter alone changes who acts; both together do",
        f"The true actor should act in all. Means of {len(runs)} seeds.",
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
