"""Drawings of chapter 24. Expert e has the same colour in all of them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from scripts import Late
from scripts.book.charts import rounded, titled
from scripts.book.figures.diagram import Diagram
from scripts.book.look import PALETTE, colored

alt, pd = Late("altair"), Late("pandas")

COLORS = dict(enumerate([*PALETTE, "#F0E442"]))  # eight experts: Okabe and Ito's yellow is the last
EXPERT = {"column": "expert", "colors": COLORS, "legend": None}


def dispatch_chart(chosen: Tensor, experts: int) -> alt.LayerChart:
    """Visits in the tokens' order, sorted, computed by experts, and summed: chosen (N, k)."""
    k, expert_of = chosen.size(1), chosen.flatten().tolist()
    order = chosen.flatten().argsort(stable=True).tolist()
    picture = Diagram(640, 290)
    for x, name in ((60, "visits"), (230, "sorted"), (400, "computed"), (580, "summed")):
        picture.word(x, 282, name)
    for rank, visit in enumerate(order):
        token, expert = visit // k, expert_of[visit]
        start, lane = 240 - 26 * visit - 12 * token, 240 - 26 * rank - 12 * expert
        end = 240 - (26 * k + 12) * token - 13 * (k - 1)
        for x, y in ((60, start), (230, lane)):
            picture.box(x, y, "", COLORS[expert], half=18, height=22)
            picture.word(x, y + 11, "abcdefgh"[token], "pale name")
        picture.box(580, end, "", "dark", half=18, height=22)
        picture.word(580, end + 11, "abcdefgh"[token], "pale name")
        picture.arrow((78, start + 11), (212, lane + 11))
        picture.arrow((248, lane + 11), (350, lane + 11))
        picture.arrow((450, lane + 11), (562, end + 11))
    for expert in range(experts):
        visits = expert_of.count(expert)
        last = sum(other <= expert for other in expert_of) - bool(visits)  # whom nobody visits
        rows = max(visits, 1)  # has room for a name
        y, height = 240 - 26 * last - 12 * expert, 26 * rows - 4
        picture.box(400, y, "", COLORS[expert], half=50, height=height)
        picture.word(400, y + height / 2, f"expert {expert}", "pale name")
    return titled(
        picture.chart(),
        "No visit is left out, and each expert computes once",
        "Tokens a to d make two visits each. A colour is an expert: blue is 0, orange 1, green 2, "
        "pink 3, which nobody visits.",
    )


def cones_chart(router: Tensor, clouds: Mapping[str, Tensor]) -> alt.ConcatChart:
    """Tokens (N, 2) in the colour of the expert whose row of `router` (E, 2) scores highest."""
    rows = pd.DataFrame((2.2 * router).numpy(), columns=["x", "y"]).rename_axis("expert")
    rows = rounded(rows.reset_index().assign(zero=0.0))
    look = {"scale": alt.Scale(domain=[-4, 7], nice=False), "axis": alt.Axis(tickCount=4)}
    x, y = alt.X("x:Q", title="first feature", **look), alt.Y("y:Q", title="second", **look)
    color, panels = colored(**EXPERT), []
    for name, tokens in clouds.items():
        frame = pd.DataFrame(tokens.numpy(), columns=["x", "y"])
        frame["expert"] = (tokens @ router.T).argmax(-1).numpy()
        busiest = frame["expert"].value_counts(normalize=True).iloc[0]
        layers = [
            alt.Chart(rounded(frame, 3)).mark_circle(size=16, opacity=0.9).encode(x, y, color),
            alt.Chart(rows).mark_rule(strokeWidth=3).encode(x, y, color, x2="zero", y2="zero"),
        ]
        panel = alt.layer(*layers).properties(width=250, height=250)
        panels.append(panel.properties(title=f"{name}: {busiest:.0%} to the busiest expert"))
    return titled(
        alt.hconcat(*panels),
        "Tokens with a shared mean fall into few cones",
        "Lines: a router's eight vectors. Dots: tokens, in the colour of the expert that wins "
        "them. Both clouds have the same shape.",
    )


def visits_chart(histories: Mapping[str, Tensor]) -> alt.FacetChart:
    """Parts of visits (steps, 8) as stacked areas over the steps, a panel for each run."""
    rows = []
    for name, history in histories.items():
        for step in range(0, len(history), 5):
            parts = history[step : step + 5].mean(0).tolist()
            rows += [
                {"run": name, "step": step, "expert": expert, "part": part}
                for expert, part in enumerate(parts)
            ]
    left, *others = (int((h[-5:].mean(0) > 0.02).sum()) for h in histories.values())
    kept = "all" if min(others) == 8 else f"{min(others)} or more"
    chart = alt.Chart(rounded(pd.DataFrame(rows))).mark_area(stroke="white", strokeWidth=0.5)
    y = alt.Y("part:Q", stack=True, title="part of visits").scale(domain=[0, 1])
    x = alt.X("step:Q").axis(tickCount=3)
    areas = chart.encode(x, y.axis(format="%", tickCount=5), colored(**EXPERT), alt.Order("expert"))
    panels = areas.properties(width=130, height=200)
    return titled(
        panels.facet(column=alt.Column("run:N", sort=list(histories), title=None)),
        f"Left alone, {left} of eight experts are in use; with each remedy {kept}",
        "Part of the visits to each expert, means of five steps; seed 0. An expert has "
        "its colour in all panels.",
    )
