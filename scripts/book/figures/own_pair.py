"""Drawings of chapter 26: words and their translation, who acts, what fine-tuning leaves wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from scripts import Late
from scripts.book.charts import rounded, titled
from scripts.book.look import GREY, INK, PALETTE, bar_axis, colored

alt, pd = Late("altair"), Late("pandas")

BEFORE = "before fine-tuning"


def alignment(source: str, target: str, links: Sequence[tuple[int, int]]) -> alt.LayerChart:
    """Two rows of words with a line for each link, from a source word's place to a target's.

    Words without a link are grey.
    """
    sides = {1: source.split(), 0: target.split()}
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


def ringed(chart: alt.Chart) -> alt.LayerChart:
    """Filled points, and black rings above them for the rows whose column "mine" is true."""
    filled = chart.transform_filter(~alt.datum.mine).mark_circle(size=70, opacity=0.6)
    rings = chart.transform_filter(alt.datum.mine).mark_point(size=110, strokeWidth=2)
    return filled + rings.encode(color=alt.value(INK))


def actor_chart(
    mine: Mapping[tuple[str, str], Mapping[str, float]],
    runs: Sequence[Mapping[str, Mapping[str, Mapping[str, float]]]],
) -> alt.TopLevelMixin:
    """How often the true actor acts between beings, by who has a capital letter and who is first.

    A run is a point, the reader's model a ring. `runs` have shares by form, kind of object and
    actor; `mine` has them by (capital, first). Raises ValueError if a run contradicts the title.
    """
    rows = [
        {"mine": False, "capital": capital, "first": first.removesuffix(" first")}
        | kinds["a being"]
        for run in runs
        for form, kinds in run.items()
        for capital, first in [form.split("; ")]
    ]
    recorded = pd.DataFrame(rows)
    decides = recorded["capital"].mask(
        recorded["capital"].isin(["both", "neither"]), recorded["first"]
    )
    acts = recorded["the true actor"].where(decides == "the actor", recorded["the object"])
    if acts.min() < 0.55:
        raise ValueError("the outputs don't say what the title says")
    rows += [
        {"mine": True, "capital": capital, "first": first} | shares
        for (capital, first), shares in mine.items()
    ]
    frame = pd.DataFrame(rows)
    frame["share"] = 100 * frame["the true actor"]
    colors = dict(zip(frame["first"].unique(), PALETTE, strict=False))
    x = alt.X("share:Q", title="outputs in which the true actor acts (%)")
    legend = alt.Legend(orient="bottom", title="first in the sentence", values=[*colors])
    points = alt.Chart(rounded(frame[["mine", "capital", "first", "share"]])).encode(
        x.scale(domain=[-4, 104], nice=False).axis(values=[0, 25, 50, 75, 100]),
        alt.Y("capital:N", sort=None, title="who has a capital letter").axis(domain=False),
        colored("first", colors, legend=legend),
        yOffset=alt.YOffset("first:N", sort=[*colors]),
    )
    return titled(
        ringed(points).properties(width=440, height=170),
        "Of two beings, the one with the capital letter acts; on a tie, the first",
        f"The true actor should act in all. Points: {len(runs)} seeds. Rings: our model.",
    )


def tuned_chart(
    mine: Mapping[str, Mapping[str, float]], runs: Sequence[Mapping[str, Any]]
) -> alt.TopLevelMixin:
    """A point for each model: exactly right of the old sentences, and of the negated ones.

    `mine` has the shares of the reader's models, by name: rings. `runs` have them under "tuned".
    """
    rows = [
        {"trained on": name, "mine": scores is mine}
        | {"old": 100 * shares["old"], "negated": 100 * shares["negated"]}
        for scores in [*(run["tuned"] for run in runs), mine]
        for name, shares in scores.items()
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
    drawn = ringed(alt.Chart(frame).encode(x, y, color)) + texts
    recorded = frame[~frame["mine"]]
    lowest, before = (recorded[recorded["trained on"] == name].min() for name in ("mixed", BEFORE))
    if lowest["negated"] < 40 or lowest["old"] < before["old"] - 1:
        raise ValueError("the mixed training forgets, or teaches too little for the title")
    title = "Mixed with old sentences, fifty negations teach and little is forgotten"
    caption = f"Points: {len(runs)} seeds. Rings: our models. 200 sentences on each axis."
    return titled(drawn, title, caption)


def cause_chart(causes: Sequence[str], helpers: Sequence[str]) -> alt.TopLevelMixin:
    """How many wrong negations have which cause, as the chapter's `cause` names it.

    `helpers` are the references': did, does or do. Raises ValueError if no more than half of the
    outputs are explained.
    """
    names = ("helper", "verb form", "helper and verb form", "not explained")
    groups = ["did" if helper == "did" else "does or do" for helper in helpers]
    counts = Counter(zip(causes, groups, strict=True))
    colors = dict(zip(("did", "does or do"), PALETTE, strict=False))
    rows = [(name, group, counts[name, group]) for name in names for group in colors]
    frame = pd.DataFrame(rows, columns=["cause", "needs", "outputs"])
    past = frame.loc[frame["needs"] == "did", "outputs"].sum()
    totals = frame.groupby("cause", sort=False, as_index=False)["outputs"].sum()
    if 2 * totals["outputs"][:-1].sum() <= len(causes):
        raise ValueError("most causes aren't explained")
    x = alt.X("outputs:Q", title="wrong outputs").axis(tickCount=5, grid=False)
    x = x.scale(domain=[0, 1.15 * int(totals["outputs"].max())], nice=False)
    color = colored("needs", colors, legend=alt.Legend(orient="bottom", title="the reference has"))
    parts = alt.Chart(frame).mark_bar().encode(x, bar_axis("cause"), color)
    numbers = alt.Chart(totals).mark_text(align="left", dx=5)
    numbers = numbers.encode(x, bar_axis("cause"), text="outputs:Q")
    drawn = alt.layer(parts, numbers).properties(width=400, height=alt.Step(30))
    title = "Most wrong negations have a wrong helper, a wrong verb form, or both"
    caption = f"Our mixed model: all its {len(causes)} wrong outputs of 200; {past} need “did”."
    return titled(drawn, title, caption)


def by_tense(runs: Sequence[Mapping[str, Any]], fifty: str = "1") -> pd.DataFrame:
    """Negations that are exactly right (%): means of `runs`, by tense and by what `fifty` shows.

    The past has "did", the present "does" or "do". `runs` are those of the record "ruvel-actors",
    whose fifty 1 is the chapter's. Verbs that the fifty don't show are left out.
    """
    columns = {
        "this helper": "the fifty show the verb in this tense",
        "this tense": "the fifty show the verb in this tense",
        "the other tense": "only in the other tense",
    }
    rows = [
        {"tense": "past" if helper == "did" else "present", "shown": columns.get(part)} | row
        for run in runs
        for name, row in run["negations"][fifty].items()
        for helper, part in [name.split("; ")]
    ]
    sums = pd.DataFrame(rows).groupby(["tense", "shown"])[["right", "of"]].sum()
    shares = 100 * sums["right"] / sums["of"]
    table = shares.round().astype("Int64").unstack()
    return table[[*dict.fromkeys(columns.values())]].rename_axis(index=None, columns=None)
