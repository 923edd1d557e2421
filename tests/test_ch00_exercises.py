"""Chapter 0's exercise with a checker: it accepts the solution and tells common mistakes apart."""

import torch

from scripts.book.exercises import rejection
from scripts.ch00_start_here import (
    check_twin_sentence,
    solution_twin_sentence,
    twin_without_turning,
)


def twin(words, rotation, delta, take=None, middle=0.0):
    """A twin whose last word loses `take(delta, steps)`."""
    copy = words.clone()
    copy[:, 0] += delta
    copy[:, 1:-1] += middle
    steps = words.size(1) - 1
    copy[:, -1] -= take(rotation, steps) @ delta
    return copy


def by(take, **options):
    return lambda *given: twin(*given, take=take, **options)


def in_place(words, rotation, delta):
    words[:] = solution_twin_sentence(words, rotation, delta)
    return words


power = torch.linalg.matrix_power

WRONG = {
    "has been turned": twin_without_turning,
    "doubled": by(lambda rotation, steps: -power(rotation, steps)),
    "turned back": by(lambda rotation, steps: power(rotation.T, steps)),
    "turned once:": by(lambda rotation, steps: rotation),
    "once too often": by(lambda rotation, steps: power(rotation, steps + 1)),
    "what has become": by(lambda rotation, steps: 0 * rotation),
    "only the first": by(power, middle=1.0),
    "change by delta": lambda words, rotation, delta: words.clone(),
    "as many words": lambda words, rotation, delta: words[:, 1:],
    "work on a copy": in_place,
}


def test_a_solution_passes():
    assert check_twin_sentence(solution_twin_sentence) is None
    check_twin_sentence(by(power))


def test_each_mistake_gets_an_answer_of_its_own():
    answers = {words: rejection(check_twin_sentence, wrong) for words, wrong in WRONG.items()}
    for words, answer in answers.items():
        assert words in answer, f"{words!r} is not in {answer!r}"
    assert len(set(answers.values())) == len(WRONG)
