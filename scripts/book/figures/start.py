"""Chapter 0's figure: the whole Transformer, drawn from a list of boxes, arrows and words."""

from __future__ import annotations

from scripts import Late
from scripts.book.figures.diagram import Diagram

alt = Late("altair")

WIDTH, HEIGHT = 760, 764


class Architecture(Diagram):
    """A diagram of wide boxes with notes, and the two pieces that both columns have."""

    def tall(self, x: float, y: float, name: str, fill: str, note: str, half=100.0) -> None:
        """A box with a note."""
        self.box(x, y, name, fill, half, height=40, note=note)

    def sublayer(self, x: float, start: float, y: float, fill: str, name: str, note: str) -> float:
        """A box with its residual connection and its add & norm; returns where the road goes on."""
        self.tall(x, y, name, fill, note)
        self.box(x, y + 56, "add & norm · ch. 4, 5", "pink", 100, height=28)
        self.arrow((x, start), (x, y - 2))
        self.arrow((x, y + 40), (x, y + 54))
        side = x + 112
        self.arrow((x, y - 16), (side, y - 16), (side, y + 70), (x + 102, y + 70))
        return y + 84

    def inputs(self, x: float, name: str, shape: str, after: str) -> None:
        """The road from ids to vectors with positions."""
        self.tall(x, 0, name, "grey", shape)
        self.tall(x, 64, "Embedding × √D", "grey", "chapter 3")
        self.tall(x, 128, "+ positions", "grey", "chapter 3")
        self.arrow((x, 40), (x, 62))
        self.arrow((x, 104), (x, 126))
        self.word(x + 8, 180, after, "beside")


def draw_encoder(to: Architecture) -> None:
    """The left column."""
    to.inputs(220, "German ids", "(B, S)", "(B, S, D)")
    to.box(222, 196, "", "frame", 124, height=250)
    note = "weights (B, H, S, S) · ch. 1, 2"
    road = to.sublayer(220, 168, 240, "blue", "Self-attention", note)
    road = to.sublayer(220, road, road + 26, "orange", "Feed-forward", "D → d_ff → D · ch. 4")
    to.tall(220, 486, "Memory", "green", "(B, S, D), from the last layer")
    to.arrow((220, road), (220, 484))
    to.word(98, 458, "Encoder", "heading")
    to.word(68, 398, "N ×", "times")
    to.tall(46, 240, "no padding", "dark", "(B, 1, S)", half=42)
    to.arrow((88, 260), (118, 260))


def draw_decoder(to: Architecture) -> None:
    """The right column, and the road from the memory to it."""
    to.inputs(580, "English ids so far", "(B, T)", "(B, T, D)")
    to.box(582, 196, "", "frame", 124, height=360)
    note = "weights (B, H, T, T) · ch. 1, 2"
    road = to.sublayer(580, 168, 240, "blue", "Causal self-attention", note)
    cross, note = road + 26, "weights (B, H, T, S) · ch. 2"
    road = to.sublayer(580, road, cross, "green", "Cross-attention", note)
    road = to.sublayer(580, road, road + 26, "orange", "Feed-forward", "D → d_ff → D · ch. 4")
    to.tall(580, 590, "Generator", "grey", "linear, D → V · ch. 4")
    to.tall(580, 654, "Softmax", "grey", "ch. 1")
    to.tall(580, 718, "p(next token)", "grey", "(B, T, V)")
    to.arrow((580, road), (580, 588))
    to.arrow((580, 630), (580, 652))
    to.arrow((580, 694), (580, 716))
    to.word(588, 568, "(B, T, D)", "beside")
    to.word(588, 642, "logits (B, T, V)", "beside")
    to.word(458, 568, "Decoder", "heading")
    to.word(728, 508, "× N", "times")
    to.tall(400, 240, "no future", "dark", "(B, T, T)", half=42)
    to.arrow((442, 260), (478, 260))
    to.tall(400, cross - 16, "no padding", "dark", "(B, 1, S)", half=42)
    to.arrow((442, cross + 8), (478, cross + 8))
    to.arrow((320, 506), (400, 506), (400, cross + 32), (478, cross + 32))
    to.word(364, 516, "keys, values", "beside")


def architecture() -> Architecture:
    """The whole Transformer, encoder left and decoder right (the paper's Figure 1)."""
    drawn = Architecture()
    draw_encoder(drawn)
    draw_decoder(drawn)
    return drawn


def architecture_chart() -> alt.LayerChart:
    """The drawing of `architecture`."""
    return architecture().chart(WIDTH, HEIGHT)
