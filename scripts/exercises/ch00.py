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
        assert isinstance(got, str), f"a text is a str, not a {type(got).__name__}"
        assert "▁" not in got, "the marks ▁ are left in the text"
        assert got == got.strip(), "the first mark became a blank before the text"
        assert " " in got or " " not in text, "the words run together: a mark ▁ stands for a blank"
        assert got == text, f"the pieces {pieces} make {text!r}, not {got!r}: only ▁ begins a word"
