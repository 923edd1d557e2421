"""Drawings of decoding: a beam as a tree, penalties and temperatures."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence

from torch import Tensor

from scripts import Late
from scripts.book.charts import GREY, INK, PALETTE, rounded, titled

alt, pd = Late("altair"), Late("pandas")

STEP = 124  # pixels from one step of a beam's tree to the next


def beam_tree(weighed: pd.DataFrame) -> pd.DataFrame:
    """Where to draw each candidate of a beam by hand: step x and row y, and those of its parent."""
    weighed = weighed.set_index("words")
    children: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for words in weighed.index:
        children.setdefault(words[:-1], []).append(words)
    row, leaves = {}, itertools.count()

    def settle(words: tuple[str, ...]) -> float:
        below = [settle(child) for child in children.get(words, [])]
        row[words] = sum(below) / len(below) if below else float(next(leaves))
        return row[words]

    settle(())
    label = [max(34, 8 * len(words[-2])) + 14 if words[1:] else 0 for words in weighed.index]
    return pd.DataFrame(
        {
            "word": [words[-1] for words in weighed.index],
            "p": [f"{p:.3f}" for p in weighed["p"]],
            "fate": list(weighed["fate"]),
            "x": [len(words) for words in weighed.index],
            "y": [row[words] for words in weighed.index],
            "from x": [  # behind the parent's label
                len(words) - 1 + wide / STEP
                for words, wide in zip(weighed.index, label, strict=True)
            ],
            "from y": [row[words[:-1]] for words in weighed.index],
        }
    )


def beam_tree_chart(tree: pd.DataFrame) -> alt.TopLevelMixin:
    """The candidates of a beam search as a tree that grows to the right."""
    steps = int(tree["x"].max())
    x = alt.X(
        "x:Q", axis=alt.Axis(title="step", values=list(range(1, steps + 1)), format="d", grid=False)
    )
    x = x.scale(domain=[0, steps + 0.5], nice=False)
    y = alt.Y("y:Q", axis=None).scale(
        domain=[-0.7, tree["y"].max() + 0.7], reverse=True, nice=False
    )
    fates = alt.Scale(domain=["kept", "ends", "dropped"], range=[PALETTE[0], PALETTE[2], "#AAAAAA"])
    color = alt.Color(
        "fate:N", scale=fates, legend=alt.Legend(title="the candidate is", orient="top")
    )
    base = alt.Chart(tree).encode(y=y)
    edges = base.mark_rule(strokeWidth=1.5).encode(
        x=alt.X("from x:Q").scale(domain=[0, steps + 0.5], nice=False),
        x2="x:Q",
        y=alt.Y("from y:Q", axis=None),
        y2="y:Q",
        color=color,
    )
    nodes = base.mark_circle(size=70, opacity=1).encode(x=x, color=color)
    looks = {
        "word": {"dy": -6, "fontSize": 13, "fontWeight": "bold"},
        "p": {"dy": 8, "fontSize": 11, "color": GREY},
    }
    labels = [
        base.encode(x=x, text=f"{name}:N").mark_text(align="left", dx=9, **look)
        for name, look in looks.items()
    ]
    drawn = alt.layer(edges, nodes, *labels)
    return titled(
        drawn.properties(width=int(STEP * (steps + 0.5)), height=46 * int(tree["y"].max() + 2)),
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
    columns = [*(f"{i}" for i in range(S)), *(f"{S + i}" for i in range(T))]
    cells, sums = [], []
    for step in range(1, T + 1):
        for i in range(S + step):
            new = i == S + step - 1 or (step == 1 and i < S)
            kind = "computed at this step" if new else "kept from before"
            cells.append({"step": step, "position": columns[i], "keys and values": kind})
        sums.append({"step": step, "kept": f"{(S + step) * kib:g} KiB"})
    labels = [piece.replace("▁", "") or "▁" for piece in (*source, *target)]
    names = f"{json.dumps(labels, ensure_ascii=False)}[toNumber(datum.value)]"
    y = alt.Y("step:O", title="step", axis=alt.Axis(ticks=False, domain=False))
    x = alt.X(
        "position:N",
        sort=columns,
        title=None,
        axis=alt.Axis(labelExpr=names, labelAngle=-60, orient="top", ticks=False, domain=False),
    )
    kinds = alt.Scale(
        domain=["computed at this step", "kept from before"], range=[PALETTE[1], "#BBD7EA"]
    )
    color = alt.Color(
        "keys and values:N", scale=kinds, legend=alt.Legend(title=None, orient="bottom")
    )
    stroke = {"stroke": "white", "strokeWidth": 2}
    grid = alt.Chart(pd.DataFrame(cells)).mark_rect(**stroke).encode(x=x, y=y, color=color)
    edge = alt.Chart(pd.DataFrame({"position": [columns[S]]})).mark_rule(
        color=INK, strokeWidth=2, xOffset=-13
    )
    numbers = alt.Chart(pd.DataFrame(sums)).mark_text(align="left", fontSize=12)
    numbers = numbers.encode(y=y, text="kept:N", x=alt.value(26 * (S + T) + 8))
    drawn = alt.layer(grid, edge.encode(x=x), numbers)
    return titled(
        drawn.properties(width=26 * (S + T), height=26 * T),
        "The source once, then one new position a step",
        "Left of the line: the source; right: what the decoder has read. Each square stands "
        "for a position's keys and values in all layers. At a row's end: what is kept by then.",
        wrap=72,
    )


def temperature_chart(
    by_temperature: Mapping[float, Tensor], words: Sequence[str]
) -> alt.TopLevelMixin:
    """The first word's probabilities at several temperatures, side by side."""
    frame = pd.DataFrame(
        [
            {"word": word, "temperature": f"τ = {t:g}", "p": value}
            for t, p in by_temperature.items()
            for word, value in zip(words, p.tolist(), strict=True)
            if value > 0
        ]
    )
    order = list(dict.fromkeys(frame["word"]))
    titles = list(dict.fromkeys(frame["temperature"]))
    base = alt.Chart(rounded(frame)).encode(
        x=alt.X("word:N", sort=order, title=None, axis=alt.Axis(labelAngle=0, ticks=False)),
        y=alt.Y("p:Q", title="probability", axis=alt.Axis(grid=False)).scale(domain=[0, 0.75]),
    )
    columns = base.mark_bar(color=PALETTE[0]).properties(width=120, height=180)
    numbers = base.mark_text(dy=-8).encode(text=alt.Text("p:Q", format=".2f"))
    drawn = alt.layer(columns, numbers).facet(
        column=alt.Column(
            "temperature:N", sort=titles, title=None, header=alt.Header(labelFontSize=13)
        )
    )
    return titled(
        drawn,
        "The lower the temperature, the more the likeliest word gets",
        "The same three probabilities. A low temperature τ spreads them apart, a high one "
        "levels them.",
    )
