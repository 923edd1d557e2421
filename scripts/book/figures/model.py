"""Drawings of chapters 4 and 5: the stacks, the wirings of a layer, and measured signals."""

from __future__ import annotations

from collections.abc import Iterable

from scripts import Late
from scripts.book.charts import GREY, rounded

alt, pd = Late("altair"), Late("pandas")

FILLS = {"ids": "#EEEEEE", "encoder": "#CFE3F2", "decoder": "#F7D9C4", "memory": "#CDEBDD"}
FILLS |= {"sublayer": "#CFE3F2", "norm": "#F3E3F0", "add": "#FFFFFF", "title": "transparent"}


class Diagram:
    """Labelled boxes and arrows along given points, on a canvas in pixels, y upwards."""

    def __init__(self):
        self.boxes, self.arrows = [], []

    def box(self, x: float, y: float, text: str, kind: str, half: float = 80) -> None:
        """A box of height 22 that stands on (x, y) and is `half` wide to each side."""
        box = {"x": x - half, "x2": x + half, "y": y, "y2": y + 22, "middle": x}
        self.boxes.append(box | {"centre": y + 11, "text": text, "kind": kind})

    def arrow(self, *points: tuple[float, float]) -> None:
        """A line through `points` that ends in a tip, pointing up or to a side."""
        dx = points[-1][0] - points[-2][0]
        common = {"arrow": len(self.arrows), "angle": 90 * (dx > 0) - 90 * (dx < 0)}
        self.arrows.append(
            [{"x": x, "y": y, "order": i} | common for i, (x, y) in enumerate(points)]
        )

    def chart(self, width: int, height: int) -> alt.LayerChart:
        x = alt.X("x:Q", axis=None, scale=alt.Scale(domain=[0, width], nice=False))
        y = alt.Y("y:Q", axis=None, scale=alt.Scale(domain=[-6, height], nice=False))
        kinds = list(dict.fromkeys(box["kind"] for box in self.boxes))
        fill = alt.Scale(domain=kinds, range=[FILLS[kind] for kind in kinds])
        color = alt.Color("kind:N", legend=None, scale=fill)
        boxes = alt.Chart(pd.DataFrame(self.boxes))
        framed = boxes.transform_filter("datum.kind != 'title'")
        rects = framed.mark_rect(stroke=GREY, strokeWidth=1, cornerRadius=4)
        middle = {"x": alt.X("middle:Q", axis=None), "y": alt.Y("centre:Q", axis=None)}
        texts = boxes.mark_text().encode(**middle, text="text:N")
        wires = alt.Chart(pd.DataFrame([point for arrow in self.arrows for point in arrow]))
        tips = alt.Chart(pd.DataFrame([arrow[-1] for arrow in self.arrows]))
        heads = tips.mark_point(shape="triangle-up", filled=True, size=50, color=GREY, opacity=1)
        layers = [
            wires.mark_line(color=GREY, strokeWidth=1.3).encode(
                x, y, detail="arrow", order="order"
            ),
            rects.encode(x, y, x2="x2", y2="y2", color=color),
            texts,
            heads.encode(x, y, angle=alt.Angle("angle:Q", scale=None)),
        ]
        return alt.layer(*layers).properties(width=width, height=height)


def stacks(N: int = 6) -> alt.LayerChart:
    """The two stacks of N layers each, and the memory that every decoder layer reads (Figure 1)."""
    drawn, top = Diagram(), 40 + 34 * N  # where the last layer is
    for x, side, ids in (
        (85, "encoder", "source ids (B, S)"),
        (405, "decoder", "target ids (B, T)"),
    ):
        drawn.box(x, 0, ids, "ids")
        drawn.box(x, 40, "embedding + position", "ids")
        drawn.arrow((x, 22), (x, 38))
        for n in range(1, N + 1):
            drawn.box(x, 40 + 34 * n, f"{side} layer {n}", side)
            drawn.arrow((x, 28 + 34 * n), (x, 38 + 34 * n))
        drawn.arrow((x, top + 22), (x, top + 32))
    drawn.box(85, top + 34, "memory (B, S, D)", "memory")
    for n in range(1, N + 1):
        drawn.arrow((165, top + 45), (245, top + 45), (245, 51 + 34 * n), (322, 51 + 34 * n))
    drawn.box(405, top + 34, "generator", "ids")
    drawn.box(405, top + 74, "logits (B, T, V)", "ids")
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
        drawn.box(x, 0, "x (B, T, D)", "ids", 58)
        y = 40
        for sublayer in ("self-attention", "feed-forward"):
            branch = y - 9
            for kind in order:
                text = {"sublayer": sublayer, "add": "+", "norm": "LayerNorm"}[kind]
                drawn.box(x, y, text, kind, 12 if kind == "add" else 58)
                drawn.arrow((x, y - (18 if y == 40 else 12)), (x, y - 2))
                if kind == "add":
                    drawn.arrow((x, branch), (x + 76, branch), (x + 76, y + 11), (x + 15, y + 11))
                y += 34
        drawn.arrow((x, y - 12), (x, y + 4))
        drawn.box(x, y + 8, title, "title")
    return drawn.chart(390, y + 34)


def decades(
    frame: pd.DataFrame, x: str, y: str, color: str, powers: Iterable[int], places: Iterable[int]
) -> alt.LayerChart:
    """Lines of `y` over `x` on a log axis with ticks at `powers` of ten, named at their ends."""
    ticks = alt.Axis(values=[10.0**power for power in powers], format=".0e")
    base = alt.Chart(rounded(frame)).encode(
        x=alt.X(f"{x}:Q", axis=alt.Axis(values=list(places), grid=False)),
        y=alt.Y(f"{y}:Q", axis=ticks, scale=alt.Scale(type="log")),
        color=alt.Color(f"{color}:N", sort=None, legend=None),
    )
    ends = base.transform_filter(alt.datum[x] == int(frame[x].max()))
    names = ends.mark_text(align="left", dx=8).encode(text=f"{color}:N")
    return alt.layer(base.mark_line(point={"size": 45}), names).properties(width=480, height=240)


def layer_lines(frame: pd.DataFrame, columns: list[str], color: str) -> alt.HConcatChart:
    """Columns side by side over the layers E1, …, D1, …; encoder and decoder are separate lines."""
    frame = rounded(frame[["layer", color, *columns]].assign(side=frame.layer.str[0]))
    layers = alt.X("layer:N", sort=None, title="layer", axis=alt.Axis(labelAngle=0))
    base = alt.Chart(frame).encode(
        x=layers,
        color=alt.Color(f"{color}:N", sort=None, legend=alt.Legend(title=None, orient="top")),
        detail="side:N",
    )
    look = {"width": 245, "height": 210}
    mark = {"size": 45}
    panels = [base.encode(y=alt.Y(f"{c}:Q", axis=alt.Axis(tickCount=5))) for c in columns]
    return alt.hconcat(*[panel.mark_line(point=mark).properties(**look) for panel in panels])
