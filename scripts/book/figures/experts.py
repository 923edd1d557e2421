"""Chapter 24's drawing: who visits which expert."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from scripts import Late
from scripts.book.charts import rounded, titled

alt, pd = Late("altair"), Late("pandas")

SHADES = ["#08306B", "#2171B5", "#6BAED6", "#C6DBEF", "#FDD0A2", "#FDAE6B", "#F16913", "#8C2D04"]


def routing_chart(histories: Mapping[str, Tensor]) -> alt.FacetChart:
    """Shares of visits (steps, 8) as stacked areas, a panel for each remedy, the busiest lowest."""
    rows = []
    for remedy, history in histories.items():
        busiest_first = history[-20:].mean(0).argsort(descending=True)
        for at in range(0, len(history), 5):
            shares = history[at : at + 5, busiest_first].mean(0)
            for rank, share in enumerate(shares.tolist()):
                rows.append({"remedy": remedy, "step": at, "rank": rank + 1, "share": share})
    chart = alt.Chart(rounded(pd.DataFrame(rows))).mark_area(stroke="white", strokeWidth=0.5)
    y = alt.Y("share:Q", stack=True, title="share of visits").scale(domain=[0, 1])
    quarters = "datum.value * 4 % 1 ? '' : format(datum.value, '.2~f')"
    dashed = {"gridDash": [3, 3], "gridColor": "black", "zindex": 1}
    y = y.axis(values=[i / 8 for i in range(9)], labelExpr=quarters, **dashed)
    color = alt.Color("rank:O", legend=None).scale(range=SHADES)
    panels = chart.encode(alt.X("step:Q").axis(tickCount=4), y, color, alt.Order("rank:Q"))
    panels = panels.properties(width=175, height=200)
    return titled(
        panels.facet(column=alt.Column("remedy:N", sort=list(histories), title=None)),
        "In this toy, routing collapses unless it is balanced",
        "Share of visits to eight experts over 200 steps, means of five; the busiest at the end "
        "is drawn lowest, and colours are ranks within a panel. Left: a few take all. Middle: the "
        "penalty evens it out. Right: the bias does, without touching the loss. Dashed: eighths.",
    )
