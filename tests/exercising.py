"""What tests of exercises share."""

from collections.abc import Callable, Mapping

from scripts.book.exercises import rejection


def assert_told_apart(check: Callable, wrong: Mapping[str, Callable]) -> None:
    """Each candidate of `wrong` is turned down in words of its own, its key among them."""
    answers = {words: rejection(check, candidate) for words, candidate in wrong.items()}
    for words, answer in answers.items():
        assert words in answer, f"{words!r} is not in {answer!r}"
    assert len(set(answers.values())) == len(wrong) >= 2
