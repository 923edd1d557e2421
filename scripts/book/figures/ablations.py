"""Drawings of the ablations: each row's distance from the base, run by run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from scripts import Late
from scripts.book.charts import GREY, INK, PALETTE, rounded, row_axis, titled

alt, pd = Late("altair"), Late("pandas")

KINDS = {"better": PALETTE[0], "worse": PALETTE[1], "within noise": GREY}
X_TITLE = "validation loss minus the base's mean, nats per piece"
REACH = 0.65  # where the axis ends


def ablation_chart(
    judged: pd.DataFrame,
    losses: Mapping[str, Sequence[float]],
    base: str,
    labels: Mapping[str, str],
) -> alt.TopLevelMixin:
    """A dot for each run, a diamond for the paper's, a band for the base's own seeds.

    `judged` has a line for each row, in the order of the drawing, with the columns verdict and
    paper's; `losses` has each row's runs and those of `base`, from whose mean all is measured.
    `labels` rename rows. Beyond `REACH` a triangle with its value replaces the dots.
    """
    mean = sum(losses[base]) / len(losses[base])
    names = {name: labels.get(name, name) for name in judged.index}
    points = [(names[n], x - mean, judged["verdict"][n]) for n in names for x in losses[n]]
    runs = pd.DataFrame(points, columns=["row", "difference", "verdict"])
    paper = judged["paper's"].dropna().rename(names).rename_axis("row")
    paper = paper.reset_index(name="difference").assign(what="the paper's row")
    seeds = {"low": min(losses[base]) - mean, "high": max(losses[base]) - mean}
    seeds = pd.DataFrame([seeds | {"what": "the base's seeds"}])

    def key(shape: str, opacity: float = 1.0) -> alt.Legend:
        look = {"symbolSize": 90, "symbolType": shape, "symbolOpacity": opacity}
        return alt.Legend(title=None, orient="top", **look)

    order = list(dict.fromkeys(runs["row"]))
    low = min(runs["difference"].min(), paper["difference"].min()) - 0.06
    place = {"title": X_TITLE, "scale": alt.Scale(domain=[round(low, 2), REACH], nice=False)}
    x, y = alt.X("difference:Q", **place).axis(tickCount=8), row_axis("row", order)
    kinds = alt.Scale(domain=list(KINDS), range=list(KINDS.values()))
    color = alt.Color("verdict:N", scale=kinds, legend=key("circle"))
    fill = alt.Fill("what:N", legend=key("square", 0.2)).scale(range=[PALETTE[0]])
    shape = alt.Shape("what:N", legend=key("diamond")).scale(range=["diamond"])
    band = alt.Chart(rounded(seeds)).mark_rect(opacity=0.2)
    diamonds = alt.Chart(rounded(paper)).mark_point(size=70, strokeWidth=1.5, color=INK)
    near = alt.Chart(rounded(runs[runs["difference"] <= REACH]))
    layers = [
        band.encode(alt.X("low:Q", **place), x2="high:Q", fill=fill),
        diamonds.encode(x, y, shape=shape),
        near.mark_circle(size=70, opacity=0.75).encode(x, y, color=color),
    ]
    far = runs[runs["difference"] > REACH].groupby(["row", "verdict"], as_index=False).mean()
    if len(far):
        far = far.assign(text=far["difference"].map("{:+.2f}".format), edge=REACH - 0.012)
        outside = alt.Chart(rounded(far)).encode(alt.X("edge:Q", **place), y)
        mark = outside.mark_point(shape="triangle-right", filled=True, size=90)
        text = outside.mark_text(align="right", dx=-9).encode(text="text:N")
        layers += [mark.encode(color=color), text]
    return titled(
        alt.layer(*layers).properties(width=430, height=20 * len(order)),
        "What each change does, what chance does, and what the paper found",
        f"Each dot is a run; where runs agree, fewer show. The base has {len(losses[base])} seeds. "
        "Letters name the groups of the paper's Table 3. A triangle marks a mean further right.",
        wrap=84,
    )
