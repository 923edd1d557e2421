"""Drawings of part III: where time goes, what the fast path is worth, races, two graphs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from scripts import Late
from scripts.book.charts import bars, heatmap, lines, long, rounded, titled
from scripts.book.figures.diagram import drawn
from scripts.book.look import GREY, LOG, PALETTE, bar_axis, colored

alt, pd = Late("altair"), Late("pandas")


def flops_chart(shares: dict[str, float]) -> alt.TopLevelMixin:
    """Which products a step's FLOPs go to."""
    frame = pd.DataFrame(shares.items(), columns=["products", "share"])
    return titled(
        bars(frame, "products", "share", number_format=".0%", value_title="share of FLOPs"),
        "At 16 tokens attention's own products are 1% of the FLOPs",
        "A step of 128 pairs of 16 tokens. The last bar holds the only products whose cost grows "
        "with the square of the length.",
    )


def roofline_chart(record: dict[str, Any]) -> alt.TopLevelMixin:
    """Speed over arithmetic intensity of the recorded operations, under the machine's two roofs."""
    x = alt.X("intensity:Q", title="arithmetic intensity: FLOPs per byte")
    x = x.scale(domain=[0.02, 300], **LOG).axis(values=[0.1, 1, 10, 100], format="~g")
    y = alt.Y("speed:Q", title="speed: billion FLOP/s")
    y = y.scale(domain=[0.2, 1000], **LOG).axis(values=[1, 10, 100, 1000], format="~g")
    rate, bandwidth = record["matrix_rate"], record["bandwidth"]
    roof = pd.DataFrame({"intensity": [0.02, rate / bandwidth, 300.0]})
    roof["speed"] = (roof["intensity"] * bandwidth).clip(upper=rate) / 1e9
    frame = pd.DataFrame(record["operations"])
    frame["intensity"] = frame["flops"] / frame["bytes"]
    frame["speed"] = frame["flops"] / frame["seconds"] / 1e9
    crowd = {"Q, K, V": "", "feed-forward, out": "", "feed-forward, back": "Q, K, V; feed-forward"}
    frame["label"] = frame["operation"].replace(crowd)
    shown = rounded(frame[["operation", "label", "intensity", "speed"]])
    dots = alt.Chart(shown).mark_point(filled=True, size=70, opacity=1, color=PALETTE[0])
    layers = [
        alt.Chart(rounded(roof)).mark_line(color=GREY).encode(x, y),
        dots.encode(x, y, tooltip=["operation", "intensity", "speed"]),
    ]
    high = shown["label"].str.startswith("Q, K, V")
    right = (shown["intensity"] > 10) & ~high  # labels stay inside the picture
    above = shown["speed"] > 1.5 * shown["intensity"] * bandwidth / 1e9
    for rows, place in (
        (high, {"align": "right", "dx": 24, "dy": -14}),
        (right, {"align": "right", "dx": -9, "dy": 6}),
        (above, {"align": "right", "dx": 6, "dy": -14}),
        (~right & ~high & ~above, {"align": "left", "dx": 9, "dy": 6}),
    ):
        text = alt.Chart(rounded(shown[rows])).mark_text(lineBreak="\n", fontSize=12, **place)
        layers.append(text.encode(x, y, text="label:N"))
    return titled(
        alt.layer(*layers).properties(width=520, height=340),
        "Products reach 30 to 60% of the roof; dropout and the loss stay far below it",
        "Operations of our step, each alone, on the record's machine. Dots above the sloping line "
        "moved more bytes a second than memory does by our measurement.",
    )


def step_account_chart(account: dict[str, float], floors: dict[str, float]) -> alt.TopLevelMixin:
    """Seconds of a step by kind of operation, with the floor of those kinds that have one."""
    spent, least = (
        rounded(pd.DataFrame(seconds.items(), columns=["kind", "seconds"]), 3)
        for seconds in (account, floors)
    )
    spent = spent.sort_values("seconds", ascending=False)
    x = alt.X("seconds:Q").axis(grid=False, tickCount=5)
    x = x.scale(domain=[0, 1.18 * spent["seconds"].max()], nice=False)
    y = bar_axis("kind", list(spent["kind"]))
    base = alt.Chart(spent).encode(x, y)
    ticks = alt.Chart(least).mark_tick(color=PALETTE[1], thickness=4, height=24, opacity=1)
    layers = [
        base.mark_bar(color=PALETTE[0], height=18),
        base.mark_text(align="left", dx=5).encode(text=alt.Text("seconds:Q", format=".3f")),
        ticks.encode(x, y),
    ]
    return titled(
        alt.layer(*layers).properties(width=380, height=alt.Step(28)),
        "Most of the step's time has no place in the floor",
        "Seconds of a step of the textbook path, by kind of operation, as the profiler books them. "
        "Orange: the floor. Kinds without a mark have a floor of zero.",
    )


GROWTH_AXES = {
    "length": "length (2,048 tokens a side)",
    "tokens": "tokens a side",
    "width": "d_model (d_ff = 4 × d_model)",
    "depth": "layers on either side",
}


def growth_chart(frame: pd.DataFrame, costs: list[str]) -> alt.TopLevelMixin:
    """Costs along the four axes, as multiples of the smallest: columns axis, value and `costs`."""
    used = frame.melt(["axis", "value"], costs, "cost", "times")
    used["times"] /= used.groupby(["axis", "cost"])["times"].transform("first")
    used = rounded(used)
    y = alt.Y("times:Q", title="times as much").axis(values=[1, 2, 4, 8, 16, 32, 64])
    y = y.scale(domain=[0.9, 70], base=2, **LOG)
    color = alt.Color("cost:N", sort=list(used["cost"].unique()), title=None)
    panels = []
    for axis, along in used.groupby("axis", sort=False):
        values = sorted(along["value"].unique().tolist())
        ends = [values[0], values[-1]]
        x = alt.X("value:Q", title=GROWTH_AXES[axis]).axis(values=values, grid=False, format=",")
        x = x.scale(domain=ends, padding=12, base=2, **LOG)
        steady = pd.DataFrame({"value": ends, "times": [1.0, ends[1] / ends[0]]})
        grey = alt.Chart(steady).mark_line(color=GREY, strokeWidth=1.5, strokeDash=[5, 4])
        chart = alt.Chart(along).mark_line(point={"filled": True, "size": 40})
        layers = [grey.encode(x, y), chart.encode(x, y, color)]
        panels.append(alt.layer(*layers).properties(width=230, height=170))
    return titled(
        alt.concat(*panels, columns=2),
        "At a fixed number of tokens length costs little; time grows most with width",
        "The textbook's step, as multiples of its cost at each axis's smallest value. Both axes "
        "of each panel are logarithmic: a straight line is a power. Dashed: slope 1.",
    )


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
    frame["token"] = ["may win" if high >= floor else "ruled out" for high in frame["high"]]
    frame = rounded(frame.assign(rank=range(1, len(shown) + 1)))
    ends = [frame["low"].min() - 0.3, frame["high"].max() + 0.3]
    scale = alt.Scale(domain=ends, nice=False)
    x = {name: alt.X(f"{name}:Q", scale=scale) for name in ("low", "coarse", "exact", "x")}
    x["low"] = x["low"].title("logit").axis(tickCount=8, format=".0f")
    y = alt.Y("rank:O", title="rank by coarse value").axis(ticks=False)
    fates = {"may win": PALETTE[0], "ruled out": "#999999"}
    color = colored("token", fates, sort=list(fates), title=None)
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


def two_graphs() -> alt.TopLevelMixin:
    """The encoder's graph, run once, and the step's graph, which the host runs again and again."""
    return titled(
        drawn("two_graphs").chart(),
        "Two graphs, and a loop that belongs to neither",
        "Read upwards. Left: once for a batch. Right: once for every token. Two things go round: "
        "the token, which the host chooses, and past, which is the last step's present. Blue and "
        "orange: graphs. Pink: the host. Green: keys and values. R = B, or more with a beam.",
    )
