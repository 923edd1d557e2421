"""Chapter 15's figures: maps with pickers, shares of heads, errors of alignment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from scripts import Late
from scripts.book.charts import INK, bars, heatmap, named, titled

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
    """The shares of every head, one panel a kind; above them what even attention gives."""
    look = {"domain": (0, 0.6), "cell": 27, "numbers": True, "value_title": "share"}
    panels = {}
    for kind, even in record["even"].items():
        rows = [row for row in record["heads"] if row["kind"] == kind]
        shares = DECODER_SHARES if kind == "decoder" else SHARES
        names = ["even", *(f"{row['layer']}.{row['head']}" for row in rows)]
        matrix = [[row[share] for share in shares] for row in (even, *rows)]
        panels[kind] = heatmap(matrix, names, shares, **look)
    return titled(
        alt.hconcat(*named(panels)),
        "Where the 72 heads look",
        "Mean weight by target, for each layer.head. The top line is what even attention over the "
        "same sentences gives. Darker than that line: preferred. The decoder can't see the next "
        "token; its separator is <s>, looked at by the later half of its queries.",
    )


def alignment_rates_chart(rates: Mapping[str, Any]) -> alt.TopLevelMixin:
    """AER of each cross-attention head, (N, H) for each moment, side by side."""
    look = {"domain": (0.2, 1), "cell": 38, "column_title": "head", "value_title": "AER"}
    panels = {}
    for moment, rate in rates.items():
        layers = [f"layer {n + 1}" for n in range(len(rate))]
        heads = [str(h + 1) for h in range(len(rate[0]))]
        panels[f"the query that is {moment} the word"] = heatmap(rate, layers, heads, **look)
    return titled(
        alt.hconcat(*named(panels)),
        "Alignment error rate of each cross-attention head",
        "Fifty captions; lower is better, so pale is good. Left: the query about to write the "
        "word. Right: a step later, when it has read it.",
    )


def alignment_methods_chart(errors: Mapping[str, float]) -> alt.TopLevelMixin:
    """AER of each way to align."""
    frame = pd.DataFrame(errors.items(), columns=["method", "AER"])
    title = "alignment error rate, lower is better"
    return titled(
        bars(frame, "method", "AER", number_format=".2f", value_title=title),
        "A translator aligns words unasked; a dictionary does better",
        "Fifty captions. Each half uses the head that was best on the other. Model 1 counted "
        "the training pairs and these captions, without their links.",
    )
