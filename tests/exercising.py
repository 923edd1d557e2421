"""What tests of exercises share."""

from collections.abc import Callable, Mapping
from typing import Any


def rejection(check: Callable[[Any], None], candidate: Any) -> str:
    """What `check` says is wrong with `candidate`; raises ValueError if it accepts it."""
    try:
        check(candidate)
    except AssertionError as answer:
        return str(answer)
    raise ValueError(f"{check.__name__} accepts a wrong candidate")


def assert_told_apart(check: Callable, wrong: Mapping[str, Callable]) -> None:
    """Each candidate in `wrong` is rejected with its own message, which contains its key."""
    answers = {words: rejection(check, candidate) for words, candidate in wrong.items()}
    for words, answer in answers.items():
        assert words in answer, f"{words!r} is not in {answer!r}"
    assert len(set(answers.values())) == len(wrong) >= 2
