"""Chapter 23: latents, windows, linear attention, delta rule, tiles: each against a reference."""

import math

import pytest
import torch
import torch.nn.functional as F
from tiny import shaken
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from scripts.ch01_attention import attention, padding_mask, subsequent_mask
from scripts.ch03_embeddings_and_positions import equivariance_gap, shift_matrix
from scripts.ch23_long_memory import (
    LatentAttention,
    LinearAttention,
    TiledAttention,
    WindowedAttention,
    delta_attention,
    linear_attention,
    masked_linear_attention,
    near_by,
    recurrent_attention,
    tile_scores,
    tiles,
)

close = torch.testing.assert_close
SRC = torch.tensor([[5, 6, 7, 8, 9, 3], [5, 6, 7, 3, 0, 0]])
LAYERS = {
    "latent": lambda: LatentAttention(4, 32, 0.0, latent=12, rotary=4),
    "window": lambda: WindowedAttention(4, 32, 0.0, window=3),
    "linear": lambda: LinearAttention(4, 32, 0.0),
}

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.parametrize("name", LAYERS)
def test_padding_changes_nothing(name):
    layer, x, causal = shaken(LAYERS[name]()), torch.randn(1, 6, 32), subsequent_mask(6)
    mask, real = padding_mask(torch.tensor([[5, 6, 7, 3, 0, 0]])), x[:, :4]
    for sees, seen in ((mask, None), (mask & causal, subsequent_mask(4))):
        close(layer(x, x, x, sees)[:, :4], layer(real, real, real, seen))


# Latents


def latent_reference(layer: LatentAttention, x: Tensor) -> Tensor:
    """Causal latent attention over x (T, D), score by score: the slow reference, (T, D)."""
    T, d_k, d_R = len(x), layer.d_k, layer.rotary
    c = x @ layer.compress.weight.T  # (T, d_c)
    c = c / (c.square().mean(-1, keepdim=True) + layer.norm.eps).sqrt() * layer.norm.weight
    rows, pairs = [], torch.arange(d_R).view(2, -1).T.flatten()  # i beside i + d_R/2
    for t in range(T):
        answer = []
        for i in range(layer.h):
            features = slice(i * d_k, (i + 1) * d_k)
            q = layer.project_query.weight[i * (d_k + d_R) : (i + 1) * (d_k + d_R)] @ x[t]
            scores = []
            for s in range(t + 1):
                key = layer.expand_key.weight[features] @ c[s]
                place = layer.place_key.weight @ x[s]
                turned = (
                    q[d_k:][pairs] @ shift_matrix(t - s, d_R) @ place[pairs]
                )  # only the distance counts
                scores.append((q[:d_k] @ key + turned) / math.sqrt(d_k + d_R))
            weights = torch.stack(scores).softmax(0)  # (t + 1,)
            answer.append(weights @ (c[: t + 1] @ layer.expand_value.weight[features].T))
        rows.append(layer.project_output.weight @ torch.cat(answer))
    return torch.stack(rows)


def test_latent_attention_by_loop():
    layer, x = shaken(LAYERS["latent"]()), torch.randn(2, 6, 32)
    by_loop = torch.stack([latent_reference(layer, row) for row in x])
    close(layer(x, x, x, subsequent_mask(6)), by_loop)
    with pytest.raises(ValueError, match="of the same vectors"):
        layer(x, x, x.clone())


@pytest.mark.parametrize("rotary", [0, 4])
def test_absorbed_equals_expanded_and_only_a_rotary_key_knows_order(rotary):
    layer, x = shaken(LatentAttention(4, 32, 0.0, latent=12, rotary=rotary)), torch.randn(2, 6, 32)
    q, turned = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 5, rotary)
    cache, mask = layer.remember(x), padding_mask(SRC).unsqueeze(1)
    close(layer.absorbed(q, turned, *cache, mask), layer.expanded(q, turned, *cache, mask))
    assert sum(part.numel() for part in cache) == 2 * 6 * (12 + rotary)
    gap = equivariance_gap(lambda x: layer(x, x, x), x[0, :5])
    assert gap > 1e-3 if rotary else gap < 1e-12


def test_both_ways_of_a_latent_layer_have_dropout():
    layer, x = LatentAttention(4, 32, 1.0, latent=12, rotary=4), torch.randn(2, 6, 32)
    for query in (x, x[:, :1]):
        assert not layer.train()(query, x, x).any()  # all weights dropped: nothing is mixed
        assert layer.eval()(query, x, x).any()


# Windows


def test_a_window_sees_its_neighbours():
    neighbours = [[abs(5 + i - j) < 2 for j in range(8)] for i in range(3)]
    assert near_by(3, 8, 2).tolist() == neighbours
    layer, x = shaken(WindowedAttention(4, 32, 0.0, window=2)), torch.randn(1, 8, 32)
    layer(x, x, x)
    assert ((layer.attn[0, 0] > 0) == near_by(8, 8, 2)).all()


# Linear attention and the delta rule


def test_linear_attention_by_hand():
    q, k, v = torch.randn(3, 9, 4)
    everything = torch.ones(9, 9, dtype=torch.bool)
    for mask in (everything, everything.tril()):
        by_hand = []
        for a, seen in zip(q, mask, strict=True):
            likeness = torch.stack([(F.elu(a) + 1) @ (F.elu(b) + 1) for b in k[seen]])
            by_hand.append(likeness / likeness.sum() @ v[seen])
        close(masked_linear_attention(q, k, v, mask), torch.stack(by_hand))
    close(recurrent_attention(q, k, v), torch.stack(by_hand))
    close(linear_attention(q, k, v), masked_linear_attention(q, k, v, everything))


def test_linear_attention_with_nothing_to_see_is_silent():
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 1, 1, 3, 4))
    out = masked_linear_attention(q, k, v, torch.zeros(1, 1, 3, 3, dtype=torch.bool))
    assert (out == 0).all()
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), (q, k, v)))


def written_at_once(q, k, v, beta):
    """The delta rule without a recurrence: one triangular system for what all tokens write."""
    system = torch.eye(k.size(-2)) + (beta.unsqueeze(-1) * (k @ k.mT)).tril(-1)
    written = torch.linalg.solve_triangular(system, beta.unsqueeze(-1) * v, upper=False)
    return (q @ k.mT).tril() @ written


def test_the_delta_rule_and_its_gradients_by_a_triangular_system():
    q, v, beta = torch.randn(2, 3, 7, 4), torch.randn(2, 3, 7, 6), torch.rand(2, 3, 7)
    k = F.normalize(torch.randn(2, 3, 7, 4), dim=-1)  # values may be wider than keys
    results = []
    for rule in (delta_attention, written_at_once):
        inputs = [x.clone().requires_grad_() for x in (q, k, v, beta)]
        y = rule(*inputs)
        results.append((y, *torch.autograd.grad(y.sin().sum(), inputs)))
    close(*results)


# Tiles


@pytest.mark.parametrize("size", [2, 100])
@pytest.mark.parametrize("causal, S", [(False, 9), (True, 5)])
def test_tiles_equal_the_textbook(causal, S, size):
    q, (k, v) = 3 * torch.randn(2, 2, 5, 4), torch.randn(2, 2, 2, S, 4)
    mask = subsequent_mask(5) if causal else None
    results = []
    for tiled in (True, False):
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        y = TiledAttention.apply(*inputs, causal, size) if tiled else attention(*inputs, mask)[0]
        results.append((y, *torch.autograd.grad(y.sin().sum(), inputs)))
    close(*results)


def test_scores_that_rise_from_tile_to_tile_neither_mislead_nor_overflow():
    k = torch.arange(12.0).unsqueeze(-1)
    for keys in (k, k.flip(0), 400 * k):
        q, v = torch.ones(1, 1), torch.randn(12, 1)
        close(TiledAttention.apply(q, keys, v, False, 4), attention(q, keys, v)[0])


def test_the_future_is_never_computed():
    q, k = torch.randn(2, 8, 4)
    starts = [
        [columns.start for columns, _ in tile_scores(q, k, rows, True, 3)] for rows in tiles(8, 3)
    ]
    assert starts == [[0], [0, 3], [0, 3, 6]]


class LargestTensor(TorchDispatchMode):
    """Notes the size, in numbers, of the largest tensor made inside the block."""

    size = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_leaves(result) if isinstance(x, Tensor)]
        self.size = max([self.size, *sizes])
        return result


def test_tiles_make_nothing_large():
    def heads():
        return [torch.empty(2, 256, 16, device="meta", requires_grad=True) for _ in range(3)]

    with LargestTensor() as largest:
        TiledAttention.apply(*heads(), True, 32).sum().backward()
    assert largest.size == 2 * 256 * 16  # and not 2 · 256 · 256
    with LargestTensor() as largest:
        attention(*heads())[0].sum().backward()
    assert largest.size == 2 * 256 * 256
