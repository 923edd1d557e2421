"""Chapter 23's exercises: checkers distinguish common mistakes and accept other right answers."""

import math

import pytest
import torch
from exercising import assert_told_apart, rejection

from scripts.book.exercises import check
from scripts.ch23_long_memory import delta_attention
from scripts.exercises import ch23 as ours
from scripts.exercises.ch23 import fading

# Softmax in one pass


def online(start=-math.inf, shift=True, shrink=True, skip=True):
    """The exercise's solution with something left out."""

    def candidate(parts):
        best, total, mixed = start, 0.0, 0.0
        for scores, v in parts:
            higher = max(best, scores.max().item()) if shift else 0.0
            if skip and higher == -math.inf:
                continue
            weights = (scores - higher).exp()
            factor = math.exp(best - higher) if shrink and shift and best > -math.inf else 1.0
            total, mixed = factor * total + weights.sum(), factor * mixed + weights @ v
            best = higher
        return mixed / total

    return candidate


def mean_of_softmaxes(parts):
    return torch.stack([scores.softmax(0) @ v for scores, v in parts]).mean(0)


def in_two_passes(parts):
    held = list(parts)
    best = max(scores.max() for scores, _ in held)
    total = sum((scores - best).exp().sum() for scores, _ in held)
    return sum((scores - best).exp() @ v for scores, v in held) / total


# A memory that fades


def forgetting(**slip):
    def candidate(q, k, v, alpha, beta):
        return fading(q, k, v, alpha, beta, **slip)

    return candidate


WRONG = {
    "online_softmax": {
        "shrink what was added": online(shrink=False),
        "overflow": online(shift=False, skip=False),
        "must start at −∞": online(start=0.0),
        "is not a number": online(skip=False),
        "Add up the tiles' sums": mean_of_softmaxes,
        "still in memory": in_two_passes,
        "one tile holds everything": lambda parts: next(parts)[1].mean(0),
    },
    "gated_delta": {
        "never looks up": forgetting(correct=0.0),
        "write first, then read": forgetting(early=True),
        "Nothing fades": lambda q, k, v, alpha, beta: delta_attention(q, k, v, beta),
        "before it faded": forgetting(stale=True),
        "was just written fades": forgetting(after=True),
        "one (T, d) tensor": lambda q, k, v, alpha, beta: v[0],
        "isn't the delta rule": lambda q, k, v, alpha, beta: v,
        "first M ← α M": lambda q, k, v, alpha, beta: fading(q, k, v, alpha**2, beta),
    },
}


@pytest.mark.parametrize("name", WRONG)
def test_each_mistake_has_a_message_of_its_own(name):
    assert_told_apart(getattr(ours, f"check_{name}"), WRONG[name])


def test_another_right_way_passes():
    def by_matrices(q, k, v, alpha, beta):
        state, out = torch.zeros(4, 4), []
        for t in range(len(v)):
            erase = torch.eye(4) - beta[t] * torch.outer(k[t], k[t])
            state = alpha[t] * erase @ state + beta[t] * torch.outer(k[t], v[t])
            out.append(state.T @ q[t])
        return torch.stack(out)

    def beginning_with_the_first(parts):
        """The first tile stays in variables of its own."""
        first, values = next(parts)
        best = first.max()
        weights = (first - best).exp().nan_to_num()
        total, mixed = weights.sum(), weights @ values
        for scores, v in parts:
            higher = torch.maximum(best, scores.max())
            weights, shrink = (scores - higher).exp(), (best - higher).exp()
            total, mixed, best = (
                total * shrink + weights.sum(),
                mixed * shrink + weights @ v,
                higher,
            )
        return mixed / total

    check(by_matrices, "gated_delta")
    check(beginning_with_the_first, "online_softmax")


def glued(parts):
    """Copies, so that no tile itself is kept."""
    scores, values = torch.zeros(0), torch.zeros(0, 4)
    for new, v in parts:
        scores, values = torch.cat((scores, new)), torch.cat((values, v))
    return scores.softmax(0) @ values


def test_copies_of_tiles_are_found_in_memory():
    assert "in memory" in rejection(ours.check_online_softmax, glued)
