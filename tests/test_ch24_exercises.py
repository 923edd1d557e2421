"""Chapter 24's exercises: checkers distinguish common mistakes and accept other right answers."""

import math

import pytest
import torch
from exercising import assert_told_apart

from scripts.book.exercises import check
from scripts.exercises import ch24 as ours

# A router


def softmax_of_all(logits, top):
    share, chosen = logits.softmax(-1).topk(top)
    return chosen, share


def always_normalised(logits, top):
    best, chosen = logits.topk(top)
    return chosen, best.softmax(-1)


def logits_normalised(logits, top):
    best, chosen = logits.topk(top)
    return chosen, best / best.sum(-1, keepdim=True) if top > 1 else best.sigmoid()


def without_gradient(logits, top):
    chosen, share = ours.router(logits, top)
    return chosen, torch.tensor(share.tolist())


def flat_when_alone(logits, top):
    best = logits.softmax(-1).max(-1)
    return ours.router(logits, top) if top > 1 else (best.indices, best.values)


def half_when_alone(logits, top):
    chosen, share = ours.router(logits, top)
    return chosen, share if top > 1 else share / 2


# What is dropped


def dropping(count=False, room=None, visits=None):
    """The solution with other room, other visits, or a number instead of a share."""

    def candidate(chosen, experts, factor):
        allowed = (room or (lambda c, e, f: math.ceil(f * c.numel() / e)))(chosen, experts, factor)
        found = (visits or (lambda c, e: c.flatten().bincount(minlength=e)))(chosen, experts)
        dropped = (found - allowed).clamp(min=0).sum().item()
        return dropped if count else dropped / chosen.numel()

    return candidate


WRONG = {
    "router": {
        "cut off after": softmax_of_all,
        "never learns": always_normalised,
        "not to more": lambda logits, top: (logits.topk(top)[1], logits.topk(top)[0].exp()),
        "least likely": lambda logits, top: ((-logits).topk(top)[1], logits[:, :top]),
        "likeliest first": lambda logits, top: (
            logits.topk(top)[1].flip(-1),
            logits.topk(top)[0].softmax(-1).flip(-1),
        ),
        "not logits": logits_normalised,
        "(7, 2)": lambda logits, top: logits.softmax(-1).max(-1),
        "(7, 1)": flat_when_alone,
        "two tensors": lambda logits, top: ours.router(logits, top)[1],
        "No gradient": without_gradient,
        "probability among all": half_when_alone,
    },
    "dropped_share": {
        "number of dropped visits": dropping(count=True),
        "not for tokens": dropping(room=lambda c, e, f: math.ceil(f * len(c) / e)),
        "to an empty one": lambda chosen, experts, factor: 0.0,
        "rounded up": dropping(room=lambda c, e, f: int(f * c.numel() / e)),
        "With two experts": dropping(room=lambda c, e, f: math.ceil(f * c.numel() / 4)),
    },
}


@pytest.mark.parametrize("name", WRONG)
def test_each_mistake_has_a_message_of_its_own(name):
    assert_told_apart(getattr(ours, f"check_{name}"), WRONG[name])


def test_another_right_way_passes():
    def by_division(logits, top):
        share, chosen = logits.softmax(-1).topk(top)
        return chosen, share / (share.sum(-1, keepdim=True) if top > 1 else 1.0)

    def in_float32(chosen, experts, factor):
        return torch.tensor(ours.dropped_share(chosen, experts, factor), dtype=torch.float32)

    check(by_division, "router")
    check(in_float32, "dropped_share")
