"""Chapter 22's exercises: each checker distinguishes the common mistakes."""

import pytest
import torch
from exercising import assert_told_apart

from scripts.exercises import ch22 as ours
from scripts.exercises.ch22 import alibi_bias, half_layout

WRONG = {
    "shared_heads": {
        "that is `repeat`": lambda k, h: k.repeat(1, h // k.size(1), 1, 1),
        "the shape": lambda k, h: k,
        "first group": lambda k, h: k[:, [0] * h],
        "keys of no group": lambda k, h: k.repeat_interleave(h // k.size(1), 2).view(2, h, 5, 3),
        "Now do it without": lambda k, h: k.repeat_interleave(h // k.size(1), 1),
        "all heads must read it": lambda k, h: k[:, [0, 0, 0, 1, 1, 1]] if k.size(1) > 1 else k,
    },
    "half_layout": {
        "Nothing was moved": lambda weight, h: weight,
        "another head": lambda weight, h: half_layout(weight, 1),
        "way back": lambda weight, h: weight.unflatten(0, (h, 2, -1)).transpose(1, 2).flatten(0, 2),
        "must occur once": lambda weight, h: weight * 2,
        "the weight's shape": lambda weight, h: weight[:4],
        "was changed": lambda weight, h: weight.copy_(half_layout(weight, h)),
    },
    "alibi_bias": {
        "The shape": lambda h, T, S: alibi_bias(h, T, S).unsqueeze(0),
        "The sign": lambda h, T, S: -alibi_bias(h, T, S),
        "not the first": lambda h, T, S: alibi_bias(h, S, S)[:, :T],
        "begin at 1": lambda h, T, S: alibi_bias(h, T, S) * 2 ** (8 / h),
        "whatever h is": lambda h, T, S: torch.stack(
            [alibi_bias(h, T, S)[0] * 2 ** (8 / h) / 2 ** (n + 1) for n in range(h)]
        ),
        "in reverse": lambda h, T, S: alibi_bias(h, T, S).flip(0),
        "slope times distance": lambda h, T, S: -alibi_bias(h, T, S).square(),
    },
}


@pytest.mark.parametrize("name", WRONG)
def test_each_mistake_has_a_message_of_its_own(name):
    assert_told_apart(getattr(ours, f"check_{name}"), WRONG[name])


def test_alibis_slopes_are_the_papers():
    assert (-alibi_bias(8, 1, 2)[:, 0, 0]).tolist() == [2.0**-n for n in range(1, 9)]
