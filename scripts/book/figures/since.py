"""Drawings of the parts since 2017, and of the record of their study."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from scripts import Late
from scripts.book.charts import PALETTE, lines, rounded, titled

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
    chart.encoding.x.scale = alt.Scale(type="log", domain=[times[0], times[-1]], nice=False)
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
    rows = [
        {"direction": i, "singular value": y, "matrix": name}
        for name, found in values.items()
        for i, y in enumerate(found.tolist(), start=1)
    ]
    return titled(
        lines(pd.DataFrame(rows), "direction", "singular value", "matrix", zero=True, height=220),
        "Nearly equal steps, from very unequal ones",
        "Singular values of a real gradient, divided by the largest, and of the step made of it. "
        "(The very last was almost 0.)",
    )


def parts_frame(record: dict[str, Any]) -> pd.DataFrame:
    """A line for each recorded run: the row, its seed, validation BLEU and perplexity."""
    return pd.DataFrame(
        [
            {
                "row": name,
                "seed": run["seed"],
                "BLEU": run["bleu"]["val"],
                "perplexity": run["val_ppl"],
            }
            for name, row in record["rows"].items()
            for run in row["runs"]
        ]
    )


def parts_chart(
    record: dict[str, Any], rows: Sequence[str], told: Collection[str]
) -> alt.TopLevelMixin:
    """Validation BLEU of every run of `rows`; the band spans the runs of 2017's model.

    The rows in `told` are marked as those that differ from 2017 by more than seeds do.
    """
    frame = parts_frame(record)
    frame = frame[frame["row"].isin(list(rows))]
    kinds = ["2017", "told apart from it", "not told apart"]
    frame["kind"] = [kinds[0 if r == "2017" else 1 if r in told else 2] for r in frame["row"]]
    own = frame.loc[frame["row"] == "2017", "BLEU"]
    x = {
        "scale": alt.Scale(
            domain=[math.floor(frame["BLEU"].min() - 0.5), math.ceil(frame["BLEU"].max() + 0.5)],
            nice=False,
            zero=False,
        ),
        "title": "validation BLEU (greedy)",
        "axis": alt.Axis(tickCount=6),
    }
    band = alt.Chart(rounded(pd.DataFrame({"low": [own.min()], "high": [own.max()]})))
    band = band.mark_rect(color=PALETTE[0], opacity=0.25)
    band = band.encode(x=alt.X("low:Q", **x), x2="high:Q")
    legend = alt.Legend(title=None, orient="top", symbolSize=90)
    color = alt.Color("kind:N", sort=kinds, legend=legend)
    shape = alt.Shape("kind:N", sort=kinds, legend=legend)
    dots = alt.Chart(rounded(frame)).mark_point(size=80, filled=True, opacity=0.85)
    dots = dots.encode(
        x=alt.X("BLEU:Q", **x),
        y=alt.Y(
            "row:N",
            sort=list(rows),
            title=None,
            axis=alt.Axis(grid=True, domain=False, ticks=False),
        ),
        color=color.scale(domain=kinds, range=[*PALETTE[:2], PALETTE[-1]]),
        shape=shape.scale(domain=kinds, range=["circle", "diamond", "circle"]),
        tooltip=["row", "seed", "BLEU", "perplexity"],
    )
    return titled(
        alt.layer(band, dots).properties(width=440, height=26 * len(rows)),
        "One part exchanged at a time, at one learning rate",
        "Each point is a run; the band spans 2017's own seeds. One run outside it is no proof: "
        f"{len(record['rows']) - 1} rows get as many chances, and told apart means by the tests of "
        "all together. The rows not shown belong to chapters 23 and 24 and Exercise 3. Two layers "
        f"of width {record['config']['d_model']}, {record['config']['epochs']} epochs; greedy "
        "decoding, as the study does.",
        wrap=78,
    )
