"""Chapter 1's exercises: each checker distinguishes mistakes and accepts other right answers."""

import math

import pytest
import torch
from exercising import assert_told_apart, rejection

from scripts.book.exercises import check
from scripts.ch01_attention import attention, masked_softmax, subsequent_mask
from scripts.exercises.ch01 import (
    additive_attention,
    check_additive_attention,
    check_insisting_query,
    check_streaming_attention,
    check_window_mask,
    window_mask,
)


def test_another_way_to_write_a_solution_passes_too():
    check_window_mask(
        lambda n, r, gap: sum(
            torch.eye(n, dtype=torch.int).roll(m * gap, 0).tril(-m * gap) for m in range(r)
        )[None].bool()
    )
    check_insisting_query(lambda share: torch.tensor([math.log(2 / (1 / share - 1)), 0, 0, 0]))
    check(pair_by_pair, "additive_attention")


def pair_by_pair(query, key, value, w, m, u, mask=None):
    """Into a tensor of the default dtype."""
    scores = torch.zeros(*query.shape[:-1], key.size(-2))
    for t in range(query.size(-2)):
        for s in range(key.size(-2)):
            scores[..., t, s] = (query[..., t, :] @ w.T + key[..., s, :] @ m.T).tanh() @ u
    weights = masked_softmax(scores, mask)
    return weights @ value, weights


def test_growing_gaps_reach_three_to_the_layers_places():
    far = torch.eye(28, dtype=torch.float64)
    for layers in (1, 2, 3):
        far = window_mask(28, 3, 3 ** (layers - 1))[0].double() @ far
        assert (far[:, 0] > 0).sum() == min(28, 3**layers)


def only(s):
    return [s, 0.0, 0.0, 0.0]


INSISTING = {
    "without dividing": lambda p: only(math.log(2 * p / (1 - p)) / 2),
    "two other words": lambda p: only(math.log(p / (1 - p))),
    "isn't the share": lambda p: only(10 * p),
    "only the first": lambda p: [5.0, -5.0, 0.0, 0.0],
    "must have four": lambda p: [math.log(2 * p / (1 - p))],
}

WINDOW = {
    "inverted": lambda n, r, gap: ~window_mask(n, r, gap),
    "a later one": lambda n, r, gap: window_mask(n, r, gap).mT,
    "see itself": lambda n, r, gap: torch.ones(1, n, n, dtype=torch.bool).tril(-1),
    "too far": lambda n, r, gap: window_mask(n, r + 1, gap),
    "multiple of gap": lambda n, r, gap: subsequent_mask(n).triu(-(r - 1) * gap),
    "too narrow": lambda n, r, gap: window_mask(n, max(1, r - 1), gap),
    "boolean": lambda n, r, gap: window_mask(n, r, gap).double(),
    "(1, n, n)": lambda n, r, gap: window_mask(n, r, gap)[0],
}


def additive(softmax=masked_softmax, bend=torch.tanh, scale=1.0, swap=False):
    """Additive attention with one thing changed."""

    def attend(query, key, value, w, m, u, mask=None):
        w, m = (m, w) if swap else (w, m)
        pairs = (query @ w.T).unsqueeze(-2) + (key @ m.T).unsqueeze(-3)
        weights = softmax(bend(pairs) @ u / scale, torch.tensor(True) if mask is None else mask)
        return weights @ value, weights

    return attend


def unmixed(*inputs):
    _, weights = additive_attention(*inputs)
    return weights @ inputs[2].flip(0), weights


def filled(fill):
    return lambda scores, mask: scores.masked_fill(~mask, fill).softmax(-1)


def boolean_only(scores, mask):
    return masked_softmax(scores, mask.bool())


ADDITIVE = {
    "columns sum to 1": additive(lambda scores, mask: scores.softmax(-2)),
    "without tanh": additive(bend=lambda pairs: pairs),
    "for the query": additive(swap=True),
    "√d_k": additive(scale=2.0),
    "formula gives": additive(bend=torch.relu),
    "mixed by them": unmixed,
    "(T, S)": lambda *inputs: [x.mT for x in additive_attention(*inputs)],
    "changes nothing": lambda *inputs: additive_attention(*inputs[:6]),
    "two tensors": lambda *inputs: additive_attention(*inputs)[1],
    "of floats": additive(boolean_only),
    "all are equal": additive(filled(-1e9)),
    "0/0": additive(filled(-math.inf)),
    "weight 0": additive(lambda scores, mask: scores.softmax(-1) * mask.any(-1, keepdim=True)),
    "one by one": lambda query, *rest: additive_attention(
        query if query.dim() == 2 else query.flip(0), *rest
    ),
}


def streaming(subtract=True, rescale=True, scale=2.0, most=math.inf, start=-math.inf, axis=-1):
    """Streaming attention with one thing changed."""

    def attend(query, blocks):
        largest, mix, total = torch.tensor(start).double(), 0.0, 0.0
        for key, value in blocks:
            scores = (query @ key.T / scale).clamp(-most, most)
            newest = torch.maximum(largest, scores.amax(axis, keepdim=True)) * subtract
            shrink = (largest - newest).exp() if rescale and subtract else 1.0
            powers = (scores - newest).exp()
            mix = mix * shrink + powers @ value
            total = total * shrink + powers.sum(-1, keepdim=True)
            largest = newest
        return mix / total

    return attend


def last_alone(query, blocks):
    for key, value in blocks:
        output = attention(query, key, value)[0]
    return output


def held(query, blocks):
    return attention(query, *map(torch.cat, zip(*blocks, strict=True)))[0]


def glued(query, blocks):
    """Copies, so that no block itself is kept."""
    keys, values = query[:0], query[:0, :2]
    for key, value in blocks:
        keys, values = torch.cat((keys, key)), torch.cat((values, value))
    return attention(query, keys, values)[0]


def scores_kept(query, blocks):
    """Scores, but no key; and a clone of each value."""
    scores, values = zip(*((query @ k.T / 2, v.clone()) for k, v in blocks), strict=True)
    return torch.cat(scores, -1).softmax(-1) @ torch.cat(values)


STREAMING = {
    "√d_k": streaming(scale=1.0),
    "only the last": last_alone,
    "averaged": lambda q, blocks: torch.stack([attention(q, k, v)[0] for k, v in blocks]).mean(0),
    "rescale both sums": streaming(rescale=False),
    "each query its own": streaming(subtract=False),
    "must shrink": streaming(most=50),
    "keep sums, not blocks": held,
}

WRONG = [
    (check_insisting_query, INSISTING),
    (check_window_mask, WINDOW),
    (check_additive_attention, ADDITIVE),
    (check_streaming_attention, STREAMING),
]


@pytest.mark.parametrize("slip", [glued, scores_kept])
def test_copies_of_blocks_and_scores_are_found_in_memory(slip):
    assert "in memory" in rejection(check_streaming_attention, slip)


def test_a_batch_has_keys_of_its_own():
    def one_batch_of_keys(query, key, value, w, m, u, mask=None):
        pairs = (query @ w.T).unsqueeze(-2) + key @ m.T
        weights = masked_softmax(pairs.tanh() @ u, mask)
        return weights @ value, weights

    assert "one by one" in rejection(check_additive_attention, one_batch_of_keys)


@pytest.mark.parametrize("slip", [{"start": 0.0}, {"axis": (-2, -1)}], ids=str)
def test_the_largest_score_may_be_negative_and_is_each_querys_own(slip):
    assert "each query its own" in rejection(check_streaming_attention, streaming(**slip))


@pytest.mark.parametrize("check, wrong", WRONG, ids=lambda x: getattr(x, "__name__", ""))
def test_each_mistake_gets_an_answer_of_its_own(check, wrong):
    assert_told_apart(check, wrong)
