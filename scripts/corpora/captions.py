"""Fifty captions of our own in the manner of Multi30k, in two languages, aligned by hand.

They are in captions.txt, whose first lines say what its lines mean.
"""

import re
from dataclasses import dataclass
from pathlib import Path

CAPTIONS = Path(__file__).with_name("captions.txt").read_text("utf-8")

# Their German verbs, in the forms that occur and are one piece for chapter 9's translator.
VERBS = """bauen bläst dreht essen fährt fängt füttert haben hat hält jagt klettert kämpfen lacht
läuft liegt liest machen raucht reitet rennen reparieren repariert ruht schießt schläft schneidet
sieht singt sitzt spielen spielt springt steht stehen streicht tanzen tragen trägt überquert
verkauft warten wäscht zeigt zieht"""


@dataclass(frozen=True)
class AlignedPair:
    """A caption in both languages, as words, with the links between them made by hand.

    A link is (German position, English position). `sure` are links that everyone would make;
    `possible` holds those and the debatable ones.
    """

    german: tuple[str, ...]
    english: tuple[str, ...]
    sure: frozenset[tuple[int, int]]
    possible: frozenset[tuple[int, int]]

    @property
    def texts(self) -> tuple[str, str]:
        """Both captions as plain text, German first."""
        texts = (" ".join(words) for words in (self.german, self.english))
        return tuple(re.sub(r" ([.,])", r"\1", text) for text in texts)


def aligned_pairs(text: str = CAPTIONS) -> list[AlignedPair]:
    """The pairs of a text like `CAPTIONS`."""
    pairs = []
    for line in re.findall("^[^#].*", text, re.MULTILINE):
        german, english, links = (part.split() for part in line.split(" | "))
        matches = [re.fullmatch(r"(\d+)([-p])(\d+)", link) for link in links]
        sure = {(int(m[1]), int(m[3])) for m in matches if m[2] == "-"}
        possible = {(int(m[1]), int(m[3])) for m in matches}
        pairs.append(
            AlignedPair(tuple(german), tuple(english), frozenset(sure), frozenset(possible))
        )
    return pairs


def sure_links(text: str) -> set[tuple[int, int]]:
    """The sure links of a text like "0-0 1p1 1-2"."""
    return {(int(i), int(j)) for i, j in re.findall(r"(\d+)-(\d+)", text)}
