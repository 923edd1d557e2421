"""Chapter 4: the whole model against nn.Transformer, its counts, its masks, what it refuses."""

import pytest
import torch
from tiny import SMALL, SRC, TGT, masks
from torch import nn
from torch.nn import functional as F

from scripts.book.instruments import scramble
from scripts.ch01_attention import subsequent_mask
from scripts.ch02_multi_head_attention import MultiHeadedAttention
from scripts.ch03_embeddings_and_positions import MAX_LEN
from scripts.ch04_encoder_decoder import (
    EncoderLayer,
    Generator,
    PositionwiseFeedForward,
    SublayerConnection,
    assert_parity,
    clones,
    count_parameters,
    make_model,
    parameters_by_hand,
)

pytestmark = pytest.mark.usefixtures("float64")


# The parts


def test_the_generator_gives_logits():
    generator = Generator(16, 11)
    x = torch.randn(2, 3, 16)
    torch.testing.assert_close(generator(x), x @ generator.proj.weight.T + generator.proj.bias)


def test_with_everything_dropped_each_part_shows_its_dropout():
    x = torch.randn(2, 3, 8)
    think = PositionwiseFeedForward(8, 16, dropout=1.0)
    torch.testing.assert_close(think(x), think.contract.bias.expand(2, 3, 8))
    pre, post = (SublayerConnection(8, 1.0, norm_first) for norm_first in (True, False))
    assert torch.equal(pre(x, lambda x: x * 7), x)  # the road itself is spared
    torch.testing.assert_close(post(x, lambda x: x * 7), F.layer_norm(x, (8,)))
    model = make_model(50, 60, **SMALL | {"dropout": 1.0})
    assert not model.src_embed(SRC).any() and not model.tgt_embed(TGT).any()


def test_erratum_28_stacked_layers_are_different_objects():
    parts = (MultiHeadedAttention(4, 16), PositionwiseFeedForward(16, 32))
    layer = EncoderLayer(16, *parts, dropout=0.1)
    assert count_parameters(clones(layer, 6)) == 6 * count_parameters(layer)
    wrong = nn.ModuleList([layer] * 6)
    assert count_parameters(wrong) == count_parameters(layer)
    addresses = [p.data_ptr() for p in make_model(10, 10, **SMALL).parameters()]
    assert len(addresses) == len(set(addresses))  # nothing is shared that shouldn't be


# The factory


def test_erratum_03_dropout_zero_reaches_every_part():
    def runs_alike(model):
        return torch.equal(model(SRC, TGT), model(SRC, TGT))

    model = make_model(50, 60, **SMALL)
    assert runs_alike(model)
    for module in model.modules():  # the slip: attention keeps its own default
        if isinstance(module, MultiHeadedAttention):
            module.dropout = MultiHeadedAttention(4, 16).dropout
    assert not runs_alike(model)
    model = make_model(50, 60, **SMALL | {"dropout": 0.3})
    assert {m.p for m in model.modules() if isinstance(m, nn.Dropout)} == {0.3}


def test_what_does_not_fit_is_refused():
    for options, message in (
        ({"tie": "all"}, "one vocabulary"),
        ({"tie": "everything"}, "tie must be"),
    ):
        with pytest.raises(ValueError, match=message):
            make_model(50, 60, **SMALL | options)
    with pytest.raises(ValueError, match="longer than the maximum of 256"):
        make_model(50, 60, **SMALL)(torch.ones(1, MAX_LEN + 1, dtype=torch.int64), TGT[:1])


@pytest.mark.parametrize("tie", ["none", "decoder", "all"])
@pytest.mark.parametrize("norm_first", [False, True])
def test_parameters_by_hand_and_by_code(tie, norm_first):
    options = {"tie": tie, "norm_first": norm_first}
    model = make_model(31, 31, 3, 12, 20, 4, **options)
    by_hand = parameters_by_hand(31, 3, 12, 20, **options)
    by_code = dict.fromkeys(by_hand, 0)
    parts = {"attn": "attention", "feed_forward": "feed-forward", "norm": "LayerNorm"}
    for name, p in model.named_parameters():  # names a shared parameter once
        part = next((parts[key] for key in parts if key in name), "embeddings and generator")
        by_code[part] += p.numel()
    assert by_hand == by_code and sum(by_hand.values()) == count_parameters(model)


# The whole


@pytest.mark.parametrize("norm_first", [False, True])
def test_outputs_and_gradients_are_those_of_torchs_transformer(norm_first):
    model = make_model(50, 60, **SMALL, norm_first=norm_first)
    scramble(model)
    assert_parity(model, SRC, TGT)
    model.decoder.layers[1].sublayer[0].norm_first = not norm_first
    with pytest.raises(AssertionError):  # the check can fail
        assert_parity(model, SRC, TGT)


@pytest.mark.parametrize("norm_first", [False, True])
def test_causality_by_perturbation(norm_first):
    model = make_model(50, 60, **SMALL, norm_first=norm_first).eval()
    for at in range(TGT.size(1)):
        changed = TGT.clone()
        changed[:, at] += 1
        for mask, first in ((subsequent_mask(5), at), (None, 0)):  # the check can fail
            difference = model(SRC, TGT, None, mask) - model(SRC, changed, None, mask)
            assert (difference.abs().amax(dim=(0, 2)) > 1e-9).nonzero()[0] == first


@pytest.mark.parametrize("norm_first", [False, True])
def test_padding_changes_nothing(norm_first):
    model = make_model(50, 60, **SMALL, norm_first=norm_first).eval()
    alone = model(SRC[1:, :4], TGT[1:, :3], None, subsequent_mask(3))
    torch.testing.assert_close(model(SRC, TGT, *masks())[1:, :3], alone)
    assert (model(SRC, TGT, None, subsequent_mask(5))[1:, :3] - alone).abs().max() > 1e-2
