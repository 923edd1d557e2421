"""Drawings of fast decoding: what a bound leaves, recorded races, and where time goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from scripts import Late
from scripts.book.charts import PALETTE, heatmap, lines, long, rounded, titled

alt, pd = Late("altair"), Late("pandas")

SEARCHES = {1: "greedy", 4: "beam 4"}  # names of the beams' widths


def rows_chart(per_step: Mapping[str, Sequence[int]]) -> alt.TopLevelMixin:
    """The rows of each step, for a batch in which all stay and one whose rows leave."""
    table = {way: dict(enumerate(rows, start=1)) for way, rows in per_step.items()}
    frame = long(table, "way", "step", "rows")
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
    titles = {"row_title": "prefix", "column_title": "cached tokens, in the order of their steps"}
    return titled(
        heatmap(family, prefixes, cached, words=("ancestor", "not"), cell=38, **titles),
        "One memory for three prefixes",
        "Each row is a prefix, each column a token whose keys and values are cached. A prefix "
        "attends to its blue cells. Two columns have no blue cell: nothing descends from them, "
        "and they stay where they are.",
    )


def bound_chart(rough: Tensor, exact: Tensor, error: float) -> alt.TopLevelMixin:
    """The 14 tokens that look best, with their intervals: coarse values (V,), exact ones (V,)."""
    shown, floor = rough.topk(14).indices, rough.max().item() - error
    values = {"coarse": rough, "low": rough - error, "high": rough + error, "exact": exact}
    frame = pd.DataFrame({name: value[shown].tolist() for name, value in values.items()})
    fates = ["may win", "ruled out"]
    frame["token"] = [fates[0] if high >= floor else fates[1] for high in frame["high"]]
    frame = rounded(frame.assign(rank=range(1, len(shown) + 1)))
    ends = [frame["low"].min() - 0.3, frame["high"].max() + 0.3]
    scale = alt.Scale(domain=ends, nice=False)
    x = {name: alt.X(f"{name}:Q", scale=scale) for name in ("low", "coarse", "exact", "x")}
    x["low"] = x["low"].title("logit").axis(tickCount=8, format=".0f")
    y = alt.Y("rank:O", title="rank by coarse value").axis(ticks=False)
    color = alt.Color("token:N", sort=fates, title=None)
    color = color.scale(domain=fates, range=[PALETTE[0], "#999999"])
    limit = alt.Chart(pd.DataFrame({"x": [round(floor, 3)]}))
    base = alt.Chart(frame).encode(y, color)
    dots = base.mark_point(filled=True, size=55, opacity=1)
    layers = [
        limit.mark_rule(strokeDash=[4, 4]).encode(x["x"]),
        base.mark_rule(strokeWidth=3).encode(x["low"], x2="high:Q"),
        base.mark_tick(thickness=3, size=12).encode(x["coarse"]),
        dots.encode(x["exact"], color=alt.value(PALETTE[1])),
    ]
    return titled(
        alt.layer(*layers).properties(width=480, height=alt.Step(20)),
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
    for column, summary in (("ratio", "median"), ("lowest", "min"), ("highest", "max")):
        frame[column] = spread.agg(summary, axis=1).round(2)
    return frame.drop(columns=["seconds", "sentences"])


def race_table(record: dict[str, Any]) -> pd.DataFrame:
    """The race of the usual searches: pace against CTranslate2's, BLEU, how many texts agree."""
    race = speed_frame(record).query("program != 'ours, exact stop'")
    spread = zip(race["ratio"], race["lowest"], race["highest"], strict=True)
    ranges = [f"{middle:.2f} ({low:.2f} to {high:.2f})" for middle, low, high in spread]
    race = race.assign(**{"ratio (range)": ranges, "same texts": race["same_as_ours"]})
    shown = ["ratio (range)", "bleu", "same texts"]
    return race.pivot(index="program", columns="beam", values=shown)


def decoding_speed_chart(record: dict[str, Any]) -> alt.TopLevelMixin:
    """Sentences a second of each program, by search."""
    frame = rounded(speed_frame(record))
    frame["search"] = frame["beam"].map(SEARCHES)
    order = list(dict.fromkeys(frame.sort_values("sentences_per_second")["program"]))
    x = alt.X("sentences_per_second:Q", title="sentences a second").axis(tickCount=7)
    x = x.scale(domain=[0, 1.1 * frame["sentences_per_second"].max()], nice=False)
    y = alt.Y("program:N", sort=order, title=None)
    searches = {"shorthand": "search:N", "sort": list(SEARCHES.values())}
    base = alt.Chart(frame).encode(x, y, alt.YOffset(**searches))
    numbers = base.mark_text(align="left", dx=4, fontSize=11)
    numbers = numbers.encode(text=alt.Text("sentences_per_second:Q", format=",.0f"))
    columns = base.mark_bar().encode(alt.Color(**searches, title=None))
    return titled(
        alt.layer(columns, numbers).properties(width=420, height=alt.Step(20)),
        "On whole files ours keeps up with CTranslate2, in 32 bits and in 8",
        f"Medians of five rounds on {record['sentences']:,} sentences, two threads. The exact stop "
        "concerns only a beam. The table's spread says how sure the order is.",
    )


def decoding_account_chart(record: dict[str, Any], program: str) -> alt.TopLevelMixin:
    """Milliseconds a sentence of `program` by kind of operation, greedy and with a beam."""
    table = [
        (name, kind, number, 1000 * seconds / record["sentences"])
        for beam, name in SEARCHES.items()
        for number, (kind, seconds) in enumerate(record["accounts"][program][str(beam)].items())
        if seconds
    ]
    frame = pd.DataFrame(table, columns=["search", "kind", "number", "milliseconds"])
    color = alt.Color("kind:N", sort=list(dict.fromkeys(frame["kind"])), title=None)
    stacked = alt.Chart(rounded(frame)).mark_bar(size=34)
    stacked = stacked.encode(
        alt.X("milliseconds:Q", title="milliseconds a sentence, one thread"),
        alt.Y("search:N", sort=list(SEARCHES.values()), title=None),
        color.scale(range=[*PALETTE, "#BBBBBB"]),
        order="number:Q",
    )
    return titled(
        stacked.properties(width=440, height=alt.Step(60)),
        "In 8 bits no kind of work takes half the time",
        "Our search in 8 bits, 1,000 sentences. Rounding and scaling are what 8 bits cost besides "
        "products.",
    )
