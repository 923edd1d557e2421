"""Chapter 6's drawings: curves over the steps of a training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from scripts import Late
from scripts.book.charts import GREY, lines

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
    rows = [
        (start + every, sum(values[start : start + every]) / every, name)
        for name, values in curves.items()
        for start in range(0, len(values) - every + 1, every)
    ]
    frame = pd.DataFrame(rows, columns=["step", "value", "name"])
    drawn = lines(frame, "step", "value", "name", y_title=y_title, log_y=log_y, zero=not log_y)
    if log_y:
        drawn.encoding.y.scale = alt.Scale(type="log", nice=False, domainMin=1)
        drawn.encoding.y.axis = alt.Axis(values=[1, 2, 5, 10, 20, 50])
    rules = pd.DataFrame((marks or {}).items(), columns=["mark", "height"]).round(4)
    base = alt.Chart(rules).encode(y="height:Q")
    dashes = base.mark_rule(strokeDash=[4, 4], color=GREY)
    named = base.mark_text(align="right", dy=11, color=GREY).encode(text="mark:N", x=alt.value(475))
    return alt.layer(drawn, dashes, named) if marks else drawn
