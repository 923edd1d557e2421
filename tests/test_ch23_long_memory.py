"""Chapter 23: latents, windows, linear attention, delta rule, tiles: each against a reference."""

import math

import pytest
import torch
import torch.nn.functional as F
from saying import ran
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from scripts.book.instruments import saved_bytes, scramble
from scripts.ch01_attention import attention, padding_mask, subsequent_mask
from scripts.ch02_multi_head_attention import merge_heads
from scripts.ch03_embeddings_and_positions import equivariance_gap, shift_matrix
from scripts.ch22_todays_block import OpenAttention, token_by_token
from scripts.ch23_long_memory import (
    LatentAttention,
    LinearAttention,
    TiledAttention,
    WindowedAttention,
    backward_mib,
    delta_attention,
    kept_numbers,
    linear_attention,
    masked_linear_attention,
    near_by,
    reach_of,
    recurrent_attention,
    tile_scores,
    tiles,
)

close = torch.testing.assert_close
SRC = torch.tensor([[5, 6, 7, 8, 9, 3], [5, 6, 7, 3, 0, 0]])

pytestmark = pytest.mark.usefixtures("float64")


def shaken(layer):
    """A layer whose scores are far from even, so that a slip shows."""
    scramble(layer, size=0.2)
    return layer


LAYERS = {
    "latent": lambda: LatentAttention(4, 32, 0.0, latent=12, rotary=4),
    "window": lambda: WindowedAttention(4, 32, 0.0, window=3),
    "linear": lambda: LinearAttention(4, 32, 0.0),
}


@pytest.mark.parametrize("name", LAYERS)
def test_cached_equals_uncached(name):
    layer, x = shaken(LAYERS[name]()), torch.randn(2, 7, 32)
    full = layer(x, x, x, subsequent_mask(7))
    close(token_by_token(layer, x), full)
    if name == "latent":
        assert (token_by_token(layer, x, forgetful=True) - full).abs().max() > 1e-2


@pytest.mark.parametrize("name", LAYERS)
def test_a_sentence_doesnt_notice_its_padding(name):
    layer, x = shaken(LAYERS[name]()), torch.randn(1, 6, 32)
    mask, real = padding_mask(SRC[1:]), x[:, :4]
    close(layer(x, x, x, mask)[:, :4], layer(real, real, real))
    causal = layer(x, x, x, mask & subsequent_mask(6))[:, :4]
    close(causal, layer(real, real, real, subsequent_mask(4)))


# Latents


def latent_reference(layer: LatentAttention, x: Tensor) -> Tensor:
    """Causal latent attention over x (T, D), score by score: the slow reference, (T, D)."""
    T, d_k, d_R = len(x), layer.d_k, layer.rotary
    c = x @ layer.compress.weight.T  # (T, d_c)
    c = c / (c.square().mean(-1, keepdim=True) + layer.norm.eps).sqrt() * layer.norm.weight
    rows = []
    for t in range(T):
        answer = []
        for i in range(layer.h):
            mine = slice(i * d_k, (i + 1) * d_k)
            q = layer.project_query.weight[i * (d_k + d_R) : (i + 1) * (d_k + d_R)] @ x[t]
            scores = []
            for s in range(t + 1):
                key = layer.expand_key.weight[mine] @ c[s]
                place = layer.place_key.weight @ x[s]
                turned = q[d_k:] @ shift_matrix(t - s, d_R) @ place  # only the distance counts
                scores.append((q[:d_k] @ key + turned) / math.sqrt(d_k + d_R))
            weights = torch.stack(scores).softmax(0)  # (t + 1,)
            answer.append(weights @ (c[: t + 1] @ layer.expand_value.weight[mine].T))
        rows.append(layer.project_output.weight @ torch.cat(answer))
    return torch.stack(rows)


def test_latent_attention_by_loop():
    layer, x = shaken(LAYERS["latent"]()), torch.randn(2, 6, 32)
    wanted = torch.stack([latent_reference(layer, row) for row in x])
    close(layer(x, x, x, subsequent_mask(6)), wanted)


@pytest.mark.parametrize("rotary", [0, 4])
def test_absorbed_equals_expanded(rotary):
    layer = shaken(LatentAttention(4, 32, 0.0, latent=12, rotary=rotary))
    q, turned = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 5, rotary)
    kept = layer.remember(x := torch.randn(2, 6, 32), x)
    mask = padding_mask(SRC).unsqueeze(1)
    close(layer.absorbed(q, turned, *kept, mask), layer.expanded(q, turned, *kept, mask))
    assert sum(part.numel() for part in kept) == 2 * 6 * (12 + rotary)


def test_both_ways_of_a_latent_layer_have_dropout():
    layer, x = LatentAttention(4, 32, 1.0, latent=12, rotary=4), torch.randn(2, 6, 32)
    for query in (x, x[:, :1]):
        assert (layer(query, x, x) == 0).all()  # all weights dropped: nothing is mixed
        assert (layer.eval()(query, x, x) != 0).any()
        layer.train()


def test_latents_across_know_no_order_and_within_they_do():
    across, x = shaken(LatentAttention(4, 32, 0.0, 12, rotary=0)), torch.randn(5, 32)
    within = shaken(LAYERS["latent"]())
    assert equivariance_gap(lambda x: across(x, x, x), x) < 1e-12
    assert equivariance_gap(lambda x: within(x, x, x), x) > 1e-3
    texts, memory = torch.randn(2, 3, 32), torch.randn(2, 6, 32)
    kept, mask = across.remember(memory, memory), padding_mask(SRC)
    one_by_one = [across.look(row, kept, mask) for row in texts.split(1, dim=1)]
    close(torch.cat(one_by_one, dim=1), across(texts, memory, memory, mask))


def test_latent_attention_wants_one_source():
    x = torch.randn(1, 3, 32)
    with pytest.raises(ValueError, match="of the same vectors"):
        LatentAttention(4, 32)(x, x, x.clone())


def test_kept_numbers_of_a_public_model():
    sizes = {"h": 128, "d_k": 128, "groups": 8, "latent": 512, "rotary": 64}
    # The last as much as 2.25 groups, as DeepSeek-V2's table 1 says.
    assert [*kept_numbers(**sizes).values()] == [32768, 2048, 256, 2.25 * 256]


# Windows


def test_a_window_sees_its_neighbours():
    wanted = [[abs(5 + i - j) < 2 for j in range(8)] for i in range(3)]
    assert near_by(3, 8, 2).tolist() == wanted
    layer, x = shaken(WindowedAttention(4, 32, 0.0, window=2)), torch.randn(1, 8, 32)
    layer(x, x, x)
    assert ((layer.attn[0, 0] > 0) == near_by(8, 8, 2)).all()


def test_a_window_is_attention_over_its_few_keys():
    layer, x = shaken(WindowedAttention(4, 32, 0.0, window=4)), torch.randn(2, 9, 32)
    q, (k, v) = layer.query_heads(x), layer.remember(x, x)
    found = layer(x, x, x, subsequent_mask(9))
    for i in range(9):
        part = slice(max(0, i - 3), i + 1)
        alone, _ = attention(q[:, :, i : i + 1], k[:, :, part], v[:, :, part])
        close(found[:, i : i + 1], layer.project_output(merge_heads(alone)))


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_depth_widens_a_window(layers):
    local, x = shaken(WindowedAttention(4, 32, 0.0, window=3)), torch.randn(9, 32)
    wanted = subsequent_mask(9)[0] & near_by(9, 9, 1 + 2 * layers)
    assert torch.equal(reach_of([local] * layers, x), wanted)
    everywhere = shaken(OpenAttention(4, 32, 0.0))
    assert torch.equal(reach_of([local, everywhere], x), subsequent_mask(9)[0])


# Linear attention and the delta rule


def test_linear_attention_three_ways():
    q, k, v = torch.randn(3, 2, 3, 9, 4)
    close(recurrent_attention(q, k, v), masked_linear_attention(q, k, v, subsequent_mask(9)))
    everything = torch.ones(9, 9, dtype=torch.bool)
    close(linear_attention(q, k, v), masked_linear_attention(q, k, v, everything))
    by_hand = []
    for a in q[0, 0]:
        likeness = [(F.elu(a) + 1) @ (F.elu(b) + 1) for b in k[0, 0]]
        mixed = sum(p * c for p, c in zip(likeness, v[0, 0], strict=True))
        by_hand.append(mixed / sum(likeness))
    close(linear_attention(q, k, v)[0, 0], torch.stack(by_hand))


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
    for way in (delta_attention, written_at_once):
        given = [x.clone().requires_grad_() for x in (q, k, v, beta)]
        y = way(*given)
        results.append((y, *torch.autograd.grad(y.sin().sum(), given)))
    close(*results)


def test_the_delta_rule_is_a_step_of_gradient_descent():
    state = torch.zeros(4, 5, requires_grad=True)
    q, k, v, beta = torch.randn(6, 4), torch.randn(6, 4), torch.randn(6, 5), torch.rand(6)
    k = F.normalize(k, dim=-1)
    for t, found in enumerate(delta_attention(q, k, v, beta)):
        loss = (state.T @ k[t] - v[t]).square().sum() / 2
        (slope,) = torch.autograd.grad(loss, state)
        state = (state - beta[t] * slope).detach().requires_grad_()
        close(found, q[t] @ state)


# Tiles


@pytest.mark.parametrize("size", [1, 3, 5, 100])
@pytest.mark.parametrize("causal, S", [(False, 5), (False, 9), (True, 5)])
def test_tiles_equal_the_textbook(causal, S, size):
    q, (k, v) = 3 * torch.randn(2, 2, 5, 4), torch.randn(2, 2, 2, S, 4)
    mask = subsequent_mask(5) if causal else None
    results = []
    for tiled in (True, False):
        given = [x.clone().requires_grad_() for x in (q, k, v)]
        y = TiledAttention.apply(*given, causal, size) if tiled else attention(*given, mask)[0]
        results.append((y, *torch.autograd.grad(y.sin().sum(), given)))
    close(*results)


def test_tiles_pass_gradcheck_and_dont_overflow():
    given = [x.requires_grad_() for x in torch.randn(3, 1, 5, 3)]
    assert torch.autograd.gradcheck(lambda *x: TiledAttention.apply(*x, True, 2), given)
    q, k, v = (x.detach() for x in given)
    close(TiledAttention.apply(400 * q, 400 * k, v, False, 2), attention(400 * q, 400 * k, v)[0])


def test_rising_scores_need_the_shrinking():
    k = torch.arange(12.0).unsqueeze(-1)
    for order in (k, k.flip(0)):
        q, v = torch.ones(1, 1), torch.randn(12, 1)
        close(TiledAttention.apply(q, order, v, False, 4), attention(q, order, v)[0])


def test_the_future_is_never_computed():
    q, k = torch.randn(2, 8, 4)
    seen = [
        (rows.start, [columns.start for columns, _ in tile_scores(q, k, rows, True, 3)])
        for rows in tiles(8, 3)
    ]
    assert seen == [(0, [0]), (3, [0, 3]), (6, [0, 3, 6])]


class LargestTensor(TorchDispatchMode):
    """Notes the size, in numbers, of the largest tensor made inside the block."""

    def __init__(self):
        super().__init__()
        self.size = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        made = [x.numel() for x in tree_leaves(result) if isinstance(x, Tensor)]
        self.size = max([self.size, *made])
        return result


def test_tiles_keep_little_and_make_nothing_large():
    def heads(n):
        return [torch.empty(2, n, 16, device="meta", requires_grad=True) for _ in range(3)]

    def run(*given):
        return TiledAttention.apply(*given, True, 32)

    assert saved_bytes(run, *heads(256)) == 8 * (4 * 2 * 256 * 16 + 2 * 256)
    assert backward_mib(run, 256) * 2**20 == 4 * (4 * 8 * 256 * 64 + 8 * 256)
    with LargestTensor() as largest:
        run(*heads(256)).sum().backward()
    assert largest.size == 2 * 256 * 16  # and not 2 · 256 · 256
    with LargestTensor() as largest:
        attention(*heads(256))[0].sum().backward()
    assert largest.size == 2 * 256 * 256


# What the chapter says.


def test_what_the_chapter_says():
    said = ran("ch23")
    reaches, causal = said.reaches, subsequent_mask(12)[0]
    assert torch.equal(reaches["three local layers"], causal & near_by(12, 12, 1 + 3 * 2))
    assert torch.equal(reaches["local, global, local"], causal)
    assert max(said.recalled[1].values()) < 1e-12
    for n, found in said.recalled.items():
        if n > 1:
            best = max(found["sharp softmax"], found["best state"])
            assert best < found["delta rule"] < found["adding"]
            assert (found["best state"] < 1e-9) == (n <= 16)
    tiles, textbook = said.mib["tiles"], said.mib["textbook"]
    assert tiles[2048] * 2**20 == 4 * (4 * 8 * 2048 * 64 + 8 * 2048)  # q, k, v, o and L
    assert tiles[2048] == 2 * tiles[1024] < textbook[2048] / 10
    assert round(textbook[2048], 1) == 2 * 128 + 4 + 3 * 4  # two T × T matrices, mask, q, k and v
