"""Chapter 3's figures: looking up rows of a table, and the hands of the positions' clocks."""

from __future__ import annotations

import math

from torch import Tensor

from scripts import Late
from scripts.book.charts import GREY, heatmap, named

alt, pd = Late("altair"), Late("pandas")


def lookup(one_hot: Tensor, table: Tensor, vectors: Tensor, names: list[str]) -> alt.HConcatChart:
    """One-hot rows (T, V) times a table (V, D) are vectors (T, D); `names` are the tokens'."""
    limit = table.abs().max().item()
    look = {"scheme": "diverging", "domain": (-limit, limit), "cell": 36}
    rows = [f"row {i}" for i in range(len(table))]
    panels = {
        "one-hot (T, V)": heatmap(one_hot, names, cell=36, digits=0),
        "table × √D (V, D)": heatmap(table, rows, **look),
        "vectors (T, D)": heatmap(vectors, names, **look),
    }
    for chart in panels.values():
        chart.layer[0].encoding.color.legend = None
    return alt.hconcat(*named(panels)).resolve_scale(color="independent")


def clocks(table: Tensor, pairs: tuple[int, ...], step: int) -> alt.FacetChart:
    """Where the hands `pairs` of sinusoids (length, D) stand; each `step`-th has its number."""
    d_model = table.size(1)
    rows = []
    for i in pairs:
        degrees = math.degrees(10_000 ** (-2 * i / d_model))
        for pos, (sin, cos) in enumerate(table[:, 2 * i : 2 * i + 2].tolist()):
            label = str(pos) if pos % step == 0 else ""
            spot = [round(value, 4) for value in (sin, cos, 1.25 * sin, 1.25 * cos)]
            rows.append((pos, label, f"hand {i}: {degrees:.1f}° a step", *spot))
    columns = ["position", "label", "hand", "sin", "cos", "label x", "label y"]
    look = {"scale": alt.Scale(domain=(-1.4, 1.4), nice=False), "axis": alt.Axis(values=[-1, 0, 1])}
    x, y = alt.X("sin:Q", title="sin", **look), alt.Y("cos:Q", title="cos", **look)
    color = alt.Color("position:Q", legend=None).scale(scheme="viridis")
    base = alt.Chart(pd.DataFrame(rows, columns=columns))
    hands = base.transform_filter("datum.label").mark_rule(color=GREY)
    layers = [
        hands.encode(x="sin:Q", y="cos:Q", x2=alt.datum(0), y2=alt.datum(0)),
        base.mark_circle(size=70, opacity=1).encode(x, y, color),
        base.mark_text().encode(x="label x:Q", y="label y:Q", text="label:N"),
    ]
    drawn = alt.layer(*layers).properties(width=175, height=175)
    return drawn.facet(facet=alt.Facet("hand:N", title=None), columns=3)
