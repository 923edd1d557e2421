"""`check` and `solution`: what they print for right and wrong attempts, and for stubs."""

import math
import sys
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from exercising import rejection

from scripts.book.exercises import check, compare, home_of, same_numbers, solution
from scripts.ch01_attention import subsequent_mask
from scripts.exercises.ch00 import as_text, check_as_text


def window_mask(n, r, gap=1):
    return subsequent_mask(n).triu(-(r - 1) * gap)


def test_check_is_silent_on_a_solution(capsys):
    check(home_of("window_mask").window_mask)
    assert capsys.readouterr() == ("", "")


def test_check_says_why_an_answer_is_wrong(capsys):
    with pytest.raises(AssertionError, match="multiple of gap"):
        check(window_mask)
    assert capsys.readouterr() == ("", "")


def dots(n, r): ...


def documented_dots(n, r):
    """What is wanted."""
    ...


def passes(n, r):
    pass


def only_documented(n, r):
    """What is wanted."""


def documented_pass(n, r):
    """What is wanted."""
    pass


@contextmanager
def decorated_dots(n, r): ...


STUBS = [dots, documented_dots, passes, only_documented, documented_pass, decorated_dots]


@pytest.mark.parametrize("stub", STUBS, ids=lambda f: f.__name__)
def test_a_stub_is_not_tried_yet(stub, capsys):
    check(stub, "window_mask")
    assert capsys.readouterr().out == "window_mask: not tried yet\n"


def returns_a_number(n, r, gap):
    """What is wanted."""
    return 7


@pytest.mark.parametrize("attempt", [returns_a_number, lambda n, r, gap: n])
def test_a_short_attempt_is_no_stub(attempt, capsys):
    with pytest.raises(AssertionError, match="return a tensor, not a int"):
        check(attempt, "window_mask")
    assert capsys.readouterr().out == ""


def test_a_forgotten_return_is_named():
    def only_works(n, r, gap):
        subsequent_mask(n).triu(-(r - 1) * gap)

    with pytest.raises(AssertionError, match="`return` missing"):
        check(only_works, "window_mask")
    check(home_of("shared_layers").shared_layers)  # works in place, so that None is right


WRONG_TYPES = {
    "window_mask": ([[True]], "return a tensor, not a list"),
    "sign_test": ([0.5], "return one number, not a list"),
    "hide_words": ((torch.zeros(2),), "return two tensors, not a tuple"),
}


@pytest.mark.parametrize("name", WRONG_TYPES)
def test_a_wrong_type_is_named(name):
    result, words = WRONG_TYPES[name]
    with pytest.raises(AssertionError, match=words):
        check(lambda *given: result, name)


@pytest.mark.parametrize("raises", [False, True])
def test_a_checker_runs_in_float64_and_leaves_the_default_as_it_was(raises):
    def ours_unless(pieces):
        assert not raises and torch.zeros(1).dtype == torch.float64
        return as_text(pieces)

    try:
        check(ours_unless, "as_text")
    except AssertionError:
        assert raises
    assert torch.get_default_dtype() == torch.float32


def test_what_torch_cannot_do_is_no_stub(capsys):
    with pytest.raises(NotImplementedError, match="softmax"):  # of integers
        check(lambda n, r, gap: torch.arange(n).softmax(dim=0), "window_mask")
    assert capsys.readouterr().out == ""


def test_a_wrapper_is_checked_under_a_name():
    right = home_of("window_mask").window_mask
    check(lambda *sizes: right(*sizes), name="window_mask")
    with pytest.raises(AssertionError, match="inverted"):
        check(lambda *sizes: ~right(*sizes), name="window_mask")


@pytest.mark.parametrize("ask", [solution, home_of, lambda name: check(dots, name)])
def test_unknown_names_are_refused_with_the_known_ones(ask):
    with pytest.raises(ValueError, match="'no_such'; the exercises are .*window_mask"):
        ask("no_such")


def test_solution_prints_our_source(capsys):
    solution("window_mask")
    printed = capsys.readouterr().out
    assert printed.startswith("def window_mask(") and printed.count("def ") == 1
    assert "return" in printed


def helper(n):
    return n


@torch.no_grad()
def takes_a_helper(n):
    return helper(n)


def test_solution_prints_what_ours_takes_from_its_module(monkeypatch, capsys):
    monkeypatch.setattr("scripts.book.exercises.home_of", lambda name: sys.modules[__name__])
    solution("takes_a_helper")
    printed = capsys.readouterr().out
    assert printed.startswith("def helper(") and "\n\n\n@torch.no_grad()\ndef takes_" in printed


def test_rejection_is_the_answer_to_a_wrong_candidate():
    assert rejection(check_as_text, "".join) == "the marks ▁ are still in the text"
    with pytest.raises(ValueError, match="check_as_text accepts"):
        rejection(check_as_text, as_text)
    with pytest.raises(ZeroDivisionError):
        rejection(check_as_text, lambda pieces: 1 / 0)


@pytest.mark.parametrize("kind", [torch.Tensor.tolist, np.asarray, torch.Tensor.float])
def test_numbers_are_compared_whatever_holds_them(kind):
    ones = torch.ones(2, dtype=torch.float64)
    assert same_numbers(kind(ones + 1e-8), ones) and not same_numbers(kind(ones + 1e-3), ones)
    assert not same_numbers(kind(ones[:1]), ones) and not same_numbers(1.0, kind(ones))
    assert not same_numbers(kind(ones * math.nan), ones * math.nan)
    mistakes = {"right": ones, "two": 2 * ones, "again": kind(2 * ones)}
    compare(kind(ones), ones, mistakes, "neither")
    compare(kind(ones), 1.5 * ones, mistakes, "neither", rtol=0.5)
    for got, words in ((2 * ones, "two"), (3 * ones, "neither")):
        with pytest.raises(AssertionError, match=words):
            compare(kind(got), ones, mistakes, "neither")
