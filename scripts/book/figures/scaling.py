"""The drawing of scaling: a grid of sizes and data, its law, and what the law misses."""

from __future__ import annotations

from scripts import Late
from scripts.book.charts import GREY, LOG, rounded, titled

alt, pd = Late("altair"), Late("pandas")

LOSS = "validation loss, nats per piece"
RULER = [a * 10**b for b in range(3, 8) for a in (1, 2, 5)]  # ticks of a logarithmic axis


def grid_chart(places: pd.DataFrame, law: str, other: str) -> alt.TopLevelMixin:
    """Mean losses of a grid by tokens, a line of the law for each size; below, what two laws miss.

    `places` has the columns N, D and loss, and one for what each law says.
    """
    errors = {f"error of {name}": places["loss"] / places[name] - 1 for name in (law, other)}
    x = alt.X("D:Q", title="target tokens in the part").scale(padding=12, **LOG)
    bare = x.axis(labels=False, title=None, values=RULER)
    level = {"type": "quantitative", "title": LOSS, "scale": alt.Scale(zero=False)}
    color = alt.Color("N:O", sort="descending").legend(title="parameters", format=".2s")
    base = alt.Chart(rounded(places.assign(**errors))).encode(color.scale(scheme="viridis"))
    dots = base.mark_circle(size=55, opacity=1)
    curves = base.mark_line(strokeWidth=1.5).encode(bare, alt.Y(law, **level))
    parts = [alt.layer(curves, dots.encode(bare, alt.Y("loss", **level))).properties(height=260)]
    zero = alt.Chart(pd.DataFrame({"y": [0]})).mark_rule(color=GREY).encode(y="y:Q")
    farthest = max(column.abs().max() for column in errors.values())
    ruled = x.axis(format="~s", values=RULER, labelFlush=False)
    for name, below in ((other, bare), (law, ruled)):
        error = alt.Y(f"error of {name}:Q", title=[name, "misses"]).axis(format="+.0%", tickCount=3)
        error = error.scale(domain=[-farthest, farthest])
        parts.append(alt.layer(zero, dots.encode(below, error)).properties(height=90))
    return titled(
        alt.vconcat(*[part.properties(width=480) for part in parts]),
        "Without dropout, size gains little when data are few",
        f"Dots: means of three seeds. Lines: the {law} law. Below: how far the runs lie above (+) "
        "or below each law.",
        wrap=80,
    )
