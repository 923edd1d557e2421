"""Chapter 22: every part against an independent reference, alone and inside the block."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from scripts.book.instruments import scramble
from scripts.ch01_attention import padding_mask, subsequent_mask
from scripts.ch02_multi_head_attention import MultiHeadedAttention
from scripts.ch04_encoder_decoder import LayerNorm, PositionwiseFeedForward, make_model
from scripts.ch06_training import Batch, LabelSmoothing, batch_loss
from scripts.ch22_todays_block import (
    GroupedAttention,
    OpenAttention,
    RMSNorm,
    RotaryAttention,
    SquaredReLU,
    SwiGLU,
    TodaysAttention,
    exchange,
    orthogonalised,
    renew,
    rotated,
    rotated_in_halves,
    token_by_token,
    zero_outputs,
)
from scripts.core import optimizers

close = torch.testing.assert_close
SRC = torch.tensor([[5, 6, 7, 8, 9, 3], [5, 6, 7, 3, 0, 0]])
TGT = torch.tensor([[2, 11, 12, 13, 14], [2, 21, 22, 3, 0]])
LAYERS = {
    "open": lambda: OpenAttention(4, 32, 0.0),
    "rotary": lambda: RotaryAttention(4, 32, 0.0),
    "grouped": lambda: GroupedAttention(4, 32, 0.0, groups=2),
    "multi-query": lambda: GroupedAttention(4, 32, 0.0, groups=1),
    "today's": lambda: TodaysAttention(4, 32, 0.0, groups=2),
}

pytestmark = pytest.mark.usefixtures("float64")


def shaken(layer):
    """A layer whose scores are far from even, so that a slip shows."""
    scramble(layer, size=0.2)
    return layer


def test_rms_norm_is_torchs():
    ours, theirs = RMSNorm(8), nn.RMSNorm(8, eps=1e-5)
    theirs.load_state_dict(shaken(ours).state_dict())
    x = torch.cat((torch.randn(3, 8), 1e-3 * torch.randn(3, 8), torch.zeros(1, 8)))
    mine, reference = (
        torch.autograd.grad(norm(y).sin().sum(), (y, norm.weight))
        for norm in (ours, theirs)
        for y in [x.clone().requires_grad_()]
    )
    close(ours(x), theirs(x))
    close(mine, reference)


def test_swiglu_by_hand():
    layer, x = SwiGLU(6, 10, dropout=0.0), torch.randn(2, 3, 6)
    gate, up = x @ layer.gate.weight.T, x @ layer.expand.weight.T
    close(layer(x), (gate / (1 + (-gate).exp()) * up) @ layer.contract.weight.T)
    assert [name for name, _ in layer.named_parameters() if "bias" in name] == []


def test_swiglu_has_dropout_inside():
    layer = SwiGLU(6, 10, dropout=0.5)
    x = torch.randn(50, 6)
    assert not torch.equal(layer(x), layer(x))
    assert torch.equal(layer.eval()(x), layer(x))


def test_rotary_is_a_complex_product():
    x = torch.randn(2, 3, 7, 8)
    theta = 10_000.0 ** -(torch.arange(0, 8, 2) / 8)
    turns = torch.polar(torch.ones(7, 4), torch.arange(5, 12).unsqueeze(-1) * theta)
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    close(rotated(x, start=5), torch.view_as_real(pairs * turns).flatten(-2))
    assert rotated(x.float()).dtype == torch.float32
    assert torch.equal(rotated(x)[..., 0, :], x[..., 0, :])  # nothing turns at position 0
    assert rotated(x[..., :0]).shape == (2, 3, 7, 0)


@pytest.mark.parametrize("turn", [rotated, rotated_in_halves])
def test_rotary_scores_know_the_distance_alone(turn):
    q, k = torch.randn(2, 9, 8)
    scores = turn(q) @ turn(k).mT
    for start in (1, 17, 1000):
        close(turn(q, start) @ turn(k, start).mT, scores)
    assert (turn(q, 3) @ turn(k).mT - scores).abs().max() > 0.1
    close(turn(q).norm(dim=-1), q.norm(dim=-1))


def test_the_two_layouts_differ_and_are_related():
    x = torch.randn(5, 8)
    halves = torch.cat((x[:, 0::2], x[:, 1::2]), dim=-1)  # evens first, then odds
    turned = rotated_in_halves(halves, 3)
    close(torch.cat((rotated(x, 3)[:, 0::2], rotated(x, 3)[:, 1::2]), -1), turned)
    assert (rotated(x, 3) - rotated_in_halves(x, 3)).abs().max() > 0.1


def test_rotary_attention_doesnt_care_where_the_text_begins():
    layer, x, causal = (
        shaken(RotaryAttention(4, 32, 0.0)),
        torch.randn(2, 6, 32),
        subsequent_mask(6),
    )
    late = layer.look(x, layer.remember(x, x, 50), causal, start=50)
    close(late, layer(x, x, x, causal))
    assert torch.equal(layer.remember(x, x, 50)[1], layer.remember(x, x)[1])  # values don't turn


def test_open_attention_is_chapter_2s():
    ours, theirs = OpenAttention(4, 32, 0.0), MultiHeadedAttention(4, 32, 0.0)
    ours.load_state_dict(shaken(theirs).state_dict())
    x, y = torch.randn(2, 5, 32), torch.randn(2, 6, 32)
    for mask in (None, padding_mask(SRC), padding_mask(SRC).unsqueeze(1)):
        assert torch.equal(ours(x, y, y, mask), theirs(x, y, y, mask))
        assert torch.equal(ours.attn, theirs.attn)


@pytest.mark.parametrize("name", LAYERS)
def test_cached_equals_uncached(name):
    layer, x = shaken(LAYERS[name]()), torch.randn(2, 7, 32)
    full = layer(x, x, x, subsequent_mask(7))
    close(token_by_token(layer, x), full)
    if name in ("rotary", "today's"):
        assert (token_by_token(layer, x, forgetful=True) - full).abs().max() > 1e-2


@pytest.mark.parametrize("name", LAYERS)
def test_a_sentence_doesnt_notice_its_padding(name):
    layer, x = shaken(LAYERS[name]()), torch.randn(1, 6, 32)
    mask, real = padding_mask(SRC[1:]), x[:, :4]
    alone = layer(real, real, real)
    padded = layer(x, x, x, mask)[:, :4]
    causal = layer(x, x, x, mask & subsequent_mask(6))[:, :4]
    close(padded, alone)
    close(causal, layer(real, real, real, subsequent_mask(4)))


def grouped_reference(layer, x, mask):
    """What `layer` computes from x (B, T, D), one head at a time."""
    d_k, heads = x.size(-1) // layer.h, []
    for head in range(layer.h):
        group = head * layer.groups // layer.h
        mine, shared = slice(head * d_k, (head + 1) * d_k), slice(group * d_k, (group + 1) * d_k)
        parts = zip(
            (layer.project_query, layer.project_key, layer.project_value),
            (mine, shared, shared),
            strict=True,
        )
        given = (F.linear(x, linear.weight[part], linear.bias[part]) for linear, part in parts)
        heads.append(F.scaled_dot_product_attention(*given, mask))
    return layer.project_output(torch.cat(heads, dim=-1))


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_grouped_attention_by_loop_gradients_too(groups):
    layer, x = shaken(GroupedAttention(4, 32, 0.0, groups)), torch.randn(2, 5, 32)
    causal, given = subsequent_mask(5), x.requires_grad_()
    both = []
    for y in (layer(x, x, x, causal), grouped_reference(layer, x, causal)):
        both.append((y, *torch.autograd.grad(y.sin().sum(), (given, *layer.parameters()))))
    close(*both)
    assert sum(kept.numel() for kept in layer.remember(x, x)) == 2 * 5 * 2 * groups * 8


def test_groups_are_neighbours():
    layer, x = shaken(GroupedAttention(4, 32, 0.0, groups=2)), torch.randn(1, 3, 32)
    with torch.no_grad():  # change the second group's values: only the last two heads may move
        heads = layer.mix(layer.query_heads(x), *layer.remember(x, x), None)
        layer.project_value.weight[8:] += 1
        moved = layer.mix(layer.query_heads(x), *layer.remember(x, x), None)
    assert torch.equal(heads[:, :2], moved[:, :2]) and not torch.equal(heads[:, 2:], moved[:, 2:])
    with pytest.raises(ValueError, match="4 heads can't be dealt out to 3 groups"):
        GroupedAttention(4, 32, groups=3)


def test_turned_values_would_know_where_the_text_begins():
    layer, x = shaken(RotaryAttention(4, 32, 0.0)), torch.randn(2, 6, 32)
    here, later = (
        layer.look(x, (k, rotated(v, start)), None, start)
        for start in (0, 50)
        for k, v in [layer.remember(x, x, start)]
    )
    assert (here - later).abs().max() > 0.01


# QK-norm


def test_a_norm_before_the_turn_keeps_the_distance_with_learned_scales():
    layer, x = shaken(TodaysAttention(4, 32, 0.0, groups=2)), torch.randn(2, 6, 32)
    assert layer.query_norm.weight.std() > 0.05
    late = layer.look(x, layer.remember(x, x, 70), None, start=70)
    close(late, layer(x, x, x))


def test_qk_norm_bounds_every_score_and_forgets_the_weights_size():
    layer, x = shaken(TodaysAttention(4, 32, 0.0, groups=2)), torch.randn(2, 6, 32)
    before = layer(x, x, x)
    with torch.no_grad():
        for p in (*layer.project_query.parameters(), *layer.project_key.parameters()):
            p *= 100
    assert (layer(x, x, x) - before).abs().max() < 1e-2  # except for what eps does
    q, (k, _) = layer.query_heads(x), layer.remember(x, x)
    scores = q @ k.repeat_interleave(2, dim=1).mT / math.sqrt(8)
    bound = layer.query_norm.weight.abs().max() * layer.key_norm.weight.abs().max() * math.sqrt(8)
    assert scores.abs().max() <= bound


# ReLU², zeroed outputs, Muon


def test_squared_relu_by_hand_and_with_dropout():
    layer, x = SquaredReLU(6, 10, dropout=0.0), torch.randn(2, 3, 6, requires_grad=True)
    z = x @ layer.expand.weight.T + layer.expand.bias
    by_hand = (z * (z > 0) * z) @ layer.contract.weight.T + layer.contract.bias
    close(layer(x), by_hand)
    close(*(torch.autograd.grad(y.sin().sum(), x)[0] for y in (layer(x), by_hand)))
    layer.dropout.p = 1.0
    close(layer(x), layer.contract.bias.expand(2, 3, 6))


def fresh_model(**sizes):
    return make_model(30, 30, N=3, d_model=16, d_ff=32, h=4, dropout=0.0, norm_first=True, **sizes)


def test_zeroed_outputs_pass_everything_on_and_then_learn():
    model, tgt = fresh_model(), subsequent_mask(5)
    before = {name: p.clone() for name, p in model.named_parameters()}
    zero_outputs(model)
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {f"{n}.weight" for n in sublayer_ends(model)}
    close(model.encode(SRC, None), model.encoder.norm(model.src_embed(SRC)))
    close(model(SRC, TGT, None, tgt), model.decoder.norm(model.tgt_embed(TGT)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):  # the last matrices move first, then the rest
        optimizer.zero_grad()
        model.generator(model(SRC, TGT, None, tgt)).sin().sum().backward()
        feed = model.decoder.layers[0].feed_forward
        assert bool(feed.contract.weight.grad.any()) and bool(feed.expand.weight.grad.any()) == (
            step > 0
        )
        optimizer.step()


def sublayer_ends(model):
    ends = (nn.Linear,)
    named = {id(part): name for name, part in model.named_modules() if isinstance(part, ends)}
    attentions = [m for m in model.modules() if isinstance(m, MultiHeadedAttention)]
    feeds = [m for m in model.modules() if isinstance(m, PositionwiseFeedForward)]
    last = [*(m.project_output for m in attentions), *(m.contract for m in feeds)]
    return {named[id(part)] for part in last}


@pytest.mark.parametrize("shape", [(12, 12), (20, 8), (8, 20)])
def test_muons_step_has_the_gradients_directions(monkeypatch, shape):
    matrix = torch.randn(shape)
    U, S, Vh = torch.linalg.svd(matrix, full_matrices=False)
    values = S / S.norm()  # the polynomial, on singular values alone
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    close(orthogonalised(matrix), U * values @ Vh)
    close(orthogonalised(7 * matrix), orthogonalised(matrix))
    for half, error in ((True, 0.05), (False, 1e-5)):
        monkeypatch.setattr(optimizers, "multiplies_bf16", lambda device, half=half: half)
        fast = optimizers.near_orthogonal(matrix.float().unsqueeze(0))[0].double()
        assert (fast - orthogonalised(matrix)).norm() < error * fast.norm()


# The block


def test_exchange_takes_exactly_one_kind():
    model = fresh_model()
    seen = []

    def make(name, part):
        seen.append((name, type(part)))
        return OpenAttention(4, 16, 0.0)

    exchange(model, MultiHeadedAttention, make)
    assert len(seen) == 3 + 2 * 3 and {kind for _, kind in seen} == {MultiHeadedAttention}
    assert "decoder.layers.1.src_attn" in dict(seen)
    exchange(model, MultiHeadedAttention, make)  # a subclass is another kind
    assert len(seen) == 9


def small(dropout=0.0, groups=2):
    sizes = {"N": 2, "d_model": 32, "d_ff": 48, "h": 4}
    model = make_model(60, 60, **sizes, dropout=dropout, norm_first=True, tie="all")
    renew(model, groups)
    return model


def test_todays_model_has_no_part_of_2017():
    model = small()
    kinds = {type(part) for part in model.modules()}
    assert not kinds & {LayerNorm, PositionwiseFeedForward, MultiHeadedAttention}
    assert not model.src_embed[1].pe.any() and not model.tgt_embed[1].pe.any()
    layer = model.decoder.layers[0]
    assert type(layer.self_attn) is TodaysAttention and type(layer.src_attn) is OpenAttention
    assert type(model.encoder.layers[1].self_attn) is TodaysAttention
    assert layer.self_attn.groups == 2 and layer.src_attn.groups == 4
    assert model.encoder.layers[1].self_attn.groups == 4
    table = model.tgt_embed[0].lut.weight
    assert model.generator.proj.weight is table is model.src_embed[0].lut.weight
    assert abs(table.std() * 32**0.5 - 1) < 0.1 and not layer.feed_forward.contract.weight.any()
    own = {id(p) for p in model.encoder.layers[0].parameters()}
    assert not own & {id(p) for p in model.encoder.layers[1].parameters()}


def attended(q, k, v, mask, output):
    heads = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
    return F.linear(heads.transpose(1, 2).flatten(-2), output.weight, output.bias)


def todays_decoder_layer(layer, x, memory, src_mask):
    """A decoder layer again, with PyTorch's functions and complex numbers."""

    def heads(linear, x):
        return F.linear(x, linear.weight, linear.bias).unflatten(-1, (-1, 8)).transpose(1, 2)

    def turned(x, norm):
        pairs = F.rms_norm(x, (8,), norm.weight, 1e-5).unflatten(-1, (-1, 2))
        angle = torch.arange(x.size(-2))[:, None] * 10_000.0 ** -(torch.arange(0, 8, 2) / 8)
        turns = torch.polar(torch.ones_like(angle), angle)
        return torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turns).flatten(-2)

    norms = [part.norm.weight for part in layer.sublayer]
    a, y = layer.self_attn, F.rms_norm(x, (32,), norms[0], 1e-5)
    q = turned(heads(a.project_query, y), a.query_norm)
    k = turned(heads(a.project_key, y), a.key_norm)
    causal = torch.ones(x.size(1), x.size(1), dtype=torch.bool).tril()
    x = x + attended(q, k, heads(a.project_value, y), causal, a.project_output)
    a, y = layer.src_attn, F.rms_norm(x, (32,), norms[1], 1e-5)
    given = heads(a.project_query, y), heads(a.project_key, memory), heads(a.project_value, memory)
    x = x + attended(*given, src_mask.unsqueeze(1), a.project_output)
    f, y = layer.feed_forward, F.rms_norm(x, (32,), norms[2], 1e-5)
    return x + (F.silu(y @ f.gate.weight.T) * (y @ f.expand.weight.T)) @ f.contract.weight.T


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_a_decoder_layer_in_pytorchs_own_functions_gradients_too(groups):
    layer = shaken(small(groups=groups)).decoder.layers[1]
    x, memory = torch.randn(2, 5, 32, requires_grad=True), torch.randn(2, 6, 32)
    mask, causal = padding_mask(SRC), subsequent_mask(5)
    given = (x, *layer.parameters())
    both = []
    for y in (layer(x, memory, mask, causal), todays_decoder_layer(layer, x, memory, mask)):
        both.append((y, *torch.autograd.grad(y.sin().sum(), given)))
    close(*both)


def test_every_dropout_of_todays_model_is_asked_for_and_at_work():
    model = small(dropout=0.3)
    assert {part.p for part in model.modules() if isinstance(part, nn.Dropout)} == {0.3}
    for layer in (LAYERS["grouped"](), LAYERS["today's"]()):
        layer, x = shaken(layer), torch.randn(1, 4, 32)
        layer.dropout.p = 1.0  # only the bias arrives
        close(layer(x, x, x), layer.project_output.bias.expand(1, 4, 32))


def test_todays_model_learns_by_heart():
    model, batch, criterion = small(), Batch(SRC, TGT), LabelSmoothing(0.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(60):
        loss, _ = batch_loss(model, batch, criterion)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.05 * losses[0]
