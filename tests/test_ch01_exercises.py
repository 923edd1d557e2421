"""Chapter 1's exercises: each checker accepts the solution and tells the common mistakes apart."""

import math

import pytest
import torch

from scripts.book.exercises import blame, rejection, same_numbers
from scripts.ch01_attention import (
    additive_variant,
    attention,
    check_additive_attention,
    check_insisting_query,
    check_streaming_attention,
    check_window_mask,
    masked_softmax,
    softmax_filled,
    solution_additive_attention,
    solution_insisting_query,
    solution_streaming_attention,
    solution_window_mask,
    subsequent_mask,
    unguarded_sums,
)

SOLVED = [
    (check_insisting_query, solution_insisting_query),
    (check_window_mask, solution_window_mask),
    (check_additive_attention, solution_additive_attention),
    (check_streaming_attention, solution_streaming_attention),
]


@pytest.mark.parametrize("check, solution", SOLVED, ids=lambda f: f.__name__)
def test_a_solution_passes(check, solution):
    assert check(solution) is None
    with pytest.raises(ValueError, match=f"{check.__name__} accepts"):
        rejection(check, solution)


def test_another_way_to_write_a_solution_passes_too():
    check_additive_attention(additive_variant(masked_softmax))
    check_window_mask(
        lambda n, r, gap: sum(
            torch.eye(n, dtype=torch.int).roll(m * gap, 0).tril(-m * gap) for m in range(r)
        )[None].bool()
    )
    check_insisting_query(lambda share: torch.tensor([math.log(2 / (1 / share - 1)), 0, 0, 0]))


def only(s):
    return [s, 0.0, 0.0, 0.0]


INSISTING = {
    "without the division": lambda p: only(math.log(2 * p / (1 - p)) / 2),
    "two other words": lambda p: only(math.log(p / (1 - p))),
    "isn't the share": lambda p: only(10 * p),
    "only the first": lambda p: [5.0, -5.0, 0.0, 0.0],
    "give it four": lambda p: [math.log(2 * p / (1 - p))],
}

WINDOW = {
    "turned over": lambda n, r, gap: ~solution_window_mask(n, r, gap),
    "a later one": lambda n, r, gap: solution_window_mask(n, r, gap).mT,
    "see itself": lambda n, r, gap: torch.ones(1, n, n, dtype=torch.bool).tril(-1),
    "too far": lambda n, r, gap: solution_window_mask(n, r + 1, gap),
    "between the gaps": lambda n, r, gap: subsequent_mask(n).triu(-(r - 1) * gap),
    "too narrow": lambda n, r, gap: solution_window_mask(n, max(1, r - 1), gap),
    "boolean": lambda n, r, gap: solution_window_mask(n, r, gap).double(),
    "(1, n, n)": lambda n, r, gap: solution_window_mask(n, r, gap)[0],
}


def additive(bend=torch.tanh, scale=1.0, swap=False):
    """Additive attention without a mask, with one thing changed."""

    def attend(query, key, value, w, m, u, mask=None):
        w, m = (m, w) if swap else (w, m)
        pairs = (query @ w.T).unsqueeze(-2) + (key @ m.T).unsqueeze(-3)
        weights = masked_softmax(bend(pairs) @ u / scale, mask)
        return weights @ value, weights

    return attend


def unmixed(*inputs):
    _, weights = solution_additive_attention(*inputs)
    return weights @ inputs[2].flip(0), weights


ADDITIVE = {
    "columns sum to 1": additive_variant(lambda scores, mask: scores.softmax(-2)),
    "without a bend": additive(bend=lambda pairs: pairs),
    "for the query": additive(swap=True),
    "√a": additive(scale=math.sqrt(6)),
    "√d_k": additive(scale=2.0),
    "formula's": additive(bend=torch.relu),
    "their mix": unmixed,
    "(T, S)": lambda *inputs: [x.mT for x in solution_additive_attention(*inputs)],
    "a tie": additive_variant(lambda scores, mask: softmax_filled(scores, mask, -1e9)),
    "0/0": additive_variant(lambda scores, mask: softmax_filled(scores, mask, -math.inf)),
    "weight 0": additive_variant(
        lambda scores, mask: scores.softmax(-1) * mask.any(-1, keepdim=True)
    ),
    "one by one": lambda query, *rest: solution_additive_attention(
        query if query.dim() == 2 else query.flip(0), *rest
    ),
}


def streaming(rescale=True, scale=None):
    """Streaming attention in which the sums needn't shrink, or the scores are scaled otherwise."""

    def attend(query, blocks):
        largest, mix, total = torch.tensor(-math.inf).double(), 0.0, 0.0
        for key, value in blocks:
            scores = query @ key.T / (scale or math.sqrt(query.size(-1)))
            newest = torch.maximum(largest, scores.amax(-1, keepdim=True))
            shrink = (largest - newest).exp() if rescale else 1.0
            powers = (scores - newest).exp()
            mix = mix * shrink + powers @ value
            total = total * shrink + powers.sum(-1, keepdim=True)
            largest = newest
        return mix / total

    return attend


def first_alone(query, blocks):
    return attention(query, *next(blocks))[0]


def last_alone(query, blocks):
    for key, value in blocks:
        output = attention(query, key, value)[0]
    return output


def clamped(query, blocks):
    """Large scores are cut off instead of being subtracted."""
    mix, total = 0.0, 0.0
    for key, value in blocks:
        powers = (query @ key.T / math.sqrt(query.size(-1))).clamp(-50, 50).exp()
        mix, total = mix + powers @ value, total + powers.sum(-1, keepdim=True)
    return mix / total


STREAMING = {
    "√d_k": streaming(scale=1.0),
    "only the last": last_alone,
    "only the first": first_alone,
    "averaged": lambda q, blocks: torch.stack([attention(q, k, v)[0] for k, v in blocks]).mean(0),
    "rescale both sums": streaming(rescale=False),
    "overflows": unguarded_sums,
    "must shrink": clamped,
    "keep sums, not blocks": lambda q, blocks: attention(
        q, *map(torch.cat, zip(*blocks, strict=True))
    )[0],
}

WRONG = [
    (check_insisting_query, INSISTING),
    (check_window_mask, WINDOW),
    (check_additive_attention, ADDITIVE),
    (check_streaming_attention, STREAMING),
]


@pytest.mark.parametrize("check, wrong", WRONG, ids=lambda x: getattr(x, "__name__", ""))
def test_each_mistake_gets_an_answer_of_its_own(check, wrong):
    answers = {words: rejection(check, candidate) for words, candidate in wrong.items()}
    for words, answer in answers.items():
        assert words in answer, f"{words!r} is not in {answer!r}"
    assert len(set(answers.values())) == len(wrong) >= 2


def test_rejection_lets_other_errors_through():
    with pytest.raises(ZeroDivisionError):
        rejection(lambda candidate: candidate(), lambda: 1 / 0)


def test_same_numbers_and_blame():
    ones = torch.ones(2, dtype=torch.float64)
    assert same_numbers(ones + 1e-12, ones) and not same_numbers(ones + 1e-3, ones)
    assert not same_numbers(ones[:1], ones) and not same_numbers([1.0, 1.0], ones)
    assert not same_numbers(ones * math.nan, ones * math.nan)
    for got, words in ((ones, "one"), (2 * ones, "two"), (3 * ones, "neither")):
        with pytest.raises(AssertionError, match=words):
            blame(got, {"one": ones, "two": 2 * ones}, "neither")
