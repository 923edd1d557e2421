"""Chapter 16's figures: heads' worth, silence by silence, a patched run, the logit lens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from scripts import Late
from scripts.book.charts import PALETTE, heatmap, rounded, titled

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
    drawn = []
    for kind, own in frame.groupby("kind", sort=False):
        lost = own.pivot(index="layer", columns="head", values="lost")
        chart = heatmap(
            lost.to_numpy(),
            [f"layer {n}" for n in lost.index],
            list(lost.columns),
            texts=own.pivot(index="layer", columns="head", values="text").to_numpy(),
            domain=(-largest, largest),
            value_title="nats / 1,000",
            scheme="diverging",
            column_title="head" if kind == "cross" else "",
            cell=(44, 26),
        )
        drawn.append(chart.properties(title=kind))
    return titled(
        alt.vconcat(*drawn),
        "What is lost when one head is silent",
        "Change of −log p of the reference, in thousandths of a nat a token; blue: the reference "
        f"becomes less likely. {pairs:,} validation pairs. A star: passes a test of all 72 at "
        "once.",
    )


def pruning_chart(record: Mapping[str, Any]) -> alt.TopLevelMixin:
    """What is lost over the number of silent heads, for each order of silencing."""
    frame, total = pd.DataFrame(record["pruning"]), len(record["heads"])
    orders = list(dict.fromkeys(frame["order"]))
    steps = sorted(set(frame["silent"]))
    scale = alt.Scale(domain=[0, total], nice=False)
    title = f"heads silenced, of {total}"
    drawn = (
        alt.Chart(rounded(frame[frame["silent"] > 0]))
        .mark_line(point={"filled": True, "size": 40})
        .encode(
            x=alt.X("silent:Q", title=title, scale=scale, axis=alt.Axis(values=steps)),
            y=alt.Y("nats:Q", title="lost, nats a token (log scale)")
            .scale(type="log", domain=[0.003, 4], nice=False)
            .axis(values=[0.003, 0.01, 0.03, 0.1, 0.3, 1, 3], format="g"),
            detail="order:N",
            color=alt.Color(
                "order:N",
                title=None,
                scale=alt.Scale(
                    domain=orders, range=[PALETTE[0], *["#BBBBBB"] * (len(orders) - 1)]
                ),
            ),
        )
        .properties(width=480, height=260)
    )
    return titled(
        drawn,
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
    look = {"digits": 1, "numbers": True, "cell": 44}
    drawn = heatmap(table, depths, words, scheme="diverging", **look)
    return titled(
        drawn,
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
    drawn = heatmap(
        final[::-1],  # the last layer on top
        depths[::-1],
        read,
        texts=tops[::-1],
        domain=(0, 1),
        value_title="p(final token)",
        column_title="the token read there",
        cell=(62, 26),
    )
    return titled(
        drawn,
        "What the decoder would say after each layer",
        "Each cell: the likeliest next token at that depth. Dark: the final token is already "
        f"probable. After layer 1 it is the final one at {agree[0]} places; over {agree[1]} "
        f"captions at {agree[2]:.0%}. Bottom: the embedding, which only repeats what was read.",
        wrap=110,
    )
