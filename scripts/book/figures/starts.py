"""Drawings of chapter 5: how first steps end at each learning rate."""

from __future__ import annotations

from scripts import Late
from scripts.book.charts import named, rounded

alt, pd = Late("altair"), Late("pandas")


def by_rate(frame: pd.DataFrame, panels: str, color: str) -> alt.HConcatChart:
    """Loss over rate, a panel for each of `panels`; thin lines are seeds, thick ones means."""
    charts = {}
    for name, part in frame.groupby(panels, sort=False):
        rates = sorted(part.rate.unique())
        x = alt.X("rate:Q", title="learning rate").scale(type="log", nice=False)
        base = alt.Chart(rounded(part[["rate", "loss", "seed", color]])).encode(
            x.axis(values=rates, format="~g", grid=False),
            color=alt.Color(f"{color}:N", sort=None).legend(title=None, orient="top", columns=2),
        )
        y = {"title": "loss of the last steps", "scale": alt.Scale(domain=[0, 2.5])}
        seeds = base.mark_line(strokeWidth=0.7, opacity=0.5)
        seeds = seeds.encode(alt.Y("loss:Q", **y), detail="seed:N")
        means = base.mark_line(point={"size": 45}).encode(alt.Y("mean(loss):Q", **y))
        charts[name] = alt.layer(seeds, means).properties(width=250, height=230)
    return alt.hconcat(*named(charts))
