"""Chapter 0's exercise."""

from scripts.book.exercises import exercise


@exercise(
    lambda: [(["▁Ein", "▁H", "am", "mer", "."],), ([],)],
    "only ▁ starts a word, and none of the marks may stay",
    "a space at the start or end: the first ▁ must not become a space",
    lambda pieces: "".join(pieces).replace("▁", " "),
    "the words run together: ▁ before a word becomes a space",
    lambda pieces: "".join(pieces).replace("▁", ""),
)
def as_text(pieces: list[str]) -> str:
    """The text that `pieces` were cut from: ▁ marks where a word begins."""
    return "".join(pieces).replace("▁", " ").strip()
