"""Chapter 0's exercise: our solution, and a checker that says what is wrong."""

from collections.abc import Callable


def as_text(pieces: list[str]) -> str:
    """The text that `pieces` were cut from: ▁ marks where a word begins."""
    return "".join(pieces).replace("▁", " ").strip()


def check_as_text(candidate: Callable[[list[str]], str]) -> None:
    """Joins the pieces of three texts: whole words, a word in pieces, nothing at all."""
    for text, pieces in (
        ("Ein Hammer.", ["▁Ein", "▁H", "am", "mer", "."]),
        ("zwei", ["▁zwei"]),
        ("", []),
    ):
        got = candidate(list(pieces))
        assert isinstance(got, str), f"the result must be a str, not a {type(got).__name__}"
        assert "▁" not in got, "the marks ▁ are still in the text"
        assert got == got.strip(), (
            "a space at the start or end: the first ▁ must not become a space"
        )
        assert " " in got or " " not in text, (
            "the words run together: ▁ before a word becomes a space"
        )
        assert got == text, f"the pieces {pieces} make {text!r}, not {got!r}: only ▁ starts a word"
