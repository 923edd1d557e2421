"""Chapter 0's figure: the whole Transformer, drawn from a list of boxes, arrows and labels."""

from __future__ import annotations

import math

from scripts import Late
from scripts.book.charts import GREY, INK

alt, pd = Late("altair"), Late("pandas")

WIDTH, HEIGHT = 760, 764
FILLS = {
    "layer": "#F8F8F8",
    "plain": "#EBEBEB",
    "attention": "#CFE3F2",
    "memory": "#CDEBDD",
    "feed": "#F7D9C4",
    "norm": "#F3E3F0",
    "mask": "#444444",
}


class Sketch:
    """Boxes, arrows (as corner points) and free labels, in pixels, y upwards."""

    def __init__(self):
        self.boxes, self.arrows, self.labels = [], [], []

    def box(self, kind, middle, low, name, note="", width=200, height=40):
        """A box on the line `low`, centred at x = `middle`, with a name and a note below it."""
        edges = {"x": middle - width / 2, "x2": middle + width / 2, "y": low, "y2": low + height}
        self.boxes.append({"kind": kind, "name": name, "note": note, **edges})

    def arrow(self, *points):
        """A line along `points`, with a tip at the last one."""
        number = len({leg["arrow"] for leg in self.arrows})
        self.arrows.extend(
            {"arrow": number, "order": i, "x": x, "y": y, "tip": i == len(points) - 1}
            for i, (x, y) in enumerate(points)
        )

    def label(self, x, y, text, style="shape"):
        """Words beside the boxes."""
        self.labels.append({"x": x, "y": y, "text": text, "style": style})

    def sublayer(self, middle, start, low, kind, name, note):
        """A box with its residual connection and its add & norm; returns where the road goes on."""
        self.box(kind, middle, low, name, note)
        self.box("norm", middle, low + 56, "add & norm · ch. 4, 5", height=28)
        self.arrow((middle, start), (middle, low - 2))
        self.arrow((middle, low + 40), (middle, low + 54))
        side = middle + 112
        self.arrow((middle, low - 16), (side, low - 16), (side, low + 70), (middle + 102, low + 70))
        return low + 84

    def inputs(self, middle, name, shape, after):
        """The road from ids to vectors with positions."""
        self.box("plain", middle, 0, name, shape)
        self.box("plain", middle, 64, "Embedding × √D", "chapter 3")
        self.box("plain", middle, 128, "+ positions", "chapter 3")
        self.arrow((middle, 40), (middle, 62))
        self.arrow((middle, 104), (middle, 126))
        self.label(middle + 8, 180, after)


def draw_encoder(to: Sketch) -> None:
    """The left column."""
    to.inputs(220, "German ids", "(B, S)", "(B, S, D)")
    to.box("layer", 222, 196, "", width=248, height=250)
    note = "weights (B, H, S, S) · ch. 1, 2"
    road = to.sublayer(220, 168, 240, "attention", "Self-attention", note)
    road = to.sublayer(220, road, road + 26, "feed", "Feed-forward", "D → d_ff → D · ch. 4")
    to.box("memory", 220, 486, "Memory", "(B, S, D), from the last layer")
    to.arrow((220, road), (220, 484))
    to.label(98, 458, "Encoder", "heading")
    to.label(68, 398, "N ×", "times")
    to.box("mask", 46, 240, "no padding", "(B, 1, S)", width=84)
    to.arrow((88, 260), (118, 260))


def draw_decoder(to: Sketch) -> None:
    """The right column, and the road from the memory to it."""
    to.inputs(580, "English ids so far", "(B, T)", "(B, T, D)")
    to.box("layer", 582, 196, "", width=248, height=360)
    note = "weights (B, H, T, T) · ch. 1, 2"
    road = to.sublayer(580, 168, 240, "attention", "Causal self-attention", note)
    cross, note = road + 26, "weights (B, H, T, S) · ch. 2"
    road = to.sublayer(580, road, cross, "memory", "Cross-attention", note)
    road = to.sublayer(580, road, road + 26, "feed", "Feed-forward", "D → d_ff → D · ch. 4")
    to.box("plain", 580, 590, "Generator", "linear, D → V · ch. 4")
    to.box("plain", 580, 654, "Softmax", "ch. 1")
    to.box("plain", 580, 718, "p(next token)", "(B, T, V)")
    to.arrow((580, road), (580, 588))
    to.arrow((580, 630), (580, 652))
    to.arrow((580, 694), (580, 716))
    to.label(588, 568, "(B, T, D)")
    to.label(588, 642, "logits (B, T, V)")
    to.label(458, 568, "Decoder", "heading")
    to.label(728, 508, "× N", "times")
    to.box("mask", 400, 240, "no future", "(B, T, T)", width=84)
    to.arrow((442, 260), (478, 260))
    to.box("mask", 400, cross - 16, "no padding", "(B, 1, S)", width=84)
    to.arrow((442, cross + 8), (478, cross + 8))
    to.arrow((320, 506), (400, 506), (400, cross + 32), (478, cross + 32))
    to.label(364, 516, "keys, values")


def architecture() -> Sketch:
    """The whole Transformer, encoder left and decoder right (the paper's Figure 1)."""
    sketch = Sketch()
    draw_encoder(sketch)
    draw_decoder(sketch)
    return sketch


def architecture_chart() -> alt.LayerChart:
    """The drawing of `architecture`."""
    sketch = architecture()
    boxes, arrows, labels = map(pd.DataFrame, (sketch.boxes, sketch.arrows, sketch.labels))
    x = alt.X("x:Q", axis=None, scale=alt.Scale(domain=[0, WIDTH], nice=False))
    y = alt.Y("y:Q", axis=None, scale=alt.Scale(domain=[-6, HEIGHT], nice=False))
    fills = alt.Scale(domain=list(FILLS), range=list(FILLS.values()))
    rects = alt.Chart(boxes).mark_rect(stroke=GREY, strokeWidth=1, cornerRadius=5)
    roads = alt.Chart(arrows).mark_line(color=GREY, strokeWidth=1.4)
    legs = arrows.groupby("arrow")[["x", "y"]].diff()[arrows["tip"]]
    turns = [math.degrees(math.atan2(dx, dy)) for dx, dy in legs.itertuples(index=False)]
    tips = alt.Chart(arrows[arrows["tip"]].assign(turn=turns))
    tips = tips.mark_point(shape="triangle-up", filled=True, size=55, color=GREY, opacity=1)

    def text(frame, words: str, size: int, ink: str = INK, **look) -> alt.Chart:
        mark = alt.Chart(frame).mark_text(fontSize=size, color=ink, **look)
        return mark.encode(x=x, y=y, text=f"{words}:N")

    centre = boxes.assign(x=(boxes.x + boxes.x2) / 2, y=(boxes.y + boxes.y2) / 2)
    dark, light = centre[centre.kind == "mask"], centre[~centre.kind.isin(["mask", "layer"])]
    two, one = light[light.note != ""], light[light.note == ""]
    up, down, bold = {"dy": -8}, {"dy": 9}, {"fontWeight": "bold"}
    shapes, headings, times = (
        labels[labels["style"] == style] for style in ("shape", "heading", "times")
    )
    layers = [
        rects.encode(
            x=x, y=y, x2="x2:Q", y2="y2:Q", color=alt.Color("kind:N", legend=None, scale=fills)
        ),
        roads.encode(x=x, y=y, detail="arrow:N", order="order:Q"),
        tips.encode(x=x, y=y, angle=alt.Angle("turn:Q", scale=None)),
        text(two, "name", 14, **bold, **up),
        text(two, "note", 12, **down),
        text(one, "name", 13),
        text(dark, "name", 12, "white", **bold, **up),
        text(dark, "note", 12, "white", **down),
        text(shapes, "text", 12, align="left"),
        text(headings, "text", 16, align="left", **bold),
        text(times, "text", 20, **bold),
    ]
    return alt.layer(*layers).properties(width=WIDTH, height=HEIGHT + 6)
