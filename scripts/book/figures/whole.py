"""Drawings of chapter 4: a layer opened up, and what is lost without a part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from scripts import Late
from scripts.book.charts import heatmap, panels, rounded
from scripts.book.look import GREY, PALETTE, colored, row_axis

alt, pd = Late("altair"), Late("pandas")


STEPS = (
    "1 letter + position",
    "2 LayerNorm of 1",
    "3 scores QKᵀ/√D, from 2",
    "4 weights: softmax of 3",
    "5 attention: 4 mixes values",
    "6 sum of 1 and 5",
    "7 widened from 6, then ReLU",
    "8 feed-forward: 7 narrowed",
    "9 sum of 6 and 8",
)


def opened(steps: Sequence[Tensor], tokens: Sequence[str]) -> alt.ConcatChart:
    """The real numbers of a layer's nine STEPS: a map each, a row for each token."""
    drawn = []
    for i, (name, matrix) in enumerate(zip(STEPS, steps, strict=True)):
        across, matrix = matrix.size(1), matrix.detach().round(decimals=2) + 0.0  # no −0
        columns = tokens if across == len(tokens) else [""] * across
        look = {"scheme": "diverging", "domain": (-3, 3), "digits": 1, "cell": (216 // across, 22)}
        chart = heatmap(matrix, tokens, columns, numbers=across <= 8, **look)
        chart.layer[0].encoding.color.legend = None
        for layer in chart.layer if i % 3 else []:
            layer.encoding.y["axis"].labels = False
        drawn.append(chart.properties(title=alt.Title(name, fontSize=13)))
    return alt.concat(*drawn, columns=3, spacing=14)


def mirror_maps(maps: Mapping[str, Tensor], word: str) -> alt.ConcatChart:
    """Where a decoder looks (T, S) while it writes `word` backwards, under each map's name."""
    return panels(
        {name: weights.numpy().round(2) for name, weights in maps.items()},
        [*map(str, range(1, len(word) + 2))],
        [*word, "·"],
        row_title="step of writing",
        column_title="source (· is </s>)",
        cell=14,
        numbers=False,
        value_title="weight",
    )


def stage_map(shares: Tensor) -> alt.LayerChart:
    """How often a decoder layer is right, `shares` (4, T): a row after each sublayer, by place."""
    stages = ("letter + position", "after self-attention", "after cross-attention")
    return heatmap(
        shares.numpy().round(2),
        [*stages, "after feed-forward"],
        [*map(str, range(1, shares.size(1))), "</s>"],
        column_title="token of the answer",
        value_title="right",
        domain=(0, 1),
        cell=(42, 34),
    )


def parts_chart(runs: Sequence[Mapping]) -> alt.HConcatChart:
    """A dot for each of `runs`, a row for what it is `without`, best rows on top.

    Left the share of ten-letter words `right`, right the `loss`; colours tell the `steps`.
    """
    rows = []
    for run in runs:
        parts, steps = run["without"], f"after {run['steps']:,} steps"
        what = f"{len(parts)} parts at once" if len(parts) > 1 else "".join(parts) or "nothing"
        rows.append((what, steps, run["right"]["10"], run["loss"]))
    frame = pd.DataFrame(rows, columns=["without", "steps", "right", "loss"])
    times = [*frame["steps"].unique()]  # shorter trainings first
    means = frame[frame["steps"] == times[0]].groupby("without")["right"].mean()
    order = ["nothing", *means.drop("nothing").sort_values(ascending=False, kind="stable").index]
    colors = dict(zip(times, (PALETTE[0], PALETTE[1]), strict=False))
    legend = alt.Legend(title=None, orient="top", offset=4)
    base = alt.Chart(rounded(frame)).mark_circle(size=75, opacity=0.7, aria=False)
    base = base.encode(colored("steps", colors, legend=legend))
    base = base.properties(width=215, height=alt.Step(26))
    line = alt.Chart(pd.DataFrame({"right": [0.95]})).mark_rule(
        color=GREY, strokeDash=[4, 3], aria=False
    )
    right = line.encode(alt.X("right:Q")) + base.encode(
        alt.X("right:Q", title="words right").axis(format="%", values=[0, 0.25, 0.5, 0.75, 1]),
        row_axis("without", order, labelPadding=10),
    )
    loss = base.encode(
        alt.X("loss:Q", title="loss (log scale)").scale(type="log").axis(format="~g", tickCount=4),
        row_axis("without", order, labels=False),
    )
    fooled = frame[(frame["right"] == 0) & (frame["loss"] < 0.01)].nlargest(1, "loss")
    words = alt.Chart(rounded(fooled)).mark_text(align="left", dx=10)
    words = words.encode(alt.X("loss:Q"), row_axis("without", order, labels=False))
    words = words.encode(text=alt.value("low, but no word right"))
    return alt.hconcat(right, loss + words, spacing=20)
