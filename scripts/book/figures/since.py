"""Drawings of chapter 23, long memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from scripts import Late
from scripts.book.charts import lines, long, named, panels, titled
from scripts.book.figures.diagram import Diagram
from scripts.book.look import LOG, PALETTE, colored

alt, pd = Late("altair"), Late("pandas")

MEMORIES = ("softmax", "latent", "window", "linear", "adding", "delta rule")
MEMORY_COLORS = dict(zip(MEMORIES, PALETTE, strict=False))


def cache_growth_chart(
    lengths: Sequence[int], numbers: Mapping[str, Sequence[int]], title: str
) -> alt.Chart:
    """What a layer keeps, a curve for each kind: MiB after so many tokens, two bytes a number."""
    table = {
        kind: {length: 2 * n / 2**20 for length, n in zip(lengths, own, strict=True)}
        for kind, own in numbers.items()
    }
    frame = long(table, "kind", "tokens", "MiB")
    x = alt.X("tokens:Q", title="tokens read").scale(domain=[lengths[0], lengths[-1]], **LOG)
    y = alt.Y("MiB:Q", title="kept by one layer, MiB").scale(domain=[1 / 32, 32], **LOG)
    powers = [1 / 16, 1 / 4, 1, 4, 16]
    chart = lines(frame, "tokens", "MiB", "kind", height=200)
    return titled(
        chart.encode(x.axis(values=list(lengths), format=",d"), y.axis(values=powers, format="~g")),
        title,
        "8 heads of 64, two bytes a number; 2 groups, latents of 256 + 32, a window of 1,024, a "
        "state of 64 × 64 a head. Up to 1,024 tokens the window hides all heads. Both axes are "
        "logarithmic.",
    )


def moved_matrix() -> alt.TopLevelMixin:
    """A score from a latent, the matrix on the key's side and on the query's."""
    diagram = Diagram(640, 150)
    for y, title, middle in ((90, "to train", "key"), (10, "to decode", "moved query")):
        diagram.word(45, y + 21, title, "name")
        fills = ("blue", "orange" if middle == "key" else "blue", "orange")
        for x, name, fill in zip((160, 370, 580), ("query", middle, "latent"), fills, strict=True):
            diagram.box(x, y, name, fill, half=48, height=42)
        made, dot = (475, 265) if middle == "key" else (265, 475)
        way = 50 if middle == "key" else -50
        diagram.arrow((made + way, y + 21), (made - way, y + 21))
        diagram.word(made, y + 33, "W" if middle == "key" else "W, transposed", "name")
        diagram.word(made, y + 8, "for each token" if middle == "key" else "once a query")
        diagram.word(dot, y + 21, "·", "times")
    return titled(
        diagram.chart(),
        "The same score, with the matrix on either side",
        "The dot is the score's dot product. Above, W makes a key from each latent. Below, its "
        "transpose changes the query, and the latents stay as they are kept.",
    )


def reach_chart(reaches: Mapping[str, Tensor], title: str) -> alt.ConcatChart:
    """Panels of (T, T) booleans: which inputs (columns) reach which outputs (rows)."""
    look = {"row_title": "output", "column_title": "input", "cell": 13}
    return titled(
        panels(reaches, words=("reaches", "does not"), **look),
        title,
        "Which inputs can change which outputs: causal, a window of 3.",
    )


def brackets_picture(T: int = 100, d: int = 24) -> alt.TopLevelMixin:
    """The two ways to bracket a product of three matrices, drawn to scale."""
    diagram, above, below = Diagram(640, 2 * T + 78), 1.5 * T + 50, T / 2  # the rows' middles
    names, highs, halves = ("Q", "Kᵀ", "V"), (T, d, T), (d / 2, T / 2, d / 2)
    for start, size, made, heading, (first, second, third) in (
        (50, T, "T × T", "the left bracket", (0, 1, 2)),
        (380, d, "d × d", "the right bracket", (1, 2, 0)),
    ):
        middles = (start, start + d / 2 + 10 + T / 2, start + d + 20 + T)
        diagram.word(middles[1], 2 * T + 68, heading, "name")
        places = [(0, above), (1, above), (2, above), (third, below)]
        for i, y in places:
            diagram.box(middles[i], y - highs[i] / 2, names[i], "blue", halves[i], highs[i])
        x = (middles[first] + middles[second]) / 2
        diagram.box(x, below - size / 2, "", "orange", size / 2, size)
        diagram.word(x if size == T else x + 34, below, made)
        for i, side in ((first, -6), (second, 6)):  # from both factors to what they make
            start_y, end_y = above - highs[i] / 2 - 4, below + size / 2 + 3
            diagram.arrow((middles[i], start_y), (x + side, end_y))
    return titled(
        diagram.chart(),
        "The same product, with a large or a small intermediate result",
        "In orange what is made first, from the two matrices at its arrows. Then the third matrix "
        "is multiplied. The result is the same, as no softmax and no mask stands between.",
    )


def chunks_picture(chunks: int = 4) -> alt.TopLevelMixin:
    """Which part of the T × T triangle is computed inside chunks, and which the state carries."""
    diagram, side = Diagram(640, 52 * chunks + 18), 52
    for row in range(chunks):
        y = side * (chunks - 1 - row)
        for column in range(row + 1):
            inside = row == column
            fill, name = ("blue", "scores") if inside else ("orange", "state")
            diagram.box(30 + side * (column + 0.5), y, name, fill, side / 2 - 1, side - 2)
        diagram.box(400, y + 8, f"chunk {row}", "blue", 50, 34)
        diagram.box(545, y + 8, f"state {row}", "orange", 50, 34)
        diagram.arrow((452, y + 25), (493, y + 25))
        if row:
            diagram.arrow((545, y + side + 8), (545, y + 44))
            diagram.arrow((495, y + side + 14), (452, y + 36))
    diagram.word(30 + side * chunks / 2, 52 * chunks + 10, "queries down, keys across")
    return titled(
        diagram.chart(),
        "Inside a chunk by a triangle, between chunks by the state",
        "A chunk needs its own scores (blue) and the state before it, which stands for all earlier "
        "keys (orange). Then it adds to the state.",
    )


def recall_picture(texts: Mapping[str, Sequence[int]], pairs: int, keys: int) -> alt.TopLevelMixin:
    """Texts of pairs and queries; an arrow leads from each query to its key's last value."""
    diagram, fills = Diagram(640, 138 * len(texts)), ["blue", "orange", "green", "pink"]
    for row, (name, ids) in enumerate(reversed(texts.items())):
        base, wide, told = 138 * row, 620 / len(ids), ids[: 2 * pairs : 2]
        order, last = [*dict.fromkeys(told)], {key: place for place, key in enumerate(told)}
        for place, token in enumerate(ids):
            x, value = 10 + wide * (place + 0.5), token >= keys
            key = ids[place - 1] if value else token
            label = str(token - keys) if value else "abcdefgh"[order.index(key)]
            diagram.box(x, base + 20, label, fills[order.index(key)], wide / 2 - 2, 28)
            if place >= 2 * pairs:
                top, target = base + 62 + 9 * (place - 2 * pairs), 10 + wide * (2 * last[key] + 1.5)
                diagram.arrow((x, base + 49), (x, top), (target, top), (target, base + 51))
        diagram.word(10 + wide * pairs, base + 6, f"pairs: {name}")
        diagram.word(10 + wide * (pairs + len(ids) / 2), base + 6, "queries, in any order")
    return titled(
        diagram.chart(),
        "Each query asks for the last value that its key had",
        "Letters are keys, numbers are values. The model answers at the queries.",
    )


def recall_chart(
    tables: Mapping[str, Mapping[str, Mapping[int, float]]],
    title: str,
    caption: str = "The two controls are dashed.",
) -> alt.TopLevelMixin:
    """A panel for each table: right answers over the keys, a curve for each memory.

    Softmax, which hides another curve, and controls are dashed.
    """
    found = dict.fromkeys(kind for table in tables.values() for kind in table)
    kinds = [kind for kind in MEMORIES if kind in found] or list(found)
    shades = {kind: MEMORY_COLORS.get(kind, PALETTE[i]) for i, kind in enumerate(kinds)}
    frames = {name: long(table, "memory", "pairs", "right") for name, table in tables.items()}
    counts = sorted(set(pd.concat(frames)["pairs"]))
    dashes = [[6, 4] if kind == "softmax" or "," in kind else [1, 0] for kind in kinds]
    dash = alt.StrokeDash("memory:N", title=None).scale(domain=kinds, range=dashes)
    legend = alt.Legend(title=None, symbolType="stroke", symbolSize=300)
    color = colored("memory", shades, legend=legend)
    drawn = {}
    for name, frame in frames.items():
        x = alt.X("pairs:Q", title="keys").scale(domain=[counts[0], counts[-1]], **LOG)
        y = alt.Y("right:Q", title="right answers").scale(domain=[0, 1]).axis(format="%")
        size = {"width": 500 // len(tables), "height": 230}
        chart = lines(frame, "pairs", "right", "memory", points=True, **size)
        drawn[name] = chart.encode(x.axis(values=counts), y, color, dash)
    setting = (
        "Right answers in 16 texts of 512 tokens, means of three seeds, without positions; noisy "
        "at few keys. A guess is right in 2%. "
    )
    return titled(alt.hconcat(*named(drawn)), title, setting + caption)


def rate_chart(shares: Mapping[str, Mapping[float, float]], title: str) -> alt.Chart:
    """Answers over the delta rule's rate, a curve for each kind of text; old values are dashed."""
    frame = long(shares, "keys", "rate", "share")
    chart = lines(frame, "rate", "share", "keys", points=True, x_title="rate β", height=220)
    y = alt.Y("share:Q", title="share of answers").scale(domain=[0, 1]).axis(format="%")
    kinds, shades = [*shares], dict(zip(shares, PALETTE, strict=False))
    shades["16 twice: old"] = shades["16 twice"]
    dashes = [[6, 4] if "old" in kind else [1, 0] for kind in kinds]
    dash = alt.StrokeDash("keys:N", title=None).scale(domain=kinds, range=dashes)
    legend = alt.Legend(title=None, symbolType="stroke", symbolSize=300)
    return titled(
        chart.encode(y, dash, colored("keys", shades, legend=legend)),
        title,
        "Right answers for 16 or 32 keys; dashed, answers with a key's old value. Nothing is "
        "trained: keys and values are random vectors of 16 numbers, of 64 values the nearest to "
        "what is read is the answer. Means of 200 texts.",
    )


def tiles_picture(
    steps: Sequence[Mapping[str, float]], scores: Sequence[Sequence[float]]
) -> alt.TopLevelMixin:
    """One query's scores, tile by tile, and what is kept after each: m, ℓ, how much it shrank."""
    diagram = Diagram(640, 190)
    for number, (tile, step) in enumerate(zip(scores, steps, strict=True)):
        x = 110 + 210 * number
        diagram.box(x, 140, "", "frame", 84, 40)
        for place, score in enumerate(tile):
            at = x - 84 + 168 * (place + 0.5) / len(tile)
            diagram.box(at, 146, f"{score:g}", "blue", 76 / len(tile), 28)
        note = f"m = {step['m']:g}, ℓ = {step['total']:.3f}"
        diagram.box(x, 30, "kept", "orange", 84, 46, note)
        diagram.arrow((x, 138), (x, 80))
        if number:
            diagram.arrow((x - 124, 53), (x - 88, 53))
            diagram.word(x - 105, 66, f"× {step['shrink']:.2f}")
    diagram.word(320, 12, "what is kept of earlier tiles shrinks when the maximum rises")
    return titled(
        diagram.chart(),
        "Of all tiles only a maximum and two sums are kept",
        "One query's scores in tiles of two. m is the largest score so far, ℓ the sum of "
        "exp(score − m). The second sum, a, isn't drawn: it shrinks as ℓ does.",
    )


def kept_for_backward_chart(mib: Mapping[str, Mapping[int, float]], title: str) -> alt.Chart:
    """MiB that autograd keeps over the length, a curve for each way to compute attention."""
    frame = long(mib, "way", "n", "MiB")
    lengths = sorted(frame["n"].unique().tolist())
    x = alt.X("n:Q", title="length").scale(domain=[lengths[0], lengths[-1]], **LOG)
    y = alt.Y("MiB:Q", title="kept for backward, MiB").scale(domain=[1, 500], **LOG)
    chart = lines(frame, "n", "MiB", "way", points=True, height=200)
    chart = chart.encode(x.axis(values=lengths, format=",d"), y.axis(values=[1, 10, 100]))
    ends = chart.transform_filter(alt.datum.n == lengths[-1])
    above = alt.expr(f"datum.way == '{next(iter(mib))}' ? -9 : 15")  # else it hits the next line
    ends = ends.mark_text(align="right", dx=-8, dy=above)
    ends = ends.encode(text=alt.Text("MiB:Q", format=".0f"))
    return titled(
        chart + ends,
        title,
        "Causal attention with 8 heads of 64, float32. Both axes are logarithmic.",
    )
