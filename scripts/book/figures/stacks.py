"""Drawings of chapters 17 and 18: language models beside counting, and one stack's variants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from scripts import Late
from scripts.book.charts import LOG, PALETTE, lines, long, panels, rounded, titled

alt, pd = Late("altair"), Late("pandas")


def counting_chart(
    tables: Mapping[str, Sequence[Mapping[str, Any]]], bits: Sequence[float], split: str
) -> alt.TopLevelMixin:
    """Bits per character on `split` of each kind of table by order, and a line across per model."""
    by_order = {kind: {row["order"]: row[split] for row in rows} for kind, rows in tables.items()}
    frame = long(by_order, "kind", "n", "bits").query("n > 3")
    look = {"x_title": "n of n-grams, order of PPM", "y_title": "bits per character"}
    curves = lines(frame, "n", "bits", "kind", points=True, **look)
    ticks = sorted(frame["n"].unique().tolist())
    curves.encoding.x.axis = alt.Axis(values=ticks, format="d", labelFlush=False)
    level = alt.Chart(rounded(pd.DataFrame({"bits": bits, "label": "mini-GPT"})))
    rule = level.mark_rule(color=PALETTE[2], strokeWidth=1.5).encode(y="bits:Q")
    name = level.mark_text(align="right", x=475, dy=12, color=PALETTE[2])
    return titled(
        alt.layer(curves, rule, name.encode(y="min(bits):Q", text="label:N")),
        "Three mini-GPTs end just behind the best table",
        f"Multi30k's English captions, {split}: lower is better. Left out: n < 4 (above 2.4 bits). "
        "Mind the axis of bits: it begins above 1.",
    )


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
        "The same two layers, three variants",
        "Dark: the output at this row's position reacts strongly to the input at this column's; "
        "white: not at all. 1.0 is the strongest cell of each panel. Same weights in all.",
    )


def classify_chart(counted: pd.DataFrame) -> alt.TopLevelMixin:
    """Test errors by number of labels, each run a point, a line through the means.

    `counted` has a row for each run, with the columns row (its kind), captions and test.
    """
    kinds, sizes = list(counted["row"].unique()), sorted(counted["captions"].unique().tolist())
    aside = counted["row"].map(dict(zip(kinds, (0.93, 1, 1.07), strict=True)))
    frame = pd.DataFrame({"kind": counted["row"], "labels": aside * counted["captions"]})
    frame = rounded(frame.assign(errors=1 - counted["test"]))
    x = alt.X("labels:Q", title="labelled captions (log scale)").axis(values=sizes, format=",")
    x = x.scale(domain=[0.8 * sizes[0], 1.25 * sizes[-1]], **LOG)
    y = alt.Y("errors:Q", title="share wrong (log scale)").scale(domain=[0.007, 0.25], **LOG)
    y = y.axis(values=[0.01, 0.02, 0.03, 0.05, 0.1, 0.2], format=".0%")
    base = alt.Chart(frame).encode(x, y, alt.Color("kind:N", sort=kinds).legend(title=None))
    means = base.transform_aggregate(errors="mean(errors)", groupby=["kind", "labels"])
    dots = base.mark_circle(size=45, opacity=0.7)
    return titled(
        alt.layer(means.mark_line(opacity=0.6), dots).properties(width=460, height=250),
        "Singular or plural? Errors by number of labels",
        "Each point is a run, eight for each kind and number of labels, the kinds drawn side by "
        "side; lower is better. With all labels the eight bags of words are the same.",
    )
