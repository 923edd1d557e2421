"""Drawings of fast decoding: what a bound leaves, recorded races, and where time goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from scripts import Late
from scripts.book.charts import PALETTE, heatmap, lines, rounded, titled

alt, pd = Late("altair"), Late("pandas")


def rows_chart(per_step: Mapping[str, Sequence[int]]) -> alt.TopLevelMixin:
    """The rows of each step, for a batch in which all stay and one whose rows leave."""
    table = [(t, n, way) for way, ns in per_step.items() for t, n in enumerate(ns, start=1)]
    frame = pd.DataFrame(table, columns=["step", "rows", "way"])
    return titled(
        lines(frame, "step", "rows", "way", zero=True),
        "Two rows in five belong to texts that have ended",
        "Rows that the decoder computes at each step for 64 sentences. What lies between the "
        "lines is computed for nothing.",
    )


def family_chart(
    family: Tensor, prefixes: Sequence[str], cached: Sequence[str]
) -> alt.TopLevelMixin:
    """Which cached tokens (L,) each prefix (K,) descends from: family (K, L) of bool."""
    return titled(
        heatmap(
            family,
            prefixes,
            cached,
            row_title="prefix",
            column_title="cached tokens, in the order of their steps",
            words=("ancestor", "not"),
            cell=38,
        ),
        "One memory for three prefixes",
        "Each row is a prefix, each column a token whose keys and values are cached. A prefix "
        "attends to its blue cells. Two columns have no blue cell: nothing descends from them, "
        "and they stay where they are.",
    )


def bound_chart(rough: Tensor, exact: Tensor, error: float) -> alt.TopLevelMixin:
    """The 14 tokens that look best, with their intervals: coarse values (V,), exact ones (V,)."""
    shown, floor = rough.topk(14).indices, rough.max().item() - error
    frame = pd.DataFrame(
        {
            "rank": range(1, len(shown) + 1),
            "coarse": rough[shown].tolist(),
            "low": (rough[shown] - error).tolist(),
            "high": (rough[shown] + error).tolist(),
            "exact": exact[shown].tolist(),
        }
    )
    frame["token"] = ["may win" if high >= floor else "ruled out" for high in frame["high"]]
    frame = rounded(frame)
    ends = [frame["low"].min() - 0.3, frame["high"].max() + 0.3]
    scale = alt.Scale(domain=ends, nice=False)
    y = alt.Y("rank:O", title="rank by coarse value", axis=alt.Axis(ticks=False))
    color = alt.Color("token:N", sort=["may win", "ruled out"], title=None).scale(
        domain=["may win", "ruled out"], range=[PALETTE[0], "#999999"]
    )
    base = alt.Chart(frame).encode(y=y, color=color)
    axis = alt.Axis(tickCount=8, format=".0f")
    spans = base.mark_rule(strokeWidth=3).encode(
        x=alt.X("low:Q", title="logit", scale=scale, axis=axis), x2="high:Q"
    )
    middles = base.mark_tick(thickness=3, size=12).encode(x=alt.X("coarse:Q", scale=scale))
    dots = base.mark_point(filled=True, size=55, opacity=1).encode(
        x=alt.X("exact:Q", scale=scale), color=alt.value(PALETTE[1])
    )
    limit = alt.Chart(pd.DataFrame({"x": [round(floor, 3)]}))
    wall = limit.mark_rule(strokeDash=[4, 4]).encode(x=alt.X("x:Q", scale=scale))
    return titled(
        alt.layer(wall, spans, middles, dots).properties(width=480, height=alt.Step(20)),
        "The token that looks best needn't be the best",
        "The tokens of one row with the largest coarse values. Upright tick: the coarse value. "
        "Bar: where the exact value must lie. Orange dot: where it does. A bar that ends left of "
        "the dashed line can't hold the largest: the first bar lies wholly to the right of it.",
    )


def speed_frame(record: dict[str, Any]) -> pd.DataFrame:
    """A row for each program and beam: sentences a second, BLEU, its pace against CTranslate2's.

    `ratio` is the median over the rounds of its speed over CTranslate2's of the same precision in
    the same round; `lowest` and `highest` are the rounds' own.
    """
    frame = pd.DataFrame([r for r in record["reports"] if r["sentences"] == record["sentences"]])
    seconds = frame.set_index(["program", "beam"])["seconds"]
    ratios = []
    for program, beam, own in zip(frame["program"], frame["beam"], frame["seconds"], strict=True):
        rival = "CTranslate2, int8" if program.endswith("int8") else "CTranslate2, float32"
        rounds = zip(seconds[rival, beam], own, strict=True)
        ratios.append([theirs / ours for theirs, ours in rounds])
    spread = pd.DataFrame(ratios, index=frame.index)
    frame["ratio"], frame["lowest"], frame["highest"] = (
        spread.median(axis=1).round(2),
        spread.min(axis=1).round(2),
        spread.max(axis=1).round(2),
    )
    return frame.drop(columns=["seconds", "sentences"])


def race_table(record: dict[str, Any]) -> pd.DataFrame:
    """The race of the usual searches: pace against CTranslate2's, BLEU, how many texts agree."""
    race = speed_frame(record).query("program != 'ours, exact stop'")
    spread = zip(race["ratio"], race["lowest"], race["highest"], strict=True)
    told = [f"{middle:.2f} ({low:.2f} to {high:.2f})" for middle, low, high in spread]
    race = race.assign(**{"ratio (range)": told, "same texts": race["same_as_ours"]})
    shown = ["ratio (range)", "bleu", "same texts"]
    return race.pivot(index="program", columns="beam", values=shown)


def decoding_speed_chart(record: dict[str, Any]) -> alt.TopLevelMixin:
    """Sentences a second of each program, by search."""
    frame = rounded(speed_frame(record))
    frame["search"] = frame["beam"].map({1: "greedy", 4: "beam 4"})
    order = list(dict.fromkeys(frame.sort_values("sentences_per_second")["program"]))
    y = alt.Y("program:N", sort=order, title=None)
    both = alt.YOffset("search:N", sort=["greedy", "beam 4"])
    base = alt.Chart(frame).encode(y=y, yOffset=both)
    axis = alt.Axis(tickCount=7)
    x = alt.X("sentences_per_second:Q", title="sentences a second", axis=axis)
    x = x.scale(domain=[0, 1.1 * frame["sentences_per_second"].max()], nice=False)
    color = alt.Color("search:N", sort=["greedy", "beam 4"], title=None)
    bars_ = base.mark_bar().encode(x=x, color=color)
    numbers = base.mark_text(align="left", dx=4, fontSize=11).encode(
        x=x, text=alt.Text("sentences_per_second:Q", format=",.0f")
    )
    return titled(
        alt.layer(bars_, numbers).properties(width=420, height=alt.Step(20)),
        "On whole files ours keeps up with CTranslate2, in 32 bits and in 8",
        f"Medians of five rounds on {record['sentences']:,} sentences, two threads. The exact stop "
        "concerns only a beam. The table's spread says how sure the order is.",
    )


def decoding_account_chart(record: dict[str, Any], program: str) -> alt.TopLevelMixin:
    """Milliseconds a sentence of `program` by kind of operation, greedy and with a beam."""
    table = [
        (name, kind, number, 1000 * seconds / record["sentences"])
        for beam, name in (("1", "greedy"), ("4", "beam 4"))
        for number, (kind, seconds) in enumerate(record["accounts"][program][beam].items())
        if seconds
    ]
    frame = pd.DataFrame(table, columns=["search", "kind", "number", "milliseconds"])
    kinds = list(dict.fromkeys(frame["kind"]))
    bars_ = (
        alt.Chart(rounded(frame))
        .mark_bar(size=34)
        .encode(
            x=alt.X("milliseconds:Q", title="milliseconds a sentence, one thread"),
            y=alt.Y("search:N", sort=["greedy", "beam 4"], title=None),
            color=alt.Color("kind:N", sort=kinds, title=None).scale(range=[*PALETTE, "#BBBBBB"]),
            order="number:Q",
        )
    )
    return titled(
        bars_.properties(width=440, height=alt.Step(60)),
        "In 8 bits no kind of work takes half the time",
        "Our search in 8 bits, 1,000 sentences. Rounding and scaling are what 8 bits cost besides "
        "products.",
    )
