"""Drawings of chapter 5: signals before training, the first steps, and how they end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from scripts import Late
from scripts.book.charts import lines, named, rounded

alt, pd = Late("altair"), Late("pandas")


def collapse(frame: pd.DataFrame) -> alt.Chart:
    """How different positions are over the layers, a line for each model and kind."""
    frame = frame.assign(
        layer=frame.layer.str[1:].astype(int),
        difference=frame.difference.clip(lower=1e-8),
        kind=frame.residual.map({True: "with x +", False: "without"}),
    )
    ticks = alt.Axis(values=[1, 1e-2, 1e-4, 1e-6, 1e-8], format=".0e")
    chart = lines(frame, "layer", "difference", "kind", points=True).encode(
        alt.X("layer:Q").axis(tickCount=6, grid=False),
        alt.Y("difference:Q", axis=ticks).scale(type="log"),
        detail="model:N",
    )
    chart.data = rounded(frame[["layer", "difference", "kind", "model"]])
    return chart


def curves_of(losses: Mapping[str, Sequence[float]], every: int) -> alt.Chart:
    """A curve for each run: the means of its losses over `every` steps."""
    means = pd.DataFrame(losses).groupby(lambda step: step // every * every + every / 2).mean()
    frame = means.rename_axis("step").reset_index()
    frame = frame.melt("step", var_name="model", value_name="loss")
    return lines(frame, "step", "loss", "model", zero=True, points=True)


def by_rate(frame: pd.DataFrame, panels: str, color: str, floor: float) -> alt.HConcatChart:
    """Loss over rate, a panel for each of `panels`; thin lines are seeds, thick ones means.

    A dashed rule stands at the loss `floor`.
    """
    charts = {}
    for name, part in frame.groupby(panels, sort=False):
        x = alt.X("rate:Q", title="learning rate (log scale)").scale(type="log", nice=False)
        base = alt.Chart(rounded(part[["rate", "loss", "seed", color]])).encode(
            x.axis(values=sorted(part.rate.unique()), format="~g", grid=False),
            color=alt.Color(f"{color}:N", sort=None).legend(title=None, orient="top", columns=2),
        )
        y = {"title": "loss of the last steps", "scale": alt.Scale(domain=[0, 2.5])}
        seeds = base.mark_line(strokeWidth=0.7, opacity=0.5)
        seeds = seeds.encode(alt.Y("loss:Q", **y), detail="seed:N")
        means = base.mark_line(point={"size": 45}).encode(alt.Y("mean(loss):Q", **y))
        rule = alt.Chart(alt.InlineData([{}])).mark_rule(strokeDash=[4, 4], aria=False)
        rule = rule.encode(y=alt.datum(floor))
        charts[name] = alt.layer(seeds, means, rule).properties(width=250, height=230)
    return alt.hconcat(*named(charts))
