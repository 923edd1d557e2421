"""Chapter 16's figures: heads' worth, silence by silence, a patched run, the logit lens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from scripts import Late
from scripts.book.charts import INK, PALETTE, heatmap, rounded, titled

alt, pd = Late("altair"), Late("pandas")


def _lettered(
    values: Sequence[Sequence[float]],
    texts: Sequence[Sequence[str]],
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    domain: tuple[float, float],
    value_title: str,
    scheme: str = "heatmap",
    column_title: str = "",
    width: int = 44,
) -> alt.LayerChart:
    """Coloured cells, each with a text of its own; rows and columns must be distinct."""
    frame = pd.DataFrame(
        [
            {"row": row, "column": column, "value": value, "text": text}
            for row, line, words in zip(rows, values, texts, strict=True)
            for column, value, text in zip(columns, line, words, strict=True)
        ]
    )
    low, high = domain
    middle = "abs(datum.value)" if scheme == "diverging" else "datum.value"
    axis = alt.Axis(ticks=False, domain=False, labelAngle=0)
    base = alt.Chart(rounded(frame)).encode(
        x=alt.X("column:O", sort=None, title=column_title or None, axis=axis),
        y=alt.Y("row:O", sort=None, title=None, axis=axis),
    )
    scale = alt.Scale(range=scheme, domain=[low, high], clamp=True)
    cells = base.mark_rect(stroke="white").encode(
        color=alt.Color("value:Q", title=value_title, scale=scale)
    )
    ink = alt.when(f"{middle} > {0.65 * high}").then(alt.value("white")).otherwise(alt.value(INK))
    drawn = alt.layer(cells, base.mark_text(fontSize=11).encode(text="text:N", color=ink))
    return drawn.properties(width=width * len(columns), height=26 * len(rows))


def worth_chart(
    rows: Sequence[Mapping[str, Any]], passed: Sequence[bool], pairs: int
) -> alt.TopLevelMixin:
    """Likelihood lost by silencing each head, one panel a kind; a star marks those that passed."""
    rows = [dict(row, star="*" * ok) for row, ok in zip(rows, passed, strict=True)]
    largest = max(abs(row["silent"]) for row in rows)
    drawn = []
    for kind in dict.fromkeys(row["kind"] for row in rows):
        by_layer: dict[str, list] = {}
        for row in rows:
            if row["kind"] == kind:
                by_layer.setdefault(f"layer {row['layer']}", []).append(row)
        lines_of = list(by_layer.values())
        texts = [[f"{1000 * r['silent']:+.0f}{r['star']}" for r in line] for line in lines_of]
        chart = _lettered(
            [[row["silent"] for row in line] for line in lines_of],
            [
                [text.replace("-", "−").replace("+0", "0").replace("−0", "0") for text in line]
                for line in texts
            ],
            list(by_layer),
            [str(head + 1) for head in range(len(lines_of[0]))],
            domain=(-largest, largest),
            value_title="nats a token",
            scheme="diverging",
            column_title="head" if kind == "cross" else "",
        )
        drawn.append(chart.properties(title=kind))
    return titled(
        alt.vconcat(*drawn),
        "What is lost when one head is silent",
        "Change of −log p of the reference, in thousandths of a nat a token; blue: the reference "
        f"becomes less likely. {pairs:,} validation pairs. A star: passes a test of all 72 at "
        "once.",
    )


def pruning_chart(record: Mapping[str, Any]) -> alt.TopLevelMixin:
    """What is lost over the number of silent heads, for each order of silencing."""
    frame, total = pd.DataFrame(record["pruning"]), len(record["heads"])
    orders = list(dict.fromkeys(frame["order"]))
    steps = sorted(set(frame["silent"]))
    scale = alt.Scale(domain=[0, total], nice=False)
    title = f"heads silenced, of {total}"
    drawn = (
        alt.Chart(rounded(frame[frame["silent"] > 0]))
        .mark_line(point={"filled": True, "size": 40})
        .encode(
            x=alt.X("silent:Q", title=title, scale=scale, axis=alt.Axis(values=steps)),
            y=alt.Y("nats:Q", title="lost, nats a token (log scale)")
            .scale(type="log", domain=[0.003, 4], nice=False)
            .axis(values=[0.003, 0.01, 0.03, 0.1, 0.3, 1, 3], format="g"),
            detail="order:N",
            color=alt.Color(
                "order:N",
                title=None,
                scale=alt.Scale(
                    domain=orders, range=[PALETTE[0], *["#BBBBBB"] * (len(orders) - 1)]
                ),
            ),
        )
        .properties(width=480, height=260)
    )
    return titled(
        drawn,
        "Silencing more and more heads",
        "How much less likely the references become, on "
        f"{record['splits']['test_2016_flickr']:,} pairs of test_2016_flickr. "
        "The order by worth is from the validation split; nothing is trained again.",
    )


def patch_chart(table: Sequence[Sequence[float]], words: Sequence[str]) -> alt.TopLevelMixin:
    """The preference for "her" after each patch: a row a depth, a column a source position."""
    depths = ["embedding", *(f"after layer {n}" for n in range(1, len(table)))]
    look = {"digits": 1, "numbers": True, "cell": 44}
    drawn = heatmap(table, depths, words, scheme="diverging", domain=(-7, 7), **look)
    return titled(
        drawn,
        "Two words carry “her”",
        "log p(her) − log p(his), when one vector of the encoder comes from the sentence about the "
        "man. Unpatched it is +6.4.",
    )


def lens_chart(
    tops: Sequence[Sequence[str]],
    final: Sequence[Sequence[float]],
    read: Sequence[str],
    agree: tuple[str, int, float],
) -> alt.TopLevelMixin:
    """The likeliest token at each depth; coloured by the probability of the final one.

    `agree` says how often layer 1 is already right: here; over how many captions; and there.
    """
    depths = ["embedding", *(f"layer {n}" for n in range(1, len(tops)))]
    drawn = _lettered(
        final[::-1],  # the last layer on top
        tops[::-1],
        depths[::-1],
        [f"{t + 1} {piece}" for t, piece in enumerate(read)],
        domain=(0, 1),
        value_title="p(final token)",
        column_title="position, and the token read there",
        width=62,
    )
    return titled(
        drawn,
        "What the decoder would say after each layer",
        "Each cell: the likeliest next token at that depth. Dark: the final token is already "
        f"probable. After layer 1 both agree at {agree[0]} places; over {agree[1]} "
        f"captions at {agree[2]:.0%}. Bottom: the embedding, which only repeats what was read.",
        wrap=110,
    )
