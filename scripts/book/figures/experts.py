"""Drawings of chapter 24. Expert e has the same colour in all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

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
    for x, name in ((60, "visits"), (230, "sorted"), (400, "computed"), (580, "weighted sum")):
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
        "No visit is left out, and no expert computes twice",
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


def in_use_chart(
    toys: Mapping[tuple[str, str], Sequence[tuple[int, float]]],
) -> alt.ConcatChart:
    """One expert's error beside eight's, and experts in use: runs by row and way, one a seed."""
    names = list(dict.fromkeys(name for name, _ in toys))
    ways = ["neither", "untrained", "uneven start", "steps along m", "both"]
    rows = ["{} experts, {} task".format(*name.split(", ")) for name in names]
    counts = [[[run[0] for run in toys[name, way]] for way in ways] for name in names]
    used = [[sum(seeds) / len(seeds) for seeds in row] for row in counts]
    alone, steps, eight = (
        [sum(error for _, error in toys[name, way]) for name in names]
        for way in ("one alone", "steps along m", "neither")
    )
    ratios = [[a / c, b / c] for a, b, c in zip(alone, steps, eight, strict=True)]
    few = [mean for row in used[:2] for mean in row[3:]]
    many = [row[0] for row in used] + [mean for row in used[2:] for mean in row[2:]]
    assert max(few) + 1 < min(many)
    assert max(one for one, _ in ratios[:2]) < 1.5 and min(one for one, _ in ratios[2:]) > 2
    assert max(steps for _, steps in ratios[:2]) < 1  # few in use cost nothing
    texts = [
        [f"{mean:.1f} ({min(seeds)}–{max(seeds)})" for mean, seeds in zip(*pair, strict=True)]
        for pair in zip(used, counts, strict=True)
    ]
    left = heatmap(
        ratios, rows, ["one alone", "steps along m"], digits=1, cell=(80, 40), domain=(0, 4)
    )
    right = heatmap(used, rows, ways, texts=texts, cell=(80, 40), domain=(0, 8))
    for layer in right.layer:
        layer.encoding.y["axis"].labels = False  # the first panel has them
    for panel in (left, right):
        panel.layer[0].encoding.color.legend = None  # each number is written
    panels = (left.properties(title="Error ÷ neither's"), right.properties(title="Experts in use"))
    return titled(
        alt.concat(*panels, spacing=15).resolve_scale(color="independent"),
        "Steps along the mean leave few in use only where one expert does nearly as well as eight",
        "Means of six seeds; in brackets the fewest and the most. A task is made by a network of "
        "random weights. Untrained: the uneven start before any step.",
    )


def visits_chart(runs: Mapping[str, Any]) -> alt.FacetChart:
    """Visits, (8,) of each step, as stacked areas over the steps, a panel for each run."""
    rows, names = [], []
    for name, run in runs.items():
        names.append(f"{name}: {run.used} in use")
        for step in range(0, len(run.history), 10):
            visits = sum(run.history[step : step + 10])
            parts = (visits / visits.sum()).tolist()
            rows += [
                {"run": names[-1], "step": step, "expert": expert, "part": part}
                for expert, part in enumerate(parts)
            ]
    used = [run.used for run in runs.values()]
    assert max(used[:2]) < min(used[2:])  # with steps along the mean, and without or balanced
    chart = alt.Chart(rounded(pd.DataFrame(rows))).mark_area(stroke="white", strokeWidth=0.5)
    y = alt.Y("part:Q", stack=True, title="part of visits").scale(domain=[0, 1])
    x = alt.X("step:Q").axis(values=[0, 150, 300])
    two_lines = alt.Header(labelExpr="split(datum.label, ': ')")
    color = colored(**EXPERT | {"legend": alt.Legend(title="expert")})
    areas = chart.encode(x, y.axis(format="%", tickCount=5), color, alt.Order("expert"))
    areas = areas.properties(width=85, height=200)
    return titled(
        areas.facet(column=alt.Column("run:N", sort=names, title=None, header=two_lines)),
        "Steps along the mean leave few experts in use; an uneven start alone doesn't",
        "Part of the visits to each expert, means of ten steps; seed 0. In use: in the last ten.",
    )
