"""Drawings of chapters 6, 9, 25 and 26: losses, and recorded trainings."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from scripts import Late
from scripts.book.charts import lines, long, rounded, titled
from scripts.book.figures.diagram import drawn
from scripts.book.look import GREY, LOG, PALETTE, bar_axis

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


def epochs_table(record: Mapping[str, Any], shipped: Mapping[str, Any]) -> pd.DataFrame:
    """By epoch: minutes so far, losses, BLEU, and the shipped run's BLEU."""
    names = {"train_loss": "training loss", "val_loss": "validation loss", "val_bleu": "BLEU"}
    table = pd.DataFrame(record["epochs"]).set_index("epoch").rename(columns=names)
    table["minutes"] = (table["seconds"].cumsum() / 60).round().astype(int)
    table["shipped run's BLEU"] = [row["val_bleu"] for row in shipped["history"]]
    return table[["minutes", *names.values(), "shipped run's BLEU"]]


def symptoms_table(record: Mapping[str, Any]) -> pd.DataFrame:
    """Before and after the epoch of the fall, by both searches: lengths, loops and BLEU."""
    fall = record["fall"]
    epochs = [fall["epoch"] - 1, fall["epoch"]]
    found = {("greedy", epoch): record["epochs"][epoch - 1] for epoch in epochs}
    found |= {("beam of 5", epoch): fall["by a beam of 5"][str(epoch)] for epoch in epochs}
    names = {"length_ratio": "length ratio", "loops": "loops"}
    names |= {"bleu": "BLEU", "bleu_cut": "BLEU, loops cut"}
    table = pd.DataFrame.from_dict(found, orient="index")[[*names]].rename(columns=names)
    table.index = pd.MultiIndex.from_tuples(found, names=["search", "epoch"])
    return table.round({"length ratio": 2, "BLEU": 1, "BLEU, loops cut": 1})


def means_table(means: Mapping[str, Any]) -> pd.DataFrame:
    """BLEU of an epoch's last weights, and of means over its last steps: the draws' means."""
    sizes = ["mean of 5", "mean of 10", "mean of 20", "mean of 40"]
    rows = {epoch: pd.DataFrame(runs)[["bleu", *sizes]].mean() for epoch, runs in means.items()}
    return pd.DataFrame(rows).T.rename_axis("epoch").rename(columns={"bleu": "last weights"})


def history_chart(history: pd.DataFrame, title: str, case: int) -> alt.HConcatChart:
    """Validation BLEU of two runs, and the first one's losses; `history` is `epochs_table`'s.

    The dashed line is at half of the last BLEU; a ring marks the epoch `case`. Raises ValueError if
    that isn't where both runs' BLEU falls most.
    """
    runs = {"BLEU": "this run", "shipped run's BLEU": "the shipped run"}
    if set(history[[*runs]].diff().idxmin()) != {case}:
        raise ValueError(f"one of the runs has a deeper fall than epoch {case}'s")
    history = history.reset_index()
    names = {"training loss": "training", "validation loss": "validation"}
    both = history.rename(columns=names).melt("epoch", [*names.values()], "split", "loss")
    size = {"points": True, "width": 225, "height": 220}
    scores = history.rename(columns=runs).melt("epoch", [*runs.values()], "run", "BLEU")
    bleu = lines(scores, "epoch", "BLEU", "run", y_title="validation BLEU", zero=True, **size)
    hues = alt.Color("run:N", sort=[*runs.values()]).scale(range=PALETTE[1:3])
    hues = hues.legend(title=None, orient="bottom-right", symbolType="stroke", fillColor="white")
    legend = alt.Legend(title=None, orient="top-right", symbolType="stroke", fillColor="white")
    color = alt.Color("split:N", sort=[*names.values()], legend=legend)
    y_title = "loss (nats a token)"
    loss = lines(both, "epoch", "loss", "split", y_title=y_title, zero=True, **size).encode(color)
    last = int(history["epoch"].max())
    x = alt.X("epoch:Q", title="epoch").scale(domain=[1, last], nice=False)
    x = x.axis(values=[1, *range(last % 3 + 3, last + 1, 3)], format="d", labelFlush=False)
    half = alt.Chart(rounded(pd.DataFrame({"half": [history["BLEU"].iloc[-1] / 2]})))
    half = half.mark_rule(strokeDash=[4, 4], color=GREY).encode(y="half:Q")
    ring = alt.Chart(rounded(history.loc[history["epoch"] == case, ["epoch", "BLEU"]]))
    ring = ring.mark_point(size=260, color=GREY, strokeWidth=2).encode(x, y="BLEU:Q")
    bleu = half + bleu.encode(x, hues) + ring
    panels = (bleu | loss.encode(x)).resolve_scale(color="independent")
    caption = "Dashed: half of this run's last BLEU. The shipped run has the same seed."
    caption += f" In both BLEU falls most in epoch {case} (ring): the chapter's Case."
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


def saved_run() -> alt.TopLevelMixin:
    """What a trainer's state holds, and how a run that was killed goes on from it."""
    return titled(
        drawn("saved_run").chart(),
        "A killed run goes on from the last state on the disk",
        "The state also holds the history, which decides the best model, and this epoch's losses.",
    )


START, END = 240, 255  # the steps between which BLEU falls; the second ends the epoch


def usual_scores(fall: Mapping[str, Any]) -> list[float]:
    """BLEU of all looks before and after the fall; `fall` is the record's."""
    return [row["bleu"] for row in fall["step by step"] if not START < row["step"] <= END]


def fall_chart(fall: Mapping[str, Any], title: str) -> alt.VConcatChart:
    """How long translations are, and their BLEU, around an epoch's end; `fall` is the record's.

    A line marks each of the long steps, and outputs as long as references; a grey band spans the
    `usual_scores`.
    """
    long_steps = [*map(int, fall["long_steps"])]
    frame, size = pd.DataFrame(fall["step by step"]), {"points": True, "width": 480, "height": 130}
    ratio = lines(frame, "step", "length_ratio", y_title="length ratio", **size)
    bleu = lines(frame, "step", "bleu", y_title="validation BLEU", **size)
    mark = alt.Chart(pd.DataFrame({"step": [END]})).mark_rule(strokeDash=[4, 4], color=GREY)
    long_lines = alt.Chart(pd.DataFrame({"step": long_steps}))
    long_lines = long_lines.mark_rule(color=PALETTE[3], strokeWidth=2)
    scale = alt.Scale(domain=[int(frame["step"].min()), int(frame["step"].max())], nice=False)
    x = alt.X("step:Q", title=None, scale=scale)
    labels = {"right": (min(long_steps) - 1, "five steps of\nlong sentences →")}
    labels["left"] = (END + 1, "← the epoch's end")
    equal = alt.Chart(pd.DataFrame({"ratio": [1]})).mark_rule(color=GREY).encode(y="ratio:Q")
    above = alt.layer(long_lines.encode(x), mark.encode(x), equal, ratio.encode(x))
    for align, (step, text) in labels.items():
        label = alt.Chart(pd.DataFrame({"step": [step], "text": [text]}))
        label = label.mark_text(align=align, lineBreak="\n", baseline="top")
        above += label.encode(x, y=alt.value(5), text="text:N")
    x = x.title("step since epoch 11 began")
    below = band(usual_scores(fall)) + long_lines.encode(x) + mark.encode(x) + bleu.encode(x)
    caption = "The axes don't begin at 0. Above 1 (line) outputs are longer than references. "
    caption += f"Grey: the range of BLEU outside steps {START + 1} to {END}."
    return titled(alt.vconcat(above, below), title, caption, wrap=78)


def band(scores: Sequence[float]) -> alt.Chart:
    """A grey band over the range of the scores, across the whole panel."""
    ends = pd.DataFrame({"low": [min(scores)], "high": [max(scores)]})
    ends = alt.Chart(ends).mark_rect(color=GREY, opacity=0.25)
    return ends.encode(y="low:Q", y2="high:Q")


# The blocks of an epoch's steps: the width in pixels, and the colour.
BLOCKS = {"…": (18, "#EEEEEE"), "five": (28, "#CFE3F2"), "before": (44, "#CFE3F2")}
BLOCKS |= {"long": (34, PALETTE[3]), "after": (36, "#F7D9C4"), "shuffled": (62, "#EEEEEE")}
# The orders in which epoch 11 was repeated: the control's name in the record, and the blocks.
ORDERS = {
    "as it came": ("as they came", "… before long after"),
    "five others first": ("five others first", "five … before long after"),
    "long steps first": ("long steps first", "long … before after"),
    "neighbours swapped": ("others after the long steps", "… after long before"),
    "shuffled before": ("order 1, long steps late, own end", "shuffled long after"),
    "shuffled again": ("order 2, long steps late, own end", "shuffled long after"),
}


def order_strip(blocks: str) -> alt.LayerChart:
    """The blocks of an epoch's steps, as in "… long after"; not to scale."""
    rows, x = [], 0
    for name in blocks.split():
        width, color = BLOCKS[name]
        rows.append({"block": name, "x": x, "x2": x + width, "color": color})
        x += width
    scale = alt.Scale(domain=[0, x], nice=False)
    base = alt.Chart(pd.DataFrame(rows)).encode(alt.X("x:Q", axis=None, scale=scale))
    rects = base.mark_rect(stroke="white").encode(x2="x2", color=alt.Color("color:N", scale=None))
    names = base.transform_calculate(middle="(datum.x + datum.x2) / 2").mark_text()
    names = names.encode(alt.X("middle:Q", axis=None), text="block:N")
    return (rects + names).properties(height=18)


def controls_chart(fall: Mapping[str, Any], orders: Sequence[str], title: str) -> alt.HConcatChart:
    """BLEU in the last ten steps of repeated epochs: a panel for each of the `orders` (ORDERS).

    A curve is a run. `fall` is the record's; a grey band spans the `usual_scores`.
    """
    controls = fall["controls"]
    looks = {
        name: [
            {"run": number, "step": look["step"], "bleu": look["bleu"]}
            for number, run in enumerate(controls[control])
            for look in (*run["earlier"], run)
        ]
        for name, (control, _) in ORDERS.items()
    }
    usual = usual_scores(fall)
    scores = [*usual, *(look["bleu"] for rows in looks.values() for look in rows)]
    scale = alt.Scale(domain=[min(scores) - 0.5, max(scores) + 0.5], nice=False, zero=False)
    panels, grey = [], band(usual).encode(alt.Y("low:Q", scale=scale))
    width = max(150, 300 // len(orders))
    for name in orders:
        x = alt.X("step:O", title="step").axis(labelAngle=0, grid=False)
        y = alt.Y("bleu:Q", title=None if panels else "validation BLEU", scale=scale)
        curves = alt.Chart(rounded(pd.DataFrame(looks[name])))
        curves = curves.mark_line(point={"color": PALETTE[0]}, color=PALETTE[0])
        panel = (grey + curves.encode(x, y, detail="run:N")).properties(width=width, height=170)
        strip = order_strip(ORDERS[name][1]).properties(width=width)
        panel = alt.vconcat(strip, panel, spacing=6)
        panels.append(panel.properties(title=alt.TitleParams(name, fontSize=12)))
    caption = "A curve is one draw of dropout. The strip is the order of the whole epoch, not to "
    caption += "scale: the five long steps (242, among them, isn't drawn), and the nine before and "
    caption += "after. Grey: the usual range, as above. The axis doesn't begin at 0."
    return titled(alt.hconcat(*panels), title, caption, wrap=66 if len(orders) < 3 else 92)


RECIPES_OF_SIZES = ("by size", "one for all", "longer")
LONGER = "one for all, with the epochs of the other"  # as the record calls the control


def size_frame(record: Mapping[str, Any], wholes: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Test BLEU of the runs that count: recipe, pairs, seed, bleu, and minutes of a CPU's thread.

    `wholes` are the records of all pairs with the preset `small`, which is one for all; a GPU made
    them, so they have no minutes.
    """
    split = "test_2016_flickr"
    rows = [
        {"recipe": "longer" if run["row"] == LONGER else run["row"], "minutes": run["seconds"] / 60}
        | {"pairs": run["pairs"], "seed": run["seed"], "bleu": run["scores"][split]["bleu"]}
        for run in record["runs"]
        if run["row"] in (*RECIPES_OF_SIZES, LONGER)
    ]
    rows += [
        {"recipe": "one for all", "minutes": None, "pairs": 29_000, "seed": whole["config"]["seed"]}
        | {"bleu": whole["test"][split]["bleu"]}
        for whole in wholes
    ]
    return pd.DataFrame(rows)


def size_means(frame: pd.DataFrame, value: str = "bleu") -> pd.DataFrame:
    """The means of `size_frame`'s runs: a row for a number of pairs, a column for a recipe."""
    return frame.groupby(["pairs", "recipe"])[value].mean().unstack()


def size_gains(frame: pd.DataFrame) -> pd.DataFrame:
    """For each number of pairs: the mean gain of the recipe by size, its spread and its draws.

    Only draws that both recipes have count. `spread` is the larger range of the two recipes' runs,
    in BLEU; the frame is `size_frame`'s.
    """
    runs = frame.pivot(index=["pairs", "seed"], columns="recipe", values="bleu")
    both = runs[["by size", "one for all"]].dropna().groupby("pairs")
    means, ranges = both.mean(), both.max() - both.min()
    gain = means["by size"] - means["one for all"]
    return pd.DataFrame({"gain": gain, "spread": ranges.max(axis=1), "draws": both.size()})


def sizes_chart(frame: pd.DataFrame) -> alt.TopLevelMixin:
    """Test BLEU by number of pairs, for a recipe by size and one for all; `size_frame`'s frame.

    Raises ValueError if with the fewest pairs the gain isn't larger than the seeds' spread, or if
    the title is wrong: with the best recipe, a step of pairs doesn't give about 8 BLEU.
    """
    gains = size_gains(frame)
    least, sizes = gains.iloc[0], sorted(frame["pairs"].unique().tolist())
    if least["gain"] <= least["spread"]:
        raise ValueError(f"the gain, {least['gain']:.1f} BLEU, isn't larger than the spread")
    steps = size_means(frame).max(axis=1).diff().dropna()
    if not steps.between(7, 9).all():
        raise ValueError("tripling the pairs doesn't give about 8 BLEU")
    x = alt.X("pairs:Q", title="training pairs (log scale)").axis(values=sizes, format=",")
    x = x.scale(domain=[0.85 * sizes[0], 1.15 * sizes[-1]], **LOG)
    y = alt.Y("bleu:Q", title="BLEU on test_2016_flickr, beam 5").scale(zero=True)
    color = alt.Color("recipe:N", sort=RECIPES_OF_SIZES, legend=None)
    aside = frame["recipe"].map({"longer": 1.08}).fillna(1)  # to the right of others
    drawn = frame[["recipe", "seed", "bleu"]].assign(pairs=(frame["pairs"] * aside).round())
    dropped = gains.index[gains["gain"] < 0]  # there `small` is the recipe by size, too
    drawn = drawn[(drawn["recipe"] != "by size") | ~drawn["pairs"].isin(dropped)]
    base = alt.Chart(rounded(drawn)).encode(x, y, color)
    joined = base.transform_aggregate(bleu="mean(bleu)", groupby=["recipe", "pairs"])
    dots = base.mark_circle(size=50, opacity=0.75)
    above = drawn["recipe"].map({"by size": 3.5, "longer": -2}).fillna(0)  # its line, and below
    names = drawn.assign(bleu=drawn["bleu"] + above)
    names = names[(names["seed"] == 1) & (names["pairs"] < 2 * sizes[0])]
    label = alt.Chart(rounded(names)).mark_text(align="left", dx=8)
    label = label.encode(x, y, color, text="recipe")
    return titled(
        alt.layer(joined.mark_line(opacity=0.6), dots, label).properties(width=520, height=270),
        "With the best recipe, each tripling of the pairs gives about 8 BLEU",
        "German to English. A point is a run, with its own draw of the pairs or with all. From "
        "10,000 on “by size” is “one for all”; “longer”, drawn to the right, wasn't tried there.",
    )
