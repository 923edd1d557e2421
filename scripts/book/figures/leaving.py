"""Drawing of chapter 14: the two graphs, what flows between them, and the host's loop."""

from __future__ import annotations

from scripts import Late
from scripts.book.charts import titled
from scripts.book.figures.diagram import Diagram

alt = Late("altair")


def two_graphs() -> alt.TopLevelMixin:
    """The encoder's graph, run once, and the step's graph, which the host runs again and again."""
    drawn, left = Diagram(), 92
    drawn.box(36, 24, "src (B, S)", "grey", 32)
    drawn.box(134, 24, "src_mask (B, 1, S)", "grey", 56)
    drawn.arrow((36, 46), (36, 78))
    drawn.arrow((134, 46), (134, 78))
    drawn.box(left, 80, "encoder.onnx", "blue", 84)
    drawn.arrow((left, 102), (left, 134))
    drawn.box(left, 136, "cross (N, 2, B, H, S, d_k)", "green", 84)
    drawn.word(left, 235, "once for a batch")
    drawn.arrow((176, 147), (208, 147), (208, 97), (228, 97))
    drawn.arrow((190, 35), (208, 35), (208, 85), (228, 85))

    drawn.box(282, 24, "tokens (R, 1)", "grey", 52)
    drawn.box(394, 24, "position (1,)", "grey", 48)
    drawn.box(542, 24, "past (N, 2, R, H, T, d_k)", "green", 86)
    for x in (282, 394, 542):
        drawn.arrow((x, 46), (x, 78))
    drawn.box(429, 80, "decoder_step.onnx", "orange", 199)
    for x in (282, 542):
        drawn.arrow((x, 102), (x, 134))
    drawn.box(282, 136, "logits (R, V)", "grey", 52)
    drawn.box(542, 136, "present (N, 2, R, H, T+1, d_k)", "green", 96)
    drawn.arrow((282, 158), (282, 190))
    drawn.box(282, 192, "the host chooses", "pink", 56)
    drawn.word(429, 235, "once for every token")
    drawn.arrow((638, 147), (650, 147), (650, 35), (630, 35))  # present becomes past
    drawn.arrow((338, 203), (664, 203), (664, 6), (282, 6), (282, 22))  # the token, read back
    return titled(
        drawn.chart(672, 250),
        "Two graphs, and a loop that belongs to neither",
        "Read upwards. Left: once for a batch. Right: once for every token. Two things go round: "
        "the token, which the host chooses, and past, which is the last step's present. Blue and "
        "orange: graphs. Pink: the host. Green: keys and values. R = B, or more with a beam.",
    )
