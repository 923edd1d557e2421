"""Drawings of chapter 8: a beam, what a decoder keeps, a temperature."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence

from torch import Tensor

from scripts import Late
from scripts.book.charts import long, rounded, titled
from scripts.book.look import GREY, INK, PALETTE, colored

alt, pd = Late("altair"), Late("pandas")


TREE_STEP = 124  # pixels from one step of a beam's tree to the next


def beam_tree(weighed: pd.DataFrame) -> pd.DataFrame:
    """Where to draw each candidate of a beam by hand: step x and row y, and those of its parent."""
    weighed = weighed.set_index("words")
    row, leaves = {}, itertools.count()

    def settle(words: tuple[str, ...]) -> float:
        below = [settle(child) for child in weighed.index if child[:-1] == words]
        row[words] = sum(below) / len(below) if below else float(next(leaves))
        return row[words]

    settle(())
    places = []
    for words, p, fate in zip(weighed.index, weighed["p"], weighed["fate"], strict=True):
        x, y = len(words), row[words]
        label = max(34, 8 * len(words[-2])) + 14 if words[1:] else 0  # the parent's, in pixels
        parent = (x - 1 + label / TREE_STEP, row[words[:-1]])
        places.append((words[-1], f"{p:.3f}", fate, x, y, *parent))
    return pd.DataFrame(places, columns=["word", "p", "fate", "x", "y", "from x", "from y"])


def beam_tree_chart(tree: pd.DataFrame) -> alt.TopLevelMixin:
    """The candidates of a beam search as a tree that grows to the right."""
    steps, last_row = int(tree["x"].max()), tree["y"].max()
    width = {"domain": [0, steps + 0.5], "nice": False}
    x = alt.X("x:Q").scale(**width)
    x = x.axis(title="step", values=list(range(1, steps + 1)), format="d", grid=False)
    y = alt.Y("y:Q", axis=None).scale(domain=[-0.7, last_row + 0.7], reverse=True, nice=False)
    color = colored("fate", {"kept": PALETTE[0], "ends": PALETTE[2], "dropped": "#AAAAAA"})
    color = color.legend(title="the candidate is", orient="top")
    base = alt.Chart(tree).encode(x, y)
    parent = alt.X("from x:Q").scale(**width), alt.Y("from y:Q", axis=None)
    layers = [
        base.mark_rule(strokeWidth=1.5).encode(*parent, color, x2="x:Q", y2="y:Q"),
        base.mark_circle(size=70, opacity=1).encode(color),
    ]
    looks = {
        "word": {"dy": -6, "fontSize": 13, "fontWeight": "bold"},
        "p": {"dy": 8, "fontSize": 11, "color": GREY},
    }
    for column, look in looks.items():
        layers.append(base.mark_text(align="left", dx=9, **look).encode(text=f"{column}:N"))
    size = {"width": int(TREE_STEP * (steps + 0.5)), "height": 46 * int(last_row + 2)}
    return titled(
        alt.layer(*layers).properties(**size),
        "A beam of two, step by step",
        "Below each word: the probability of the whole text up to it. In each column any of the "
        "two best that ends is finished; of the others the two best go on. The winner begins with "
        "the second-best word. Heights only spread the tree.",
    )


def kept_chart(source: Sequence[str], target: Sequence[str], kib: float) -> alt.TopLevelMixin:
    """Which positions' keys and values are computed at each step, and which are kept from before.

    `target` are the tokens that the decoder reads, `kib` the KiB that one position takes.
    """
    S, T = len(source), len(target)
    columns = [str(i) for i in range(S + T)]
    kinds = {"computed at this step": PALETTE[1], "kept from before": "#BBD7EA"}
    computed, before = kinds
    cells, sums = [], []
    for step in range(1, T + 1):
        first_new = 0 if step == 1 else S + step - 1  # the first step reads the source, too
        for i in range(S + step):
            cells.append((step, columns[i], computed if i >= first_new else before))
        sums.append((step, f"{(S + step) * kib:g} KiB"))
    labels = [piece.replace("▁", "") or "▁" for piece in (*source, *target)]
    names = f"{json.dumps(labels, ensure_ascii=False)}[toNumber(datum.value)]"
    bare = {"ticks": False, "domain": False}
    x = alt.X("position:N", sort=columns, title=None)
    x = x.axis(labelExpr=names, labelAngle=-60, orient="top", **bare)
    y = alt.Y("step:O", title="step").axis(**bare)
    color = colored("keys and values", kinds).legend(title=None, orient="bottom")
    grid = alt.Chart(pd.DataFrame(cells, columns=["step", "position", "keys and values"]))
    edge = alt.Chart(pd.DataFrame({"position": [columns[S]]}))
    numbers = alt.Chart(pd.DataFrame(sums, columns=["step", "kept"]))
    numbers = numbers.mark_text(align="left", fontSize=12)
    layers = [
        grid.mark_rect(stroke="white", strokeWidth=2).encode(x, y, color),
        edge.mark_rule(color=INK, strokeWidth=2, xOffset=-13).encode(x),
        numbers.encode(y, x=alt.value(26 * (S + T) + 8), text="kept:N"),
    ]
    return titled(
        alt.layer(*layers).properties(width=26 * (S + T), height=26 * T),
        "The source once, then one new position a step",
        "Left of the line: the source; right: what the decoder has read. Each square stands "
        "for a position's keys and values in all layers. At a row's end: what is kept by then.",
        wrap=72,
    )


def temperature_chart(
    by_temperature: Mapping[float, Tensor], words: Sequence[str]
) -> alt.TopLevelMixin:
    """The first word's probabilities at several temperatures, side by side."""
    table = {
        f"τ = {t:g}": dict(zip(words, p.tolist(), strict=True)) for t, p in by_temperature.items()
    }
    frame = long(table, "temperature", "word", "p").query("p > 0")
    order = list(dict.fromkeys(frame["word"]))
    x = alt.X("word:N", sort=order, title=None).axis(labelAngle=0, ticks=False)
    y = alt.Y("p:Q", title="probability").axis(grid=False).scale(domain=[0, 0.75])
    base = alt.Chart(rounded(frame)).encode(x, y)
    columns = base.mark_bar(color=PALETTE[0]).properties(width=120, height=180)
    numbers = base.mark_text(dy=-8).encode(text=alt.Text("p:Q", format=".2f"))
    column = alt.Column("temperature:N", sort=list(table), title=None).header(labelFontSize=13)
    return titled(
        alt.layer(columns, numbers).facet(column=column),
        "The lower the temperature, the more the likeliest word gets",
        "The same three probabilities. A low temperature τ spreads them apart, a high one "
        "levels them.",
    )
