"""The series' one look: colours, the theme, how a chart is shown, and the axes of names.

A chart shows as Vega-Lite JSON (drawn by JupyterLab, compared by nbval) and as a PNG (shown on
GitHub) in one output.
"""

from __future__ import annotations

import functools
import io
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from scripts import Late

alt = Late("altair")  # a training imports chapters, but draws nothing

# Okabe and Ito's colours without the yellow: distinct to colour-blind eyes, and legible on white.
PALETTE = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#444444"]
SEQUENTIAL = ["#F7FBFF", "#C6DBEF", "#6BAED6", "#2171B5", "#08306B"]
DIVERGING = ["#7F3B08", "#E08214", "#FDD9AE", "#F7F7F7", "#B5D5EA", "#4393C3", "#053061"]
INK, GREY, PALE = "#222222", "#666666", "#E4E4E4"
VEGALITE = "application/vnd.vegalite.v5+json"  # what JupyterLab draws and nbformat accepts
LOG = {"type": "log", "nice": False}  # a logarithmic scale whose ends are given
PNG_BYTES = 150_000  # a sharp picture larger than this gives way to a plain one


def series_theme() -> alt.theme.ThemeConfig:
    """Sizes for a notebook about 700 pixels wide."""
    axis = {"labelFontSize": 12, "titleFontSize": 13, "titleFontWeight": "normal"}
    quiet = {"domainColor": GREY, "tickColor": GREY, "gridColor": PALE, "titlePadding": 8}
    legend = {"labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": "normal"}
    colors = {"labelColor": INK, "titleColor": INK}
    return {
        "config": {
            "background": "white",
            "font": "Helvetica, Arial, sans-serif",
            "title": {"anchor": "start", "color": INK, "fontSize": 13, "subtitleColor": GREY},
            "axis": axis | quiet | colors | {"labelLimit": 240},
            "legend": legend | colors | {"labelLimit": 260, "symbolStrokeWidth": 3},
            "header": legend | colors,
            "range": {"category": PALETTE, "heatmap": SEQUENTIAL, "diverging": DIVERGING},
            "view": {"continuousWidth": 480, "continuousHeight": 260, "stroke": None},
            "line": {"strokeWidth": 2.5},
            "text": {"fontSize": 12, "color": INK},
        }
    }


def json_and_png(spec: dict, **_) -> tuple[dict, dict]:
    """Altair's renderer hook: a chart as JSON, PNG and a line of text in one output.

    Returns the output's data and its metadata (the picture's size on the page, in pixels).
    """
    import base64

    import vl_convert  # heavy, and needed only when a chart is really shown
    from PIL import Image

    version = ".".join(alt.SCHEMA_VERSION.split(".")[:2])  # "v5.20.1" -> "v5.20"
    for scale in (2, 1):
        png = _squeezed(vl_convert.vegalite_to_png(spec, vl_version=version, scale=scale))
        if len(png) <= PNG_BYTES:
            break
    width, height = (pixels // scale for pixels in Image.open(io.BytesIO(png)).size)
    title = spec.get("title", {})
    text = title.get("text", "") if isinstance(title, dict) else title
    data = {
        VEGALITE: spec,
        "image/png": base64.b64encode(png).decode(),
        "text/plain": f"[Chart] {text}".rstrip(),
    }
    return data, {"image/png": {"width": width, "height": height}}


def _squeezed(png: bytes) -> bytes:
    """The picture in at most 256 colours, packed tightly: a tenth of what vl-convert makes.

    A picture that has no more colours keeps each of its pixels.
    """
    from PIL import Image

    packed, picture = io.BytesIO(), Image.open(io.BytesIO(png)).convert("RGB")
    picture = picture.quantize(256, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    picture.save(packed, "PNG", optimize=True)
    return packed.getvalue()


@functools.cache
def switch_on() -> None:
    """The theme, and the renderer: from then on every chart shown has the series' look."""
    alt.theme.register("series", enable=True)(series_theme)
    alt.renderers.register("series", json_and_png)
    if "google.colab" not in sys.modules:  # Colab draws Altair's own output, and not this one
        alt.renderers.enable("series")


def row_axis(column: str, order: Sequence[str] | None = None, **look: Any) -> alt.Y:
    """A line across the chart for each value of `column`, in `order` or in the frame's."""
    y = alt.Y(f"{column}:N", sort=order, title=None)
    return y.axis(grid=True, domain=False, ticks=False, **look)


def bar_axis(column: str, order: Sequence[str] | None = None, **look: Any) -> alt.Y:
    """A bar's name beside it for each value of `column`, in `order` or in the frame's."""
    y = alt.Y(f"{escaped(column)}:N", sort=order, title=None)
    return y.axis(ticks=False, labelPadding=8, **look)


def colored(column: str, colors: Mapping[str, str], **options: Any) -> alt.Color:
    """A colour for each value of `column`; `options` are those of `alt.Color`."""
    scale = alt.Scale(domain=list(colors), range=list(colors.values()))
    return alt.Color(f"{column}:N", scale=scale, **options)


def escaped(name: str) -> str:
    """A column's name as Altair's shorthand wants it: dots and brackets mean nothing special."""
    return re.sub(r"([.\[\]:])", r"\\\1", name)
