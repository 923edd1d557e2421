"""What tests of exercises share."""

from collections.abc import Callable, Mapping
from typing import Any

from scripts.book.exercises import check


def rejection(checker: Callable[[Any], None], candidate: Any) -> str:
    """What a reader is told is wrong with `candidate`; raises ValueError if it is accepted."""
    try:
        check(candidate, checker.__name__.removeprefix("check_"))
    except AssertionError as answer:
        return str(answer)
    raise ValueError(f"{checker.__name__} accepts a wrong candidate")


def assert_told_apart(checker: Callable, wrong: Mapping[str, Callable]) -> None:
    """Each candidate in `wrong` is rejected with its own message, which contains its key."""
    answers = {words: rejection(checker, candidate) for words, candidate in wrong.items()}
    for words, answer in answers.items():
        assert words in answer, f"{words!r} is not in {answer!r}"
    assert len(set(answers.values())) == len(wrong) >= 2
