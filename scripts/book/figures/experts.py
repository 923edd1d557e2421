"""Drawings of chapter 24. Expert e has the same colour in all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from scripts import Late
from scripts.book.charts import heatmap, rounded, titled
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
        "No visit is left out, and a visited expert computes once",
        "Tokens a to d make two visits each. A colour is an expert: blue is 0, orange 1, green 2, "
        "pink 3, which nobody visits.",
    )


def step_chart(router: Tensor, cloud: Tensor, mean: Tensor, step: Tensor) -> alt.ConcatChart:
    """Who wins which token: router (E, 2), cloud (N, 2); expert 1 takes the step, mean or not."""
    look = {"scale": alt.Scale(domain=[-4, 7], nice=False), "axis": alt.Axis(tickCount=4)}
    x, y = alt.X("x:Q", title="first feature", **look), alt.Y("y:Q", title="second", **look)
    color, drawn = colored(**EXPERT), []
    stepped = router.clone()
    stepped[1] += step
    for name, tokens in (("mean 0", cloud), (f"mean {mean.norm():.0f} away", cloud + mean)):
        for when, vectors in (("before", router), ("after the step", stepped)):
            lines = pd.DataFrame(vectors.numpy(), columns=["x", "y"]).rename_axis("expert")
            lines = rounded(lines.reset_index().assign(zero=0.0))
            dots = pd.DataFrame(tokens.numpy(), columns=["x", "y"])
            dots["expert"] = (tokens @ vectors.T).argmax(-1).numpy()
            won = (dots["expert"] == 1).mean()
            layers = [
                alt.Chart(rounded(dots, 3)).mark_circle(size=16, opacity=0.9).encode(x, y, color),
                alt.Chart(lines).mark_rule(strokeWidth=3).encode(x, y, color, x2="zero", y2="zero"),
            ]
            panel = alt.layer(*layers).properties(width=240, height=200)
            drawn.append(panel.properties(title=f"{name}, {when}: orange wins {won:.0%}"))
    assert won > 0.9  # the last panel's, which the title speaks of
    return titled(
        alt.concat(*drawn, columns=2),
        "Where tokens share a mean, the leader wins nearly all by one step along it",
        "Lines: the vectors of eight experts. Orange's takes the same step in both rows. Dots: "
        "tokens, in the colour of the expert that wins them.",
    )


def in_use_chart(runs: Mapping[str, Sequence[tuple[int, int, float]]]) -> alt.ConcatChart:
    """Experts in use at first and at last, for each row's seeds; the last two rows learn freely."""
    drawn, means = [], []
    for i, name in enumerate(("at the first step", "in the last 20 steps")):
        counts = [[run[i] for run in row] for row in runs.values()]
        means = [sum(row) / len(row) for row in counts]
        chart = heatmap(
            [[*row, mean] for row, mean in zip(counts, means, strict=True)],
            [*runs],
            [*range(len(counts[0])), "mean"],
            column_title="seed",
            domain=(0, 8),
            cell=36,
            texts=[
                [*map(str, row), f"{mean:.1f}"] for row, mean in zip(counts, means, strict=True)
            ],
        )
        for layer in chart.layer if i else []:
            layer.encoding.y["axis"].labels = False  # the first panel has them
        drawn.append(chart.properties(title=alt.Title(name, fontSize=13)))
    assert max(means[-2:]) + 1 < min(means[:-2])  # the last panel's
    return titled(
        alt.concat(*drawn, spacing=15),
        "Few stay in use only where the router reads the mean and experts that read it learn",
        "Experts in use, of eight; the rows are those of the table.",
    )


def visits_chart(histories: Mapping[str, Tensor]) -> alt.FacetChart:
    """Visits (steps, 8) as stacked areas over the steps, a panel for each run."""
    rows, names, used = [], [], []
    for name, history in histories.items():
        end = history[-10:].sum(0)
        used.append(int((end > 0.02 * end.sum()).sum()))
        names.append(f"{name}: {used[-1]} in use")
        for step in range(0, len(history), 10):
            visits = history[step : step + 10].sum(0)
            parts = (visits / visits.sum()).tolist()
            rows += [
                {"run": names[-1], "step": step, "expert": expert, "part": part}
                for expert, part in enumerate(parts)
            ]
    assert used[0] + 1 < min(used[1:])  # the first is left alone
    chart = alt.Chart(rounded(pd.DataFrame(rows))).mark_area(stroke="white", strokeWidth=0.5)
    y = alt.Y("part:Q", stack=True, title="part of visits").scale(domain=[0, 1])
    x = alt.X("step:Q").axis(tickCount=3)
    two_lines = alt.Header(labelExpr="split(datum.label, ': ')")
    color = colored(**EXPERT | {"legend": alt.Legend(title="expert")})
    areas = chart.encode(x, y.axis(format="%", tickCount=5), color, alt.Order("expert"))
    areas = areas.properties(width=130, height=200)
    return titled(
        areas.facet(column=alt.Column("run:N", sort=names, title=None, header=two_lines)),
        "Left alone, few experts are in use; each remedy spreads the visits",
        "Part of the visits to each expert, means of ten steps; seed 0. In use: in the last ten.",
    )
