"""Drawings of part V: long memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from scripts import Late
from scripts.book.charts import lines, long, panels, titled
from scripts.book.look import LOG

alt, pd = Late("altair"), Late("pandas")


def cache_growth_chart(lengths: Sequence[int], mib: Mapping[str, Sequence[float]]) -> alt.Chart:
    """What a layer keeps, a curve for each kind: MiB after so many tokens."""
    table = {kind: dict(zip(lengths, sizes, strict=True)) for kind, sizes in mib.items()}
    frame = long(table, "kind", "tokens", "MiB")
    chart = lines(frame, "tokens", "MiB", "kind", zero=True, y_title="kept by one layer, MiB")
    x = alt.X("tokens:Q", title="tokens read").scale(domain=[0, lengths[-1]], nice=False)
    return titled(
        chart.encode(x.axis(tickCount=5, format=",d")),
        "What one layer keeps while it reads",
        "8 heads of 64 at two bytes a number; 2 groups, latents of 256 + 32, a window of 1,024. "
        "Three of them grow with the text, at different slopes. A window stops growing when it is "
        "full, and a state never grows. Other sizes would give another order.",
    )


def reach_chart(reaches: Mapping[str, Tensor]) -> alt.ConcatChart:
    """Panels of (T, T) booleans: which inputs (columns) reach which outputs (rows)."""
    look = {"row_title": "output", "column_title": "input", "cell": 15}
    return titled(
        panels(reaches, words=("reaches", "does not"), **look),
        "What can reach what",
        "Which inputs have a gradient at which outputs, causal, window of 3. Each layer of windows "
        "reaches two words farther; one global layer reaches all.",
    )


def recall_chart(recalled: Mapping[int, Mapping[str, float]]) -> alt.Chart:
    """Error of what is read back over the number of pairs, a curve for each memory."""
    frame = long(recalled, "pairs", "memory", "error")
    look = {"y_title": "relative error of what is read", "zero": True, "points": True}
    chart = lines(frame, "pairs", "error", "memory", **look)
    x = alt.X("pairs:Q", title="pairs written").axis(values=sorted(recalled))
    return titled(
        chart.encode(x.scale(domain=[0, max(recalled)], nice=False)),
        "A small memory fills up",
        "Pairs of random keys and values in 16 dimensions, all read back; means of 20 draws. "
        "A state has 16 × 16 numbers, however many pairs come. The best one holds 16 pairs; both "
        "rules fail earlier. Softmax keeps every pair, and must be sharp to find it.",
    )


def kept_for_backward_chart(mib: Mapping[str, Mapping[int, float]]) -> alt.Chart:
    """MiB that autograd keeps over the length, a curve for each way to compute attention."""
    frame = long(mib, "way", "n", "MiB")
    lengths = sorted(frame["n"].unique().tolist())
    x = alt.X("n:Q", title="length").scale(domain=[lengths[0], lengths[-1]], **LOG)
    y = alt.Y("MiB:Q", title="kept for backward, MiB").scale(type="log")
    chart = lines(frame, "n", "MiB", "way", points=True)
    return titled(
        chart.encode(x.axis(values=lengths, format=",d"), y),
        "The matrix that is never stored",
        "Causal attention with 8 heads of 64, float32. The textbook keeps the T × T weights for "
        "the way back. With tiles only q, k, v, the outputs and one number a query remain. "
        "Both axes are logarithmic.",
    )
