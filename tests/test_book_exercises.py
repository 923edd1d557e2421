"""`check` and `solution`: what they print for right and wrong attempts, and for stubs."""

import math
import sys

import pytest
import torch
from exercising import rejection

from scripts.book.exercises import blame, check, home_of, same_numbers, solution
from scripts.ch01_attention import subsequent_mask


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


STUBS = [dots, documented_dots, passes, only_documented, documented_pass]


@pytest.mark.parametrize("stub", STUBS, ids=lambda f: f.__name__)
def test_a_stub_is_not_tried_yet(stub, capsys):
    check(stub, "window_mask")
    assert capsys.readouterr().out == "window_mask: not tried yet\n"


def returns_a_number(n, r, gap):
    """What is wanted."""
    return 7


@pytest.mark.parametrize("attempt", [returns_a_number, lambda n, r, gap: n])
def test_a_short_attempt_is_no_stub(attempt, capsys):
    with pytest.raises(AttributeError):  # the checker asks for the mask's shape
        check(attempt, "window_mask")
    assert capsys.readouterr().out == ""


def test_a_forgotten_return_is_named():
    def only_works(n, r, gap):
        subsequent_mask(n).triu(-(r - 1) * gap)

    with pytest.raises(AssertionError, match="`return` missing"):
        check(only_works, "window_mask")
    check(home_of("shared_layers").shared_layers)  # works in place, so that None is right


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
    def seven(candidate):
        assert candidate() == 7, "it isn't seven"

    assert rejection(seven, lambda: 8).startswith("it isn't seven")
    with pytest.raises(ValueError, match="seven accepts"):
        rejection(seven, lambda: 7)
    with pytest.raises(ZeroDivisionError):
        rejection(seven, lambda: 1 / 0)


def test_same_numbers_and_blame():
    ones = torch.ones(2, dtype=torch.float64)
    assert same_numbers(ones + 1e-12, ones) and not same_numbers(ones + 1e-3, ones)
    assert not same_numbers(ones[:1], ones) and not same_numbers([1.0, 1.0], ones)
    assert not same_numbers(ones * math.nan, ones * math.nan)
    for got, words in ((ones, "one"), (2 * ones, "two"), (3 * ones, "neither")):
        with pytest.raises(AssertionError, match=words):
            blame(got, {"one": ones, "two": 2 * ones}, "neither")
