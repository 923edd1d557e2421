"""Drawings of chapters 4 and 5: the stacks, the wirings of a layer, and measured signals."""

from __future__ import annotations

from collections.abc import Iterable

from scripts import Late
from scripts.book.charts import rounded
from scripts.book.figures.diagram import Diagram

alt, pd = Late("altair"), Late("pandas")


def stacks(N: int = 6) -> alt.LayerChart:
    """The two stacks of N layers each, and the memory that every decoder layer reads (Figure 1)."""
    drawn, top = Diagram(), 40 + 34 * N  # where the last layer is
    for x, side, ids, fill in (
        (85, "encoder", "source ids (B, S)", "blue"),
        (405, "decoder", "target ids (B, T)", "orange"),
    ):
        drawn.box(x, 0, ids, "grey")
        drawn.box(x, 40, "embedding + position", "grey")
        drawn.arrow((x, 22), (x, 38))
        for n in range(1, N + 1):
            drawn.box(x, 40 + 34 * n, f"{side} layer {n}", fill)
            drawn.arrow((x, 28 + 34 * n), (x, 38 + 34 * n))
        drawn.arrow((x, top + 22), (x, top + 32))
    drawn.box(85, top + 34, "memory (B, S, D)", "green")
    for n in range(1, N + 1):
        drawn.arrow((165, top + 45), (245, top + 45), (245, 51 + 34 * n), (322, 51 + 34 * n))
    drawn.box(405, top + 34, "generator", "grey")
    drawn.box(405, top + 74, "logits (B, T, V)", "grey")
    drawn.arrow((405, top + 56), (405, top + 72))
    return drawn.chart(490, top + 104)


def wirings() -> alt.LayerChart:
    """An encoder layer in post-norm and in pre-norm: each sublayer, its norm, and the road of x."""
    drawn = Diagram()
    orders = {
        "post-norm (paper)": ("sublayer", "add", "norm"),
        "pre-norm": ("norm", "sublayer", "add"),
    }
    for x, (title, order) in zip((95, 295), orders.items(), strict=True):
        drawn.box(x, 0, "x (B, T, D)", "grey", 58)
        y = 40
        for sublayer in ("self-attention", "feed-forward"):
            branch = y - 9
            for kind in order:
                text = {"sublayer": sublayer, "add": "+", "norm": "LayerNorm"}[kind]
                fill = {"sublayer": "blue", "add": "white", "norm": "pink"}[kind]
                drawn.box(x, y, text, fill, 12 if kind == "add" else 58)
                drawn.arrow((x, y - (18 if y == 40 else 12)), (x, y - 2))
                if kind == "add":
                    drawn.arrow((x, branch), (x + 76, branch), (x + 76, y + 11), (x + 15, y + 11))
                y += 34
        drawn.arrow((x, y - 12), (x, y + 4))
        drawn.word(x, y + 19, title)
    return drawn.chart(390, y + 34)


def decades(
    frame: pd.DataFrame, x: str, y: str, color: str, powers: Iterable[int], places: Iterable[int]
) -> alt.LayerChart:
    """Lines of `y` over `x` on a log axis with ticks at `powers` of ten, named at their ends."""
    base = alt.Chart(rounded(frame)).encode(
        alt.X(f"{x}:Q").axis(values=list(places), grid=False),
        alt.Y(f"{y}:Q").axis(values=[10.0**n for n in powers], format=".0e").scale(type="log"),
        alt.Color(f"{color}:N", sort=None, legend=None),
    )
    ends = base.transform_filter(alt.datum[x] == int(frame[x].max()))
    names = ends.mark_text(align="left", dx=8).encode(text=f"{color}:N")
    return alt.layer(base.mark_line(point={"size": 45}), names).properties(width=480, height=240)


def layer_lines(frame: pd.DataFrame, columns: list[str], color: str) -> alt.HConcatChart:
    """Columns side by side over the layers E1, …, D1, …; encoder and decoder are separate lines."""
    frame = rounded(frame[["layer", color, *columns]].assign(side=frame.layer.str[0]))
    base = alt.Chart(frame).mark_line(point={"size": 45}).properties(width=245, height=210)
    base = base.encode(
        alt.X("layer:N", sort=None, title="layer").axis(labelAngle=0),
        alt.Color(f"{color}:N", sort=None).legend(title=None, orient="top"),
        detail="side:N",
    )
    return alt.hconcat(*[base.encode(alt.Y(f"{name}:Q").axis(tickCount=5)) for name in columns])
