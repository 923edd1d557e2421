"""A drawing of multi-head attention: the layer's steps, with the shape at each arrow."""

from __future__ import annotations

from scripts import Late
from scripts.book.charts import GREY, INK, PALE, PALETTE

alt, pd = Late("altair"), Late("pandas")

LOOKS = {  # of the words in the drawing
    "label": {"fontSize": 13, "color": INK},
    "power": {"fontSize": 9, "color": INK},
    "shape": {"fontSize": 12, "color": GREY, "align": "left"},
    "step": {"fontSize": 13, "color": INK, "align": "left", "fontStyle": "italic"},
}


def layer_diagram(heads: int = 4) -> alt.LayerChart:
    """Multi-head attention, step by step from top to bottom; each head has its colour."""
    boxes, words, arrows, rails = [], [], [], []

    def write(x: float, y: float, text: str, kind: str = "label") -> None:
        words.append((x, y, text, kind))

    def row(x: float, width: float, y: float, text: str, gap: float = 0) -> None:
        step = (width + gap) / heads
        for i in range(heads):
            boxes.append((x + i * step, x + (i + 1) * step - gap, y, y + 28, PALETTE[i]))
            write(x + i * step + (step - gap) / 2, y + 14, text.format(i))

    def matrix(x: float, y: float, name: str) -> None:
        boxes.append((x - 48, x + 48, y, y + 28, PALE))
        write(x - 26, y + 14, "W")
        write(x - 15, y + 9, name, "power")
        write(x + 14, y + 14, "(D, D)")

    def arrow(x: float, y: float, shape: str) -> None:
        arrows.append((x, y + 1, y + 32))
        write(x + 7, y + 18, shape, "shape")

    def rail(y: float, head_end: float) -> None:
        """A line along all heads, tied to each: what touches it belongs to every head."""
        middles = [280 + (i - (heads - 1) / 2) * 362 / heads for i in range(heads)]
        rails.append((middles[0], middles[-1], y, y))
        rails.extend((x, x, y, head_end) for x in middles)

    columns = (150, "Q", "query", "T"), (280, "K", "key", "S"), (410, "V", "value", "S")
    for x, name, role, length in columns:
        write(x, 8, role)
        arrow(x, 18, f"(B, {length}, D)")
        matrix(x, 58, name)
        arrow(x, 86, f"(B, {length}, D)")
        row(x - 48, 96, 126, "{}")
        arrow(x, 154, f"(B, H, {length}, D/H)")
    rail(190, 202)
    row(102, 356, 202, "head {}", gap=6)
    rail(242, 230)
    arrow(280, 242, "(B, H, T, D/H)")
    row(232, 96, 282, "{}")
    arrow(280, 310, "(B, T, D)")
    matrix(280, 350, "O")
    arrow(280, 378, "(B, T, D)")
    write(280, 426, "output")
    for y, step in ((72, "project"), (140, "split"), (216, "attend"), (296, "join"), (364, "mix")):
        write(0, y, step, "step")

    y, y2 = (alt.Y(f"{name}:Q", scale=None, axis=None) for name in ("y", "y2"))
    x = alt.X("x:Q", scale=None, axis=None)
    fill = alt.Color("color:N", scale=None)
    squares = alt.Chart(pd.DataFrame(boxes, columns=["x", "x2", "y", "y2", "color"]))
    shafts = alt.Chart(pd.DataFrame(arrows, columns=["x", "y", "y2"]))
    ties = alt.Chart(pd.DataFrame(rails, columns=["x", "x2", "y", "y2"]))
    texts = alt.Chart(pd.DataFrame(words, columns=["x", "y", "text", "kind"]))
    tip = {"shape": "triangle-down", "size": 60, "filled": True, "opacity": 1, "color": GREY}
    layers = [
        squares.mark_rect(opacity=0.45, stroke="white").encode(x, y, fill, x2="x2", y2="y2"),
        shafts.mark_rule(color=GREY).encode(x, y, y2="y2"),
        ties.mark_rule(color=GREY).encode(x, y, x2="x2", y2="y2"),
        shafts.mark_point(**tip).encode(x, y2),
    ]
    for kind, look in LOOKS.items():
        chosen = texts.transform_filter(alt.datum.kind == kind)
        layers.append(chosen.mark_text(baseline="middle", **look).encode(x, y, text="text:N"))
    return alt.layer(*layers).properties(width=490, height=435)
