"""Drawings of chapters 6, 9 and 25: losses, and recorded trainings."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

from scripts import Late
from scripts.book.charts import lines, long, rounded, titled
from scripts.book.look import GREY, PALETTE, bar_axis

alt, pd = Late("altair"), Late("pandas")


def learning_curves(
    curves: Mapping[str, Sequence[float]],
    marks: Mapping[str, float] | None = None,
    *,
    every: int = 1,
) -> alt.LayerChart:
    """One curve for each list of values, a value a step; dashed horizontal lines at the `marks`.

    `every` steps are averaged into one point.

    >>> learning_curves({"warm-up": losses}, {"ln 10": 2.303}, every=5)
    """
    means = {name: {} for name in curves}
    for name, values in curves.items():
        for end in range(every, len(values) + 1, every):
            means[name][end] = sum(values[end - every : end]) / every
    frame = long(means, "name", "step", "value")
    drawn = lines(frame, "step", "value", "name", y_title="loss (nats a token)", zero=True)
    rules = pd.DataFrame((marks or {}).items(), columns=["mark", "height"]).round(4)
    base = alt.Chart(rules).encode(y="height:Q")
    dashes = base.mark_rule(strokeDash=[4, 4], color=GREY)
    names = base.mark_text(align="right", dy=11, color=GREY).encode(text="mark:N", x=alt.value(475))
    return alt.layer(drawn, dashes, names) if marks else drawn


def history_chart(history: pd.DataFrame, title: str, caption: str) -> alt.HConcatChart:
    """Validation BLEU, and both losses, by epoch; `history` has a row for each epoch."""
    names = {"train_loss": "training", "val_loss": "validation"}
    both = history.rename(columns=names).melt("epoch", [*names.values()], "split", "loss")
    size = {"points": True, "width": 225, "height": 220}
    mark = {"color": PALETTE[1]}  # validation's, as in the panel beside it
    bleu = lines(history, "epoch", "val_bleu", y_title="validation BLEU", zero=True, **size)
    bleu = bleu.mark_line(point={"filled": True, "size": 45} | mark, **mark)
    legend = alt.Legend(title=None, orient="top-right", symbolType="stroke", fillColor="white")
    color = alt.Color("split:N", sort=[*names.values()], legend=legend)
    y_title = "loss (nats a token)"
    loss = lines(both, "epoch", "loss", "split", y_title=y_title, zero=True, **size).encode(color)
    last = int(history["epoch"].max())
    x = alt.X("epoch:Q", title="epoch").scale(domain=[1, last], nice=False)
    x = x.axis(values=[1, *range(last % 3 + 3, last + 1, 3)], format="d")
    panels = (bleu.encode(x) | loss.encode(x)).resolve_scale(color="independent")
    return titled(panels, title, caption, wrap=78)  # the legend stays in its panel


def diary(frame: pd.DataFrame) -> alt.HConcatChart:
    """A row for each look at a run: its loss as a bar, and one sentence's translation by then."""
    bars = alt.Chart(rounded(frame)).mark_bar().encode(bar_axis("step").title("step"), x="loss:Q")
    short = frame.assign(
        translation=[textwrap.shorten(t, 66, placeholder=" …") for t in frame["translation"]]
    )
    texts = alt.Chart(short).mark_text(align="left", fontSize=13, x=0)
    texts = texts.encode(alt.Y("step:N", axis=None), text="translation:N")
    size = {"height": 24 * len(frame)}
    return alt.hconcat(bars.properties(width=170, **size), texts.properties(width=430, **size))


def fall_chart(rows: Sequence[Mapping[str, float]], end: int) -> alt.VConcatChart:
    """What was read last, how long translations are, and their BLEU, around the epoch's `end`."""
    frame = pd.DataFrame(rows)
    panels = {
        "recent_length": "labels in a caption,\nlast ten steps",
        "length_ratio": "length of outputs /\nof references",
        "bleu": "validation BLEU",
    }
    last = "step since the epoch began; dashed: its end"
    mark = alt.Chart(pd.DataFrame({"step": [end]})).mark_rule(strokeDash=[4, 4], color=GREY)
    drawn = []
    for name, title in panels.items():
        curve = lines(frame, "step", name, points=True, width=480, height=110)
        y = alt.Y(f"{name}:Q", title=title.split("\n")).scale(zero=False)
        x = alt.X("step:Q", title=last if name == "bleu" else None).scale(nice=False)
        drawn.append(alt.layer(curve.encode(x, y), mark.encode(x="step:Q")))
    return alt.vconcat(*drawn)
