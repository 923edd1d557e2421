"""Chapter 7's drawings: lengths of captions, and what padding fills."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from scripts import Late
from scripts.book.charts import bars, heatmap, lines, long, named

alt, pd = Late("altair"), Late("pandas")


def length_curves(shares: Mapping[str, Mapping[str, float]]) -> alt.Chart:
    """A curve for each language: the share of captions over their number of words."""
    frame = long(shares, "language", "words", "share").astype({"words": int})
    names = {"x_title": "words in a caption", "y_title": "share of training captions"}
    chart = lines(frame, "words", "share", "language", zero=True, **names)
    chart.encoding.y.axis = alt.Axis(format=".0%", tickCount=5)
    return chart


def size_curves(frame: pd.DataFrame) -> alt.Chart:
    """Tokens per sentence over the vocabulary's size: a curve for each value of "text"."""
    names = {"x_title": "entries in the vocabulary (V)", "y_title": "tokens per test sentence"}
    chart = lines(frame, "V", "tokens", "text", log_x=True, zero=True, points=True, **names)
    chart.encoding.x.scale = alt.Scale(type="log", domain=[100, 10_000])
    chart.encoding.x.axis = alt.Axis(values=[125, 250, 500, 1000, 2000, 4000, 8000])
    chart.encoding.y.axis = alt.Axis(tickCount=5)
    return chart


def two_batches(masks: Mapping[str, Any]) -> alt.HConcatChart:
    """Batches side by side, (rows, width) booleans each: tokens dark, padding pale."""
    look = {"row_title": "sentence", "column_title": "position", "words": ("token", "padding")}
    panels = {name: heatmap(mask, cell=10, **look) for name, mask in masks.items()}
    return alt.hconcat(*named(panels), spacing=30)


def padding_bars(tables: Mapping[str, Mapping[str, float]]) -> alt.VConcatChart:
    """A panel of bars for each corpus: the share of padding for each way to make batches."""
    look = {"value_title": "share of the batch that is padding", "number_format": ".0%"}
    panels = {}
    for corpus, table in tables.items():
        frame = pd.DataFrame(table.items(), columns=["batches", "padding"])
        panels[corpus] = bars(frame, "batches", "padding", end=1.0, **look)  # one scale for all
    return alt.vconcat(*named(panels), spacing=24)
