"""Chapter 4: the whole model against nn.Transformer, its counts, its masks, what it refuses."""

import pytest
import torch
from tiny import SMALL, SRC, TGT, masks
from torch import nn
from torch.nn import functional as F

from scripts.book.instruments import scramble
from scripts.ch01_attention import padding_mask, subsequent_mask
from scripts.ch02_multi_head_attention import MultiHeadedAttention
from scripts.ch03_embeddings_and_positions import MAX_LEN
from scripts.ch04_encoder_decoder import (
    PAPER_VOCAB,
    EncoderLayer,
    Generator,
    LayerNorm,
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
    scramble(think)
    torch.testing.assert_close(think(x), think.contract.bias.expand(2, 3, 8))
    pre, post = (SublayerConnection(8, 1.0, norm_first) for norm_first in (True, False))
    assert torch.equal(pre(x, lambda x: x * 7), x)  # the road itself is spared
    torch.testing.assert_close(post(x, lambda x: x * 7), F.layer_norm(x, (8,)))
    model = make_model(50, 60, **SMALL | {"dropout": 1.0})
    assert not model.src_embed(SRC).any() and not model.tgt_embed(TGT).any()


def test_erratum_28_stacked_layers_are_different_objects():
    parts = (MultiHeadedAttention(4, 16), PositionwiseFeedForward(16, 32))
    layer = EncoderLayer(16, *parts, dropout=0.1)
    right, wrong = clones(layer, 6), nn.ModuleList([layer] * 6)
    assert count_parameters(right) == 6 * count_parameters(layer)
    assert count_parameters(wrong) == count_parameters(layer)
    assert len({id(part) for part in right}) == 6 and len({id(part) for part in wrong}) == 1
    model = make_model(10, 10, **SMALL | {"N": 6})
    assert len({id(part) for part in (*model.encoder.layers, *model.decoder.layers)}) == 12
    addresses = [p.data_ptr() for p in model.parameters()]
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
    assert not runs_alike(model)


def test_final_norms_belong_to_pre_norm_only():
    for norm_first in (False, True):
        model = make_model(10, 10, **SMALL, norm_first=norm_first)
        for stack in (model.encoder, model.decoder):
            assert isinstance(stack.norm, LayerNorm) == norm_first


@pytest.mark.parametrize("tie", ["none", "decoder", "all"])
def test_every_choice_runs_and_loads_again(tie):
    model = make_model(60, 60, **SMALL, tie=tie)
    vectors = model(SRC, TGT, *masks())
    assert vectors.shape == (2, 5, 16) and model.generator(vectors).shape == (2, 5, 60)
    again = make_model(60, 60, **SMALL, tie=tie)
    again.load_state_dict(model.state_dict())
    torch.testing.assert_close(again(SRC, TGT, *masks()), vectors)
    with pytest.raises(ValueError, match="longer than the maximum of 256"):
        model(torch.ones(1, MAX_LEN + 1, dtype=torch.int64), TGT[:1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tie": "all"}, "one vocabulary"),
        ({"tie": "everything"}, "tie must be"),
        ({"h": 3}, "not a multiple"),
    ],
)
def test_what_does_not_fit_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make_model(50, 60, **SMALL | options)


# Counts


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


@pytest.mark.parametrize("size, millions", [((6, 512, 2048), 65), ((6, 1024, 4096), 213)])
def test_the_papers_sizes_are_met_within_three_percent(size, millions):
    assert abs(sum(parameters_by_hand(PAPER_VOCAB, *size).values()) / millions / 1e6 - 1) < 0.03


# The whole


@pytest.mark.parametrize("norm_first", [False, True])
def test_parity_notices_planted_faults(norm_first, monkeypatch):
    def unbiased(self, x):
        spread = x.std(-1, keepdim=True) + 1e-6
        return (x - x.mean(-1, keepdim=True)) / spread * self.weight + self.bias

    def swapped(self, x, sublayer):
        self.norm_first = not norm_first
        return right_connection(self, x, sublayer)

    def no_relu(self, x):
        return self.contract(self.expand(x))

    right_connection = SublayerConnection.forward
    faults = (
        (LayerNorm, "forward", unbiased),
        (SublayerConnection, "forward", swapped),
        (PositionwiseFeedForward, "forward", no_relu),
        ("scripts.ch01_attention.math.sqrt", lambda x: 1.0),
    )
    for fault in faults:
        model = make_model(50, 60, **SMALL, norm_first=norm_first)
        scramble(model)
        with monkeypatch.context() as planted, pytest.raises(AssertionError):
            planted.setattr(*fault)
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
    right = model(SRC[:1], TGT[:1], None, subsequent_mask(5))
    for extra in (1, 4):
        src, tgt = F.pad(SRC[:1], (0, extra)), F.pad(TGT[:1], (0, extra))
        causal = subsequent_mask(5 + extra)
        masked = model(src, tgt, padding_mask(src), padding_mask(tgt) & causal)
        torch.testing.assert_close(masked[:, :5], right, rtol=0, atol=1e-12)
        assert (model(src, tgt, None, causal)[:, :5] - right).abs().max() > 1e-2
    alone = model(SRC[1:, :4], TGT[1:, :3], None, subsequent_mask(3))
    torch.testing.assert_close(model(SRC, TGT, *masks())[1:, :3], alone)


def test_a_source_of_padding_alone_gives_no_nan():
    model = make_model(50, 60, **SMALL)
    src = torch.zeros(1, 4, dtype=torch.int64)
    vectors = model(src, TGT[:1], padding_mask(src), subsequent_mask(5))
    vectors.sum().backward()
    assert vectors.isfinite().all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
