"""Drawings of chapter 10: what chance does to a difference, and where a translator errs."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from scripts import Late
from scripts.book.charts import long, rounded, titled
from scripts.book.look import GREY, PALETTE, bar_axis, colored, row_axis

alt, pd = Late("altair"), Late("pandas")


def ingredient_chart(
    record: dict[str, Any], title: str, differing: Collection[str]
) -> alt.TopLevelMixin:
    """Validation BLEU of every run, a line for each ingredient; the band is the recipe's spread.

    The rows in `differing` are marked as those that differ from the recipe by more than seeds do.
    """
    order = list(record["rows"])
    runs = [(name, run) for name, row in record["rows"].items() for run in row["runs"]]
    runs = [(name, run["seed"], run["best"]) for name, run in runs]
    frame = pd.DataFrame(runs, columns=["changed", "seed", "BLEU"])
    kinds = ["the recipe", "differs from it", "no clear difference"]
    kind_of = {name: kinds[1 if name in differing else 2] for name in order}
    frame["kind"] = frame["changed"].map(kind_of | {"the recipe": kinds[0]})
    recipe = frame.loc[frame["changed"] == "the recipe", "BLEU"]
    spread = pd.DataFrame({"low": [recipe.min()], "high": [recipe.max()]})
    ends = [math.floor(frame["BLEU"].min() - 0.5), math.ceil(frame["BLEU"].max() + 0.5)]
    place = {"scale": alt.Scale(domain=ends, nice=False, zero=False), "axis": alt.Axis(tickCount=8)}
    place["title"] = "validation BLEU (greedy, cased)"
    look = {"sort": kinds, "legend": alt.Legend(title=None, orient="top", symbolSize=90)}
    color, shape = alt.Color("kind:N", **look), alt.Shape("kind:N", **look)
    band = alt.Chart(rounded(spread)).mark_rect(color=PALETTE[0], opacity=0.25)
    dots = alt.Chart(rounded(frame)).mark_point(size=80, filled=True, opacity=0.85)
    dots = dots.encode(
        alt.X("BLEU:Q", **place),
        row_axis("changed", order),
        color.scale(domain=kinds, range=[*PALETTE[:2], PALETTE[-1]]),
        shape.scale(domain=kinds, range=["circle", "diamond", "circle"]),
        tooltip=["changed", "seed", "BLEU"],
    )
    drawn = alt.layer(band.encode(alt.X("low:Q", **place), x2="high:Q"), dots)
    return titled(
        drawn.properties(width=440, height=26 * len(order)),
        title,
        "Each point is a run; the band spans the recipe's own seeds. Differs: its p passes a "
        f"stricter bar, for {len(order) - 1} tests. Narrow model, "
        f"{record['config']['epochs']} epochs.",
        wrap=78,
    )


def chance_chart(record: dict[str, Any]) -> alt.TopLevelMixin:
    """Beam against greedy: histograms of the coins' swaps and, below, of the sentences' draws."""
    compared = record["beam_against_greedy"]
    steps = {key: pd.DataFrame(compared[key]) for key in ("histogram_of_swaps", "histogram")}
    both = pd.concat(steps.values())
    ends = [round(both["from"].min() - 0.2, 1), round(both["from"].max() + 0.3, 1)]
    scale = alt.Scale(domain=ends, nice=False)
    measured = (compared["difference"], f"{compared['difference']:+.2f}, measured")
    solid, dashed = {"strokeWidth": 2.5}, {"strokeWidth": 1.5, "strokeDash": [5, 4]}
    middle = (*measured, "center", solid)
    spread = [  # aligned so that they don't touch
        (compared[end], f"{compared[end]:+.2f}", align, dashed)
        for end, align in (("low", "right"), ("high", "left"))
    ]

    def panel(key: str, color: str, title: str, x_title: str | None, marks: list[tuple]):
        frame = steps[key].assign(share=steps[key]["draws"] / steps[key]["draws"].sum())
        frame["to"] = frame["from"] + 0.1
        x = alt.X("from:Q", bin="binned", scale=scale, title=x_title)
        x = x.axis(labelFlush=False, labels=x_title is not None)
        y = alt.Y("share:Q", title="share").axis(format=".0%", tickCount=4)
        columns = alt.Chart(rounded(frame)).mark_bar(binSpacing=1, color=color, opacity=0.7)
        layers = [columns.encode(x, y, x2="to:Q")]
        for place, label, align, look in marks:
            line = alt.Chart(rounded(pd.DataFrame({"at": [place], "label": [label]})))
            line = line.encode(x=alt.X("at:Q", scale=scale))
            text = line.mark_text(y=-8, color=PALETTE[1], align=align).encode(text="label:N")
            layers += [line.mark_rule(color=PALETTE[1], **look), text]
        heading = alt.Title(title, anchor="start", fontSize=13, fontWeight="normal", offset=18)
        return alt.layer(*layers).properties(width=460, height=120, title=heading)

    x_title = "BLEU of the beam minus BLEU of greedy decoding"
    equals = "Equals: a coin swaps each sentence's two outputs"
    upper = panel("histogram_of_swaps", GREY, equals, None, [middle])
    lower = panel("histogram", PALETTE[0], "Sentences resampled", x_title, [middle, *spread])
    return titled(
        alt.vconcat(upper, lower),
        "The beam's lead is larger than chance would explain",
        "No grey column reaches the measured difference. Between the dashed lines lie 95% of the "
        "draws.",
        wrap=76,
    )


def length_chart(record: dict[str, Any]) -> alt.TopLevelMixin:
    """BLEU by the source's length, and its spread, from a record of `studies.judging`."""
    frame = pd.DataFrame(record["lengths"])
    sizes = zip(frame["words"], frame["sentences"], strict=True)
    frame["bucket"] = [f"{words} words (n = {n})" for words, n in sizes]
    ends = [math.floor(frame["low"].min() / 5) * 5, math.ceil(frame["high"].max() / 5) * 5]
    scale = alt.Scale(domain=ends, nice=False, zero=False)
    low = alt.X("low:Q", scale=scale, title="BLEU, and where 95% of resampled test sets lie")
    middle = alt.X("bleu:Q", scale=scale)
    base = alt.Chart(rounded(frame)).encode(row_axis("bucket"))
    spread = base.mark_rule(color=PALETTE[0], strokeWidth=3, opacity=0.45)
    layers = [
        spread.encode(low.axis(labelFlush=False), x2="high:Q"),
        base.mark_circle(color=PALETTE[0], size=110, opacity=1).encode(middle),
        base.mark_text(dy=-13).encode(middle, text=alt.Text("bleu:Q", format=".1f")),
    ]
    return titled(
        alt.layer(*layers).properties(width=440, height=42 * len(frame)),
        "Only the longest captions score clearly lower",
        "BLEU by the words of the source. Each bar holds 95% of resampled sets of such sentences: "
        "if bars overlap widely, the order may be chance.",
        wrap=80,
    )


def rare_word_chart(record: dict[str, Any]) -> alt.TopLevelMixin:
    """Recall of the references' words by training frequency, and where the misses are."""
    counted = pd.DataFrame([row for row in record["frequencies"] if row["words"]])
    counted.index = [f"{row.frequency} times (n = {row.words:,})" for row in counted.itertuples()]
    missed = counted["words"] - counted["found"]
    shares = {
        "of these words, found": counted["found"] / counted["words"],
        "of all misses, in this group": missed / max(1, missed.sum()),
    }
    frame = long(pd.DataFrame(shares).to_dict("index"), "seen", "what", "share")
    sides = list(shares)
    x = alt.X("share:Q", title=None).scale(domain=[0, 1], nice=False)
    x = x.axis(format=".0%", tickCount=5, labelFlush=False)
    color = colored("what", dict(zip(sides, PALETTE[:2], strict=True)))
    color = color.legend(title=None, orient="top")
    base = alt.Chart(rounded(frame)).encode(x, bar_axis("seen"), alt.YOffset("what:N", sort=sides))
    numbers = base.mark_text(align="left", dx=5).encode(text=alt.Text("share:Q", format=".0%"))
    drawn = alt.layer(base.mark_bar().encode(color), numbers)
    return titled(
        drawn.properties(width=340, height=alt.Step(20)),
        "Rare words are seldom found, but most misses are common words",
        "The references' words, by how often they occur in the training split: the share of each "
        "group that the outputs contain, and how all misses fall into the groups.",
    )


def sentence_table(record: dict[str, Any], end: str) -> pd.DataFrame:
    """The quoted sentences of one end, "worst" or "best", from a record of `studies.judging`."""
    quoted = [row for row in record[end] if "source" in row]
    return pd.DataFrame(quoted)[["line", "chrf2", "source", "reference", "output"]]
