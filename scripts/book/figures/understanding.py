"""Drawings of part IV: looking inside, interventions, stacks, studies of many runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from scripts import Late
from scripts.book.charts import bars, heatmap, lines, long, named, panels, rounded, titled
from scripts.book.figures.diagram import Diagram, drawn
from scripts.book.look import GREY, INK, LOG, PALE, PALETTE, bar_axis, colored, row_axis
from scripts.book.records import load_record, record_names

alt, pd = Late("altair"), Late("pandas")


def map_explorer(maps: Sequence[Mapping[str, Any]], start: Mapping[str, Any]) -> alt.TopLevelMixin:
    """Maps in one chart, with pickers for sentence, kind, layer and head.

    Each of `maps` has the names of a sentence and a kind, the labels `rows` and `columns`, and
    `weights` (N, H, rows, columns), all of the same N and H. Weights are packed as whole
    thousandths, one text a map, and spread out by the chart itself. `start` says what the pickers
    show at first.
    """
    packed = []
    for chosen in maps:
        whole = (1000 * chosen["weights"]).round().long().flatten(-2).tolist()
        texts = [[" ".join(map(str, flat)) for flat in heads] for heads in whole]
        labels = {key: chosen[key] for key in ("sentence", "kind", "rows", "columns")}
        packed.append(labels | {"maps": texts})
    N, H = len(texts), len(texts[0])
    choices = {key: list(dict.fromkeys(m[key] for m in packed)) for key in ("sentence", "kind")}
    choices |= {"layer": list(range(1, N + 1)), "head": list(range(1, H + 1))}
    pickers = []
    for name, options in choices.items():
        menu = alt.binding_select(options=options, name=f"{name} ")
        pickers.append(alt.param(name, value=start[name], bind=menu))
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
        "Who looks at whom: one head of 72 (choose below)",
        f"Shown at first: {start['kind']} {start['layer']}.{start['head']}. Rows are queries (read "
        "→ about to write), columns are keys; each row sums to 1.",
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
    return titled(
        alt.hconcat(*named(maps)),
        "Four encoder heads look at the previous token; two decoder heads at <s>",
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
        "One head, one caption. Rows: English words; columns: German words. Blue: weight. Frames: "
        "the links that we drew by hand. A head is right where a row's darkest cell is framed.",
    )


def alignment_rates_chart(rates: Mapping[str, Any]) -> alt.TopLevelMixin:
    """AER of each cross-attention head, (N, H) for each moment, side by side."""
    look = {"domain": (0.2, 1), "cell": 38, "column_title": "head", "value_title": "AER"}
    maps = {}
    for moment, rate in rates.items():
        layers = [f"layer {n + 1}" for n in range(len(rate))]
        heads = [str(h + 1) for h in range(len(rate[0]))]
        maps[MOMENTS[moment]] = heatmap(rate, layers, heads, **look)
    return titled(
        alt.hconcat(*named(maps)),
        "All 24 heads align better in the query about to write",
        "Alignment error rate over fifty captions; lower is better, so pale is good. Left: the "
        "query about to write the word. Right: a step later, when it has read it.",
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
    kinds: Mapping[str, pd.DataFrame], across: Mapping[str, str], labelled: Sequence[str]
) -> alt.TopLevelMixin:
    """Heads as dots, a panel a kind: a number of the map across, the worth up, on one scale.

    The index of each of the `kinds` names its heads; `across` says which column is drawn.
    Those `labelled` bear the last word of their name.
    """
    units = {"entropy": "entropy, bits", "AER": "AER"}
    worths = [worth for heads in kinds.values() for worth in heads["silent"]]
    scale = alt.Scale(domain=[min(worths), max(worths)], nice=True)
    charts = {}
    for kind, number in across.items():
        frame = kinds[kind][[number, "silent"]]
        label = [name.split()[-1] if name in labelled else "" for name in frame.index]
        base = alt.Chart(rounded(frame, 5).assign(label=label)).encode(
            alt.X(f"{number}:Q", title=units[number])
            .scale(zero=False, padding=30)
            .axis(tickCount=5),
            alt.Y("silent:Q", title="worth, nats a token").scale(scale).axis(tickCount=5),
        )
        text = base.mark_text(dx=-7, align="right", fontSize=12, color=INK)
        dots = alt.layer(base.mark_circle(size=60, opacity=0.8), text.encode(text="label:N"))
        charts[kind] = dots.properties(width=190, height=210)
    return titled(
        alt.hconcat(*named(charts)),
        "In the encoder sharp heads are worth more; elsewhere no order can be seen",
        "A dot is a head. Low entropy: a sharp head. Low AER: a good aligner. Named: the six heads "
        "of chapter 15's bet.",
        wrap=110,
    )


def cross_costs_chart(costs: Mapping[str, Mapping[str, float]]) -> alt.TopLevelMixin:
    """What each change of cross-attention's heads costs, a bar for each set of pairs.

    `costs` leads from the set of pairs to the change and to nats a token.
    """
    frame = long(costs, "pairs", "change", "cost")
    changes = list(frame["change"].unique())
    x = alt.X("cost:Q", title="added to the loss, nats a token")
    base = alt.Chart(rounded(frame)).encode(
        x.scale(domain=[0, 1.1 * frame["cost"].max()], nice=False).axis(tickCount=5, grid=False),
        bar_axis("change", changes),
        yOffset=alt.YOffset("pairs:N", sort=list(costs)),
    )
    fill = colored("pairs", dict(zip(costs, PALETTE, strict=False)), title=None, sort=None)
    numbers = base.mark_text(align="left", dx=5).encode(text=alt.Text("cost:Q", format=".2f"))
    chart = alt.layer(base.mark_bar().encode(color=fill), numbers)
    return titled(
        chart.properties(width=340, height=42 * len(changes)),
        "Little is lost without 12 heads, best or worst aligners; much without all 24",
        "The heads of cross-attention, changed in six ways. The aligners are the four best or "
        "worst of each layer, by their AER on our captions.",
    )


def patch_chart(
    table: Sequence[Sequence[float]], words: Sequence[str], unpatched: float
) -> alt.TopLevelMixin:
    """The preference for "her" after each patch: a row a depth, a column a source position."""
    depths = ["embedding", *(f"after layer {n}" for n in range(1, len(table)))]
    return titled(
        heatmap(table, depths, words, scheme="diverging", digits=1, numbers=True, cell=44),
        "Two German words carry “her”",
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
        f"{count['better']} of {len(judged)} changes help beyond chance, {count['worse']} harm",
        f"Each dot is a run; where runs agree, fewer show. The base has {len(losses[base])} seeds. "
        "Letters name the groups of the paper's Table 3. A triangle marks a mean further right.",
        wrap=84,
    )


def budget_chart(bought: pd.DataFrame, title: str) -> alt.TopLevelMixin:
    """Loss by size, a curve for each budget, and the passes of its best and its widest model.

    `bought` has the columns budget (in units), width, N, passes and loss.
    """
    budgets = sorted(bought["budget"].unique(), reverse=True)
    scheme = alt.SchemeParams("viridis", extent=[0, 0.85])  # without its yellow
    sizes = alt.Axis(values=sorted(bought["N"].unique()), format=".2s", labelFlush=False)
    encoding = {
        "x": alt.X("N:Q", title="parameters", axis=sizes).scale(padding=30, **LOG),
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
    best = alt.Chart(bought.loc[groups["loss"].idxmin()]).encode(**encoding)
    widest = alt.Chart(bought.loc[groups["N"].idxmax()]).encode(**encoding)
    layers = [
        alt.Chart(bought).mark_line(point={"size": 50}).encode(**encoding, color=color),
        best.mark_point(size=160, strokeWidth=1.5).encode(color=color),
        best.mark_text(dy=18).encode(text="best:N", color=alt.value(INK)),
        widest.mark_text(dy=-12).encode(text="early:N", color=alt.value(GREY)),
    ]
    return titled(
        alt.layer(*layers).properties(width=480, height=320),
        title,
        "Each curve spends one budget; a unit is one pass of width 48. Rings: the best size. "
        "Grey: the passes of the widest model, which is read early in its schedule.",
        wrap=80,
    )


TOKEN_TICKS = [a * 10**b for b in range(3, 8) for a in (1, 2, 5)]  # ticks of a logarithmic axis


def grid_chart(places: pd.DataFrame, law: str, other: str) -> alt.TopLevelMixin:
    """Mean losses of a grid by tokens, a line of the law for each size; below, what two laws miss.

    `places` has the columns N, D and loss, and one for what each law says.
    """
    errors = {f"error of {name}": places["loss"] / places[name] - 1 for name in (law, other)}
    x = alt.X("D:Q", title="target tokens that exist").scale(padding=12, **LOG)
    bare = x.axis(labels=False, title=None, values=TOKEN_TICKS)
    level = {"title": "validation loss, nats per piece", "scale": alt.Scale(zero=False, padding=8)}
    color = alt.Color("N:O", sort="descending").legend(title="parameters", format=".2s")
    base = alt.Chart(rounded(places.assign(**errors))).encode(color.scale(scheme="viridis"))
    dots = base.mark_circle(size=55, opacity=1)
    curves = base.mark_line(strokeWidth=1.5).encode(bare, alt.Y(f"{law}:Q", **level))
    parts = [alt.layer(curves, dots.encode(bare, alt.Y("loss:Q", **level))).properties(height=260)]
    zero = alt.Chart(pd.DataFrame({"y": [0]})).mark_rule(color=GREY).encode(y="y:Q")
    farthest = round(max(column.abs().max() for column in errors.values()), 4)
    ruled = x.axis(format="~s", values=TOKEN_TICKS, labelFlush=False)
    for name, below in ((other, bare), (law, ruled)):
        error = alt.Y(f"error of {name}:Q", title=[f"{name} law", "misses"]).axis(
            format="+.0%", tickCount=3
        )
        error = error.scale(domain=[-farthest, farthest])
        parts.append(alt.layer(zero, dots.encode(below, error)).properties(height=90))
    return titled(
        alt.vconcat(*[part.properties(width=480) for part in parts]),
        f"Size gains less when text is short: the {law} law follows, the {other} law can't",
        f"Dots: means of three seeds. Lines: the {law} law. Below: how far the runs lie above (+) "
        "or below each law.",
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


def shares_table(lessons: Mapping[tuple[str, float], Sequence[Any]]) -> pd.DataFrame:
    """What the q of each student's lessons give the person's word, and the five largest others.

    A lesson has `labels` (N,) and `q` (N, V). Means over all places.
    """
    rows = []
    for student, parts in lessons.items():
        labels = torch.cat([lesson.labels for lesson in parts]).unsqueeze(1)  # (N, 1)
        q = torch.cat([lesson.q for lesson in parts])  # (N, V)
        others = q.scatter(1, labels, 0.0).topk(5)[0].sum(dim=1)  # (N,)
        rows.append([*student, q.gather(1, labels).mean().item(), others.mean().item()])
    columns = ["targets", "τ", "q, the person's word", "q, its five likeliest others"]
    return pd.DataFrame(rows, columns=columns).round(3)


SCORES = {"loss": "loss on people's text", "loss_teacher": "loss on the teacher's text"}
SCORES |= {"bleu": "BLEU", "chrf": "chrF", "words": "words a caption", "back_bleu": "BLEU, German"}
SCORES |= {"other_loss": "loss beside another's German", "distinct": "different texts"}


def scores_table(means: pd.DataFrame, rows: Sequence[str], *scores: str) -> pd.DataFrame:
    """Some rows and columns of `means`, the columns named in words."""
    return means.loc[[*rows], [*scores]].rename(columns=SCORES).round(2)


def falls_chart(
    runs: pd.DataFrame, start: str, rows: Mapping[str, str], title: str, caption: str
) -> alt.TopLevelMixin:
    """A panel for the loss, one for chrF: a line from row `start` to each of `rows`, named here.

    The lines join means; a pale dot is one of the `runs`.
    """
    means, charts = runs.groupby("row").mean(numeric_only=True), []
    for score, heading in (("loss", "validation loss, nats a token"), ("chrf", "chrF")):
        frame = means.loc[[*rows], [score]].assign(name=[*rows.values()])
        seeds = runs[runs["row"].isin([*rows])][["row", score]].replace({"row": dict(rows)})
        y = row_axis("name", [*rows.values()], labels=not charts)
        seeds = alt.Chart(rounded(seeds.rename(columns={"row": "name"}))).encode(y)
        base = alt.Chart(rounded(frame.assign(before=means.loc[start, score]))).encode(y)
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
