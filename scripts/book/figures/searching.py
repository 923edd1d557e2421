"""Drawings of chapter 8: a beam, the beam curse, what a draw is from."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from scripts import Late
from scripts.book.charts import heatmap, rounded, titled
from scripts.book.look import GREY, PALETTE, bar_axis, colored

alt, pd = Late("altair"), Late("pandas")


TREE_STEP = 124  # pixels from one step of a beam's tree to the next


def beam_tree(steps: Sequence[tuple[list, list, list]]) -> pd.DataFrame:
    """Where to draw each candidate of a beam by hand: step x and row y, and those of its parent.

    `steps` hold the candidates, those that ended, and those that go on.
    """
    candidates = dict(c for step in steps for c in step[0])
    winner, _ = max((c for step in steps for c in step[1]), key=lambda c: c[1])
    ended, kept = ({words for step in steps for words, _ in step[i]} for i in (1, 2))
    row, leaves = {}, itertools.count()

    def settle(words: tuple[str, ...]) -> float:
        below = [settle(child) for child in candidates if child[:-1] == words]
        row[words] = sum(below) / len(below) if below else float(next(leaves))
        return row[words]

    settle(())
    places = []
    for words, p in candidates.items():
        fate = "ends" if words in ended else "kept" if words in kept else "dropped"
        x, y = len(words), row[words]
        label = max(34, 8 * len(words[-2])) + 14 if words[1:] else 0  # the parent's, in pixels
        parent = (x - 1 + label / TREE_STEP, row[words[:-1]])
        stroke = 4 if winner[: len(words)] == words else 1.5
        places.append((words[-1], f"{p:.3f}", fate, stroke, x, y, *parent))
    columns = ["word", "p", "fate", "stroke", "x", "y", "from x", "from y"]
    return pd.DataFrame(places, columns=columns)


def beam_tree_chart(tree: pd.DataFrame) -> alt.TopLevelMixin:
    """The candidates of a beam search as a tree that grows to the right."""
    steps, last_row = int(tree["x"].max()), tree["y"].max()
    width = {"domain": [0, steps + 0.5], "nice": False}
    x = alt.X("x:Q").scale(**width)
    x = x.axis(title="step", values=list(range(1, steps + 1)), format="d", grid=False)
    y = alt.Y("y:Q", axis=None).scale(domain=[-0.7, last_row + 0.7], reverse=True, nice=False)
    color = colored("fate", {"kept": PALETTE[0], "ends": PALETTE[2], "dropped": "#AAAAAA"})
    color = color.legend(title="the candidate is", orient="top")
    base = alt.Chart(tree).encode(x, y)
    parent = alt.X("from x:Q").scale(**width), alt.Y("from y:Q", axis=None)
    stroke = alt.StrokeWidth("stroke:Q", scale=None)
    layers = [
        base.mark_rule().encode(*parent, color, stroke, x2="x:Q", y2="y:Q"),
        base.mark_circle(size=70, opacity=1).encode(color),
    ]
    looks = {
        "word": {"dy": -6, "fontSize": 13, "fontWeight": "bold"},
        "p": {"dy": 8, "fontSize": 11, "color": GREY},
    }
    for column, look in looks.items():
        layers.append(base.mark_text(align="left", dx=9, **look).encode(text=f"{column}:N"))
    size = {"width": int(TREE_STEP * (steps + 0.5)), "height": 46 * int(last_row + 2)}
    return titled(
        alt.layer(*layers).properties(**size),
        "The winner of a beam of two begins with the second-best word",
        "Below each word: the probability of the whole text up to it. In each column any of the "
        "two best that ends is finished; of the others the two best go on. The winner's path is "
        "thick. The vertical order means nothing.",
    )


def curse_chart(captions: pd.DataFrame, smoothing: float) -> alt.TopLevelMixin:
    """log p of the empty text against that of a beam's best: a point for each caption.

    The columns are caption, length, found and empty; `smoothing` is the log p that it asks for.
    """
    struck = captions[captions["empty"] > captions["found"]]
    ends = {"found": [-18, -8], "empty": [-18, -8]}
    diagonal = alt.Chart(pd.DataFrame(ends)).mark_line(color=GREY, strokeWidth=1)
    asked = alt.Chart(pd.DataFrame({"empty": [round(smoothing, 2)]}))
    asked = asked.mark_rule(color=GREY, strokeDash=[4, 4]).encode(y="empty:Q")
    x = alt.X("found:Q", title="log p of the best text that a beam of 5 finds")
    y = alt.Y("empty:Q", title="log p of the empty text").scale(domain=[-18, -8])
    x, length = x.scale(domain=[-18, 0]), alt.Color("length:Q", title="tokens")
    length = length.scale(domain=[0, 25], range="heatmap")
    dots = alt.Chart(rounded(captions)).mark_circle(size=80, opacity=1, stroke=GREY)
    short = struck.assign(caption=struck["caption"].str.split().str[:2].str.join(" "))
    names = alt.Chart(rounded(short)).mark_text(align="left", dx=9, dy=-6, fontSize=12)
    layers = [dots.encode(x, y, length), names.encode(x, y, text="caption:N")]
    return titled(
        alt.layer(diagonal.encode(x, y), asked, *layers).properties(width=468, height=260),
        f"For {len(struck)} of {len(captions)} captions the empty text is likelier than the beam's",
        "Above the line the empty text is likelier. Dashed: what label smoothing asks for. Darker: "
        "the beam's text is longer.",
    )


def width_chart(beams: pd.DataFrame) -> alt.TopLevelMixin:
    """BLEU, with its brevity penalty and without it (`match`), chrF2 and length, by width."""
    alphas = {"α = 0": PALETTE[1], "α = 0.6": PALETTE[0]}
    dashes = {"BLEU": [1, 0], "without its penalty": [5, 4]}
    x = alt.X("beam:Q", title="width K").scale(type="log", domain=[1, 100])
    x = x.axis(values=[1, 2, 5, 10, 20, 50, 100])
    beams = beams.rename(columns={"bleu": "BLEU", "match": "without its penalty"})
    beams = rounded(beams.assign(ranked=beams["alpha"].map("α = {:g}".format)))
    scores = beams.melt(["beam", "ranked"], [*dashes], "score")
    dash = alt.StrokeDash("score:N", title="score").legend(symbolType="stroke", symbolSize=400)
    dash = dash.scale(domain=[*dashes], range=[*dashes.values()])
    size, color = {"width": 200, "height": 220}, colored("ranked", alphas, title="ranked by")

    def panel(frame: pd.DataFrame, y: alt.Y) -> alt.Chart:
        drawn = alt.Chart(frame).mark_line(point={"size": 40}, aria=False).encode(x, y, color)
        return drawn.properties(**size)

    bleu = panel(scores, alt.Y("value:Q", title="BLEU").scale(domain=[40, 45])).encode(dash)
    chrf = panel(beams, alt.Y("chrf2:Q", title="chrF2").scale(domain=[59, 64]))
    length = alt.Y("length_ratio:Q", title="length, relative to the references")
    return titled(
        alt.hconcat(bleu, chrf, panel(beams, length.scale(domain=[0.9, 1])), spacing=30),
        "Ranked by log p alone, wider beams write less, and more of it matches",
        "300 validation captions, from a record. Dashed: BLEU without its own penalty for short "
        "texts. Right: tokens written per token of reference.",
    )


def next_word_chart(pieces: Sequence[str], log_probs: Sequence[float]) -> alt.TopLevelMixin:
    """What is drawn from after temperature, top-k and nucleus: a slider for each.

    The k likeliest come first, so these pieces are all that is needed for k up to their number.
    """
    ranges = {
        "temperature": (1.0, 0.1, 2, 0.1),
        "top_k": (len(pieces), 1, len(pieces), 1),
        "top_p": (0.9, 0.05, 1, 0.05),
    }
    sliders = []
    for name, (value, low, high, step) in ranges.items():
        bind = alt.binding_range(min=low, max=high, step=step, name=f"{name} ")
        sliders.append(alt.param(name=name, value=value, bind=bind))
    log_probs = [*log_probs, np.log1p(-np.exp(log_probs).sum())]
    pieces = [*pieces, "all others"]  # never kept: no k reaches their rank
    rank = range(1, len(pieces) + 1)
    frame = pd.DataFrame({"piece": pieces, "log_prob": log_probs, "rank": rank})
    share = np.exp(frame["log_prob"])
    bars = alt.Chart(rounded(frame)).transform_calculate(
        power="datum.rank <= top_k ? exp(datum.log_prob / temperature) : 0"
    )
    bars = bars.transform_joinaggregate(total="sum(power)")
    bars = bars.transform_calculate(share="datum.power / datum.total")
    sort = [{"field": "rank"}]
    bars = bars.transform_window(so_far="sum(share)", sort=sort, frame=[None, 0])
    bars = bars.transform_calculate(
        kept="datum.so_far - datum.share < top_p - 1e-9 ? datum.share : 0"
    )
    bars = bars.transform_joinaggregate(kept_total="sum(kept)")
    bars = bars.transform_calculate(
        drawn="datum.kept / datum.kept_total", model="exp(datum.log_prob)"
    )
    y = bar_axis("piece", list(pieces))
    x = alt.X("drawn:Q", title="probability").axis(tickCount=4)  # grows with sharper settings
    drawn = bars.mark_bar(color=PALETTE[0]).encode(x, y)
    model = bars.mark_tick(color=PALETTE[1], thickness=3, aria=False).encode(x="model:Q", y=y)
    number = drawn.mark_text(align="left", dx=8).encode(text=alt.Text("drawn:Q", format=".2f"))
    number = number.transform_filter("datum.drawn > 0")
    both = (drawn + model + number).properties(width=400, height=alt.Step(24))
    return titled(
        both.add_params(*sliders),
        f"A nucleus of 0.9 keeps only {(share.cumsum() - share < 0.9).sum()} pieces",
        "Bars: what is drawn from. Orange: the model's own probabilities. In Jupyter, sliders set "
        "temperature, k and p.",
    )


def agreement_chart(agreement: Tensor, drawn: Sequence[str]) -> alt.TopLevelMixin:
    """How well each text agrees with each; on the right its mean, by which the rows are sorted."""
    means = agreement.mean(dim=1)
    order = means.argsort(descending=True, stable=True)
    rows, judges = [f"{i + 1} {drawn[i]}" for i in order], [str(i + 1) for i in order.tolist()]
    looks = {"value_title": "chrF", "digits": 0, "cell": 34, "domain": (50, 100)}
    all_pairs = heatmap(agreement[order][:, order], rows, judges, column_title="judged by", **looks)
    on_average = heatmap(means[order].unsqueeze(1), [""] * len(drawn), ["mean"], **looks)
    return titled(
        alt.hconcat(all_pairs, on_average, spacing=4),
        "Fixing the roof wins the vote; eating it and rowing it come next",
        "chrF of each row, judged by each column: to leave out the judge's letters costs more than "
        "to add others.",
    )
