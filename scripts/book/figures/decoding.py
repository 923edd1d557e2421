"""Drawings of chapter 13: what each part of a fast search saves, where its gain ends, the race."""

from __future__ import annotations

import itertools
import math
import operator
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from scripts import Late
from scripts.book.charts import heatmap, lines, long, rounded, titled
from scripts.book.look import GREY, INK, LOG, PALETTE, bar_axis, colored, row_axis

alt, pd = Late("altair"), Late("pandas")

GAINS = {  # title, name of the axis, caption; a title names where parts begin to gain
    "blocks": (
        "Blocks gain for the 8 largest from {0[0]:,} logits on, for the 64 largest from {0[1]:,}",
        "logits in a row",
        "Time of torch.topk over that of best_logits, for 32 rows.",
    ),
    "screen": (
        "8 bits gain from N = {0[0]} on, with the bound from N = {0[1]} on",
        "N, the rows of the step",
        "Time to find the largest logits with a product in 32 bits, over that with one in 8 bits.",
    ),
}


def gains_of(seconds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """How many times as long each way's predecessor takes, by medians over rounds."""
    taken = {way: statistics.median(rounds) for way, rounds in seconds.items()}
    return {new: taken[old] / taken[new] for old, new in itertools.pairwise(taken)}


def waterfall(seconds: Mapping[str, Sequence[float]], axis: str) -> alt.LayerChart:
    """What each way gains over the one before it, {way: seconds by round}; and all together.

    The control is each way's forward rounds against its backward ones. The last way isn't exact.
    """
    gains = gains_of(seconds)
    total = math.prod(gains.values())  # the first way's median over the last one's
    halves = [
        statistics.median(rounds[::2]) / statistics.median(rounds[1::2])
        for rounds in seconds.values()
    ]
    low, high = min(halves), max(halves)
    frame = pd.DataFrame({"change": [*gains, "all together", "control"]})
    frame["to"] = [*itertools.accumulate(gains.values(), operator.mul), total, high]
    frame["from"] = [1, *frame["to"][: len(gains) - 1], 1, low]
    labels = [f"×{ratio:.{1 if ratio > 1.95 else 2}f}" for ratio in (*gains.values(), total)]
    frame["label"] = [*labels, f"×{low:.2f} to ×{high:.2f}"]
    frame = rounded(frame)
    x = alt.X("from:Q", title=axis)
    x = x.scale(domain=[0.9 * low, 2.2 * frame["to"].max()], **LOG)
    x = x.axis(values=[1, 2, 4, 8, 16, 32], format="d")
    base = alt.Chart(frame).encode(bar_axis("change", frame["change"].tolist()))
    color = alt.when(alt.FieldOneOfPredicate("change", [*gains])).then(alt.value(PALETTE[0]))
    together = frame[frame["change"] == "all together"].assign(to=frame["to"][len(gains) - 2])
    layers = [
        base.mark_bar(height=18).encode(x, x2="to:Q", color=color.otherwise(alt.value(GREY))),
        base.mark_text(align="left", dx=6).encode(alt.X("to:Q"), text="label:N"),
        alt.Chart(together)
        .mark_tick(color="white", thickness=3, size=18)
        .encode(alt.X("to:Q"), bar_axis("change", frame["change"].tolist())),
    ]
    return alt.layer(*layers).properties(width=420, height=alt.Step(28))


def waterfall_chart(
    ways: Mapping[str, Sequence[float]], beams: Mapping[str, Sequence[float]]
) -> alt.TopLevelMixin:
    """`waterfall` of greedy search, whose first bar is the cache, and of a beam of 4."""
    cache, *others, eight = gains_of(ways).values()
    counts = (len(next(iter(contest.values()))) for contest in (ways, beams))
    assert cache > max([*others, eight]), "the text says so"
    charts = [
        waterfall(ways, "greedy search: times as fast as computing every prefix anew"),
        waterfall(beams, "beam of 4: times as fast as with a cache for each prefix"),
    ]
    return titled(
        alt.vconcat(*charts).resolve_scale(x="independent", y="independent"),
        f"The cache gains {cache:.1f} times, the other exact tricks {math.prod(others):.1f} times, "
        f"8 bits {eight:.1f}",
        f"Searches for 64 captions, one thread, medians of {' and '.join(map(str, counts))} "
        "rounds. Each bar is one way against the way before it, and begins where the last one "
        "ends, on an axis of factors. All together: the last way against the first; tick: without "
        "8 bits. Control: each way in odd rounds against itself in even ones; a bar within it says "
        "nothing.",
    )


def gains_chart(
    name: str, gains: Mapping[str, Mapping[int, float]], used_from: int | None = None
) -> alt.TopLevelMixin:
    """What parts save, over a size: gains {part: {size: ratio}}, with a "control" as the last.

    A dashed line marks the size from which on greedy search uses the bound.
    """
    title, axis, caption = GAINS[name]
    frame = long(gains, "part", "size", "ratio")
    sizes = sorted(frame["size"].unique().tolist())
    low, high = min(gains["control"].values()), max(gains["control"].values())
    x = alt.X("size:Q", title=axis).scale(domain=[sizes[0], sizes[-1]], base=2, padding=12, **LOG)
    x = x.axis(values=sizes, grid=False, format=",")
    ends = [0.9 * min(0.9, frame["ratio"].min()), 1.1 * frame["ratio"].max()]
    y = alt.Y("ratio:Q", title="times as fast").scale(domain=ends, **LOG)
    y = y.axis(values=[0.3, 0.5, 0.7, 1, 1.5, 2, 3, 4], format="~g")
    shades = dict(zip(gains, [*PALETTE[: len(gains) - 1], "#999999"], strict=True))
    color = colored("part", shades, sort=list(gains), title=None)
    layers = [
        alt.Chart(pd.DataFrame({"ratio": [1.0]})).mark_rule(color=GREY).encode(y),
        alt.Chart(rounded(frame)).mark_line(point={"filled": True, "size": 45}).encode(x, y, color),
    ]
    if used_from is not None:
        limit = alt.Chart(pd.DataFrame({"size": [used_from]}))
        layers.append(limit.mark_rule(strokeDash=[4, 4], color=GREY).encode(x))
        caption += " Dashed line: greedy search uses the bound from here on."
    caption += (
        f" The control's gains are {low:.2f} to {high:.2f}. The title counts gains 5% above the "
        "control's highest."
    )
    starts = []  # of each part: the size from which on it gains clearly more than the control
    for ratios in [*gains.values()][:-1]:
        lost = [size for size, ratio in ratios.items() if ratio <= 1.05 * high]
        starts.append(
            min((size for size in sizes if size > max(lost, default=0)), default=math.inf)
        )
    chart = alt.layer(*layers).properties(width=480, height=230)
    return titled(chart, title.format(starts), caption)


NUMBERS = {2: "Two", 3: "Three", 4: "Four", 5: "Five", 6: "Six"}
SEARCHES = {1: "greedy", 4: "beam 4"}  # names of the beams' widths


def rows_chart(
    ways: Mapping[str, Sequence[Tensor]], texts: Sequence[Sequence[int]]
) -> alt.TopLevelMixin:
    """The rows (N, D) of each step, for each way to write `texts`, which need a row a token."""
    counts = {way: list(map(len, steps)) for way, steps in ways.items()}
    needed = sum(map(len, texts))
    stay, leave = (1 - needed / sum(rows) for rows in counts.values())
    table = {
        f"{way}: {sum(rows):,} rows": dict(enumerate(rows, start=1)) for way, rows in counts.items()
    }
    return titled(
        lines(long(table, "way", "step", "rows"), "step", "rows", "way", zero=True),
        f"{stay:.0%} of the rows are computed for nothing if all stay, {leave:.0%} if they leave",
        f"Rows that the decoder computes at each step for {len(texts)} sentences. The texts need "
        f"{needed:,} in all.",
    )


def family_chart(family: Tensor, cached: Sequence[str]) -> alt.TopLevelMixin:
    """Which cached tokens (L,) each prefix (K,) descends from: family (K, L) of bool."""
    prefixes = [" ".join(cached[i] for i in row.nonzero().flatten()) for row in family]
    titles = {"row_title": "prefix", "column_title": "cached tokens, in the order of their steps"}
    return titled(
        heatmap(family, prefixes, cached, words=("ancestor", "not"), cell=38, **titles),
        f"{NUMBERS[len(family)]} prefixes share {len(cached)} cached tokens; "
        f"{NUMBERS[(~family.any(dim=0)).sum().item()].lower()} belong to none of them",
        "Each row is a prefix, each column a token whose keys and values are cached. A prefix "
        "attends to its blue cells.",
    )


def bound_chart(rough: Tensor, exact: Tensor, error: Tensor, tokenizer: Any) -> alt.TopLevelMixin:
    """The 8 tokens that look best, with their intervals: coarse values (V,), exact ones (V,)."""
    shown, floor = rough.topk(8).indices, (rough.max() - error).item()
    assert shown[1] == exact.argmax(), "the title says so"
    values = {"coarse": rough, "low": rough - error, "high": rough + error, "exact": exact}
    frame = pd.DataFrame({name: value[shown].tolist() for name, value in values.items()})
    frame["token"] = [
        "may be the largest" if high >= floor else "ruled out" for high in frame["high"]
    ]
    frame["label"] = frame["exact"].map("{:.3f}".format)
    frame["piece"] = [tokenizer.processor.id_to_piece(token) for token in shown.tolist()]
    frame = rounded(frame.assign(rank=range(1, len(shown) + 1)))
    ends = [frame["low"].min() - 0.3, frame["high"].max() + 1]
    scale = alt.Scale(domain=ends, nice=False)
    x = {name: alt.X(f"{name}:Q", scale=scale) for name in ("low", "high", "coarse", "exact", "x")}
    x["low"] = x["low"].title("logit").axis(tickCount=8, format=".0f")
    y = alt.Y("piece:N", title=None, sort=frame["piece"].tolist()).axis(ticks=False)
    fates = {"may be the largest": PALETTE[0], "ruled out": "#999999"}
    color = colored("token", fates, sort=list(fates), title=None)
    limit = alt.Chart(pd.DataFrame({"x": [round(floor, 3)]}))
    base = alt.Chart(frame).encode(y, color)
    dots = base.mark_point(filled=True, size=22, opacity=1)
    layers = [
        limit.mark_rule(strokeDash=[4, 4]).encode(x["x"]),
        base.mark_rule(strokeWidth=3).encode(x["low"], x2="high:Q"),
        base.mark_tick(thickness=2, size=17).encode(x["coarse"]),
        dots.encode(x["exact"], color=alt.value(PALETTE[1])),
        base.transform_filter("datum.rank <= 2")
        .mark_text(align="left", dx=6)
        .encode(x["high"], text="label:N", color=alt.value(PALETTE[1])),
    ]
    able = (frame["token"] == "may be the largest").sum()
    return titled(
        alt.layer(*layers).properties(width=480, height=alt.Step(20)),
        "The token of the second-largest coarse logit is the largest, and the bound keeps it",
        "The tokens of the 8 largest coarse logits of a row. Tick: coarse logit. Orange: exact "
        "logit, in numbers for the first two. Bar: where the bound lets it lie. A bar that ends "
        "left of the dashed line can't hold the largest, as the first bar lies to the right of it: "
        f"{able} of {len(rough):,} tokens may be the largest.",
    )


def speed_frame(record: dict[str, Any], sentences: int | None = None) -> pd.DataFrame:
    """A row for each program and beam: sentences a second, BLEU, its pace against CTranslate2's.

    `rounds` has CTranslate2's time over its own in each round, at the same precision; `lowest`,
    `ratio` and `highest` are their smallest, their median and their largest.
    """
    sentences = sentences or record["sentences"]
    frame = pd.DataFrame([r for r in record["reports"] if r["sentences"] == sentences])
    seconds = frame.set_index(["program", "beam"])["seconds"]
    ratios = []
    for program, beam, own in zip(frame["program"], frame["beam"], frame["seconds"], strict=True):
        rival = "CTranslate2, int8" if program.endswith("int8") else "CTranslate2, float32"
        rounds = zip(seconds[rival, beam], own, strict=True)
        ratios.append([theirs / ours for theirs, ours in rounds])
    spread = pd.DataFrame(ratios, index=frame.index).quantile([0, 0.5, 1], axis=1).T
    frame[["lowest", "ratio", "highest"]] = spread.round(2)
    return frame.assign(rounds=ratios).drop(columns=["seconds", "sentences"])


def race_chart(record: dict[str, Any]) -> alt.TopLevelMixin:
    """CTranslate2's time over ours: a dot for each round, a tick at their median."""
    races = {count: speed_frame(record, count) for count in (record["sentences"], 300)}
    race = pd.concat(races, names=["sentences"]).reset_index(level=0)
    race = race[race["program"].isin(["ours, float32", "ours, int8"])]
    race["race"] = [
        f"{count:,} sentences, {SEARCHES[beam]}, {program.removeprefix('ours, ')}"
        for count, beam, program in zip(
            race["sentences"], race["beam"], race["program"], strict=True
        )
    ]
    race["precision"] = race["program"].str.removeprefix("ours, ")
    race["label"] = race["ratio"].map("×{:.2f}".format)
    order = race["race"].tolist()
    rounds = rounded(
        race[["race", "precision", "rounds"]].explode("rounds").astype({"rounds": float})
    )
    ends = [0.9 * rounds["rounds"].min(), 1.1 * rounds["rounds"].max()]
    x = alt.X("rounds:Q", title="CTranslate2's time over ours").scale(domain=ends, **LOG)
    x = x.axis(values=[0.8, 1, 1.2, 1.4, 1.6, 1.8], grid=False)
    dots, medians = alt.Chart(rounds), alt.Chart(race[["race", "ratio", "label"]])
    medians = medians.encode(alt.X("ratio:Q"), row_axis("race", order))
    shades = {"float32": PALETTE[0], "int8": PALETTE[1]}
    color = colored("precision", shades, title=None)
    layers = [
        alt.Chart(pd.DataFrame({"rounds": [1.0]})).mark_rule(color=GREY).encode(x),
        dots.mark_point(filled=True).encode(x, row_axis("race", order), color),
        medians.mark_tick(thickness=2.5, size=18, color=INK),
        medians.mark_text(dy=-14).encode(text="label:N"),
    ]
    ahead = (rounds["rounds"] > 1).sum()
    return titled(
        alt.layer(*layers).properties(width=420, height=alt.Step(34)),
        f"Ours is faster than CTranslate2 in {ahead} of {len(rounds)} rounds",
        "Dot: one round, in which both took their turn. Black: the median of a race's rounds. To "
        "the right of 1 ours is faster. (The table has each program's own medians.)",
    )


def race_table(record: dict[str, Any]) -> pd.DataFrame:
    """The race of 1,000 sentences: sentences a second, BLEU, how many texts differ."""
    race = speed_frame(record).query("program != 'ours, exact stop'")
    columns = {
        "sentences/s": race["sentences_per_second"].map("{:,.0f}".format),
        "BLEU": race["bleu"].map("{:.2f}".format),
        "other texts": record["sentences"] - race["same_as_ours"],
    }
    table = race.assign(**columns).pivot(index="program", columns="beam", values=[*columns])
    return table.rename(columns=SEARCHES)


def stop_table(record: dict[str, Any]) -> pd.DataFrame:
    """The exact stop beside the usual one: texts that change, BLEU, time in the same round."""
    whole = [r for r in record["reports"] if (r["sentences"], r["beam"]) == (1000, 4)]
    seconds = pd.DataFrame({r["program"]: r["seconds"] for r in whole})
    times = seconds.div(seconds["ours, float32"], axis=0).median()
    names = {"ours, float32": "after K endings", "ours, exact stop": "when none can overtake"}
    rows = {
        names[r["program"]]: {
            "texts that change": 1000 - r["same_as_ours"],
            "BLEU": f"{r['bleu']:.2f}",
            "times as long": f"{times[r['program']]:.2f}",
        }
        for r in whole
        if r["program"] in names
    }
    return pd.DataFrame.from_dict(rows, orient="index")


def alone_table(record: dict[str, Any]) -> pd.DataFrame:
    """Milliseconds for a sentence that is translated alone: the median."""
    alone = pd.DataFrame(record["one_at_a_time"]).set_index(["program", "beam"])["p50"]
    return alone.map("{:.1f}".format).unstack().rename(columns=SEARCHES)
