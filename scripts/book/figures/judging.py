"""Drawings of chapter 10: what matches, and what chance does to a difference."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from scripts import Late
from scripts.book.charts import rounded, titled
from scripts.book.look import GREY, INK, PALETTE, bar_axis, row_axis

alt, pd = Late("altair"), Late("pandas")


def ingredient_chart(
    record: dict[str, Any], title: str, passing: Mapping[str, Collection[str]]
) -> alt.TopLevelMixin:
    """Validation BLEU of every run, a line for each ingredient, a panel for each search.

    The band is the recipe's spread. Of a search, the rows in `passing` differ from the recipe by
    more than seeds do.
    """
    kinds = ["the recipe", "differs from it", "no clear difference"]
    order = [f"{name} ({len(row['runs'])})" for name, row in record["rows"].items()]
    scores = {"greedy decoding": "best", "a beam of 5": "beam"}
    panels = []
    for search, names in passing.items():
        runs = []
        for label, (name, row) in zip(order, record["rows"].items(), strict=True):
            kind = kinds[0 if name == kinds[0] else 1 if name in names else 2]
            runs += [(label, run["seed"], run[scores[search]], kind) for run in row["runs"]]
        frame = pd.DataFrame(runs, columns=["changed", "seed", "BLEU", "kind"])
        recipe = frame.loc[frame["kind"] == kinds[0], "BLEU"]
        spread = pd.DataFrame({"low": [recipe.min()], "high": [recipe.max()]})
        place = {"scale": alt.Scale(domain=[20, 35], nice=False, zero=False)}
        place |= {"axis": alt.Axis(tickCount=8), "title": "validation BLEU (cased)"}
        look = {"sort": kinds, "legend": alt.Legend(title=None, orient="top", symbolSize=90)}
        color, shape = alt.Color("kind:N", **look), alt.Shape("kind:N", **look)
        band = alt.Chart(rounded(spread)).mark_rect(color=PALETTE[0], opacity=0.25)
        dots = alt.Chart(rounded(frame)).mark_point(size=70, filled=True, opacity=0.85)
        dots = dots.encode(
            alt.X("BLEU:Q", **place),
            row_axis("changed", order, labels=not panels),
            color.scale(domain=kinds, range=[*PALETTE[:2], PALETTE[-1]]),
            shape.scale(domain=kinds, range=["circle", "diamond", "circle"]),
            tooltip=["changed", "seed", "BLEU"],
        )
        drawn = alt.layer(band.encode(alt.X("low:Q", **place), x2="high:Q"), dots)
        heading = alt.Title(search, fontSize=13, fontWeight="normal")
        panels.append(drawn.properties(width=230, height=26 * len(order), title=heading))
    return titled(
        alt.hconcat(*panels, spacing=12),
        title,
        "Each point is a run (in parentheses, how many); the band spans the recipe's own. Diamonds "
        f"pass Holm's test of {len(order) - 1}. Narrow model, {record['config']['epochs']} epochs.",
        wrap=78,
    )


def match_walls(pairs: Collection[tuple[list[str], list[str]]]) -> alt.TopLevelMixin:
    """For outputs and references, lists of tokens: a brick for each n-gram, blue if it has a match.

    The bricks of the lowest row are the output's words; one of n words lies n − 1 rows higher, over
    their middle.
    """
    rows, widest = ["quadruples", "triples", "pairs", "words"], max(len(o) for o, _ in pairs)
    walls = []
    for output, reference in pairs:
        padded, bricks = f" {' '.join(reference)} ", []
        for n, row in enumerate(reversed(rows), start=1):
            for i in range(len(output) - n + 1):
                text = " ".join(output[i : i + n])
                kind = "match" if f" {text} " in padded else "no match"
                left = i + (n - 1) / 2
                label = text if n == 1 else ""
                bricks.append((row, left, left + 0.94, left + 0.47, label, kind, text))
        names = ["row", "left", "right", "middle", "label", "kind", "text"]
        base = alt.Chart(pd.DataFrame(bricks, columns=names)).encode(
            bar_axis("row", rows, grid=False, domain=False)
        )
        scale = alt.Scale(domain=[0, widest], nice=False)
        kinds = ["match", "no match"]
        fill = alt.Color("kind:N", scale=alt.Scale(domain=kinds, range=[PALETTE[0], "white"]))
        ink = alt.when("datum.kind == 'match'").then(alt.value("white")).otherwise(alt.value(INK))
        wall = base.mark_rect(stroke=GREY, strokeWidth=1, aria=False).encode(
            alt.X("left:Q", scale=scale, axis=None),
            alt.X2("right:Q"),
            fill.legend(None),
            tooltip=["text", "kind"],
        )
        words = base.mark_text(fontSize=11).encode(
            alt.X("middle:Q", scale=scale, axis=None), text="label:N", color=ink
        )
        heading = alt.Title(f"reference: {' '.join(reference)}", anchor="start", fontSize=13)
        walls.append(alt.layer(wall, words).properties(width=630, height=104, title=heading))
    return alt.vconcat(*walls, spacing=18)


def binned(values: Collection[float], step: float) -> pd.DataFrame:
    """How many of the values lie in each step, from its lower end."""
    places = [round(step * math.floor(value / step), 4) for value in values]
    counts = pd.Series(places).value_counts().sort_index()
    return pd.DataFrame({"from": counts.index, "count": counts.to_numpy()})


def difference_chart(
    differences: Collection[float], measured: float, counted: str, ends: Collection[float] = ()
) -> alt.TopLevelMixin:
    """A histogram of differences in steps of 0.1; lines at the measured one and, dashed, at `ends`.

    `counted` says what the differences are of: tosses, or draws.
    """
    frame = binned(differences, 0.1)
    domain = [frame["from"].min() - 0.1, max(frame["from"].max(), measured) + 0.2]
    scale = alt.Scale(domain=[round(end, 2) for end in domain], nice=False)
    x = alt.X("from:Q", bin="binned", scale=scale, title="BLEU of the beam minus BLEU of greedy")
    columns = alt.Chart(rounded(frame.assign(to=frame["from"] + 0.1)))
    columns = columns.mark_bar(binSpacing=1, color=PALETTE[0], opacity=0.7)
    y = alt.Y("count:Q", title=counted).axis(tickCount=2, minExtent=36)
    y = y.scale(domain=[0, 1.15 * int(frame["count"].max())], nice=False)  # the rules stand out
    layers = [columns.encode(x.axis(labelFlush=False), y, x2="to:Q")]
    for place in (measured, *ends):
        side = "center" if place == measured else "right" if place < measured else "left"
        label = f"{place:+.2f}" + (", measured" if place == measured else "")
        line = alt.Chart(rounded(pd.DataFrame({"at": [place], "label": [label]})))
        line = line.encode(x=alt.X("at:Q", scale=scale))
        text = line.mark_text(y=-8, color=PALETTE[1], align=side).encode(text="label:N")
        dash = [1, 0] if place == measured else [5, 4]
        layers = [line.mark_rule(color=PALETTE[1], strokeWidth=2, strokeDash=dash), *layers, text]
    return alt.layer(*layers).properties(width=460, height=110)


def p_chart(p_of_equals: Mapping[str, Collection[float]]) -> alt.TopLevelMixin:
    """For each test, how often it gives each p, in steps of 0.05, and how many are at most 0.05.

    The line is at 5% of the pairs.
    """
    panels = {}
    for name, values in p_of_equals.items():
        alarms = sum(p <= 0.05 for p in values) / len(values)
        label = f"{name}: {alarms:.0%} at most 0.05"
        panels[label] = binned([p - 1e-9 for p in values], 0.05)
    frame = pd.concat(panels, names=["test"]).reset_index(level="test")
    base = alt.Chart(rounded(frame.assign(to=frame["from"] + 0.05)))
    color = alt.when("datum.to < 0.06").then(alt.value(PALETTE[1])).otherwise(alt.value(PALETTE[0]))
    columns = base.mark_bar(binSpacing=1).encode(
        alt.X("from:Q", bin="binned", title="p").scale(domain=[0, 1], nice=False),
        alt.Y("count:Q", title="pairs").axis(tickCount=3),
        x2="to:Q",
        color=color,
    )
    level = base.mark_rule(color=INK, strokeDash=[5, 4]).encode(y=alt.datum(0.05 * len(values)))
    header = alt.Header(title=None, labelAnchor="start", labelFontSize=13)
    layers = alt.layer(columns, level).properties(width=460, height=54)
    return layers.facet(alt.Facet("test:N", sort=list(panels), header=header), columns=1)
