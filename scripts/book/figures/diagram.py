"""A sketch pad for diagrams: boxes, arrows and words at given places, drawn as one chart."""

from __future__ import annotations

import math
import tomllib
from pathlib import Path

from scripts import Late
from scripts.book.look import GREY

alt, pd = Late("altair"), Late("pandas")

FILLS = {"blue": "#CFE3F2", "orange": "#F7D9C4", "green": "#CDEBDD", "pink": "#F3E3F0"}
FILLS |= {"grey": "#EEEEEE", "frame": "#F8F8F8", "white": "#FFFFFF", "dark": "#444444"}
BOLD, LEFT = {"fontWeight": "bold"}, {"align": "left"}
LOOKS = {"plain": {}, "name": BOLD | {"fontSize": 14}, "beside": LEFT}
LOOKS |= {"heading": BOLD | LEFT | {"fontSize": 16}, "times": BOLD | {"fontSize": 20}}
LOOKS |= {"pale plain": {"color": "white"}, "pale name": BOLD | {"color": "white"}}


class Diagram:
    """Boxes, arrows along given points, and words, on a canvas in pixels, y upwards."""

    def __init__(self, width: int, height: int):
        self.width, self.height = width, height
        self.boxes, self.arrows, self.words = [], [], []

    def box(
        self, x: float, y: float, name: str, fill: str, half=80.0, height=22.0, note=""
    ) -> None:
        """A box that stands on (x, y), `half` wide to each side: its name, and a note below it."""
        edges = {"x": x - half, "x2": x + half, "y": y, "y2": y + height}
        self.boxes.append({"fill": fill, "name": name, "note": note} | edges)
        middle, pale = y + height / 2, "pale " * (fill == "dark")
        if note:
            self.word(x, middle + 8, name, f"{pale}name")
            self.word(x, middle - 9, note, f"{pale}plain")
        elif name:
            self.word(x, middle, name)

    def arrow(self, *points: tuple[float, float]) -> None:
        """A line through `points` that ends in a tip."""
        self.arrows.append(points)

    def word(self, x: float, y: float, text: str, look: str = "plain") -> None:
        """A text at (x, y), in one of the LOOKS."""
        self.words.append({"x": x, "y": y, "text": text, "look": look})

    def chart(self) -> alt.LayerChart:
        """The diagram as a chart."""
        x = alt.X("x:Q", axis=None, scale=alt.Scale(domain=[0, self.width], nice=False))
        y = alt.Y("y:Q", axis=None, scale=alt.Scale(domain=[-6, self.height], nice=False))
        boxes = pd.DataFrame(self.boxes)[["x", "x2", "y", "y2", "fill"]].replace({"fill": FILLS})
        rects = alt.Chart(boxes).mark_rect(stroke=GREY, strokeWidth=1, cornerRadius=4)
        points = [
            {"x": x, "y": y, "arrow": number, "order": i}
            for number, arrow in enumerate(self.arrows)
            for i, (x, y) in enumerate(arrow)
        ]
        roads = alt.Chart(pd.DataFrame(points)).mark_line(color=GREY, strokeWidth=1.3)
        tips = alt.Chart(pd.DataFrame([tip(*arrow[-2:]) for arrow in self.arrows]))
        tips = tips.mark_point(shape="triangle-up", filled=True, size=50, color=GREY, opacity=1)
        layers = [
            rects.encode(x, y, x2="x2", y2="y2", color=alt.Color("fill:N", scale=None)),
            roads.encode(x, y, detail="arrow:N", order="order:Q"),
            tips.encode(x, y, angle=alt.Angle("turn:Q", scale=None)),
        ]
        for look, words in pd.DataFrame(self.words).groupby("look", sort=False):
            texts = alt.Chart(words[["x", "y", "text"]]).mark_text(**LOOKS[look])
            layers.append(texts.encode(x, y, text="text:N"))
        return alt.layer(*layers).properties(width=self.width, height=self.height + 6)


def drawn(name: str) -> Diagram:
    """A diagram of diagrams.toml, part by part."""
    picture = tomllib.loads(Path(__file__).with_name("diagrams.toml").read_text("utf-8"))[name]
    diagram = Diagram(*picture["size"])
    for kind, *place in picture["parts"]:
        getattr(diagram, kind)(*place)
    return diagram


def tip(before: tuple[float, float], end: tuple[float, float]) -> dict[str, float]:
    """An arrow's tip at `end`, turned by as many degrees from upwards as the last leg is."""
    across, up = end[0] - before[0], end[1] - before[1]
    return {"x": end[0], "y": end[1], "turn": math.degrees(math.atan2(across, up))}
