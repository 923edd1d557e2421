"""Drawings of chapter 7: merges, vocabularies, padding, shifted lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from scripts import Late
from scripts.book.charts import bars, heatmap, lines, long, named
from scripts.book.look import GREY, PALETTE, colored

alt, pd = Late("altair"), Late("pandas")


def merge_tree(steps: Sequence[Sequence[str]]) -> alt.LayerChart:
    """How letters become pieces: `steps` are the pieces after each merge. A slider plays them."""
    steps = [[piece.replace("▁", "_") for piece in pieces] for pieces in steps]  # in the same font
    places = [(float(i), 0) for i in range(len(steps[0]))]  # of the pieces so far: x, merge
    nodes = [(piece, x, 0, 0, x, 0) for piece, (x, _) in zip(steps[0], places, strict=True)]
    for number, (before, after) in enumerate(pairwise(steps), 1):
        i = next(i for i, piece in enumerate(after) if piece != before[i])
        middle = (places[i][0] + places[i + 1][0]) / 2
        nodes += [("", *child, number, middle, number) for child in places[i : i + 2]]
        nodes.append((after[i], middle, number, number, middle, number))
        places[i : i + 2] = [(middle, number)]
    last = len(steps) - 1
    frame = pd.DataFrame(nodes, columns=["piece", "x", "y", "merge", "to x", "to y"])
    frame["kind"] = ["a final piece" if (x, y) in places else "joined further"
                     for x, y in zip(frame["x"], frame["y"], strict=True)]  # fmt: skip
    bind = alt.binding_range(min=0, max=last, step=1, name="merges ")
    slider = alt.param(name="merges", value=last, bind=bind)
    width, height = max(260, 44 * len(steps[0])), 36 * (last + 1)
    x = alt.X("x:Q", axis=None).scale(domain=[-0.6, len(steps[0]) - 0.4], nice=False)
    y = alt.Y("y:Q", title="merge").scale(domain=[-0.7, last + 0.7], nice=False)
    y = y.axis(values=list(range(last + 1)), format="d", grid=False, domain=False, ticks=False)
    base = alt.Chart(frame).transform_filter("datum.merge <= merges").encode(x, y)
    kinds = {"a final piece": PALETTE[0], "joined further": GREY}
    color = colored("kind", kinds).legend(title=None, orient="top")
    lines = base.mark_rule(color=GREY, aria=False).encode(x2="to x:Q", y2="to y:Q")
    words = base.transform_filter("datum.piece != ''")
    layers = [lines, words.mark_circle(size=50, opacity=1, aria=False).encode(color)]
    for row, dy in (("datum.y > 0", -12), ("datum.y == 0", 14)):  # letters stand below
        text = words.transform_filter(row).mark_text(dy=dy, fontSize=13)
        layers.append(text.encode(color, text="piece:N"))
    return alt.layer(*layers).properties(width=width, height=height).add_params(slider)


def shift_curve(curves: Mapping[str, Mapping[int, float]]) -> alt.Chart:
    """A curve for each way to read two files: how lengths correlate, over the first line."""
    frame = long(curves, "lines by", "first line", "correlation")
    y = alt.Y("correlation:Q").scale(domain=[-0.25, 1], nice=False).axis(tickCount=5)
    return lines(frame, "first line", "correlation", "lines by", points=True).encode(y)


def two_batches(masks: Mapping[str, Any]) -> alt.HConcatChart:
    """Batches side by side, (rows, width) booleans each: tokens dark, padding pale."""
    look = {"row_title": "sentence", "column_title": "position", "words": ("token", "padding")}
    panels = {name: heatmap(mask, cell=10, **look) for name, mask in masks.items()}
    return alt.hconcat(*named(panels), spacing=30)


def padding_bars(table: Mapping[str, float]) -> alt.LayerChart:
    """The share of padding for each way to make batches."""
    frame = pd.DataFrame(table.items(), columns=["batches", "padding"])
    look = {"value_title": "share of the batch that is padding", "number_format": ".0%"}
    return bars(frame, "batches", "padding", end=1.0, **look)
