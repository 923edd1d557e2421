"""Chapter 16's figures: heads' worth, silence by silence, a patched run, the logit lens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from scripts import Late
from scripts.book.charts import LOG, PALETTE, heatmap, named, rounded, titled

alt, pd = Late("altair"), Late("pandas")


def worth_chart(
    rows: Sequence[Mapping[str, Any]], passed: Sequence[bool], pairs: int
) -> alt.TopLevelMixin:
    """Likelihood lost by silencing each head, one panel a kind; a star marks those that passed."""
    frame = pd.DataFrame(rows)
    frame["lost"] = 1000 * frame["silent"]
    shown = [f"{round(x):+}".replace("-", "−").replace("+0", "0") for x in frame["lost"]]
    frame["text"] = [x + "*" * ok for x, ok in zip(shown, passed, strict=True)]
    largest = frame["lost"].abs().max()
    look = {"value_title": "nats / 1,000", "scheme": "diverging", "cell": (44, 26)}
    panels = {}
    for kind, own in frame.groupby("kind", sort=False):
        lost, texts = (own.pivot(index="layer", columns="head", values=v) for v in ("lost", "text"))
        panels[kind] = heatmap(
            lost.to_numpy(),
            [f"layer {n}" for n in lost.index],
            list(lost.columns),
            texts=texts.to_numpy(),
            domain=(-largest, largest),
            column_title="head" if kind == "cross" else "",
            **look,
        )
    return titled(
        alt.vconcat(*named(panels)),
        "What is lost when one head is silent",
        "Change of −log p of the reference, in thousandths of a nat a token; blue: the reference "
        f"becomes less likely. {pairs:,} validation pairs. A star: passes a test of all 72 at "
        "once.",
    )


def pruning_chart(record: Mapping[str, Any]) -> alt.TopLevelMixin:
    """What is lost over the number of silent heads, for each order of silencing."""
    frame, total = pd.DataFrame(record["pruning"]), len(record["heads"])
    x = alt.X("silent:Q", title=f"heads silenced, of {total}").scale(domain=[0, total], nice=False)
    x = x.axis(values=sorted(set(frame["silent"])))
    y = alt.Y("nats:Q", title="lost, nats a token (log scale)").scale(domain=[0.003, 4], **LOG)
    y = y.axis(values=[0.003, 0.01, 0.03, 0.1, 0.3, 1, 3], format="g")
    first, *others = dict.fromkeys(frame["order"])
    color = alt.Color("order:N", title=None)
    color = color.scale(domain=[first, *others], range=[PALETTE[0], *["#BBBBBB"] * len(others)])
    curves = alt.Chart(rounded(frame[frame["silent"] > 0]))
    curves = curves.mark_line(point={"filled": True, "size": 40})
    return titled(
        curves.encode(x, y, color, detail="order:N").properties(width=480, height=260),
        "Silencing more and more heads",
        "How much less likely the references become, on "
        f"{record['splits']['test_2016_flickr']:,} pairs of test_2016_flickr. "
        "The order by worth is from the validation split; nothing is trained again.",
    )


def patch_chart(
    table: Sequence[Sequence[float]], words: Sequence[str], unpatched: float
) -> alt.TopLevelMixin:
    """The preference for "her" after each patch: a row a depth, a column a source position."""
    depths = ["embedding", *(f"after layer {n}" for n in range(1, len(table)))]
    return titled(
        heatmap(table, depths, words, scheme="diverging", digits=1, numbers=True, cell=44),
        "Two words carry “her”",
        "log p(her) − log p(his), when one vector of the encoder comes from the sentence about the "
        f"man. Unpatched it is {unpatched:+.1f}.",
    )


def lens_chart(
    tops: Sequence[Sequence[str]],
    final: Sequence[Sequence[float]],
    read: Sequence[str],
    agree: tuple[str, int, float],
) -> alt.TopLevelMixin:
    """The likeliest token at each depth; coloured by the probability of the final one.

    `agree` says how often layer 1 is already right: here; over how many captions; and there.
    """
    depths = ["embedding", *(f"layer {n}" for n in range(1, len(tops)))]
    look = {"value_title": "p(final token)", "column_title": "the token read there"}
    look |= {"texts": tops[::-1], "domain": (0, 1), "cell": (62, 26)}
    return titled(
        heatmap(final[::-1], depths[::-1], read, **look),  # the last layer on top
        "What the decoder would say after each layer",
        "Each cell: the likeliest next token at that depth. Dark: the final token is already "
        f"probable. After layer 1 it is the final one at {agree[0]} places; over {agree[1]} "
        f"captions at {agree[2]:.0%}. Bottom: the embedding, which only repeats what was read.",
        wrap=110,
    )
