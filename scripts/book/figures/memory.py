"""Chapter 23's drawings: what a layer keeps, how far windows reach, what a state can hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from scripts import Late
from scripts.book.charts import LOG, lines, long, panels, titled

alt = Late("altair")


def cache_growth_chart(lengths: Sequence[int], mib: Mapping[str, Sequence[float]]) -> alt.Chart:
    """What a layer keeps, a curve for each kind: MiB after so many tokens."""
    table = {kind: dict(zip(lengths, sizes, strict=True)) for kind, sizes in mib.items()}
    frame = long(table, "kind", "tokens", "MiB")
    names = {"x_title": "tokens read", "y_title": "kept by one layer, MiB"}
    chart = lines(frame, "tokens", "MiB", "kind", zero=True, **names)
    chart.encoding.x.scale = alt.Scale(domain=[0, lengths[-1]], nice=False)
    chart.encoding.x.axis = alt.Axis(tickCount=5, format=",d")
    return titled(
        chart,
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
    names = {"x_title": "pairs written", "y_title": "relative error of what is read"}
    chart = lines(frame, "pairs", "error", "memory", zero=True, points=True, **names)
    pairs = sorted(recalled)
    chart.encoding.x.scale = alt.Scale(domain=[0, pairs[-1]], nice=False)
    chart.encoding.x.axis = alt.Axis(values=pairs)
    return titled(
        chart,
        "A small memory fills up",
        "Pairs of random keys and values in 16 dimensions, all read back; means of 20 draws. "
        "A state has 16 × 16 numbers, however many pairs come. The best one holds 16 pairs; both "
        "rules fail earlier. Softmax keeps every pair, and must be sharp to find it.",
    )


def kept_for_backward_chart(mib: Mapping[str, Mapping[int, float]]) -> alt.Chart:
    """MiB that autograd keeps over the length, a curve for each way to compute attention."""
    frame = long(mib, "way", "n", "MiB")
    names = {"x_title": "length", "y_title": "kept for backward, MiB"}
    chart = lines(frame, "n", "MiB", "way", log_x=True, log_y=True, points=True, **names)
    lengths = sorted(frame["n"].unique().tolist())
    chart.encoding.x.scale = alt.Scale(domain=[lengths[0], lengths[-1]], **LOG)
    chart.encoding.x.axis = alt.Axis(values=lengths, format=",d")
    return titled(
        chart,
        "The matrix that is never stored",
        "Causal attention with 8 heads of 64, float32. The textbook keeps the T × T weights for "
        "the way back. With tiles only q, k, v, the outputs and one number a query remain. "
        "Both axes are logarithmic.",
    )
