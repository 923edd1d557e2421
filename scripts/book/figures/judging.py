"""Drawings of judging: what a record says of a model on a test set."""

from __future__ import annotations

import math
from typing import Any

from scripts import Late
from scripts.book.charts import GREY, PALETTE, rounded, titled

alt, pd = Late("altair"), Late("pandas")


def chance_chart(record: dict[str, Any]) -> alt.TopLevelMixin:
    """Beam against greedy: histograms of the coins' swaps and, below, of the sentences' draws."""
    compared = record["beam_against_greedy"]
    steps = {key: pd.DataFrame(compared[key]) for key in ("histogram_of_swaps", "histogram")}
    both = pd.concat(steps.values())
    ends = [round(both["from"].min() - 0.2, 1), round(both["from"].max() + 0.3, 1)]
    scale = alt.Scale(domain=ends, nice=False)
    measured = f"{compared['difference']:+.2f}, measured"
    low, high = (f"{compared[key]:+.2f}" for key in ("low", "high"))

    def panel(key: str, color: str, title: str, x_title: str | None, marks: dict[str, float]):
        frame = steps[key].assign(share=steps[key]["draws"] / steps[key]["draws"].sum())
        frame["to"] = frame["from"] + 0.1
        axis = alt.Axis(labelFlush=False, labels=x_title is not None)
        x = alt.X("from:Q", bin="binned", scale=scale, title=x_title, axis=axis)
        y = alt.Y("share:Q", title="share", axis=alt.Axis(format=".0%", tickCount=4))
        columns = alt.Chart(rounded(frame)).mark_bar(binSpacing=1, color=color, opacity=0.7)
        layers = [columns.encode(x=x, x2="to:Q", y=y)]
        for label, at in marks.items():
            line = alt.Chart(rounded(pd.DataFrame({"at": [at], "label": [label]})))
            line = line.encode(x=alt.X("at:Q", scale=scale))
            look = {"color": PALETTE[1], "strokeWidth": 2.5}
            look |= {} if label == measured else {"strokeDash": [5, 4], "strokeWidth": 1.5}
            align = {low: "right", high: "left"}.get(label, "center")  # or they touch
            text = {"y": -8, "color": PALETTE[1], "align": align}
            layers += [line.mark_rule(**look), line.mark_text(**text).encode(text="label:N")]
        heading = alt.Title(title, anchor="start", fontSize=13, fontWeight="normal", offset=18)
        return alt.layer(*layers).properties(width=460, height=120, title=heading)

    difference = {measured: compared["difference"]}
    spread = {low: compared["low"], high: compared["high"]}
    x_title = "BLEU of the beam minus BLEU of greedy decoding"
    equals = "Equals: a coin swaps each sentence's two outputs"
    upper = panel("histogram_of_swaps", GREY, equals, None, difference)
    lower = panel("histogram", PALETTE[0], "Sentences resampled", x_title, difference | spread)
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
    frame["bucket"] = [
        f"{words} words (n = {n})"
        for words, n in zip(frame["words"], frame["sentences"], strict=True)
    ]
    ends = [math.floor(frame["low"].min() / 5) * 5, math.ceil(frame["high"].max() / 5) * 5]
    scale = alt.Scale(domain=ends, nice=False, zero=False)
    y = alt.Y(
        "bucket:N", sort=None, title=None, axis=alt.Axis(grid=True, ticks=False, domain=False)
    )
    base = alt.Chart(rounded(frame)).encode(y=y)
    title = "BLEU, and where 95% of resampled test sets lie"
    x = alt.X("low:Q", scale=scale, title=title, axis=alt.Axis(labelFlush=False))
    spread = base.mark_rule(color=PALETTE[0], strokeWidth=3, opacity=0.45).encode(x=x, x2="high:Q")
    middle = base.mark_circle(color=PALETTE[0], size=110, opacity=1)
    middle = middle.encode(x=alt.X("bleu:Q", scale=scale))
    number = base.mark_text(dy=-13).encode(
        x=alt.X("bleu:Q", scale=scale), text=alt.Text("bleu:Q", format=".1f")
    )
    return titled(
        alt.layer(spread, middle, number).properties(width=440, height=42 * len(frame)),
        "Only the longest captions score clearly lower",
        "BLEU by the words of the source. Each bar holds 95% of resampled sets of such sentences: "
        "if bars overlap widely, the order may be chance.",
        wrap=80,
    )


def rare_word_chart(record: dict[str, Any]) -> alt.TopLevelMixin:
    """Recall of the references' words by training frequency, and where the misses are."""
    counted = [row for row in record["frequencies"] if row["words"]]
    misses = max(1, sum(row["words"] - row["found"] for row in counted))
    sides = ("of these words, found", "of all misses, in this group")
    rows = [
        (f"{row['frequency']} times (n = {row['words']:,})", side, share)
        for row in counted
        for side, share in zip(
            sides,
            (row["found"] / row["words"], (row["words"] - row["found"]) / misses),
            strict=True,
        )
    ]
    frame = rounded(pd.DataFrame(rows, columns=["seen", "what", "share"]))
    shades = alt.Scale(domain=list(sides), range=[PALETTE[0], PALETTE[1]])
    scale = alt.Scale(domain=[0, 1], nice=False)
    ruler = alt.Axis(format=".0%", tickCount=5, labelFlush=False)
    base = alt.Chart(frame).encode(
        x=alt.X("share:Q", title=None, scale=scale, axis=ruler),
        y=alt.Y("seen:N", sort=None, title=None, axis=alt.Axis(ticks=False, labelPadding=8)),
        yOffset=alt.YOffset("what:N", sort=list(sides)),
    )
    legend = alt.Legend(title=None, orient="top")
    filled = base.mark_bar().encode(color=alt.Color("what:N", scale=shades, legend=legend))
    numbers = base.mark_text(align="left", dx=5).encode(text=alt.Text("share:Q", format=".0%"))
    return titled(
        alt.layer(filled, numbers).properties(width=340, height=alt.Step(20)),
        "Rare words are seldom found, but most misses are common words",
        "The references' words, by how often they occur in the training split: the share of each "
        "group that the outputs contain, and how all misses fall into the groups.",
    )


def sentence_table(record: dict[str, Any], end: str) -> pd.DataFrame:
    """The quoted sentences of one end, "worst" or "best", from a record of `studies.judging`."""
    quoted = [row for row in record[end] if "source" in row]
    return pd.DataFrame(quoted)[["line", "chrf2", "source", "reference", "output"]]
