"""The drawing of scaling: a grid of sizes and data, its law, and what the law misses."""

from __future__ import annotations

from scripts import Late
from scripts.book.charts import GREY, rounded, titled

alt, pd = Late("altair"), Late("pandas")

LOSS = "validation loss, nats per piece"
LOG = {"type": "log", "nice": False}
RULER = [a * 10**b for b in range(3, 8) for a in (1, 2, 5)]  # ticks of a logarithmic axis
SHORT = {"format": "~s", "values": RULER, "labelFlush": False}


def grid_chart(places: pd.DataFrame, law: str, other: str) -> alt.TopLevelMixin:
    """Mean losses of a grid by tokens, a line of the law for each size; below, what two laws miss.

    `places` has the columns N, D and loss, and one for what each law says.
    """
    errors = {f"error of {name}": places["loss"] / places[name] - 1 for name in (law, other)}
    drawn = rounded(places.assign(**errors))
    x = alt.X("D:Q", scale=alt.Scale(padding=12, **LOG), title="target tokens in the part")
    level = {"type": "quantitative", "title": LOSS, "scale": alt.Scale(zero=False)}
    legend = alt.Legend(title="parameters", format=".2s")
    color = alt.Color("N:O", scale=alt.Scale(scheme="viridis"), sort="descending", legend=legend)
    base = alt.Chart(drawn).encode(color=color)
    bare = x.axis(labels=False, title=None, values=RULER)
    lines = base.mark_line(strokeWidth=1.5).encode(x=bare, y=alt.Y(law, **level))
    dots = base.mark_circle(size=55, opacity=1)
    zero = alt.Chart(pd.DataFrame({"y": [0]})).mark_rule(color=GREY).encode(y="y:Q")
    ends = max(column.abs().max() for column in errors.values())
    scale, parts = alt.Scale(domain=[-ends, ends]), []
    for name, below in ((other, bare), (law, x.axis(**SHORT))):
        axis = alt.Axis(format="+.0%", tickCount=3)
        error = alt.Y(f"error of {name}:Q", title=[name, "misses"], axis=axis, scale=scale)
        strip = alt.layer(zero, dots.encode(x=below, y=error))
        parts.append(strip.properties(width=480, height=90))
    upper = alt.layer(lines, dots.encode(x=bare, y=alt.Y("loss", **level)))
    upper = upper.properties(width=480, height=260)
    return titled(
        alt.vconcat(upper, *parts),
        "Without dropout, size gains little when data are few",
        f"Dots: means of three seeds. Lines: the {law} law. Below: how far the runs lie above (+) "
        "or below each law.",
        wrap=80,
    )
