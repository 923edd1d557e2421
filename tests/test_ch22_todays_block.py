"""Chapter 22: every part against an independent reference, alone and inside the block."""

import pytest
import torch
import torch.nn.functional as F
from tiny import assert_neither_cache_nor_padding_matters, shaken
from torch import nn

from scripts.ch01_attention import padding_mask, subsequent_mask
from scripts.ch02_multi_head_attention import MultiHeadedAttention
from scripts.ch04_encoder_decoder import LayerNorm, PositionwiseFeedForward, make_model
from scripts.ch22_todays_block import (
    GroupedAttention,
    OpenAttention,
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


# Parts


def test_rotary_is_a_complex_product():
    x = torch.randn(2, 3, 7, 8)
    theta = 10_000.0 ** -(torch.arange(0, 8, 2) / 8)
    turns = torch.polar(torch.ones(7, 4), torch.arange(5, 12).unsqueeze(-1) * theta)
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    close(rotated(x, start=5), torch.view_as_real(pairs * turns).flatten(-2))
    assert rotated(x.float()).dtype == torch.float32
    # The other layout does the same to features in another order.
    halves, turned = (torch.cat((y[..., 0::2], y[..., 1::2]), dim=-1) for y in (x, rotated(x, 3)))
    close(rotated_in_halves(halves, 3), turned)


@pytest.mark.parametrize("name", ["rotary", "today's"])
def test_attention_doesnt_care_where_the_text_begins(name):
    layer, x, causal = shaken(LAYERS[name]()), torch.randn(2, 6, 32), subsequent_mask(6)
    late = layer.look(x, layer.remember(x, x, 50), causal, start=50)
    close(late, layer(x, x, x, causal))
    forgetful = token_by_token(layer, x, forgetful=True)
    assert (forgetful - late).abs().max() > 1e-2


def test_open_attention_is_chapter_2s():
    layer, reference = OpenAttention(4, 32, 0.0), MultiHeadedAttention(4, 32, 0.0)
    layer.load_state_dict(shaken(reference).state_dict())
    x, y = torch.randn(2, 5, 32), torch.randn(2, 6, 32)
    for mask in (None, padding_mask(SRC), padding_mask(SRC).unsqueeze(1)):
        assert torch.equal(layer(x, y, y, mask), reference(x, y, y, mask))
        assert torch.equal(layer.attn, reference.attn)


@pytest.mark.parametrize("name", LAYERS)
def test_neither_a_cache_nor_padding_changes_anything(name):
    assert_neither_cache_nor_padding_matters(shaken(LAYERS[name]()))


def test_three_groups_for_four_heads_are_refused():
    with pytest.raises(ValueError, match="4 heads can't be dealt out to 3 groups"):
        GroupedAttention(4, 32, groups=3)


def test_squared_relu_by_hand():
    layer, x = SquaredReLU(6, 10, dropout=0.0), torch.randn(2, 3, 6)
    z = x @ layer.expand.weight.T + layer.expand.bias
    close(layer(x), (z * (z > 0) * z) @ layer.contract.weight.T + layer.contract.bias)


def fresh_model(**sizes):
    sizes = {"d_model": 32, "d_ff": 48, "h": 4, "dropout": 0.0, "norm_first": True} | sizes
    return make_model(60, 60, N=2, **sizes, tie="all")


@pytest.mark.parametrize("shape", [(12, 12), (20, 8), (8, 20)])
def test_muons_step_is_the_chapters(monkeypatch, shape):
    """In 16 bits and in 32; the chapter compares its own with a singular value decomposition."""
    matrix = torch.randn(shape)
    for half, error in ((True, 0.05), (False, 1e-5)):
        monkeypatch.setattr(optimizers, "multiplies_bf16", lambda device, half=half: half)
        fast = optimizers.near_orthogonal(matrix.float().unsqueeze(0))[0].double()
        assert (fast - orthogonalised(matrix)).norm() < error * fast.norm()


# The block


def test_exchange_takes_exactly_one_kind():
    model, parts = fresh_model(), []

    def make(name, part):
        parts.append((name, type(part)))
        return OpenAttention(4, 32, 0.0)

    exchange(model, MultiHeadedAttention, make)
    exchange(model, MultiHeadedAttention, make)  # what stands there now is a subclass
    assert len(parts) == 2 + 2 * 2 and {kind for _, kind in parts} == {MultiHeadedAttention}
    assert "decoder.layers.1.src_attn" in dict(parts)


def renewed(groups=2, **sizes):
    model = fresh_model(**sizes)
    renew(model, groups)
    return model


def test_todays_model_has_no_part_of_2017():
    model = renewed()
    kinds = {type(part) for part in model.modules()}
    assert not kinds & {LayerNorm, PositionwiseFeedForward, MultiHeadedAttention}
    assert not model.src_embed[1].pe.any() and not model.tgt_embed[1].pe.any()
    encoder, decoder = model.encoder.layers[1], model.decoder.layers[0]
    assert type(encoder.self_attn) is type(decoder.self_attn) is TodaysAttention
    assert (encoder.self_attn.groups, decoder.self_attn.groups) == (4, 2)
    table = model.tgt_embed[0].lut.weight
    assert model.generator.proj.weight is table is model.src_embed[0].lut.weight
    assert abs(table.std() * 32**0.5 - 1) < 0.1 and not decoder.feed_forward.contract.weight.any()


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
    q, k, v = (
        heads(a.project_query, y),
        heads(a.project_key, memory),
        heads(a.project_value, memory),
    )
    x = x + attended(q, k, v, src_mask.unsqueeze(1), a.project_output)
    f, y = layer.feed_forward, F.rms_norm(x, (32,), norms[2], 1e-5)
    return x + (F.silu(y @ f.gate.weight.T) * (y @ f.expand.weight.T)) @ f.contract.weight.T


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_a_decoder_layer_in_pytorchs_own_functions_gradients_too(groups):
    layer = shaken(renewed(groups)).decoder.layers[1]
    x, memory = torch.randn(2, 5, 32, requires_grad=True), torch.randn(2, 6, 32)
    mask, causal = padding_mask(SRC), subsequent_mask(5)
    outputs = layer(x, memory, mask, causal), todays_decoder_layer(layer, x, memory, mask)
    gradients = (torch.autograd.grad(y.sin().sum(), (x, *layer.parameters())) for y in outputs)
    close(*outputs)
    close(*gradients)


def test_every_dropout_of_todays_model_is_asked_for_and_at_work():
    model = renewed(dropout=0.3)
    assert {part.p for part in model.modules() if isinstance(part, nn.Dropout)} == {0.3}
    for layer in (LAYERS["grouped"](), LAYERS["today's"]()):
        x = torch.randn(1, 4, 32)
        layer.dropout.p = 1.0  # only the bias arrives
        close(layer(x, x, x), layer.project_output.bias.expand(1, 4, 32))
    x = torch.randn(2, 3, 6)
    assert not SwiGLU(6, 10, dropout=1.0)(x).any()
    layer = SquaredReLU(6, 10, dropout=1.0)
    close(layer(x), layer.contract.bias.expand(2, 3, 6))
