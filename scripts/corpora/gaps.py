"""German captions without their verb: singular or plural? The label is in the text itself.

The rule knows some thirty verbs of captions, and skips captions in which it finds none or several.
"""

from dataclasses import dataclass

GAP = "<mask>"
NUMBER = {  # a finite verb of captions, third person: singular to plural
    "steht": "stehen", "sitzt": "sitzen", "geht": "gehen", "läuft": "laufen", "spielt": "spielen",
    "fährt": "fahren", "hält": "halten", "trägt": "tragen", "springt": "springen",
    "liegt": "liegen", "schaut": "schauen", "blickt": "blicken", "macht": "machen",
    "rennt": "rennen", "arbeitet": "arbeiten", "wartet": "warten", "klettert": "klettern",
    "tanzt": "tanzen",
    "lächelt": "lächeln", "posiert": "posieren", "benutzt": "benutzen", "versucht": "versuchen",
    "schläft": "schlafen", "isst": "essen", "liest": "lesen", "sieht": "sehen", "zieht": "ziehen",
    "kauft": "kaufen", "trinkt": "trinken", "ist": "sind", "hat": "haben", "wird": "werden",
}  # fmt: skip
PLURAL = {*NUMBER.values()}
MODAL = {  # beside one of these a plural form is an infinitive
    "kann", "können", "könnte", "muss", "müssen", "soll", "sollen", "will", "wollen", "darf",
    "dürfen", "mag", "mögen", "möchte", "möchten", "lässt", "lassen", "würde", "würden",
}  # fmt: skip
PUNCTUATION = str.maketrans({mark: f" {mark} " for mark in '.,;:!?"()'})


@dataclass(frozen=True)
class GapItem:
    """A German caption without its verb: the words before and after the gap, and its number."""

    before: tuple[str, ...]
    behind: tuple[str, ...]
    plural: bool

    @property
    def words(self) -> tuple[str, ...]:
        """The words with the gap in place."""
        return (*self.before, GAP, *self.behind)


def spaced(text: str) -> str:
    """The text with spaces around its punctuation marks."""
    return " ".join(text.translate(PUNCTUATION).split())


def gap_item(text: str) -> GapItem | None:
    """The caption with its finite verb taken out, or None if the rule doesn't find exactly one.

    The rule: exactly one word of the caption is in `NUMBER`; a plural form, which German also uses
    as the infinitive, doesn't follow "zu", is followed by a word, and no modal verb is near.
    """
    words = tuple(spaced(text).split())
    places = [i for i, word in enumerate(words) if word in NUMBER or word in PLURAL]
    if len(places) != 1:
        return None
    at = places[0]
    before, verb, behind = words[:at], words[at], words[at + 1 :]
    if verb in PLURAL and (
        not before or before[-1] == "zu" or not behind or behind[0] in ".," or MODAL & {*words}
    ):
        return None
    return GapItem(before, behind, verb in PLURAL)


def german_gaps(corpus: dict[str, list[tuple[str, str]]]) -> dict[str, list[GapItem]]:
    """The captions in which the rule finds one verb: train, val, and all test splits as one."""
    gaps: dict[str, list[GapItem]] = {"train": [], "val": [], "test": []}
    for name, pairs in corpus.items():
        items = (gap_item(german) for german, _ in pairs)
        gaps[name if name in gaps else "test"] += filter(None, items)
    return gaps
