"""Charts and tables of recorded trainings: histories, ingredients, scores, translations."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from scripts import Late
from scripts.book.charts import LOG, PALETTE, lines, rounded, row_axis, titled
from scripts.book.records import load_record

alt, pd = Late("altair"), Late("pandas")

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
    ppl = lines(both, "epoch", "perplexity", "split", **size)
    top = math.ceil(1.2 * both["perplexity"].max())
    ppl.encoding.y.scale = alt.Scale(domain=[1, top], **LOG)
    ppl.encoding.y.axis = alt.Axis(values=[value for value in LOG_TICKS if value <= top])
    legend = alt.Legend(title=None, orient="top-right", symbolType="stroke", fillColor="white")
    ppl.encoding.color.legend = legend
    last = int(frame["epoch"].max())
    for chart in (bleu, ppl):
        chart.encoding.x.scale = alt.Scale(domain=[1, last], nice=False)
        chart.encoding.x.axis = alt.Axis(values=[1, *range(last % 3 + 3, last + 1, 3)], format="d")
    both_panels = (bleu | ppl).resolve_scale(color="independent")  # the legend stays in its panel
    return titled(both_panels, title, caption, wrap=78)


def ingredient_chart(
    record: dict[str, Any], title: str, differing: Collection[str]
) -> alt.TopLevelMixin:
    """Validation BLEU of every run, a line for each ingredient; the band is the recipe's spread.

    The rows in `differing` are marked as those that differ from the recipe by more than seeds do.
    """
    order = list(record["rows"])
    runs = [(name, run) for name, row in record["rows"].items() for run in row["runs"]]
    runs = [(name, run["seed"], run["best"]) for name, run in runs]
    frame = pd.DataFrame(runs, columns=["changed", "seed", "BLEU"])
    kinds = ["the recipe", "differs from it", "no clear difference"]
    kind_of = {name: kinds[1 if name in differing else 2] for name in order}
    frame["kind"] = frame["changed"].map(kind_of | {"the recipe": kinds[0]})
    recipe = frame.loc[frame["changed"] == "the recipe", "BLEU"]
    spread = pd.DataFrame({"low": [recipe.min()], "high": [recipe.max()]})
    ends = [math.floor(frame["BLEU"].min() - 0.5), math.ceil(frame["BLEU"].max() + 0.5)]
    place = {"scale": alt.Scale(domain=ends, nice=False, zero=False), "axis": alt.Axis(tickCount=8)}
    place["title"] = "validation BLEU (greedy, cased)"
    look = {"sort": kinds, "legend": alt.Legend(title=None, orient="top", symbolSize=90)}
    color, shape = alt.Color("kind:N", **look), alt.Shape("kind:N", **look)
    band = alt.Chart(rounded(spread)).mark_rect(color=PALETTE[0], opacity=0.25)
    dots = alt.Chart(rounded(frame)).mark_point(size=80, filled=True, opacity=0.85)
    dots = dots.encode(
        alt.X("BLEU:Q", **place),
        row_axis("changed", order),
        color.scale(domain=kinds, range=[*PALETTE[:2], PALETTE[-1]]),
        shape.scale(domain=kinds, range=["circle", "diamond", "circle"]),
        tooltip=["changed", "seed", "BLEU"],
    )
    return titled(
        alt.layer(band.encode(alt.X("low:Q", **place), x2="high:Q"), dots).properties(
            width=440, height=26 * len(order)
        ),
        title,
        "Each point is a run; the band spans the recipe's own seeds. Differs: its p passes a "
        f"stricter bar, for {len(order) - 1} tests. Narrow model, "
        f"{record['config']['epochs']} epochs.",
        wrap=78,
    )


def score_table(*names: str) -> pd.DataFrame:
    """Test scores of recorded runs: cased sacreBLEU, lower-cased beside it."""
    shown = {"bleu": "BLEU", "bleu_greedy": "greedy", "bleu_lowercased": "lower-cased"}
    shown["search"] = "search"
    rows = [
        {"model": name, "test set": split} | {shown[key]: test[key] for key in shown}
        for name in names
        for split, test in load_record(name)["test"].items()
    ]
    return pd.DataFrame(rows).set_index("model")


def sample_table(name: str) -> pd.DataFrame:
    """The first four translations on record, each under its source and beside its reference."""
    samples = load_record(name)["samples"][:4]
    rows = [(i + 1, what, sample[what]) for i, sample in enumerate(samples) for what in sample]
    return pd.DataFrame(rows, columns=["caption", "what", "text"]).set_index(["caption", "what"])
