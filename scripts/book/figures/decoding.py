"""Drawings of chapter 13: what each part of a fast search saves, where its gain ends, the race."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from scripts import Late
from scripts.book.charts import heatmap, lines, long, rounded, titled
from scripts.book.look import GREY, LOG, PALETTE, bar_axis, colored

alt, pd = Late("altair"), Late("pandas")

GAINS = {  # title, name of the axis, caption
    "blocks": (
        "Blocks save more in a large vocabulary, and if few are wanted",
        "logits in a row",
        "Time of torch.topk over that of best_logits, for 32 rows. Where the blocks of 64 would be "
        "more than an eighth of the row, best_logits is topk.",
    ),
    "screen": (
        "For 16 rows 8 bits are {0[8 bits][16]:.1f} times as fast, "
        "with the proof {0[with a proof][16]:.1f} times",
        "rows of the step",
        "Time of the product in 32 bits, and finding its largest, over the same in 8 bits.",
    ),
}


def waterfall(
    gains: Mapping[str, float], total: float, controls: Sequence[float], axis: str
) -> alt.LayerChart:
    """What each way gains over the one before it, {way: ratio}; the last over the first."""
    low, high = min(controls), max(controls)
    frame = pd.DataFrame({"change": [*gains, "first against last", "control"]})
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
    layers = [
        base.mark_bar(height=18).encode(x, x2="to:Q", color=color.otherwise(alt.value(GREY))),
        base.mark_text(align="left", dx=6).encode(alt.X("to:Q"), text="label:N"),
    ]
    return alt.layer(*layers).properties(width=420, height=alt.Step(28))


def waterfall_chart(greedy: tuple, beam: tuple) -> alt.TopLevelMixin:
    """`waterfall` of greedy search, whose first bar is the cache, and of a beam of 4: its tree."""
    cache, *others, eight = greedy[0].values()
    tree, *_ = beam[0].values()
    charts = [
        waterfall(*greedy, "greedy search: times as fast as computing every prefix anew"),
        waterfall(*beam, "beam of 4: times as fast as with a cache for each prefix"),
    ]
    return titled(
        alt.vconcat(*charts).resolve_scale(x="independent", y="independent"),
        f"A cache gains {cache:.1f}, the other exact tricks {math.prod(others):.1f}, "
        f"8 bits {eight:.1f}; in a beam the tree gains {tree:.2f}",
        "Searches for 64 captions, one thread. Each bar is one way against the way before it, "
        "and begins where the last one ends, on an axis of factors. Control: ways against "
        "themselves; a bar within it says nothing.",
    )


def gains_chart(name: str, gains: Mapping[str, Mapping[int, float]]) -> alt.TopLevelMixin:
    """What parts save, over a size: gains {part: {size: ratio}}, with a "control" as the last."""
    title, axis, caption = GAINS[name]
    frame = long(gains, "part", "size", "ratio")
    sizes = sorted(frame["size"].unique().tolist())
    low, high = min(gains["control"].values()), max(gains["control"].values())
    x = alt.X("size:Q", title=axis).scale(domain=[sizes[0], sizes[-1]], base=2, padding=12, **LOG)
    x = x.axis(values=sizes, grid=False, format=",")
    ends = [0.9 * min(0.9, frame["ratio"].min()), 1.1 * frame["ratio"].max()]
    y = alt.Y("ratio:Q", title="times as fast").scale(domain=ends, **LOG)
    y = y.axis(values=[0.5, 0.7, 1, 1.2, 1.5, 2, 3, 4], format="~g")
    shades = dict(zip(gains, [*PALETTE[: len(gains) - 1], "#999999"], strict=True))
    color = colored("part", shades, sort=list(gains), title=None)
    layers = [
        alt.Chart(pd.DataFrame({"ratio": [1.0]})).mark_rule(color=GREY).encode(y),
        alt.Chart(rounded(frame)).mark_line(point={"filled": True, "size": 45}).encode(x, y, color),
    ]
    caption += f" Below 1 it loses; within the control's range, {low:.2f} to {high:.2f}, it says "
    caption += "nothing."
    chart = alt.layer(*layers).properties(width=480, height=230)
    return titled(chart, title.format(gains), caption)


NUMBERS = {2: "Two", 3: "Three", 4: "Four", 5: "Five", 6: "Six"}
SEARCHES = {1: "greedy", 4: "beam 4"}  # names of the beams' widths


def rows_chart(
    ways: Mapping[str, Sequence[Tensor]], texts: Sequence[Sequence[int]]
) -> alt.TopLevelMixin:
    """The rows (N, D) of each step, for each way to write `texts`, which need a row a token."""
    counts = {way: list(map(len, steps)) for way, steps in ways.items()}
    needed = sum(map(len, texts))
    stay, leave = (1 - needed / sum(rows) for rows in counts.values())
    table = {way: dict(enumerate(rows, start=1)) for way, rows in counts.items()}
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
        f"{NUMBERS[len(family)]} prefixes share {len(cached)} cached tokens, and none moves",
        "Each row is a prefix, each column a token whose keys and values are cached. A prefix "
        "attends to its blue cells. Two columns have no blue cell: nothing descends from them.",
    )


def bound_chart(rough: Tensor, exact: Tensor, error: float) -> alt.TopLevelMixin:
    """The 8 tokens that look best, with their intervals: coarse values (V,), exact ones (V,)."""
    shown, floor = rough.topk(8).indices, rough.max().item() - error
    assert shown[1] == exact.argmax(), "the title says so"
    values = {"coarse": rough, "low": rough - error, "high": rough + error, "exact": exact}
    frame = pd.DataFrame({name: value[shown].tolist() for name, value in values.items()})
    frame["token"] = ["may win" if high >= floor else "ruled out" for high in frame["high"]]
    frame["label"] = frame["exact"].map("{:.3f}".format)
    frame = rounded(frame.assign(rank=range(1, len(shown) + 1)))
    ends = [frame["low"].min() - 0.3, frame["high"].max() + 1]
    scale = alt.Scale(domain=ends, nice=False)
    x = {name: alt.X(f"{name}:Q", scale=scale) for name in ("low", "high", "coarse", "exact", "x")}
    x["low"] = x["low"].title("logit").axis(tickCount=8, format=".0f")
    y = alt.Y("rank:O", title="rank by coarse value").axis(ticks=False)
    fates = {"may win": PALETTE[0], "ruled out": "#999999"}
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
    able = (frame["token"] == "may win").sum()
    return titled(
        alt.layer(*layers).properties(width=480, height=alt.Step(20)),
        "The second-best coarse token is the largest, and the bound keeps it",
        "A row whose best coarse token is wrong. Tick: coarse value. Orange: exact value, "
        "in numbers for the first two. Bar: where the bound lets it lie. A bar that ends left of "
        "the dashed line can't hold the largest, as the first bar lies wholly to the right of it: "
        f"{able} of {len(rough):,} tokens may win.",
    )


def speed_frame(record: dict[str, Any], sentences: int | None = None) -> pd.DataFrame:
    """A row for each program and beam: sentences a second, BLEU, its pace against CTranslate2's.

    `ratio` is the median over the rounds of its speed over CTranslate2's of the same precision in
    the same round; `lowest` and `highest` are the rounds' own.
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
    return frame.drop(columns=["seconds", "sentences"])


def race_table(record: dict[str, Any]) -> pd.DataFrame:
    """The race of the usual searches: sentences a second, BLEU, how many texts agree."""
    races = {count: speed_frame(record, count) for count in (record["sentences"], 300)}
    race = pd.concat(races, names=["sentences"]).reset_index(level=0)
    race = race.query("program != 'ours, exact stop'")
    ahead = race.eval("program == 'ours, int8' and beam == 4")
    assert race.loc[ahead, "lowest"].gt(1).all(), "the chapter says so"
    assert race.loc[ahead, "ratio"].between(1.15, 1.25).all()  # 1.2 times
    assert race.loc[~ahead, "ratio"].between(0.89, 1.11).all()
    spans = zip(race["lowest"], race["highest"], strict=True)
    columns = {
        "sentences/s": race["sentences_per_second"].map("{:,.0f}".format),
        "rounds": ["" if low == high else f"{low:.2f}–{high:.2f}" for low, high in spans],
        "BLEU": race["bleu"],
        "same texts": race["same_as_ours"].map(str),
    }
    table = race.assign(**columns).pivot(
        index=["sentences", "program"], columns="beam", values=[*columns]
    )
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
    """Milliseconds for a sentence that is translated alone."""
    alone = pd.DataFrame(record["one_at_a_time"]).set_index(["program", "beam"])[["p50", "p99"]]
    return alone.map("{:.1f}".format).unstack().rename(columns=SEARCHES)
