"""Drawings of the parts since 2017."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from scripts import Late
from scripts.book.charts import LOG, lines, long, titled

alt, pd = Late("altair"), Late("pandas")


def gates_chart(z: Tensor, curves: Mapping[str, Tensor]) -> alt.TopLevelMixin:
    """What each function makes of z."""
    frame = pd.DataFrame({"z": z.numpy(), **{name: y.numpy() for name, y in curves.items()}})
    frame = frame.melt("z", var_name="function", value_name="y")
    chart = lines(frame, "z", "y", "function", y_title="what becomes of z", height=200)
    dashed = alt.condition("datum.function == 'ReLU'", alt.value([6, 4]), alt.value([1, 0]))
    return titled(
        chart.encode(strokeDash=dashed),
        "What each lets through",
        "ReLU's slope jumps at 0. SiLU dips to −0.28 and has a slope nearly everywhere; ReLU² "
        "begins flat and grows faster than its input. SwiGLU multiplies SiLU's curve by a second "
        "map, which one axis can't show.",
    )


def sharpness_chart(frame: pd.DataFrame) -> alt.TopLevelMixin:
    """The largest attention weight as the weights of query and key are multiplied."""
    titles = {"x_title": "query's and key's weights, times", "y_title": "largest weight"}
    look = {"points": True, "zero": True, "log_x": True, "height": 220}
    chart = lines(frame, "times", "weight", "attention", **titles, **look)
    times = sorted(set(frame["times"]))
    chart.encoding.x.scale = alt.Scale(domain=[times[0], times[-1]], **LOG)
    chart.encoding.x.axis = alt.Axis(values=times)
    return titled(
        chart,
        "QK-norm keeps attention as soft as it was",
        "The largest weight of each of 32 random words, averaged, as the query's and key's weights "
        "grow. Without a norm softmax settles on one word; with it the weights' size can't "
        "sharpen it (their directions can, up to the bound).",
    )


def spectrum_chart(values: Mapping[str, Tensor]) -> alt.TopLevelMixin:
    """Singular values of several matrices, in order."""
    table = {name: dict(enumerate(own.tolist(), start=1)) for name, own in values.items()}
    frame = long(table, "matrix", "direction", "singular value")
    return titled(
        lines(frame, "direction", "singular value", "matrix", zero=True, height=220),
        "Nearly equal steps, from very unequal ones",
        "Singular values of a real gradient, divided by the largest, and of the step made from it. "
        "(The last was almost 0.)",
    )
