"""Drawings of part IV: looking inside, interventions, stacks, studies of many runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from scripts import Late
from scripts.book.charts import bars, heatmap, lines, named, panels, rounded, titled
from scripts.book.figures.diagram import Diagram, drawn
from scripts.book.look import GREY, INK, LOG, PALE, PALETTE, bar_axis, colored, row_axis
from scripts.book.records import load_record, record_names
from scripts.book.verdict import t_exceeded

alt, pd = Late("altair"), Late("pandas")


def one_map(
    weights: Tensor, rows: Sequence[str], columns: Sequence[str], title: str
) -> alt.TopLevelMixin:
    """A head's weights (T, S) while the words in `rows` are about to be written."""
    texts = [[f"{w:.1f}" if w >= 0.05 else "" for w in row] for row in weights.tolist()]
    look = {"texts": texts, "domain": (0, 1), "cell": 36, "value_title": "weight"}
    return titled(
        heatmap(weights, rows, columns, **look),
        title,
        "Rows: the word about to be written. Columns: what is looked at. Each row sums to 1.",
        wrap=60,
    )


def map_explorer(
    maps: Sequence[tuple[str, str, Sequence[str], Sequence[str], Tensor]],
    start: tuple[str, int, int],
    title: str,
) -> alt.TopLevelMixin:
    """Maps in one chart, with pickers for sentence, kind, layer and head.

    Each of `maps` has the names of a sentence and a kind, the labels of rows and of columns, and
    weights (N, H, rows, columns), all of the same N and H. Weights are packed as whole thousandths,
    one text a map, and spread out by the chart itself. `start` is the kind, layer and head that the
    pickers show at first, of the first sentence; `title` says what one sees there.
    """
    packed = []
    for sentence, kind, rows, columns, weights in maps:
        whole = (1000 * weights).round().long().flatten(-2).tolist()
        texts = [[" ".join(map(str, flat)) for flat in heads] for heads in whole]
        labels = {"sentence": sentence, "kind": kind, "rows": rows, "columns": columns}
        packed.append(labels | {"maps": texts})
    first = dict(zip(("kind", "layer", "head"), start, strict=True), sentence=maps[0][0])
    N, H = len(texts), len(texts[0])
    choices = {key: list(dict.fromkeys(m[key] for m in packed)) for key in ("sentence", "kind")}
    choices |= {"layer": list(range(1, N + 1)), "head": list(range(1, H + 1))}
    pickers = []
    for name, options in choices.items():
        menu = alt.binding_select(options=options, name=f"{name} ")
        pickers.append(alt.param(name, value=first[name], bind=menu))
    label = "substring(datum.label, 3)"  # before it: the place, which keeps equal words apart
    look = {"labelExpr": label, "ticks": False, "domain": False, "labelOverlap": False}
    base = (
        alt.Chart(alt.Data(values=packed))
        .transform_filter("datum.sentence == sentence && datum.kind == kind")
        .transform_calculate(weight="split(datum.maps[layer - 1][head - 1], ' ')")
        .transform_flatten(["weight"])
        .transform_window(place="row_number()")
        .transform_calculate(row="floor((datum.place - 1) / length(datum.columns))")
        .transform_calculate(column="(datum.place - 1) % length(datum.columns)")
        .transform_calculate(query="format(datum.row, '02d') + ' ' + datum.rows[datum.row]")
        .transform_calculate(key="format(datum.column, '02d') + ' ' + datum.columns[datum.column]")
        .transform_calculate(share="toNumber(datum.weight) / 1000")
        .encode(
            alt.X("key:O", title="key: what is looked at").axis(labelAngle=-40, **look),
            alt.Y("query:O", title="query: who looks").axis(**look),
            tooltip=["query:N", "key:N", "share:Q"],
        )
    )
    color = alt.Color("share:Q", title="weight").scale(domain=[0, 1], range="heatmap")
    ink = alt.when("datum.share > 0.6").then(alt.value("white")).otherwise(alt.value(INK))
    numbers = base.transform_filter("datum.share >= 0.095").mark_text(fontSize=10)
    numbers = numbers.encode(text=alt.Text("share:Q", format=".1f"), color=ink)
    drawn = alt.layer(base.mark_rect(stroke="white", strokeWidth=1).encode(color), numbers)
    return titled(
        drawn.add_params(*pickers).properties(width=alt.Step(26), height=alt.Step(26)),
        title,
        f"Shown at first: {start[0]} {start[1]}.{start[2]}; choose any of 72 heads below. "
        "Rows are queries (read → about to write), columns are keys; each row sums to 1.",
        wrap=66,
    )


SHARES = ("same place", "previous", "next", "separator")
DECODER_SHARES = ("same place", "previous", "separator")  # what lies ahead is masked


def head_shares_chart(record: Mapping[str, Any]) -> alt.TopLevelMixin:
    """The shares of every head of self-attention, one panel a kind; above, what is even.

    A number stands where a head gives more than twice the even share.
    """
    maps = {}
    for kind, shares in {"encoder": SHARES, "decoder": DECODER_SHARES}.items():
        even = record["even"][kind]
        rows = [even, *(row for row in record["heads"] if row["kind"] == kind)]
        names = ["even", *(f"{row['layer']}.{row['head']}" for row in rows[1:])]
        matrix = [[row[share] for share in shares] for row in rows]
        texts = [
            [f"{row[s]:.2f}" if row is even or row[s] > 2 * even[s] else "" for s in shares]
            for row in rows
        ]
        look = {"texts": texts, "domain": (0, 0.6), "cell": 27, "value_title": "share"}
        maps[kind] = heatmap(matrix, names, shares, **look)
    encoder = [row for row in record["heads"] if row["kind"] == "encoder"]
    assert sum(row["previous"] > 0.3 for row in encoder) == 4
    assert max(row["separator"] for row in encoder) < 0.1
    return titled(
        alt.hconcat(*named(maps)),
        "Four encoder heads give over 30% to the previous token; none gives 10% to </s>",
        "Mean weight by target, for each layer.head. The top line is what even attention over the "
        "same sentences gives; numbers stand where a head gives more than twice that. The decoder "
        "can't see the next token; <s> is its separator, and only the later half of the queries is "
        "counted.",
        wrap=70,
    )


MOMENTS = {"writing": "the query about to write the word", "reading": "… that has just read it"}


def links_over_maps(maps: Mapping[str, Tensor], pair: Any) -> alt.TopLevelMixin:
    """Weights between words (J, I) for each moment, with the links drawn by hand as frames.

    `pair` has the words `german` and `english`, and the links `sure` and `possible`.
    """
    links = [
        {"row": j, "column": i, "link": "sure" if (i, j) in pair.sure else "possible"}
        for i, j in sorted(pair.possible)
    ]
    colors = {"sure": PALETTE[1], "possible": GREY}
    colors = {link: colors[link] for link in colors if any(x["link"] == link for x in links)}
    look = {"domain": (0, 1), "cell": 30, "value_title": "weight", "numbers": False}
    charts, hits = {}, {}
    for moment, weights in maps.items():
        map_chart = heatmap(weights, pair.english, pair.german, **look)
        frames = alt.Chart(pd.DataFrame(links)).mark_rect(filled=False, strokeWidth=2.5)
        frames = frames.encode(
            alt.X("column:O", title=None),
            alt.Y("row:O", title=None),
            alt.Stroke("link:N").scale(domain=list(colors), range=list(colors.values())),
        )
        hits[moment] = sum(
            (i, j) in pair.possible for j, i in enumerate(weights.argmax(-1).tolist())
        )
        charts[MOMENTS[moment]] = alt.layer(map_chart, frames)
    return titled(
        alt.hconcat(*named(charts)),
        f"{hits['writing']} of {len(pair.english)} English words find their German word "
        f"before they are written, {hits['reading']} once they are read",
        "Head 2.8, one caption. Rows: English words; columns: German words, without </s>. Blue: "
        "weight. Frames: the links that we drew by hand. A head is right where a row's darkest "
        "cell is framed.",
    )


def alignment_dots(
    rates: Mapping[str, Tensor], others: Mapping[str, Mapping[str, float]]
) -> alt.TopLevelMixin:
    """AER of each cross-attention head, (N, H) for each group of captions, as dots on one axis.

    `others` leads from the group to the AER of "the guess" and of further methods, as lines across.
    """
    colors = dict(zip(others[next(iter(others))], (PALETTE[1], GREY), strict=True))
    charts, better = {}, []
    for group, rate in rates.items():
        rows = [(f"layer {n + 1}", x) for n, layer in enumerate(rate.tolist()) for x in layer]
        x = alt.X("AER:Q", title="AER (0: all links right)" if charts else None)
        x = x.scale(domain=[0, 0.8])
        dots = alt.Chart(rounded(pd.DataFrame(rows, columns=["layer", "AER"])))
        dots = dots.mark_circle(size=75, opacity=0.6, color=PALETTE[0]).encode(x, row_axis("layer"))
        lines = alt.Chart(rounded(pd.DataFrame(others[group].items(), columns=["method", "AER"])))
        stroke = colored("method", colors, title=None)
        rules = lines.mark_rule(strokeWidth=2.5).encode(x, stroke)
        charts[group] = alt.layer(rules, dots).properties(width=440, height=90)
        better.append(int((rate < others[group]["the guess"]).sum()))
    kept, moved = better
    return titled(
        alt.vconcat(*named(charts)),
        f"Where words change places, {moved} of 24 heads beat the guess; elsewhere {kept}",
        "Alignment error rate in the query about to write; a dot is a head. The guess: the German "
        "word at the same relative place.",
    )


def residual_stream() -> alt.TopLevelMixin:
    """One position's road through a decoder layer, and where one cuts, patches and reads."""
    return titled(
        drawn("residual_stream").chart(),
        "Everything is added to one vector: three places to look or act",
        "One position, read upwards: the first decoder layer, then the others. Each sublayer "
        "reads the stream and adds to it. We patch the encoder's stream, which becomes the memory.",
        wrap=100,
    )


def worth_chart(rows: Sequence[dict], passed: Sequence[bool], pairs: int) -> alt.TopLevelMixin:
    """Likelihood lost by silencing each head, one panel a kind; a star marks those that passed."""
    frame = pd.DataFrame(rows)
    frame["lost"] = 1000 * frame["silent"]
    shown = [f"{round(x):+}".replace("-", "−").replace("+0", "0") for x in frame["lost"]]
    frame["text"] = [x + "*" * ok for x, ok in zip(shown, passed, strict=True)]
    largest = frame["lost"].abs().max()
    look = {"value_title": "nats / 1,000", "scheme": "diverging", "cell": (44, 26)}
    maps = {}
    for kind, own in frame.groupby("kind", sort=False):
        lost, texts = (own.pivot(index="layer", columns="head", values=v) for v in ("lost", "text"))
        maps[kind] = heatmap(
            lost.to_numpy(),
            [f"layer {n}" for n in lost.index],
            list(lost.columns),
            texts=texts.to_numpy(),
            domain=(-largest, largest),
            column_title="head" if kind == "cross" else "",
            **look,
        )
    return titled(
        alt.vconcat(*named(maps)),
        f"{sum(passed)} of {len(rows)} worths are more than chance, and all are small",
        "A head's worth: how much −log p of the reference rises while it is silent, in thousandths "
        f"of a nat a token. {pairs:,} validation pairs. A star: more than chance, with all "
        f"{len(rows)} tested at once.",
    )


def map_and_worth_chart(
    kinds: Mapping[str, pd.DataFrame], labelled: Sequence[str], pairs: int
) -> alt.TopLevelMixin:
    """Heads as dots, a panel a kind: a number of the map across, the worth up, on one scale.

    The index of each of the `kinds` names its heads. Those `labelled`, the one worth most first,
    bear the last word of their name. A worth's standard error follows from the p of its t test over
    so many `pairs`.
    """
    everyone = pd.concat([*kinds.values()])
    assert everyone.loc[[*labelled], "silent"].is_monotonic_decreasing
    units = {"entropy": "entropy, bits", "AER": "AER"}
    across = {"encoder": "entropy", "decoder": "entropy", "cross": "AER"}
    frames = {}
    for kind, number in across.items():
        worths, tests = (kinds[kind][name] for name in ("silent", "silent p"))
        reach = 2 * worths.abs() / [t_exceeded(p, pairs - 1) for p in tests]
        frames[kind] = kinds[kind][[number, "silent"]].assign(
            low=worths - reach,
            high=worths + reach,
            label=[name.split()[-1] if name in labelled else "" for name in worths.index],
        )
    ends = [
        min(f["low"].min() for f in frames.values()),
        max(f["high"].max() for f in frames.values()),
    ]

    def up(column: str) -> alt.Y:
        y = alt.Y(f"{column}:Q", title="worth, nats a token").axis(tickCount=5)
        return y.scale(domain=ends, nice=True)

    charts = {}
    for kind, number in across.items():
        x = alt.X(f"{number}:Q", title=units[number]).scale(zero=False, padding=30)
        base = alt.Chart(rounded(frames[kind], 5)).encode(x.axis(tickCount=5), up("silent"))
        layers = (
            base.mark_rule(color=GREY, opacity=0.5).encode(up("low"), alt.Y2("high")),
            base.mark_circle(size=60, opacity=0.8),
            *(
                base.transform_filter(f"datum.{number} {where} {kinds[kind][number].max() * 0.75}")
                .mark_text(dx=dx, align=align, fontSize=12, color=INK)
                .encode(text="label:N")
                for where, dx, align in (("<", -7, "right"), (">=", 7, "left"))
            ),
        )
        charts[kind] = alt.layer(*layers).properties(width=190, height=210)
    return titled(
        alt.hconcat(*named(charts)),
        "In the encoder sharp heads are worth more; elsewhere the errors may hide an order",
        "A dot is a head, its line two standard errors of its worth either way. Low entropy: a "
        "sharp head. Low AER: a good aligner. Named: the six heads of chapter 15's bet.",
        wrap=110,
    )


def _cost_bars(
    frame: pd.DataFrame, title: str = "added to the loss, nats a token", height: int = 42
) -> alt.LayerChart:
    """What changes cost: a bar for each `way` of each `change`, and two standard `error`s."""
    reach = 2 * frame["error"]
    frame = frame.assign(low=frame["cost"] - reach, high=frame["cost"] + reach)
    ways, changes = (list(dict.fromkeys(frame[name])) for name in ("way", "change"))
    end = 1.12 * frame["high"].max()

    def x(column: str) -> alt.X:
        across = alt.X(f"{column}:Q", title=title)
        return across.scale(domain=[0, end], nice=False).axis(tickCount=5, grid=False)

    base = alt.Chart(rounded(frame)).encode(
        x("cost"),
        bar_axis("change", changes),
        yOffset=alt.YOffset("way:N", sort=ways),
    )
    fill = colored("way", dict(zip(ways, PALETTE, strict=False)), title=None, sort=None)
    layers = (
        base.mark_bar().encode(fill),
        base.mark_rule(color=INK).encode(x("low"), alt.X2("high")),
        base.mark_text(align="left", dx=5).encode(x("high"), text=alt.Text("cost:Q", format=".2f")),
    )
    return alt.layer(*layers).properties(width=340, height=height * len(changes))


def together_chart(groups: Sequence[Mapping[str, Any]], pairs: int) -> alt.TopLevelMixin:
    """What silencing each kind's heads costs: each alone, added up, and all together."""
    ways = ("one by one, added up", "together")
    columns = {"group": "change"} | {f"silent, {way.split(',')[0]}": way for way in ways}
    wide = pd.DataFrame(groups).rename(columns=columns)
    encoder, decoder, cross = (f"{many / one:.0f}" for one, many in wide[[*ways]].to_numpy())
    frame = wide.melt("change", ways, "way", "cost").assign(error=0.0)
    return titled(
        _cost_bars(frame),
        f"Together, heads cost {encoder}, {decoder} and {cross} times what they cost one by one",
        "The 24 heads of each kind of attention are silent, each alone or all at once. "
        f"{pairs:,} validation pairs.",
    )


def halves_chart(
    costs: Mapping[str, Mapping[str, tuple[float, float]]], whole: str
) -> alt.TopLevelMixin:
    """What each change of cross-attention's heads costs, a bar for each set of pairs.

    `costs` leads from the set of pairs to the change, and to nats a token with a standard error.
    The change `whole` is far beyond the others: it stands in the caption.
    """
    rows = [
        {"way": pairs, "change": change, "cost": cost, "error": error}
        for pairs, changes in costs.items()
        for change, (cost, error) in changes.items()
    ]
    frame = pd.DataFrame(rows)
    far = [f"{cost:.2f}" for cost in frame.loc[frame["change"] == whole, "cost"]]
    for changes in costs.values():
        assert all(cost < changes[whole][0] / 10 for x, (cost, _) in changes.items() if x != whole)
    return titled(
        _cost_bars(frame[frame["change"] != whole]),
        "Each half of the heads that we silence costs under a tenth of all 24",
        f"Changes of cross-attention's heads. {whole[0].upper() + whole[1:]}: {' and '.join(far)}. "
        "Lines: two standard errors either way.",
    )


def patch_chart(
    table: Sequence[Sequence[float]], words: Sequence[str], unpatched: float
) -> alt.TopLevelMixin:
    """The preference for "her" after each patch: a row a depth, a column a source position."""
    depths = ["embedding", *(f"after layer {n}" for n in range(1, len(table)))]
    lowest = [min(column) for column in zip(*table, strict=True)]
    assert [i for i, x in enumerate(lowest) if x < unpatched - 1] == [1, 3]  # noun and pronoun
    return titled(
        heatmap(table, depths, words, scheme="diverging", digits=1, numbers=True, cell=44),
        "The noun and the pronoun carry “her”",
        "log p(her) − log p(his), while one vector of the encoder comes from the man's sentence. "
        f"Without a patch it is {unpatched:+.1f}.",
    )


def lens_chart(
    tops: Sequence[Sequence[str]], final: Sequence[Sequence[float]], read: Sequence[str]
) -> alt.TopLevelMixin:
    """The likeliest token at each depth; coloured by the probability of the final one."""
    depths = ["embedding", *(f"layer {n}" for n in range(1, len(tops)))]
    look = {"value_title": "p(final token)", "column_title": "the token read there"}
    look |= {"texts": tops[::-1], "domain": (0, 1), "cell": (62, 26)}
    right = [sum(map(str.__eq__, stage, tops[-1])) for stage in tops[:-1]]
    return titled(
        heatmap(final[::-1], depths[::-1], read, **look),  # the last layer on top
        f"Layer 2 has {right[2]} of the {len(read)} final tokens here, layer 1 only {right[1]}",
        "Each cell: the likeliest next token after that layer. Dark: the final token is already "
        "probable. Bottom row: the embedding.",
        wrap=110,
    )


def lens_losses_chart(
    losses: Sequence[float],
    other_losses: Sequence[float],
    even: float,
    costs: Sequence[tuple[float, float]],
) -> alt.TopLevelMixin:
    """The lens's loss, stage by stage, with and without the word just read; what each cut costs.

    Losses begin with the embedding, `costs` (with standard errors) with the first sublayer; `even`
    is the loss of an even guess.
    """
    kinds = ("self-attention", "cross-attention", "feed-forward")
    stages = ["embedding", *(f"layer {i // 3 + 1}, {kinds[i % 3]}" for i in range(len(costs)))]
    curves = {"of all words": losses, "of all but the word just read": other_losses}
    frame = pd.DataFrame({"stage": stages} | curves).melt("stage", var_name="of", value_name="loss")
    unsaid, gained = losses[0] - other_losses[0], losses[0] - losses[-1]
    assert unsaid > gained / 2
    y = bar_axis("stage", stages).scale(domain=stages)
    fill = colored(
        "of", dict(zip(curves, PALETTE, strict=False)), title="The lens chooses", sort=None
    )
    left = alt.Chart(rounded(frame)).encode(
        alt.X("loss:Q", title="the lens's loss, nats a token").axis(values=[0, 5, 10, 15, 20, 25]),
        y,
        fill,
    )
    guess = alt.Chart(
        rounded(pd.DataFrame({"loss": [even], "text": [f"an even guess: {even:.1f}"]}))
    )
    rule = guess.mark_rule(color=GREY, strokeDash=[4, 3]).encode(x="loss:Q")
    text = guess.mark_text(align="left", dx=6, color=GREY).encode(
        x="loss:Q", y=alt.value(270), text="text:N"
    )
    running = alt.layer(
        rule, text, left.mark_line(order=False), left.mark_point(filled=True, size=50, opacity=1)
    )
    bars_frame = pd.DataFrame(costs, columns=["cost", "error"]).assign(stage=stages[1:])
    reach = 2 * bars_frame["error"]
    bars_frame = bars_frame.assign(low=bars_frame["cost"] - reach, high=bars_frame["cost"] + reach)
    x = alt.X("cost:Q", title="its cut costs, nats a token").axis(tickCount=4, grid=False)
    base = alt.Chart(rounded(bars_frame)).encode(x, y.axis(None))
    cut = alt.layer(
        base.mark_bar(color=PALETTE[2], height=14),
        base.mark_rule(color=INK).encode(alt.X("low:Q"), alt.X2("high:Q")),
        base.mark_text(align="left", dx=5).encode(
            alt.X("high:Q"), text=alt.Text("cost:Q", format=".2f")
        ),
    )
    panels_ = [(running, 330), (cut, 150)]
    drawn_ = [chart.properties(width=width, height=300) for chart, width in panels_]
    return titled(
        alt.hconcat(*drawn_).resolve_scale(y="independent"),
        f"Of the {gained:.0f} nats that the lens gains, {unsaid:.0f} only unsay the word just read",
        "The decoder, our 50 captions. Left: the loss if we stop after this sublayer. Right: how "
        "much the model's own loss rises if this sublayer alone adds nothing; lines: two standard "
        "errors either way.",
    )


def rivals_chart(
    costs: Mapping[int, float], level: float, title: str, caption: str, model: str = "mini-GPT"
) -> alt.TopLevelMixin:
    """Bits per character of tables, by the characters K that they see; a line across: the model."""
    frame = pd.DataFrame(costs.items(), columns=["K", "bits"])
    curve = lines(frame, "K", "bits", points=True, y_title="bits per character")
    x = alt.X("K:Q", title="K, characters that the table sees").scale(zero=False)
    curve = curve.encode(x.axis(values=[*frame["K"]], format="d", labelFlush=False))
    across = alt.Chart(rounded(pd.DataFrame({"bits": [level], "label": [model]})))
    rule = across.mark_rule(color=PALETTE[2], strokeWidth=1.5).encode(y="bits:Q")
    name = across.mark_text(align="right", x=475, dy=12, color=PALETTE[2])
    return titled(alt.layer(curve, rule, name.encode(y="bits:Q", text="label:N")), title, caption)


def influence_panels(maps: Mapping[str, Tensor]) -> alt.TopLevelMixin:
    """How strongly each output position reacts to each input position, (T, T) for each mask."""
    drawn = panels(
        {name: strength / strength.max() for name, strength in maps.items()},
        row_title="output position",
        column_title="input position",
        value_title="influence",
        numbers=False,
    )
    return titled(
        drawn,
        "Exactly what the mask allows gets through, even after two layers",
        "Dark: the output at this row's position reacts strongly to the input at this column's; "
        "white: not at all. 1.0 is the strongest cell of each panel. Same weights in all.",
    )


def classify_runs() -> tuple[pd.DataFrame, int, float]:
    """Chapter 18's classifiers: a line a run, how many captions tested them, the share singular.

    A run has its kind, labels (how many captions with a label it had; 0: none), seed, and errors,
    its share wrong. Runs with seed 0 chose the rates and are left out.
    """
    runs = pd.DataFrame(load_record("classify-multi30k")["runs"])
    runs = runs[runs["seed"] > 0].rename(columns={"row": "kind"})
    facts = runs[runs["labels"] == 0].dropna(subset="labelled").iloc[0]  # of a run with all labels
    labels = runs["labels"].replace(0, facts["labelled"]).fillna(0).astype(int)
    runs = runs.assign(labels=labels, errors=1 - runs["test"])
    captions = facts["captions"]["test"]
    return runs[["kind", "labels", "seed", "errors"]], captions, facts["singular"] / captions


def classify_chart(runs: pd.DataFrame, always_singular: float, title: str) -> alt.TopLevelMixin:
    """Test errors by number of labels, each run a point, a line through the means.

    `runs` are those of `classify_runs`; `always_singular` is the share wrong of that answer.
    """
    kinds, sizes = list(runs["kind"].unique()), sorted(runs["labels"].unique().tolist())
    none = sizes[1] / 4  # where those without labels stand
    aside = runs["kind"].map(dict(zip(kinds, (0.93, 1, 1.07, 1, 1), strict=True)))
    labels = aside * runs["labels"].replace(0, none)
    frame = pd.DataFrame({"kind": runs["kind"], "labels": labels, "errors": runs["errors"]})
    x = alt.X("labels:Q", title="labelled captions (log scale, but for none)").axis(
        values=[none, *sizes[1:]],
        labelExpr=f"datum.value == {none} ? 'none' : datum.label",
        format=",",
    )
    x = x.scale(domain=[0.8 * none, 1.25 * sizes[-1]], **LOG)
    y = alt.Y("errors:Q", title="share wrong (log scale)").scale(domain=[0.007, 0.3], **LOG)
    y = y.axis(values=[0.01, 0.02, 0.03, 0.05, 0.1, 0.2], format=".0%")
    base = alt.Chart(rounded(frame)).encode(
        x, y, alt.Color("kind:N", sort=kinds).legend(title=None)
    )
    means = base.transform_aggregate(errors="mean(errors)", groupby=["kind", "labels"])
    dots = base.mark_circle(size=45, opacity=0.7)
    rule = alt.Chart(pd.DataFrame({"errors": [round(always_singular, 3)]})).encode(y)
    rule = rule.mark_rule(strokeDash=[5, 4], color=GREY)
    return titled(
        alt.layer(rule, means.mark_line(opacity=0.6), dots).properties(width=460, height=250),
        title,
        "Singular or plural? Each point is a run, the kinds drawn side by side; lower is better. "
        "With labels there are eight of each; those of the bag with all labels agree. Dashed: who "
        "always says “singular”.",
    )


VERDICTS = {"better": PALETTE[0], "worse": PALETTE[1]}
VERDICTS |= {"rate unsure": PALETTE[4], "within noise": GREY}
REACH = 0.65  # where the axis ends


def ablation_chart(
    judged: pd.DataFrame,
    losses: Mapping[str, Sequence[float]],
    base: str,
    labels: Mapping[str, str],
) -> alt.TopLevelMixin:
    """A dot for each run, a diamond for the paper's, a band for the base's own seeds.

    `judged` has a line for each row, in the order of the drawing, with the columns verdict and
    paper's; `losses` has each row's runs and those of `base`, from whose mean all is measured.
    `labels` rename rows. Beyond `REACH` a triangle with its value replaces the dots.
    """
    mean = sum(losses[base]) / len(losses[base])
    names = {name: labels.get(name, name) for name in judged.index}
    points = [(names[n], x - mean, judged["verdict"][n]) for n in names for x in losses[n]]
    runs = pd.DataFrame(points, columns=["row", "difference", "verdict"])
    paper = judged["paper's"].dropna().rename(names).rename_axis("row")
    paper = paper.reset_index(name="difference").assign(what="the paper's row")
    seeds = {"low": min(losses[base]) - mean, "high": max(losses[base]) - mean}
    seeds = pd.DataFrame([seeds | {"what": "the base's seeds"}])

    def key(shape: str, opacity: float = 1.0) -> alt.Legend:
        look = {"symbolSize": 90, "symbolType": shape, "symbolOpacity": opacity}
        return alt.Legend(title=None, orient="top", **look)

    count = judged["verdict"].value_counts()
    order = list(dict.fromkeys(runs["row"]))
    low = min(runs["difference"].min(), paper["difference"].min()) - 0.06
    place = {"scale": alt.Scale(domain=[round(low, 2), REACH], nice=False)}
    place["title"] = "validation loss minus the base's mean, nats per piece"
    x, y = alt.X("difference:Q", **place).axis(tickCount=8), row_axis("row", order)
    color = colored("verdict", VERDICTS, legend=key("circle"))
    fill = alt.Fill("what:N", legend=key("square", 0.2)).scale(range=[PALETTE[0]])
    shape = alt.Shape("what:N", legend=key("diamond")).scale(range=["diamond"])
    band = alt.Chart(rounded(seeds)).mark_rect(opacity=0.2)
    diamonds = alt.Chart(rounded(paper)).mark_point(size=70, strokeWidth=1.5, color=INK)
    near = alt.Chart(rounded(runs[runs["difference"] <= REACH]))
    layers = [
        band.encode(alt.X("low:Q", **place), x2="high:Q", fill=fill),
        diamonds.encode(x, y, shape=shape),
        near.mark_circle(size=70, opacity=0.75).encode(x, y, color=color),
    ]
    far = runs[runs["difference"] > REACH].groupby(["row", "verdict"], as_index=False).mean()
    if len(far):
        far = far.assign(text=far["difference"].map("{:+.2f}".format), edge=REACH - 0.012)
        outside = alt.Chart(rounded(far)).encode(alt.X("edge:Q", **place), y)
        mark = outside.mark_point(shape="triangle-right", filled=True, size=90)
        text = outside.mark_text(align="right", dx=-9).encode(text="text:N")
        layers += [mark.encode(color=color), text]
    return titled(
        alt.layer(*layers).properties(width=430, height=20 * len(order)),
        f"{count['better']} of {len(judged)} changes clearly lower the loss, "
        f"{count['worse']} raise it",
        f"Each dot is a run; where runs agree, fewer show. The base has {len(losses[base])} seeds. "
        "Letters name the groups of the paper's Table 3. A triangle marks a mean further right.",
        wrap=84,
    )


def ablation_rates_chart(sweeps: pd.DataFrame) -> alt.TopLevelMixin:
    """How far each row's loss at each rate lies above its lowest; the highest best rate on top."""
    losses = sweeps.pivot_table(index="row", columns="lr", values="loss", sort=False)
    losses = losses.sort_index(axis=1)
    best = losses.idxmin(axis=1).sort_values(ascending=False, kind="stable")
    assert best["d_model 32"] == 4 * best["d_model 128"], "the title"
    above = losses.sub(losses.min(axis=1), axis=0).loc[best.index]
    names = {"column_title": "peak learning rate", "value_title": "nats above the row's lowest"}
    rates = [f"{rate:.3g}" for rate in above.columns]
    texts = [["" if math.isnan(x) else f"{x:.2f}" for x in row] for row in above.to_numpy()]
    look = {"domain": (0, 0.5), "texts": texts, "cell": (44, 24)}
    return titled(
        heatmap(above.to_numpy(), [*best.index], rates, **names, **look),
        "Rows differ in their best rate: the narrow model's is four times the wide one's",
        "Validation loss above the row's lowest; grey: not tried. One seed; in rows with steps of "
        "√2, where two were tried, their mean.",
    )


def budget_chart(bought: pd.DataFrame, ended: pd.DataFrame) -> alt.TopLevelMixin:
    """Loss by size, a curve for each budget, and the passes of its best and its widest model.

    `bought` has the columns budget (in units), width, N, passes and loss; `ended` has N and loss
    of runs that were trained to their end with one unit.
    """
    budgets = sorted(bought["budget"].unique())
    scheme = alt.SchemeParams("viridis", extent=[0.85, 0])  # without its yellow
    sizes = alt.Axis(values=sorted(bought["N"].unique()), format=".2s", labelFlush=False)
    encoding = {
        "x": alt.X("N:Q", title="parameters", axis=sizes).scale(
            padding=30, domainMax=1.4 * bought["N"].max(), **LOG
        ),
        "y": alt.Y("loss:Q", title="validation loss, nats per piece").scale(
            zero=False, nice=False, padding=36
        ),
    }
    color = alt.Color("budget:O", sort=budgets, title="units of budget").scale(scheme=scheme)
    passes = bought["passes"].map("{:.1f} passes".format)
    bought = rounded(
        bought.assign(early=passes, best="width " + bought["width"].astype(str) + ", " + passes)
    )
    groups = bought.groupby("budget")
    lowest = bought.loc[groups["loss"].idxmin()]
    assert lowest["N"].is_monotonic_increasing and lowest["N"].nunique() > 1, "the title says so"
    assert all(groups["N"].min() < lowest["N"].array) and all(lowest["N"].array < groups["N"].max())
    best = alt.Chart(lowest).encode(**encoding)
    ends = alt.Chart(rounded(ended.groupby("N", as_index=False)["loss"].mean())).encode(**encoding)
    widest = alt.Chart(bought.loc[groups["N"].idxmax()]).encode(**encoding)
    layers = [
        alt.Chart(bought).mark_line(point={"size": 50}).encode(**encoding, color=color),
        ends.mark_point(shape="cross", angle=45, size=70, filled=True, color=PALETTE[1], opacity=1),
        ends.mark_text(dx=10, align="left", color=PALETTE[1]).encode(text=alt.value("to its end")),
        best.mark_point(size=160, strokeWidth=1.5).encode(color=color),
        best.mark_text(dy=24).encode(text="best:N", color=alt.value(INK)),
        widest.mark_text(dx=10, align="left").encode(text="early:N", color=alt.value(GREY)),
    ]
    return titled(
        alt.layer(*layers).properties(width=480, height=320),
        "The best width is in between, and it grows with the budget",
        "Each curve spends one budget, in one to eight passes; a unit is one pass of width 48. "
        "Rings: the best size. Grey: the passes of the widest model. Crosses: two models trained "
        "to their end with about one unit.",
        wrap=80,
    )


def ends_table() -> pd.DataFrame:
    """Chapter 20's trainings to their end beside readings of equal rate, seeds and passes."""
    keys = ["d_model", "share", "lr", "seed"]
    ends = pd.DataFrame(load_record("budgets-multi30k")["runs"])
    ways = pd.DataFrame(load_record("grid-multi30k")["runs"]).set_index(keys)["losses"]
    pairs = ends.join(ways.rename("readings"), on=keys, how="inner")
    columns = {"d_model": "width", "epochs": "passes", "lr": "peak rate", "loss": "to its end"}
    pairs = pairs.rename(columns=columns)
    readings = zip(pairs["readings"], pairs["passes"], strict=True)
    pairs["on the way"] = [losses[passes - 1] for losses, passes in readings]
    groups = pairs.groupby(["width", "passes", "peak rate"])[["on the way", "to its end"]]
    return groups.mean().round(2).assign(seeds=groups.size())


def decision_chart(measured: pd.Series, predicted: pd.DataFrame) -> alt.TopLevelMixin:
    """What laws predict at one budget, a curve each with its lowest place, and what was measured.

    `measured` and the columns of `predicted`, one a law, are losses by the number of parameters.
    """
    for _, losses in predicted.items():
        assert (np.interp(measured.index, predicted.index, losses) > measured).all()
        assert measured.index[0] < losses.idxmin() < measured.index[1], "the title says so"
    bowl = np.polyfit(np.log(measured.index), measured, 2)
    bowl = pd.DataFrame({"N": predicted.index, "loss": np.polyval(bowl, np.log(predicted.index))})
    curves = predicted.rename_axis("N").reset_index().melt("N", var_name="law", value_name="loss")
    dots = measured.rename_axis("N").rename("loss").reset_index().assign(law="measured")
    picks = curves.loc[curves.groupby("law")["loss"].idxmin()]
    color = colored(
        "law", dict(zip([*predicted, "measured"], [*PALETTE[1:3], INK], strict=True)), title=None
    )
    sizes = alt.Axis(values=[*measured.index, *picks["N"].round(-3)], format=".2s")
    x = alt.X("N:Q", title="parameters", axis=sizes).scale(**LOG)
    y = alt.Y("loss:Q", title="loss with eight units").scale(zero=False, padding=12)
    parabola = alt.Chart(rounded(bowl)).mark_line(color=GREY, strokeDash=[4, 4], strokeWidth=1.5)
    layers = [
        alt.Chart(rounded(curves)).mark_line(),
        alt.Chart(rounded(picks)).mark_point(shape="diamond", size=150, filled=True, opacity=1),
        alt.Chart(rounded(dots)).mark_circle(size=80, opacity=1),
    ]
    layers = [parabola.encode(x, y), *[layer.encode(x, y, color) for layer in layers]]
    return titled(
        alt.layer(*layers).properties(width=480),
        "Both laws predict too high a loss, and nearly the best size",
        "Lines: each law, fitted to the cheap readings (means of three seeds). Diamonds: their "
        "lowest places. Dots: widths 48, 64 and 96, from the curves of the first chart; the "
        "parabola through them (dashed) only guides the eye.",
        wrap=80,
    )


def local_chart(local_a: pd.Series, kaplan: float, law: float) -> alt.TopLevelMixin:
    """How fast the best size grows, by the parameters in the layers, beside two published a."""
    levels = {"Kaplan et al.": kaplan, "the law, if all count": law}
    small, largest = local_a[local_a.index < 7e7], local_a.iloc[-3:]
    assert small.min() > kaplan and abs(largest - law).max() < 0.03, "the title says so"
    frame = rounded(local_a.rename_axis("N").rename("a").reset_index())
    sizes = alt.Axis(values=[10**n for n in range(3, 11)], format="~s")
    x = alt.X("N:Q", title="parameters in the layers of the best model", axis=sizes).scale(**LOG)
    y = alt.Y("a:Q", title="local a").scale(zero=False, domain=[0.45, 1])
    named_levels = pd.DataFrame({"level": [*levels], "a": [*levels.values()], "N": [3e8, 1e3]})
    rules = alt.Chart(rounded(named_levels)).encode(y)
    words = {"align": "left", "dx": 6, "dy": -8, "color": GREY}
    text = alt.Text("label:N")
    labels = rules.transform_calculate(label="datum.level + ': ' + format(datum.a, '.2f')")
    layers = [
        rules.mark_rule(color=GREY, strokeDash=[5, 4], strokeWidth=1.5),
        labels.mark_text(**words).encode(x, text),
        alt.Chart(frame).mark_line(color=PALETTE[0]).encode(x, y),
    ]
    return titled(
        alt.layer(*layers).properties(width=480, height=240),
        "Without the table, a is above 0.73 for small models, and near 0.51 for large ones",
        "How fast the best size grows with the budget, at each size, if only the layers count. "
        "One layer has 120,000 parameters (below, the formula is only continued); Kaplan et al.'s "
        "largest model has 1.5 billion.",
        wrap=80,
    )


TOKEN_TICKS = [a * 10**b for b in range(3, 8) for a in (1, 2, 5)]  # ticks of a logarithmic axis


def grid_chart(places: pd.DataFrame, law: str, other: str) -> alt.TopLevelMixin:
    """Mean losses of a grid by tokens, a panel a law; below, what it misses.

    `places` has the columns N, D and loss, and one for what each law says.
    """
    errors = {f"error of {name}": places["loss"] / places[name] - 1 for name in (law, other)}
    spread = places.groupby("D")["loss"].agg(np.ptp)
    assert spread.idxmin() == spread.index.min(), "the title says so"
    assert errors[f"error of {law}"].abs().max() < errors[f"error of {other}"].abs().max() / 2
    x = alt.X("D:Q", title="target tokens that exist").scale(padding=12, **LOG)
    ruled = x.axis(format="~s", values=TOKEN_TICKS, labelFlush=False)
    color = alt.Color("N:O").legend(title="parameters", format=".2s")
    color = color.scale(scheme=alt.SchemeParams("viridis", extent=[0.9, 0]))
    base = alt.Chart(rounded(places.assign(**errors))).encode(color)
    dots = base.mark_circle(size=45, opacity=1)
    zero = alt.Chart(pd.DataFrame({"y": [0]})).mark_rule(color=GREY).encode(y="y:Q")
    farthest = round(max(column.abs().max() for column in errors.values()), 4)
    levels = [places[name] for name in ("loss", law, other)]
    ends = [min(map(min, levels)), max(map(max, levels))]
    columns = {}
    for name in (other, law):
        first = name == other  # its panels name the axes of both
        y = alt.Y(f"{name}:Q").scale(domain=ends, nice=False, padding=8)
        y = y.title("validation loss, nats per piece" if first else None)
        bare = x.axis(labels=False, title=None, values=TOKEN_TICKS)
        curves = base.mark_line(strokeWidth=1.5).encode(bare, y)
        seen = dots.encode(bare, alt.Y("loss:Q"))
        share = "datum.value == 0 ? '0' : format(datum.value, '+.0%')"
        error = alt.Y(f"error of {name}:Q", title="misses" if first else None).axis(
            labelExpr=share, tickCount=3
        )
        error = error.scale(domain=[-farthest, farthest])
        missed = alt.layer(zero, dots.encode(ruled, error))
        parts = [
            alt.layer(curves, seen).properties(width=240, height=260, title=f"{name} law"),
            missed.properties(width=240, height=90),
        ]
        columns[name] = alt.vconcat(*parts)
    return titled(
        alt.hconcat(*columns.values()),
        f"Size gains less when text is short: the {law} law follows, the {other} law can't",
        "Dots: means of three seeds. Lines: the law, fitted to all of them. Below: how far the "
        "runs lie above (+) or below it.",
        wrap=80,
    )


def rival_dots(
    runs: pd.DataFrame, to_beat: Mapping[str, str], title: str = "validation BLEU, greedy"
) -> alt.LayerChart:
    """Every run a dot, a tick at each row's mean, a diamond at the mean that it has to beat.

    `runs` has the columns row and bleu; `to_beat` names each row's rival. Rivals that have none
    come first.
    """
    means = runs.groupby("row", sort=False)["bleu"].mean()
    first = [row for row in to_beat.values() if row not in to_beat]
    rows = [row for row in dict.fromkeys((*first, *to_beat)) if row in means.index]
    ends = [math.floor(runs["bleu"].min()), math.ceil(runs["bleu"].max())]
    x = alt.X("bleu:Q", title=title).scale(domain=ends, nice=False, padding=10).axis(tickCount=6)
    y = row_axis("row", rows, labelLimit=260)
    dots = alt.Chart(rounded(runs[["row", "bleu"]])).mark_circle(size=70, color=PALETTE[0])
    ticks = alt.Chart(rounded(means.reset_index())).mark_tick(thickness=2, size=18, color=INK)
    rivals = [{"row": row, "bleu": means[to_beat[row]]} for row in rows if row in to_beat]
    diamonds = alt.Chart(rounded(pd.DataFrame(rivals))).mark_point(shape="diamond", color=GREY)
    layers = [layer.encode(x, y) for layer in (diamonds, ticks, dots)]
    return alt.layer(*layers).properties(width=380, height=28 * len(rows))


def by_mask(runs: pd.DataFrame) -> tuple[pd.DataFrame, pd.Series]:
    """Losses after each pass, a column each, and BLEU of the study `prefix_causes`.

    Their index is what a target's mask sees ("causal" or "prefix"), the change and the seed.
    """
    sees, _, change = (column for _, column in runs["row"].str.partition(", ").items())
    change = change.str.replace("place", "position")  # the chapter's word
    runs = runs.assign(sees=sees, change=change).set_index(["sees", "change", "seed"])
    losses = pd.DataFrame([*runs["losses"]], runs.index).rename(columns=lambda i: i + 1)
    return losses, runs["bleu"]


def lag_panels(in_loss: pd.DataFrame, in_bleu: pd.Series, title: str) -> alt.TopLevelMixin:
    """Lags by change and seed: means in loss, a curve a change; each seed in BLEU, a row each."""
    from scipy.stats import ttest_1samp

    means = in_bleu.groupby("change").mean().sort_values(ascending=False)  # the widest on top
    tints = ["#444444", PALETTE[2], PALETTE[3], PALETTE[4], PALETTE[0], PALETTE[1]]
    color = colored("change", dict(zip(means.index, tints, strict=True)), legend=None)
    zero = alt.Chart(pd.DataFrame({"zero": [0]})).mark_rule(color=INK)

    curves = in_loss.groupby("change").mean().melt(ignore_index=False, var_name="passes")
    x = alt.X("passes:Q", title="passes over the data").scale(nice=False, padding=8)
    y = alt.Y("value:Q", title="lag in loss, nats a piece").axis(tickCount=5)
    line = alt.Chart(rounded(curves.reset_index())).mark_line(point={"size": 40})
    line = line.encode(x.axis(values=[*in_loss.columns]), y, color)

    ends = {}
    for change, lags in in_bleu.groupby("change"):
        interval = ttest_1samp(lags, 0).confidence_interval()
        ends[change] = {"low": interval.low, "high": interval.high}
    frame = pd.DataFrame.from_dict(ends, orient="index").rename_axis("change").reset_index()
    rows = row_axis("change", [*means.index], labelLimit=260)
    bars = alt.Chart(rounded(frame)).mark_rule(strokeWidth=2, opacity=0.6)
    bars = bars.encode(alt.X("low:Q", title="lag in BLEU"), rows, color, x2="high:Q")
    dots = alt.Chart(rounded(in_bleu.rename("lag").reset_index())).mark_circle(size=60, opacity=1)
    dots = dots.encode(alt.X("lag:Q"), rows, color)

    left = alt.layer(zero.encode(y="zero:Q"), line).properties(width=200, height=210)
    right = alt.layer(zero.encode(x="zero:Q"), bars, dots).properties(width=200, height=210)
    return titled(
        alt.hconcat(left, right),
        title,
        "How far the prefix mask is behind the causal one; at 0 they are level. Left: means of "
        "three seeds. Right, in the same colours: each seed after the last pass, and a 95% "
        "interval.",
        wrap=104,
    )


def who_writes() -> alt.TopLevelMixin:
    """Four recipes of chapter 21: who writes a pair's two sides, and who learns from it."""
    german, english = ("German", "people's"), ("English", "people's")
    recipes = {
        "distillation by words": (german, ("word probabilities", "teacher's, at people's words")),
        "distillation by sequences": (german, ("English", "the teacher's")),
        "back-translation": (("German", "a reverse model's"), english),
        "minimum risk": (german, ("its own attempts", "marked against people's")),
    }
    learners = ("a student", "a student", "the forward model", "the model itself")
    diagram = Diagram(700, 226)
    for x, heading in ((258, "source"), (443, "target"), (627, "who learns")):
        diagram.word(x, 216, heading, "name")
    rows = zip((160, 108, 56, 4), recipes.items(), learners, strict=True)
    for y, (recipe, sides), learner in rows:
        diagram.word(6, y + 19, recipe, "beside")
        for x, (what, who) in zip((258, 443), sides, strict=True):
            diagram.box(x, y, what, "blue" if who == "people's" else "orange", 86, 38, who)
        diagram.arrow((530, y + 19), (566, y + 19))
        diagram.box(627, y + 8, learner, "grey", 60)
    return titled(
        diagram.chart(),
        "Three recipes make the target, one makes the source",
        "Blue: people wrote it. Orange: a model did.",
    )


def next_words_chart(
    words: Sequence[str], shares: Mapping[str, Sequence[float]], title: str, caption: str
) -> alt.TopLevelMixin:
    """The probabilities of some words, a panel of bars for each temperature, each on its scale."""
    charts = {}
    for temperature, values in shares.items():
        frame = pd.DataFrame({"next word": words, "probability": values})
        chart = bars(frame, "next word", "probability", number_format=".2~g")
        charts[temperature] = chart.properties(width=210)
    side_by_side = alt.hconcat(*named(charts)).resolve_scale(x="independent")
    return titled(side_by_side, title, caption, wrap=80)


def shares_table(targets: Mapping[tuple[str, int], Tensor]) -> pd.DataFrame:
    """What each student's q (N, V) gives the person's word, and the five largest others.

    The first student's q is the person's words alone. Means over all places.
    """
    labels, rows = next(iter(targets.values())).argmax(dim=1, keepdim=True), []  # (N, 1)
    for student, q in targets.items():
        others = q.scatter(1, labels, 0.0).topk(5)[0].sum(dim=1)  # (N,)
        rows.append([*student, q.gather(1, labels).mean().item(), others.mean().item()])
    columns = ["targets", "τ", "q, the person's word", "q, the five largest others"]
    return pd.DataFrame(rows, columns=columns).round(3)


RECIPES_NAMED = {"a part, in 8 passes": "a part, 8 passes"}  # as in the record; on the page
RECIPES_NAMED |= {"a part, with shuffled German": "shuffled German"}
RECIPES_NAMED |= {"a part, back-translated by sampling": "drawn German"}
RECIPES_NAMED |= {"a part, back-translated": "greedy German"}


def recipe_runs() -> pd.DataFrame:
    """Chapter 21's trainings on record, with short names; those of seed 0 only chose the rates."""
    runs = pd.DataFrame(load_record("recipes-multi30k")["runs"])
    return runs[runs["seed"] > 0].replace({"row": RECIPES_NAMED})


SCORES = {"loss": "loss on people's text", "loss_teacher": "loss on the teacher's text"}
SCORES |= {"bleu": "BLEU", "chrf": "chrF", "words": "words a caption", "back_bleu": "BLEU, German"}
SCORES |= {"other_loss": "loss beside another's German", "distinct": "different texts"}


def scores_table(means: pd.DataFrame, rows: Sequence[str], *scores: str) -> pd.DataFrame:
    """Some rows and columns of `means`, the columns named in words."""
    return means.loc[[*rows], [*scores]].rename(columns=SCORES).round(2)


def falls_chart(
    runs: pd.DataFrame, start: str, rows: Sequence[str], title: str, caption: str
) -> alt.TopLevelMixin:
    """A panel for the loss, one for chrF: a line from row `start` to each of `rows`.

    The lines join means; a pale dot is one of the `runs`.
    """
    means, charts = runs.groupby("row").mean(numeric_only=True), []
    for score, heading in (("loss", "validation loss, nats a token"), ("chrf", "chrF")):
        frame = means.loc[[*rows], [score]].reset_index().assign(before=means.loc[start, score])
        y = row_axis("row", rows, labels=not charts, labelLimit=200)
        seeds = alt.Chart(rounded(runs.loc[runs["row"].isin(rows), ["row", score]])).encode(y)
        base = alt.Chart(rounded(frame)).encode(y)
        x = alt.X(f"{score}:Q", title=heading).axis(tickCount=6)
        x, begin = x.scale(zero=False, nice=False, padding=12), alt.X("before:Q")
        layers = [
            base.mark_rule(color=GREY, strokeWidth=2).encode(x, x2="before:Q"),
            seeds.mark_circle(size=60, opacity=0.35, color=PALETTE[0]).encode(x),
            base.mark_circle(size=90, opacity=1, color=PALETTE[0]).encode(x),
            base.mark_point(size=90, color=PALETTE[0], fill="white", opacity=1).encode(begin),
        ]
        charts.append(alt.layer(*layers).properties(width=230, height=36 * len(frame)))
    return titled(alt.hconcat(*charts), title, caption, wrap=80)


TESTS = ("BLEU, test of 2016", "BLEU, test of 2017")
RECIPES = ("onward", "onward-mean", "widened", "widened-mean", "risk", "risk-mean", "all-mean")
RUNGS = {"chapter 9, penalty 0.6": "multi30k-de-en"}  # chapter 21's, each with its records
RUNGS |= {name: f"ladder-{name}-?" for name in RECIPES} | {"risk": "ladder-risk-long-?"}


def ladder_runs(rungs: Mapping[str, str]) -> pd.DataFrame:
    """The BLEU of every run on record of each rung, whose records fit a pattern.

    On two tests, with a beam and the length penalty that validation chose, and then greedily.
    """
    columns = ["name", *TESTS, *(f"greedy, {test}" for test in TESTS)]
    kinds = [(key, year) for key in ("bleu", "bleu_greedy") for year in (2016, 2017)]
    runs = [
        [name, *(tests[f"test_{year}_flickr"][key] for key, year in kinds)]
        for name, pattern in rungs.items()
        for tests in (load_record(record)["test"] for record in record_names(pattern))
    ]
    return pd.DataFrame(runs, columns=columns)


def two_tests_chart(
    runs: pd.DataFrame, control: tuple[str, float, float], luck: float, title: str, caption: str
) -> alt.TopLevelMixin:
    """Every model a mark, BLEU on one test across and on another up; a mean has another shape.

    `control` has a name and both scores. In the grey square a model differs from it by at most
    `luck` on each test. Three marks bear labels: the control, the first run, and the last, which
    ships.
    """
    columns = ["name", *TESTS]
    runs = pd.concat([pd.DataFrame([control], columns=columns), runs[columns]], ignore_index=True)
    names = runs["name"]
    runs["recipe"] = names.str.removesuffix("-mean").replace("all", "all-mean")
    runs["model"] = names.str.endswith("-mean").map({False: "one run", True: "mean of runs"})
    runs["label"] = [*names[:2], *[""] * (len(runs) - 3), "ships"]
    x, y = (
        channel(f"{test}:Q").axis(title=test, tickCount=5).scale(zero=False, nice=False, padding=20)
        for channel, test in zip((alt.X, alt.Y), TESTS, strict=True)
    )
    _, across, up = control
    edges = {
        TESTS[0]: across - luck,
        "right": across + luck,
        TESTS[1]: up - luck,
        "high": up + luck,
    }
    square = (
        alt.Chart(pd.DataFrame([edges]))
        .mark_rect(color=PALE)
        .encode(x, y, x2="right:Q", y2="high:Q")
    )
    color = dict(zip(runs["recipe"].unique(), (INK, GREY, *PALETTE), strict=False))
    legend = alt.Legend(values=[*color][2:])
    kinds = {"domain": ["one run", "mean of runs"], "range": ["circle", "diamond"]}
    shape = alt.Shape("model:N", title=None).scale(**kinds)
    base = alt.Chart(rounded(runs)).encode(x, y)
    marks = base.mark_point(size=110, filled=True, opacity=0.9)
    marks = marks.encode(colored("recipe", color, title=None, legend=legend), shape)
    labels = base.mark_text(dx=-9, align="right", color=INK).encode(text="label:N")
    return titled(
        (square + marks + labels).properties(width=480, height=320), title, caption, wrap=80
    )


def gains_table(runs: pd.DataFrame, control: tuple[str, float, float]) -> pd.DataFrame:
    """The mean gain of each name's runs: with a beam over `control`, greedily over the first name.

    `runs` is a table of `ladder_runs`, `control` has a name and its BLEU on both tests.
    """
    means = runs.groupby("name", sort=False).mean()
    columns = [f"{kind}, test of {year}" for kind in ("beam", "greedy") for year in (2016, 2017)]
    gains = means - [*control[1:], *means.iloc[0, 2:]]
    return gains.set_axis(columns, axis=1).round(1) + 0.0  # no -0.0
