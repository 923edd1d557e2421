"""Drawings of chapter 7: merges, what a vocabulary costs, padding, shifted lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from scripts import Late
from scripts.book.charts import heatmap, lines, long, named, rounded
from scripts.book.look import GREY, PALETTE, bar_axis, colored

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
    width, height = max(480, 44 * len(steps[0])), 36 * (last + 1)
    x = alt.X("x:Q", axis=None).scale(domain=[-0.6, len(steps[0]) - 0.4], nice=False)
    y = alt.Y("y:Q", title="merge number").scale(domain=[-0.7, last + 0.7], nice=False)
    y = y.axis(values=list(range(last + 1)), format="d", grid=False, domain=False, ticks=False)
    base = alt.Chart(frame).transform_filter("datum.merge <= merges").encode(x, y)
    kinds = {"a final piece": PALETTE[0], "joined further": GREY}
    color = colored("kind", kinds).legend(title=None, orient="top")
    lines = base.mark_rule(color=GREY, aria=False).encode(x2="to x:Q", y2="to y:Q")
    words = base.transform_filter("datum.piece != ''")
    layers = [lines, words.mark_circle(size=50, opacity=1, aria=False).encode(color)]
    for row, dy in (("datum.y > 0", -12), ("datum.y == 0", 15)):  # letters stand below
        text = words.transform_filter(row).encode(text="piece:N")
        layers.append(text.mark_text(dy=dy, fontSize=13, stroke="white", strokeWidth=4))
        layers.append(text.mark_text(dy=dy, fontSize=13).encode(color))
    return alt.layer(*layers).properties(width=width, height=height).add_params(slider)


def shift_curve(curves: Mapping[str, Mapping[int, float]]) -> alt.Chart:
    """A curve for each pairing of two files: how lengths correlate, over the first line."""
    frame = long(curves, "pairs", "first line", "correlation")
    y = alt.Y("correlation:Q").scale(domain=[-0.25, 1], nice=False).axis(tickCount=5)
    return lines(frame, "first line", "correlation", "pairs", points=True).encode(y)


def two_batches(masks: Mapping[str, Any]) -> alt.HConcatChart:
    """Batches side by side, (rows, width) booleans each: tokens dark, padding pale."""
    look = {"cell": 10, "column_title": "position", "words": ("token", "padding")}
    panels = {name: heatmap(mask, [""] * len(mask), **look) for name, mask in masks.items()}
    return alt.hconcat(*named(panels), spacing=30)


def vocabulary_costs(
    tokens: Mapping[str, Mapping[str, float]],
    operations: Mapping[str, float],
    generator: Mapping[str, float],
) -> alt.LayerChart:
    """For each V a bar of `operations`, in millions, of which `generator` is a part.

    `tokens` holds the pieces of a sentence in each language; all are by V.
    """
    rows = []
    for v, total in operations.items():
        pieces = " + ".join(f"{by_v[v]:.1f}" for by_v in tokens.values())
        for part, cost in (("layers", total - generator[v]), ("the generator", generator[v])):
            rows.append((f"V = {int(v):,}: {pieces} pieces", part, cost, total))
    frame = rounded(pd.DataFrame(rows, columns=["V", "part", "cost", "total"]))
    base = alt.Chart(frame).encode(bar_axis("V"))
    x = alt.X("cost:Q", title="million operations").scale(domain=[0, 300])
    color = colored("part", {"layers": PALETTE[0], "the generator": PALETTE[1]}).legend(title=None)
    totals = base.transform_filter("datum.part == 'layers'").mark_text(align="left", dx=6)
    totals = totals.encode(x="total:Q", text=alt.Text("total:Q", format=".0f"))
    drawn = alt.layer(base.mark_bar().encode(x, color, order="part:O"), totals)
    return drawn.properties(width=400, height=alt.Step(30))
