"""Drawings of judging: the brevity penalty, and what a record says of a model on a test set."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from scripts import Late
from scripts.book.charts import GREY, PALETTE, bars, lines, rounded, titled

alt, pd = Late("altair"), Late("pandas")


def brevity_chart(penalties: Mapping[float, float]) -> alt.TopLevelMixin:
    """The brevity penalty by the ratio of lengths, the output's to the reference's."""
    drawn = lines(
        pd.DataFrame({"c / r": penalties.keys(), "BP": penalties.values()}),
        "c / r",
        "BP",
        x_title="length of the output / length of the reference",
        y_title="brevity penalty",
        zero=True,
    )
    return titled(
        drawn,
        "Too short costs, too long doesn't",
        "At 80% of the reference's length, a fifth of the score is gone. Longer outputs aren't "
        "punished here: their surplus words already lower the precisions.",
    )


def beam_chart(frame: pd.DataFrame) -> alt.TopLevelMixin:
    """BLEU for each width of the beam, as bars from zero, so that small differences look small."""
    return titled(
        bars(frame, "beam", "BLEU", number_format=".1f"),
        "A sure model gains little from a wider beam",
        "BLEU of the shipped sample model on 40 test sentences, α = 0.6. There is no trend: "
        "with so few sentences, one bad one moves BLEU by a point.",
    )


def beam_sweep_chart(record: dict[str, Any]) -> alt.TopLevelMixin:
    """BLEU and time for each width of the beam, from a record of `studies.judging`."""
    frame = pd.DataFrame(record["beams"])
    size = {"points": True, "width": 260, "height": 220, "x_title": "width K of the beam"}
    bleu = lines(frame, "beam", "bleu", y_title="BLEU (cased, 13a)", **size)
    cost = lines(frame, "beam", "time_to_greedy", y_title="time, greedy = 1", zero=True, **size)
    return titled(
        bleu | cost,
        "What a wider beam buys, and what it costs",
        f"{record['model']}, {record['sentences']:,} sentences of {record['split']}, α = 0.6. "
        "Left: what each further prefix adds or takes; the axis doesn't begin at 0. Right: each "
        "of them costs time.",
    )


def chance_chart(record: dict[str, Any]) -> alt.TopLevelMixin:
    """Beam against greedy: histograms of the draws of the sentences, and of the coins' swaps."""
    compared = record["beam_against_greedy"]
    names = {"histogram_of_swaps": "equals: swapped by coins", "histogram": "sentences drawn anew"}
    frame = pd.concat([pd.DataFrame(compared[key]).assign(what=names[key]) for key in names])
    frame["share"] = frame["draws"] / frame.groupby("what")["draws"].transform("sum")
    frame["to"] = frame["from"] + 0.1
    ends = [round(frame["from"].min() - 0.2, 1), round(frame["to"].max() + 0.2, 1)]
    scale = alt.Scale(domain=ends, nice=False)
    title = "BLEU of the beam minus BLEU of greedy decoding"
    shades = alt.Scale(domain=list(names.values()), range=[GREY, PALETTE[0]])
    columns = alt.Chart(rounded(frame)).mark_bar(binSpacing=1, opacity=0.7)
    columns = columns.encode(
        x=alt.X("from:Q", bin="binned", scale=scale, title=title),
        x2="to:Q",
        y=alt.Y("share:Q", stack=None, title="share", axis=alt.Axis(format=".0%")),
        color=alt.Color("what:N", scale=shades, legend=alt.Legend(title=None, orient="top")),
    )
    rule = alt.Chart(rounded(pd.DataFrame({"at": [compared["difference"]]})))
    rule = rule.mark_rule(strokeWidth=2.5, color=PALETTE[1]).encode(x=alt.X("at:Q", scale=scale))
    return titled(
        alt.layer(columns, rule).properties(width=520, height=220),
        "What the difference might be, and what it would be between equals",
        "Grey: a coin for each sentence swaps the two outputs. Coloured: the sentences are drawn "
        "anew. The line is the measured difference; where no grey column reaches it, chance "
        "hardly explains it.",
    )


def penalty_sweep_chart(record: dict[str, Any]) -> alt.TopLevelMixin:
    """BLEU and length of the outputs by length penalty, from a record of `studies.judging`."""
    frame = pd.DataFrame(record["penalties"])
    size = {"points": True, "width": 260, "height": 220, "x_title": "length penalty α"}
    bleu = lines(frame, "alpha", "bleu", y_title="BLEU (cased, 13a)", **size)
    length = lines(frame, "alpha", "length_ratio", y_title="length: output / reference", **size)
    one = alt.Chart(pd.DataFrame({"y": [1.0]})).mark_rule(color=GREY, strokeDash=[5, 4])
    return titled(
        bleu | alt.layer(length, one.encode(y="y:Q")),
        "The length penalty moves the length, and BLEU with it",
        f"Beam of 5, {record['sentences']:,} sentences. Right: outputs grow with α; the dashed "
        "line is the references' length. Left: mind the axis, which does not begin at 0.",
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
    x = alt.X("low:Q", scale=scale, title="BLEU, and where 95% of resampled test sets lie")
    spread = base.mark_rule(color=PALETTE[0], strokeWidth=3, opacity=0.45).encode(x=x, x2="high:Q")
    middle = base.mark_circle(color=PALETTE[0], size=110, opacity=1)
    middle = middle.encode(x=alt.X("bleu:Q", scale=scale))
    number = base.mark_text(dy=-13).encode(
        x=alt.X("bleu:Q", scale=scale), text=alt.Text("bleu:Q", format=".1f")
    )
    return titled(
        alt.layer(spread, middle, number).properties(width=440, height=42 * len(frame)),
        "BLEU by the length of the source",
        "Each point is the BLEU of the sentences of one length, each bar what other sentences of "
        "that length might have given. Where bars overlap widely, the order of the points may be "
        "chance.",
    )


def rare_word_chart(record: dict[str, Any]) -> alt.TopLevelMixin:
    """Recall of the reference's words by training frequency, from a record of `studies.judging`."""
    rows = [row for row in record["frequencies"] if row["words"]]
    frame = pd.DataFrame(rows)
    frame["seen in training"] = [f"{row['frequency']} times (n = {row['words']:,})" for row in rows]
    return titled(
        bars(
            frame,
            "seen in training",
            "recall",
            value_title="share of these words that the output contains",
            number_format=".0%",
        ),
        "The rarer a word, the less often it is found",
        "The words of the references by how often they occur in the training split. A word that "
        "was hardly ever seen can be spelled, piece by piece, but it is seldom found.",
    )


def sentence_table(record: dict[str, Any], end: str) -> pd.DataFrame:
    """The quoted sentences of one end, "worst" or "best", from a record of `studies.judging`."""
    quoted = [row for row in record[end] if "source" in row]
    return pd.DataFrame(quoted)[["line", "chrf2", "source", "reference", "output"]]
