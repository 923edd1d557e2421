"""Drawings of part II: corpora, losses, recorded trainings, decoding, judging."""

from __future__ import annotations

import itertools
import json
import math
import textwrap
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from scripts import Late
from scripts.book.charts import bars, heatmap, lines, long, named, rounded, titled
from scripts.book.look import GREY, INK, LOG, PALETTE, bar_axis, colored, row_axis
from scripts.book.records import load_record

alt, pd = Late("altair"), Late("pandas")


def learning_curves(
    curves: Mapping[str, Sequence[float]],
    marks: Mapping[str, float] | None = None,
    *,
    every: int = 1,
    y_title: str = "loss (nats a token)",
    log_y: bool = False,
) -> alt.LayerChart:
    """One curve for each list of values, a value a step; dashed horizontal lines at the `marks`.

    `every` steps are averaged into one point. `log_y` is for perplexities: it begins at 1.

    >>> learning_curves({"warm-up": losses}, {"ln 10": 2.303}, every=5)
    """
    means = {name: {} for name in curves}
    for name, values in curves.items():
        for end in range(every, len(values) + 1, every):
            means[name][end] = sum(values[end - every : end]) / every
    frame = long(means, "name", "step", "value")
    drawn = lines(frame, "step", "value", "name", y_title=y_title, zero=True)
    if log_y:
        y = alt.Y("value:Q", title=y_title).axis(values=[1, 2, 5, 10, 20, 50])
        drawn = drawn.encode(y.scale(domainMin=1, **LOG))
    rules = pd.DataFrame((marks or {}).items(), columns=["mark", "height"]).round(4)
    base = alt.Chart(rules).encode(y="height:Q")
    dashes = base.mark_rule(strokeDash=[4, 4], color=GREY)
    names = base.mark_text(align="right", dy=11, color=GREY).encode(text="mark:N", x=alt.value(475))
    return alt.layer(drawn, dashes, names) if marks else drawn


def length_curves(shares: Mapping[str, Mapping[str, float]]) -> alt.Chart:
    """A curve for each language: the share of captions over their number of words."""
    frame = long(shares, "language", "words", "share").astype({"words": int})
    y = alt.Y("share:Q", title="share of training captions").scale(zero=True)
    chart = lines(frame, "words", "share", "language", x_title="words in a caption")
    return chart.encode(y.axis(format=".0%", tickCount=5))


def size_curves(frame: pd.DataFrame) -> alt.Chart:
    """Tokens per sentence over the vocabulary's size: a curve for each value of "text"."""
    x = alt.X("V:Q", title="entries in the vocabulary (V)").scale(type="log", domain=[100, 10_000])
    x = x.axis(values=[125, 250, 500, 1000, 2000, 4000, 8000])
    y = alt.Y("tokens:Q", title="tokens per test sentence").scale(zero=True).axis(tickCount=5)
    return lines(frame, "V", "tokens", "text", points=True).encode(x, y)


def two_batches(masks: Mapping[str, Any]) -> alt.HConcatChart:
    """Batches side by side, (rows, width) booleans each: tokens dark, padding pale."""
    look = {"row_title": "sentence", "column_title": "position", "words": ("token", "padding")}
    panels = {name: heatmap(mask, cell=10, **look) for name, mask in masks.items()}
    return alt.hconcat(*named(panels), spacing=30)


def padding_bars(tables: Mapping[str, Mapping[str, float]]) -> alt.VConcatChart:
    """A panel of bars for each corpus: the share of padding for each way to make batches."""
    look = {"value_title": "share of the batch that is padding", "number_format": ".0%"}
    panels = {}
    for corpus, table in tables.items():
        frame = pd.DataFrame(table.items(), columns=["batches", "padding"])
        panels[corpus] = bars(frame, "batches", "padding", end=1.0, **look)  # one scale for all
    return alt.vconcat(*named(panels), spacing=24)


TREE_STEP = 124  # pixels from one step of a beam's tree to the next


def beam_tree(weighed: pd.DataFrame) -> pd.DataFrame:
    """Where to draw each candidate of a beam by hand: step x and row y, and those of its parent."""
    weighed = weighed.set_index("words")
    row, leaves = {}, itertools.count()

    def settle(words: tuple[str, ...]) -> float:
        below = [settle(child) for child in weighed.index if child[:-1] == words]
        row[words] = sum(below) / len(below) if below else float(next(leaves))
        return row[words]

    settle(())
    places = []
    for words, p, fate in zip(weighed.index, weighed["p"], weighed["fate"], strict=True):
        x, y = len(words), row[words]
        label = max(34, 8 * len(words[-2])) + 14 if words[1:] else 0  # the parent's, in pixels
        parent = (x - 1 + label / TREE_STEP, row[words[:-1]])
        places.append((words[-1], f"{p:.3f}", fate, x, y, *parent))
    return pd.DataFrame(places, columns=["word", "p", "fate", "x", "y", "from x", "from y"])


def beam_tree_chart(tree: pd.DataFrame) -> alt.TopLevelMixin:
    """The candidates of a beam search as a tree that grows to the right."""
    steps, last_row = int(tree["x"].max()), tree["y"].max()
    width = {"domain": [0, steps + 0.5], "nice": False}
    x = alt.X("x:Q").scale(**width)
    x = x.axis(title="step", values=list(range(1, steps + 1)), format="d", grid=False)
    y = alt.Y("y:Q", axis=None).scale(domain=[-0.7, last_row + 0.7], reverse=True, nice=False)
    color = colored("fate", {"kept": PALETTE[0], "ends": PALETTE[2], "dropped": "#AAAAAA"})
    color = color.legend(title="the candidate is", orient="top")
    base = alt.Chart(tree).encode(x, y)
    parent = alt.X("from x:Q").scale(**width), alt.Y("from y:Q", axis=None)
    layers = [
        base.mark_rule(strokeWidth=1.5).encode(*parent, color, x2="x:Q", y2="y:Q"),
        base.mark_circle(size=70, opacity=1).encode(color),
    ]
    looks = {
        "word": {"dy": -6, "fontSize": 13, "fontWeight": "bold"},
        "p": {"dy": 8, "fontSize": 11, "color": GREY},
    }
    for column, look in looks.items():
        layers.append(base.mark_text(align="left", dx=9, **look).encode(text=f"{column}:N"))
    size = {"width": int(TREE_STEP * (steps + 0.5)), "height": 46 * int(last_row + 2)}
    return titled(
        alt.layer(*layers).properties(**size),
        "A beam of two, step by step",
        "Below each word: the probability of the whole text up to it. In each column any of the "
        "two best that ends is finished; of the others the two best go on. The winner begins with "
        "the second-best word. Heights only spread the tree.",
    )


def kept_chart(source: Sequence[str], target: Sequence[str], kib: float) -> alt.TopLevelMixin:
    """Which positions' keys and values are computed at each step, and which are kept from before.

    `target` are the tokens that the decoder reads, `kib` the KiB that one position takes.
    """
    S, T = len(source), len(target)
    columns = [str(i) for i in range(S + T)]
    kinds = {"computed at this step": PALETTE[1], "kept from before": "#BBD7EA"}
    computed, before = kinds
    cells, sums = [], []
    for step in range(1, T + 1):
        first_new = 0 if step == 1 else S + step - 1  # the first step reads the source, too
        for i in range(S + step):
            cells.append((step, columns[i], computed if i >= first_new else before))
        sums.append((step, f"{(S + step) * kib:g} KiB"))
    labels = [piece.replace("▁", "") or "▁" for piece in (*source, *target)]
    names = f"{json.dumps(labels, ensure_ascii=False)}[toNumber(datum.value)]"
    bare = {"ticks": False, "domain": False}
    x = alt.X("position:N", sort=columns, title=None)
    x = x.axis(labelExpr=names, labelAngle=-60, orient="top", **bare)
    y = alt.Y("step:O", title="step").axis(**bare)
    color = colored("keys and values", kinds).legend(title=None, orient="bottom")
    grid = alt.Chart(pd.DataFrame(cells, columns=["step", "position", "keys and values"]))
    edge = alt.Chart(pd.DataFrame({"position": [columns[S]]}))
    numbers = alt.Chart(pd.DataFrame(sums, columns=["step", "kept"]))
    numbers = numbers.mark_text(align="left", fontSize=12)
    layers = [
        grid.mark_rect(stroke="white", strokeWidth=2).encode(x, y, color),
        edge.mark_rule(color=INK, strokeWidth=2, xOffset=-13).encode(x),
        numbers.encode(y, x=alt.value(26 * (S + T) + 8), text="kept:N"),
    ]
    return titled(
        alt.layer(*layers).properties(width=26 * (S + T), height=26 * T),
        "The source once, then one new position a step",
        "Left of the line: the source; right: what the decoder has read. Each square stands "
        "for a position's keys and values in all layers. At a row's end: what is kept by then.",
        wrap=72,
    )


def temperature_chart(
    by_temperature: Mapping[float, Tensor], words: Sequence[str]
) -> alt.TopLevelMixin:
    """The first word's probabilities at several temperatures, side by side."""
    table = {
        f"τ = {t:g}": dict(zip(words, p.tolist(), strict=True)) for t, p in by_temperature.items()
    }
    frame = long(table, "temperature", "word", "p").query("p > 0")
    order = list(dict.fromkeys(frame["word"]))
    x = alt.X("word:N", sort=order, title=None).axis(labelAngle=0, ticks=False)
    y = alt.Y("p:Q", title="probability").axis(grid=False).scale(domain=[0, 0.75])
    base = alt.Chart(rounded(frame)).encode(x, y)
    columns = base.mark_bar(color=PALETTE[0]).properties(width=120, height=180)
    numbers = base.mark_text(dy=-8).encode(text=alt.Text("p:Q", format=".2f"))
    column = alt.Column("temperature:N", sort=list(table), title=None).header(labelFontSize=13)
    return titled(
        alt.layer(columns, numbers).facet(column=column),
        "The lower the temperature, the more the likeliest word gets",
        "The same three probabilities. A low temperature τ spreads them apart, a high one "
        "levels them.",
    )


LOG_TICKS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000]  # the marks of a logarithmic axis


def history_chart(name: str, title: str, caption: str) -> alt.HConcatChart:
    """Validation BLEU and perplexity by epoch, from the record `results/NAME.json`."""
    frame = pd.DataFrame(load_record(name)["history"])
    both = frame.melt("epoch", ["train_ppl", "val_ppl"], "split", "perplexity")
    both["split"] = both["split"].map({"train_ppl": "training", "val_ppl": "validation"})
    size = {"points": True, "width": 225, "height": 220}
    bleu = lines(frame, "epoch", "val_bleu", y_title="validation BLEU", zero=True, **size)
    mark = {"color": PALETTE[1]}  # validation's, as in the panel beside it
    bleu = bleu.mark_line(point={"filled": True, "size": 45} | mark, **mark)
    top, last = math.ceil(1.2 * both["perplexity"].max()), int(frame["epoch"].max())
    y = alt.Y("perplexity:Q", title="perplexity").scale(domain=[1, top], **LOG)
    y = y.axis(values=[value for value in LOG_TICKS if value <= top])
    legend = alt.Legend(title=None, orient="top-right", symbolType="stroke", fillColor="white")
    color = alt.Color("split:N", sort=["training", "validation"], legend=legend)
    ppl = lines(both, "epoch", "perplexity", "split", **size).encode(y, color)
    x = alt.X("epoch:Q", title="epoch").scale(domain=[1, last], nice=False)
    x = x.axis(values=[1, *range(last % 3 + 3, last + 1, 3)], format="d")
    both_panels = bleu.encode(x) | ppl.encode(x)
    both_panels = both_panels.resolve_scale(color="independent")  # the legend stays in its panel
    return titled(both_panels, title, caption, wrap=78)


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


def score_table(*names: str) -> pd.DataFrame:
    """Test scores of recorded runs: cased sacreBLEU, lower-cased beside it."""
    keys = ["bleu", "bleu_greedy", "bleu_lowercased", "search"]
    rows = [
        (name, split, *(test[key] for key in keys))
        for name in names
        for split, test in load_record(name)["test"].items()
    ]
    columns = ["model", "test set", "BLEU", "greedy", "lower-cased", "search"]
    return pd.DataFrame(rows, columns=columns).set_index("model")


def sample_table(name: str) -> pd.DataFrame:
    """The first four translations on record, each under its source and beside its reference."""
    samples = load_record(name)["samples"][:4]
    rows = [(i + 1, what, sample[what]) for i, sample in enumerate(samples) for what in sample]
    return pd.DataFrame(rows, columns=["caption", "what", "text"]).set_index(["caption", "what"])


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


def diary(frame: pd.DataFrame) -> alt.HConcatChart:
    """A row for each look at a run: its loss as a bar, and one sentence's translation by then."""
    bars = alt.Chart(rounded(frame)).mark_bar().encode(bar_axis("step").title("step"), x="loss:Q")
    short = frame.assign(
        translation=[textwrap.shorten(t, 66, placeholder=" …") for t in frame["translation"]]
    )
    texts = alt.Chart(short).mark_text(align="left", fontSize=13, x=0)
    texts = texts.encode(alt.Y("step:N", axis=None), text="translation:N")
    size = {"height": 24 * len(frame)}
    return alt.hconcat(bars.properties(width=170, **size), texts.properties(width=430, **size))
