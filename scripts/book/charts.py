"""The charts that several chapters draw, and what every chart passes through.

`titled` switches the series' look on. Nothing is drawn before a notebook shows a chart, so a
headless script never draws.

    titled(heatmap(weights, words, words), "Who looks at whom", "Each row sums to 1.")
"""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from scripts import Late
from scripts.book.look import INK, PALE, PALETTE, bar_axis, colored, escaped, switch_on

alt, pd = Late("altair"), Late("pandas")


def titled(chart: alt.TopLevelMixin, title: str, caption: str, wrap: int = 88) -> alt.TopLevelMixin:
    """The chart with its title and, below it, a caption that says what to see.

    `wrap` is the caption's width in characters. Every chart of the series goes through here.

    >>> titled(lines(frame, "step", "loss"), "The loss falls", "Fast first, then slowly.")
    """
    switch_on()
    heading = alt.Title(
        title,
        subtitle=textwrap.wrap(caption, wrap),
        anchor="start",
        fontSize=16,
        subtitleFontSize=13,
        subtitlePadding=5,
        offset=14,
    )
    return chart.properties(title=heading)


def rounded(frame: pd.DataFrame, digits: int = 4) -> pd.DataFrame:
    """A copy with `digits` significant digits in float columns: the same JSON on every machine.

    What is smaller than a billionth of its column's largest value is noise, and becomes 0.

    >>> rounded(pd.DataFrame({"p": [0.123456, 1e-17]}))["p"].tolist()
    [0.1235, 0.0]
    """
    frame = frame.copy()
    for name in frame.select_dtypes("floating"):
        values = frame[name].astype("float64")
        finite = values[np.isfinite(values)]
        floor = finite.abs().max() * 1e-9 if len(finite) else 0.0
        short = [0.0 if abs(v) <= floor else float(f"{v:.{digits}g}") for v in values]
        frame[name] = short
    return frame


def long(table: Mapping[Any, Mapping[Any, Any]], *columns: str) -> pd.DataFrame:
    """A row for each value of a table of tables; `columns` name outer key, inner key and value.

    >>> long({"mini": {1: 3.2, 2: 2.8}}, "model", "epoch", "loss")
    """
    rows = [(outer, inner, value) for outer, row in table.items() for inner, value in row.items()]
    return pd.DataFrame(rows, columns=columns)


def named(charts: Mapping[str, alt.TopLevelMixin]) -> list[alt.TopLevelMixin]:
    """Charts with their names above them, to be set side by side."""
    return [chart.properties(title=name) for name, chart in charts.items()]


def heatmap(
    matrix,
    rows: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    *,
    row_title: str = "",
    column_title: str = "",
    value_title: str = "",
    scheme: str = "sequential",
    domain: Sequence[float] | None = None,
    numbers: bool | None = None,
    digits: int = 2,
    cell: int | tuple[int, int] | None = None,
    words: tuple[str, str] = ("allowed", "hidden"),
    texts: Sequence[Sequence[str]] | None = None,
) -> alt.LayerChart:
    """A matrix as coloured cells, row 0 on top; labels may repeat, and each keeps its own place.

    `matrix` is (rows, columns): numbers, where NaN and infinities show as grey cells, or booleans,
    whose two colours are named by `words`. Without `rows` or `columns` the positions are shown.
    `scheme` is "sequential" (pale to dark blue) or "diverging" (brown, white at 0, blue above).
    `numbers` writes each value into its cell (by default if there are at most 12 × 12), `texts`
    (rows, columns) other words; `domain` fixes the colours' ends; `cell` is a cell's side in
    pixels, or its width and height.

    >>> heatmap([[0.9, 0.1], [0.3, 0.7]], ["the", "dog"], ["der", "Hund"], value_title="weight")
    """
    array = np.asarray(matrix.detach().cpu() if hasattr(matrix, "detach") else matrix)
    height, width = array.shape
    cell = cell or max(4, min(42, 460 // max(height, width)))
    across, down = cell if isinstance(cell, tuple) else (cell, cell)

    row, column = np.indices(array.shape)
    frame = pd.DataFrame({"row": row.ravel(), "column": column.ravel()})
    if rows is not None:
        frame["from"] = np.repeat([str(label) for label in rows], width)
    if columns is not None:
        frame["to"] = np.tile([str(label) for label in columns], height)
    chart = alt.Chart().encode(
        x=alt.X("column:O", axis=_cell_axis(columns, width, column_title, across, flat=True)),
        y=alt.Y("row:O", axis=_cell_axis(rows, height, row_title, down, flat=False)),
        tooltip=[*frame.columns.intersection(["from", "to"]), "row", "column", "value"],
    )
    edge = {"stroke": "white", "strokeWidth": 1} if down >= 12 else {}
    cells = chart.mark_rect(**edge)
    size = {"width": width * across, "height": height * down}
    legend = alt.Legend(title=value_title or None)
    if array.dtype == bool:
        frame["value"] = np.where(array.ravel(), *words)
        two_colors = dict(zip(words, (PALETTE[0], PALE), strict=True))
        mask = cells.encode(color=colored("value", two_colors, legend=legend))
        return alt.layer(mask, data=frame).properties(**size)

    frame = rounded(frame.assign(value=array.ravel().astype("float64")))
    finite = frame["value"][np.isfinite(frame["value"])]
    low, high = domain or (finite.min(), finite.max())
    diverging = scheme == "diverging"
    if diverging and not domain:
        low, high = -max(abs(low), abs(high)), max(abs(low), abs(high))
    colors = {"sequential": "heatmap", "diverging": "diverging"}[scheme]
    scale = alt.Scale(range=colors, domain=[float(low), float(high)], clamp=True)
    legend.gradientLength = max(60, min(180, height * down))
    layers = [cells.encode(color=alt.Color("value:Q", scale=scale, legend=legend))]
    if len(finite) < len(frame):  # the layer above leaves these cells out
        layers.append(chart.mark_rect(color=PALE, **edge).transform_filter("!isValid(datum.value)"))
    if texts is not None:
        frame["text"] = [text for line in texts for text in line]
    elif numbers or (numbers is None and max(height, width) <= 12):
        frame["text"] = [_cell_text(value, digits) for value in frame["value"]]
    if "text" in frame:
        limit = 0.7 * high if diverging else low + 0.66 * (high - low)
        value = "abs(datum.value)" if diverging else "datum.value"
        dark = f"isValid(datum.value) && {value} > {limit:.6g}"
        ink = alt.when(dark).then(alt.value("white")).otherwise(alt.value(INK))
        written = chart.mark_text(fontSize=12 if across >= 34 else 10)
        layers.append(written.encode(text="text:N", color=ink))
    return alt.layer(*layers, data=frame).properties(**size)


def panels(
    matrices: Mapping[str, Any],
    rows: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    *,
    per_line: int = 4,
    row_title: str = "who looks (query)",
    column_title: str = "at whom (key)",
    cell: int = 30,
    **look: Any,
) -> alt.ConcatChart:
    """Matrices of one shape side by side, each under its name, all on one colour scale from 0.

    The first panel of each line has the rows' labels and title. `look` is for `heatmap`.

    >>> panels({"head 1": weights[0], "head 2": weights[1]}, words, words, value_title="weight")
    """
    arrays = {name: np.asarray(matrix) for name, matrix in matrices.items()}
    if not any(array.dtype == bool for array in arrays.values()):
        look.setdefault("domain", (0, max(float(np.nanmax(a)) for a in arrays.values())))
    drawn = []
    for i, (name, array) in enumerate(arrays.items()):
        first = i % per_line == 0
        titles = {"row_title": row_title if first else "", "column_title": column_title}
        chart = heatmap(array, rows, columns, cell=cell, **titles, **look)
        for layer in [] if first or rows is None else chart.layer:
            layer.encoding.y["axis"].labels = False
        drawn.append(chart.properties(title=alt.Title(name, fontSize=13)))
    return alt.concat(*drawn, columns=per_line, spacing=15)


def _cell_text(value: float, digits: int) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "−∞" if value < 0 else "∞"
    return f"{value:.{digits}f}".replace("-", "−")


def _cell_axis(labels, size: int, title: str, cell: int, flat: bool) -> alt.Axis:
    """An axis of positions whose labels are looked up, so that equal labels stay apart."""
    look = {"title": title or None, "ticks": False, "domain": False, "labelPadding": 6}
    if labels is None:
        step = max(1, math.ceil(size / 10))
        return alt.Axis(values=list(range(0, size, step)), labelAngle=0, **look)
    names = [str(label) for label in labels]
    crowded = flat and max(map(len, names)) * 7 > cell - 4
    angle = {"labelAngle": -40, "labelAlign": "right"} if crowded else {"labelAngle": 0}
    lookup = json.dumps(names, ensure_ascii=False) + "[datum.value]"
    return alt.Axis(labelExpr=lookup, labelOverlap=False, **angle, **look)


def lines(
    frame: pd.DataFrame,
    x: str,
    y: str,
    color: str | None = None,
    *,
    x_title: str | None = None,
    y_title: str | None = None,
    zero: bool = False,
    points: bool = False,
    width: int = 480,
    height: int = 260,
) -> alt.Chart:
    """Curves of column `y` over column `x`, one for each value of column `color`.

    The legend lists the curves in the frame's order. `points` marks the measured places; `zero`
    makes the y axis begin at 0. Titles default to the columns' names.

    >>> lines(history, "epoch", "BLEU", "model", points=True)
    """
    used = frame[[name for name in (x, y, color) if name]]
    encoding = {
        "x": alt.X(f"{escaped(x)}:Q", title=x_title or x, scale=alt.Scale(zero=False)),
        "y": alt.Y(f"{escaped(y)}:Q", title=y_title or y, scale=alt.Scale(zero=zero)),
    }
    if color:
        order = [str(name) for name in used[color].unique()]
        used = used.assign(**{color: used[color].astype(str)})
        legend = alt.Legend(title=None, symbolType="stroke", symbolSize=300)
        encoding["color"] = alt.Color(f"{escaped(color)}:N", sort=order, legend=legend)
    mark = {} if color else {"color": PALETTE[0]}
    if points:
        mark["point"] = {"filled": True, "size": 45} | mark
    chart = alt.Chart(rounded(used)).mark_line(**mark).encode(**encoding)
    return chart.properties(width=width, height=height)


def bars(
    frame: pd.DataFrame,
    label: str,
    value: str,
    *,
    value_title: str | None = None,
    number_format: str = ".3~g",
    color: str | None = None,
    end: float | None = None,
) -> alt.LayerChart:
    """Horizontal bars in the frame's order, each with its number at the end.

    `label` and `value` (0 or more) name columns; so does `color`, if the bars fall into groups.
    The axis ends at `end`, or a bit beyond the longest bar.

    >>> bars(pd.DataFrame({"batching": ["naive", "bucketed"], "padding": [0.31, 0.05]}),
    ...      "batching", "padding", number_format=".0%")
    """
    used = rounded(frame[list(dict.fromkeys(name for name in (label, value, color) if name))])
    end = end or float(used[value].max()) * 1.15  # room for the number beside the longest bar
    x = alt.X(f"{escaped(value)}:Q", title=value_title or value).scale(domain=[0, end], nice=False)
    x = x.axis(format=number_format, tickCount=5, grid=False)
    base = alt.Chart(used).encode(x, bar_axis(label))
    fill = {"color": alt.Color(f"{escaped(color)}:N", sort=None, title=None)} if color else {}
    numbers = base.mark_text(align="left", dx=5)
    numbers = numbers.encode(text=alt.Text(f"{escaped(value)}:Q", format=number_format))
    drawn = alt.layer(base.mark_bar(color=PALETTE[0]).encode(**fill), numbers)
    return drawn.properties(width=400, height=alt.Step(30))
