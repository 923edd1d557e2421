"""Drawings of chapter 7: the lengths of captions, vocabularies, padding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from scripts import Late
from scripts.book.charts import bars, heatmap, lines, long, named

alt, pd = Late("altair"), Late("pandas")


def length_curves(shares: Mapping[str, Mapping[str, float]]) -> alt.Chart:
    """A curve for each language: the share of captions over their number of words."""
    frame = long(shares, "language", "words", "share").astype({"words": int})
    y = alt.Y("share:Q", title="share of training captions").scale(zero=True)
    chart = lines(frame, "words", "share", "language", x_title="words in a caption")
    return chart.encode(y.axis(format=".0%", tickCount=5))


def size_curves(frame: pd.DataFrame) -> alt.Chart:
    """Tokens per sentence over the vocabulary's size: a curve for each value of "text"."""
    x = alt.X("V:Q", title="entries in the vocabulary (V)").scale(type="log", domain=[100, 10_000])
    x = x.axis(values=[125, 250, 500, 1000, 2000, 4000, 8000])
    y = alt.Y("tokens:Q", title="tokens per test sentence").scale(zero=True).axis(tickCount=5)
    return lines(frame, "V", "tokens", "text", points=True).encode(x, y)


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
