"""Drawings of chapters 6, 9 and 25: losses, and recorded trainings."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence

from scripts import Late
from scripts.book.charts import lines, long, rounded, titled
from scripts.book.look import GREY, LOG, PALETTE, bar_axis
from scripts.book.records import load_record

alt, pd = Late("altair"), Late("pandas")


def learning_curves(
    curves: Mapping[str, Sequence[float]],
    marks: Mapping[str, float] | None = None,
    *,
    every: int = 1,
    y_title: str = "loss (nats a token)",
    log_y: bool = False,
) -> alt.LayerChart:
    """One curve for each list of values, a value a step; dashed horizontal lines at the `marks`.

    `every` steps are averaged into one point. `log_y` is for perplexities: it begins at 1.

    >>> learning_curves({"warm-up": losses}, {"ln 10": 2.303}, every=5)
    """
    means = {name: {} for name in curves}
    for name, values in curves.items():
        for end in range(every, len(values) + 1, every):
            means[name][end] = sum(values[end - every : end]) / every
    frame = long(means, "name", "step", "value")
    drawn = lines(frame, "step", "value", "name", y_title=y_title, zero=True)
    if log_y:
        y = alt.Y("value:Q", title=y_title).axis(values=LOG_TICKS)
        drawn = drawn.encode(y.scale(domainMin=1, **LOG))
    rules = pd.DataFrame((marks or {}).items(), columns=["mark", "height"]).round(4)
    base = alt.Chart(rules).encode(y="height:Q")
    dashes = base.mark_rule(strokeDash=[4, 4], color=GREY)
    names = base.mark_text(align="right", dy=11, color=GREY).encode(text="mark:N", x=alt.value(475))
    return alt.layer(drawn, dashes, names) if marks else drawn


LOG_TICKS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000]  # the marks of a logarithmic axis


def history_chart(name: str, title: str, caption: str) -> alt.HConcatChart:
    """Validation BLEU and perplexity by epoch, from the record `results/NAME.json`."""
    frame = pd.DataFrame(load_record(name)["history"])
    both = frame.melt("epoch", ["train_ppl", "val_ppl"], "split", "perplexity")
    both["split"] = both["split"].map({"train_ppl": "training", "val_ppl": "validation"})
    size = {"points": True, "width": 225, "height": 220}
    bleu = lines(frame, "epoch", "val_bleu", y_title="validation BLEU", zero=True, **size)
    mark = {"color": PALETTE[1]}  # validation's, as in the panel beside it
    bleu = bleu.mark_line(point={"filled": True, "size": 45} | mark, **mark)
    top, last = math.ceil(1.2 * both["perplexity"].max()), int(frame["epoch"].max())
    y = alt.Y("perplexity:Q", title="perplexity").scale(domain=[1, top], **LOG)
    y = y.axis(values=[value for value in LOG_TICKS if value <= top])
    legend = alt.Legend(title=None, orient="top-right", symbolType="stroke", fillColor="white")
    color = alt.Color("split:N", sort=["training", "validation"], legend=legend)
    ppl = lines(both, "epoch", "perplexity", "split", **size).encode(y, color)
    x = alt.X("epoch:Q", title="epoch").scale(domain=[1, last], nice=False)
    x = x.axis(values=[1, *range(last % 3 + 3, last + 1, 3)], format="d")
    both_panels = bleu.encode(x) | ppl.encode(x)
    both_panels = both_panels.resolve_scale(color="independent")  # the legend stays in its panel
    return titled(both_panels, title, caption, wrap=78)


def score_table(*names: str) -> pd.DataFrame:
    """Test scores of recorded runs: cased sacreBLEU, lower-cased beside it."""
    keys = ["bleu", "bleu_greedy", "bleu_lowercased", "search"]
    rows = [
        (name, split, *(test[key] for key in keys))
        for name in names
        for split, test in load_record(name)["test"].items()
    ]
    columns = ["model", "test set", "BLEU", "greedy", "lower-cased", "search"]
    return pd.DataFrame(rows, columns=columns).set_index("model")


def sample_table(name: str) -> pd.DataFrame:
    """The first four translations on record, each under its source and beside its reference."""
    samples = load_record(name)["samples"][:4]
    rows = [(i + 1, what, sample[what]) for i, sample in enumerate(samples) for what in sample]
    return pd.DataFrame(rows, columns=["caption", "what", "text"]).set_index(["caption", "what"])


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
