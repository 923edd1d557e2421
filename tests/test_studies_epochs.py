"""The study of epochs: what counts as a loop, and the orders that its controls train in."""

import pytest
import torch
from tiny import few_pairs

from scripts.studies import epochs


@pytest.mark.parametrize(
    ("ids", "loop"),
    [
        ([5, 6, 7, 7, 7, 8], None),  # three copies aren't enough
        ([5, 6, 7, 7, 7, 7, 3], (2, 1)),
        ([5, 8, 9, 8, 9, 8, 9, 8, 9, 8], (1, 2)),
        ([*range(13)] * 4, None),  # what is repeated is too long
    ],
)
def test_a_loop_is_four_copies_and_is_cut_behind_the_first(ids, loop):
    assert epochs.loop_in(ids) == loop
    assert epochs.cut_at_loop(ids) == (ids[: sum(loop)] if loop else ids)


def test_a_mean_of_weights_is_that_of_the_last_steps():
    weights = [torch.tensor([n, 2.0 * n]) for n in (100, 1, 3)]
    assert epochs.mean_of_last(weights, 2).tolist() == [2.0, 4.0]


def test_the_longest_of_the_last_steps_move_and_nothing_is_lost(monkeypatch):
    monkeypatch.setattr(epochs, "LONG", 2)
    monkeypatch.setattr(epochs, "LAST", 4)
    data = few_pairs()
    steps = [[[i]] for i in range(8)]
    long = epochs.longest(data, steps, 4)
    lengths = [epochs.labels_each(data, step) for step in steps[4:]]
    assert sorted(lengths)[-2:] == sorted(long.values())
    orders = epochs.orders_of(data, steps)
    assert all(sorted(order) == list(range(8)) for order in orders.values())
    assert orders["long steps first"][:2] == [*long]
    after = range(max(long) + 1, 8)  # what follows the long steps
    before = range(min(long) - len(after), min(long))
    assert orders["others after the long steps"][8 - len(after) :] == [*before]
    for name in ("order 1", "order 2"):
        assert orders[f"{name}, long steps late, own end"][-2 - len(after) :] == [*long, *after]
