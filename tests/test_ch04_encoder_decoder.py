"""Chapter 4: the whole model against nn.Transformer, its counts, its masks, what it refuses."""

import pytest
import torch
from parity import assert_parity, to_torch_transformer, torch_vectors
from tiny import SMALL, SRC, TGT, masks
from torch import nn
from torch.nn import functional as F

from scripts.book.instruments import scramble
from scripts.ch01_attention import subsequent_mask
from scripts.ch02_multi_head_attention import MultiHeadedAttention
from scripts.ch03_embeddings_and_positions import MAX_LEN
from scripts.ch04_encoder_decoder import (
    PARTS,
    SUBLAYERS,
    EncoderLayer,
    Generator,
    PositionwiseFeedForward,
    SublayerConnection,
    clones,
    count_parameters,
    fresh_model,
    make_model,
    nothing,
    share_reversed,
    train_to_reverse,
    without,
    write_reversal,
)
from scripts.corpora.reversal import BOS, EOS, reversals

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


def parameters_by_hand(vocab, N, d_model, d_ff, tie, norm_first):
    """How many numbers each kind of part learns, by arithmetic alone."""
    D, tables = d_model, {"none": 3, "decoder": 2, "all": 1}[tie]
    return {
        "attention": 3 * N * 4 * (D * D + D),
        "feed-forward": 2 * N * (D * d_ff + d_ff + d_ff * D + D),
        "LayerNorm": (5 * N + 2 * norm_first) * 2 * D,
        "embeddings and generator": tables * vocab * D + vocab,
    }


@pytest.mark.parametrize("tie", ["none", "decoder", "all"])
@pytest.mark.parametrize("norm_first", [False, True])
def test_parameters_by_hand_and_by_code(tie, norm_first):
    """Also: in the paper's models most of them are in the feed-forward layers."""
    for D in (512, 1024):
        paper = parameters_by_hand(37_000, 6, D, 4 * D, "all", norm_first)
        assert max(paper, key=paper.get) == "feed-forward"
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


def test_torchs_two_final_norms_show_only_after_training():
    """Post-norm has none in the paper; on fresh weights, normalising twice is nearly once."""
    model, gaps = make_model(50, 60, **SMALL), []
    for size in (0.0, 0.1):
        scramble(model, size=size)
        plain = to_torch_transformer(model, final_norms=True)
        ours, theirs = model(SRC, TGT, *masks()), torch_vectors(plain, model, SRC, TGT)
        gaps.append((ours - theirs)[TGT != 0].abs().max().item())
    assert gaps[0] < 1e-3 and gaps[1] > 1e-2


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


# Reversing words


def test_a_memory_serves_every_step_of_writing():
    model = make_model(50, 60, **SMALL).eval()
    memory = model.encode(SRC, masks()[0])
    at_once = model(SRC, TGT, masks()[0], subsequent_mask(5))
    for t in range(1, 6):
        so_far = model.decode(memory, masks()[0], TGT[:, :t], subsequent_mask(t))
        torch.testing.assert_close(so_far[:, -1], at_once[:, t - 1])


def test_writing_picks_the_best_token_of_each_step():
    model = without(seed=1).double()
    source, _ = reversals(3, (5, 5), torch.Generator().manual_seed(0))
    written = write_reversal(model, source)
    assert written.shape == (3, 7) and (written[:, 0] == BOS).all()
    vectors = model(source, written[:, :-1], None, subsequent_mask(6))
    assert torch.equal(model.generator(vectors).argmax(-1), written[:, 1:])


def test_training_lowers_the_loss_and_is_watched_from_before_to_after():
    seen, model = [], without()
    losses = train_to_reverse(model, steps=30, watch=seen.append)
    assert seen == [*range(31)] and losses[-1] < losses[0] - 0.5
    assert losses[0] == train_to_reverse(without(), steps=1)[0]
    assert 0 <= share_reversed(model, 4, 20) < 1


@pytest.mark.parametrize("part", PARTS)
def test_what_is_out_is_out_and_all_else_is_there(part):
    """Which other sources, earlier letters, later letters and orders a fresh model reacts to."""
    source, target = torch.tensor([[5, 6, 7, 8, EOS]]), torch.tensor([[BOS, 8, 7, 6]])
    whole, model = without(), without(part)
    assert sum(p.numel() for p in whole.parameters()) == sum(p.numel() for p in model.parameters())
    layers = [side.layers[0] for side in (model.encoder, model.decoder)]

    def reacts(source2, target2, at):
        before = model(source, target, None, subsequent_mask(4))[0, at]
        after = model(source2, target2, None, subsequent_mask(4))[0, at]
        return bool((before - after).abs().max() > 1e-5)

    other = torch.tensor([[5, 6, 7, 9, EOS]])
    assert reacts(other, target, 1) == (part != "cross-attention")
    later = torch.tensor([[BOS, 8, 7, 9]])
    assert reacts(source, later, 1) == (part == "causal mask")
    earlier = torch.tensor([[BOS, 9, 7, 6]])
    assert reacts(source, earlier, 3) == (part != "decoder self-attention")
    assert reacts(source.flip(1), target, 1) == (part not in ("positions", "cross-attention"))
    assert layers[0].self_attn.h == (1 if part == "several heads" else 4)
    x = torch.randn(1, 4, 64, dtype=torch.float32)
    bare = layers[0].sublayer[0](x, torch.zeros_like)
    assert torch.equal(bare, x) == (part != "residuals")
    assert torch.equal(layers[1].sublayer[2].norm(x), x) == (part == "LayerNorms")
    silent = sum(module.forward is nothing for module in model.modules())
    assert silent == (dict.fromkeys(SUBLAYERS, 1) | {"feed-forward": 2}).get(part, 0)


def test_an_unknown_part_is_refused():
    with pytest.raises(ValueError, match="no part 'wheels': choose from positions, "):
        without("wheels")


@pytest.mark.audit
@pytest.mark.parametrize("seed", range(8))
def test_eight_of_eight_seeds_reverse_from_both_ends_and_use_their_feed_forward_layer(seed):
    """What the page says of eight trainings, with room for other processors' rounding."""
    model, early = fresh_model(seed), []
    layer = model.decoder.layers[0]

    def right(length):
        """By place, how many of 500 words' tokens are right, given the right beginning."""
        source, target = reversals(500, (length, length), torch.Generator().manual_seed(5))
        with torch.no_grad():
            vectors = model(source, target[:, :-1], None, subsequent_mask(length + 1))
            return model.generator(vectors).argmax(-1) == target[:, 1:]  # (500, length + 1)

    def look_on(step):
        if step == 70:
            early.extend(right(8).double().mean(0).tolist())

    train_to_reverse(model, seed=seed, watch=look_on)
    assert share_reversed(model) > 0.95
    assert early[0] > 0.9 and early[-1] > 0.6 and early[5] < 0.7
    layer.feed_forward.forward = nothing
    assert right(10).all(-1).double().mean() < 0.97
