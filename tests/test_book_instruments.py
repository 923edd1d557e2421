"""The instruments: what depends on what, and what is held at once; chapter 1 holds the others."""

import pytest
import torch
from torch import nn

from scripts.book.instruments import (
    count_calls,
    held_bytes,
    influence,
    most_alive,
    scramble,
    traced,
)

GENERATOR = torch.Generator().manual_seed(0)
WEIGHTS = torch.randn(3, 4, generator=GENERATOR, dtype=torch.float64)  # inputs (4, 2) to (3, 5)
MIX = torch.randn(2, 5, generator=GENERATOR, dtype=torch.float64)
WEIGHTS[1, 2] = 0.0  # output 1 doesn't see input 2


def layer(x):
    return (WEIGHTS @ x @ MIX).tanh()


@pytest.mark.parametrize("batched", [False, True])
def test_influence_equals_a_loop_over_derivatives(batched):
    x = torch.randn(4, 2, generator=GENERATOR, dtype=torch.float64, requires_grad=True)
    squares = torch.zeros(3, 4, dtype=torch.float64)
    for t in range(3):
        for output in layer(x)[t]:
            squares[t] += torch.autograd.grad(output, x, retain_graph=True)[0].square().sum(-1)
    strength = influence(layer, x[None] if batched else x)
    torch.testing.assert_close(strength, squares.sqrt())
    assert strength[1, 2] == 0 and (strength > 0).sum() == 11 and x.grad is None


def test_most_alive_counts_what_is_held_at_once():
    at_once = most_alive(lambda: [torch.ones(100) for _ in range(8)])
    in_turn = most_alive(lambda: [torch.ones(100).view(4, 25).size() for _ in range(8)])
    assert at_once == 8 * in_turn == 8 * 4 * 100


class Halves(nn.Module):
    """Two layers, the second inside another module; a mask is passed along."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 5))

    def forward(self, x, mask):
        return self.second(self.first(x).where(mask, 0.0))


def test_held_bytes_counts_what_a_graph_keeps_when_the_output_is_gone():
    x, kept = torch.randn(100, dtype=torch.float64, requires_grad=True), []
    assert held_bytes(torch.exp, x) == 0
    assert held_bytes(lambda x: kept.append(x.exp().exp()), x) == 2 * 800
    assert held_bytes(lambda x: kept.append((x * x).sum()), x) == 800  # one storage, saved twice


def test_traced_notes_each_step_where_it_ends_and_takes_its_hooks_away():
    model, x, mask = Halves(), torch.ones(2, 3), torch.ones(2, 1, dtype=torch.bool)
    with pytest.raises(ZeroDivisionError), traced(model, r"|first|second(\.0)?") as rows:
        model(x, mask)
        raise ZeroDivisionError
    model(x, mask)
    assert rows == [
        ("first", "(2, 3)", "(2, 4)"),
        ("second.0", "(2, 4)", "(2, 5)"),
        ("second", "(2, 4)", "(2, 5)"),
        ("", "(2, 3)", "(2, 5)"),  # the whole model, without its mask
    ]


def test_calls_are_counted_and_the_hook_is_gone_after_an_error():
    module, x = nn.Identity(), torch.ones(2)
    calls, result = count_calls(module, lambda: module(x) + module(x))
    assert calls == 2 and torch.equal(result, 2 * x)
    with pytest.raises(ZeroDivisionError):
        count_calls(module, lambda: module(x) / (1 // 0))
    assert not module._forward_hooks


def test_scramble_moves_every_number_and_repeats():
    one, other = (nn.LayerNorm(50) for _ in range(2))
    scramble(one, seed=3, size=0.5), scramble(other, seed=3, size=0.5)
    for p, q, before in zip(one.parameters(), other.parameters(), (1.0, 0.0), strict=True):
        assert torch.equal(p, q) and (p != before).all() and 0.3 < (p - before).std() < 0.7
