"""Chapter 0's exercise: the checker accepts another right answer and distinguishes mistakes."""

from exercising import assert_told_apart

from scripts.exercises.ch00 import check_as_text

WRONG = {
    "must be a str": list,
    "are still in": "".join,
    "at the start": lambda pieces: "".join(pieces).replace("▁", " "),
    "run together": lambda pieces: "".join(pieces).replace("▁", ""),
    "only ▁ starts": lambda pieces: " ".join(pieces).replace("▁", ""),
}


def test_another_way_to_write_a_solution_passes_too():
    check_as_text(lambda pieces: " ".join("".join(pieces).split("▁")).strip())


def test_each_mistake_gets_an_answer_of_its_own():
    assert_told_apart(check_as_text, WRONG)
