"""Chapter 5: LayerNorm and its placement, the numbers to start with, tied tables, first steps."""

import copy
import math

import pytest
import torch
from tiny import SMALL, SRC, TGT, masks
from torch import nn
from torch.nn import functional as F

from scripts.ch02_multi_head_attention import MultiHeadedAttention
from scripts.ch04_encoder_decoder import (
    EncoderDecoder,
    EncoderLayer,
    LayerNorm,
    PositionwiseFeedForward,
    SublayerConnection,
    clones,
    initialise,
    make_model,
)
from scripts.ch05_norms_and_first_steps import (
    NoResidual,
    deep_model,
    difference,
    layer_signals,
    storage_addresses,
    wrong_initialise,
    wrong_layer_norm,
    xavier_bound,
)
from scripts.corpora.reversal import reversals

pytestmark = pytest.mark.usefixtures("float64")


def training_step(model: EncoderDecoder) -> None:
    logits = model.generator(model(SRC, TGT, *masks()))
    F.cross_entropy(logits.flatten(0, 1), TGT.flatten()).backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()


def test_erratum_02_layer_norm_has_biased_variance_and_eps_under_the_root():
    x = torch.randn(50, 8)
    for scale, off_by in ((1.0, 0.05), (1e-4, 1.0)):  # the second: where ε counts
        reference = F.layer_norm(scale * x, (8,))
        torch.testing.assert_close(LayerNorm(8)(scale * x), reference)
        assert (wrong_layer_norm(scale * x) - reference).abs().max() > off_by


def test_layer_norm_has_the_gradients_of_pytorchs():
    data = torch.cat((torch.randn(4, 16), 1e-3 * torch.randn(4, 16), torch.ones(1, 16)))  # (9, D)
    results = []
    for norm in (LayerNorm(16), nn.LayerNorm(16)):
        numbers = {"weight": torch.linspace(0.5, 2, 16), "bias": torch.linspace(-1, 1, 16)}
        norm.load_state_dict(numbers)
        x = data.clone().requires_grad_()
        y = norm(x)
        results.append((y, *torch.autograd.grad(y.sin().sum(), (x, norm.weight, norm.bias))))
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-10)


def test_erratum_01_norm_placement_is_what_it_says():
    x, matrix = torch.randn(2, 5, 16), torch.randn(16, 16)

    def sublayer(x):
        return (x @ matrix).tanh()

    def is_pre(part):
        return torch.equal(part(x, torch.zeros_like), x)

    post, pre = SublayerConnection(16, 0.0), SublayerConnection(16, 0.0, norm_first=True)
    torch.testing.assert_close(post(x, sublayer), F.layer_norm(x + sublayer(x), (16,)))
    torch.testing.assert_close(pre(x, sublayer), x + sublayer(F.layer_norm(x, (16,))))
    assert is_pre(pre)
    default = make_model(10, 10, **SMALL)
    layers = (*default.encoder.layers, *default.decoder.layers)
    assert not any(is_pre(part) for layer in layers for part in layer.sublayer)


def test_erratum_04_biases_start_at_zero_and_layers_differ():
    def expand_biases(stack):  # (N, F)
        return torch.stack([layer.feed_forward.expand.bias for layer in stack])

    model = make_model(50, 60, **SMALL)
    for stack in (model.encoder.layers, model.decoder.layers):
        first, second = (layer.feed_forward.expand.weight for layer in stack)
        assert not torch.equal(first, second)
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert not any(module.bias.any() for module in linear)

    parts = (MultiHeadedAttention(4, 16), PositionwiseFeedForward(16, 32))
    wrong = clones(EncoderLayer(16, *parts, dropout=0.1), 6)
    wrong_initialise(wrong)
    biases = expand_biases(wrong)
    assert biases.any() and (biases == biases[0]).all()
    initialise(wrong)
    assert not expand_biases(wrong).any()


def test_matrices_have_xaviers_spread_and_tables_one_over_root_d():
    model = make_model(300, 300, N=1, d_model=128, d_ff=512, h=4)
    for module in model.modules():
        if isinstance(module, nn.Linear) and module is not model.generator.proj:
            fan_out, fan_in = module.weight.shape
            bound = xavier_bound(fan_in, fan_out)
            assert module.weight.abs().max() <= bound
            assert abs(module.weight.std() / (bound / math.sqrt(3)) - 1) < 0.02
    tied = make_model(300, 300, N=1, d_model=128, d_ff=512, h=4, tie="all")
    for table in (model.src_embed[0].lut, model.tgt_embed[0].lut, tied.generator.proj):
        assert abs(table.weight.std() * math.sqrt(128) - 1) < 0.02


def test_without_its_residual_a_sublayer_forgets_x():
    x, matrix = torch.randn(2, 5, 16), torch.randn(16, 16)

    def sublayer(x):
        return (x @ matrix).tanh()

    post, pre = NoResidual(16, 0.0), NoResidual(16, 0.0, norm_first=True)
    torch.testing.assert_close(post(x, sublayer), F.layer_norm(sublayer(x), (16,)))
    torch.testing.assert_close(pre(x, sublayer), sublayer(F.layer_norm(x, (16,))))


def test_small_parts_have_pytorchs_spread_and_no_bias():
    model = deep_model(norm_first=False, small="attn")
    for name, part in model.named_modules():
        if isinstance(part, nn.Linear):
            rows, columns = part.weight.shape
            bound = columns**-0.5 if "attn" in name else xavier_bound(columns, rows)
            assert 0.95 * bound < part.weight.abs().max() <= bound * (1 + 1e-6)
            assert not part.bias.any()


def test_signals_are_those_of_the_whole_model():
    """The gradient at the embeddings, and the last layer's output, computed by `forward`."""
    model = deep_model(norm_first=True).double()
    src, tgt = reversals(4, (5, 5))
    signals = layer_signals(model, src, tgt).set_index("layer")
    outputs, embedded = [], []
    model.decoder.layers[-1].register_forward_hook(lambda *call: outputs.append(call[-1]))
    model.src_embed.register_forward_hook(lambda *call: embedded.append(call[-1]))
    y = model(src, tgt[:, :-1], None, torch.ones(1, 6, 6, dtype=torch.bool).tril())
    loss = F.cross_entropy(model.generator(y).flatten(0, 1), tgt[:, 1:].flatten())
    (gradient,) = torch.autograd.grad(loss, embedded)
    assert abs(signals.gradient["E0"] - gradient.norm()) < 1e-9
    assert abs(signals.difference["D6"] - difference(outputs[0])) < 1e-9


def test_a_model_that_reads_nothing_pays_the_letters_and_the_length():
    """The entropy of a label, given only its place; chapter 5 computes it from whole words."""
    _, targets = reversals(20_000, (4, 6), torch.Generator().manual_seed(0))
    labels, nats = targets[:, 1:], 0.0
    for place in labels.T:
        counts = torch.bincount(place[place != 0]).double()
        nats -= (counts[counts > 0] * (counts[counts > 0] / counts.sum()).log()).sum().item()
    assert abs(nats / (labels != 0).sum() - (5 * math.log(10) + math.log(3)) / 6) < 0.005


def test_a_tied_models_first_loss_is_about_ln_v_and_a_half():
    model = make_model(5000, 5000, 1, 128, 256, 4, 0.0, tie="all")
    src, tgt, labels = torch.randint(4, 5000, (3, 16, 12))
    logits = model.generator(model(src, tgt))
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten()).item()
    assert abs(loss - math.log(5000) - 0.5) < 0.3


def test_erratum_07_tied_tables_share_storage():
    for tie, tables in (("none", 3), ("decoder", 2), ("all", 1)):
        model = make_model(60, 60, **SMALL, tie=tie)
        training_step(model)
        assert len(set(storage_addresses(copy.deepcopy(model).float()))) == tables

    wrong = make_model(60, 60, **SMALL)  # the slip: the same numbers in three tables
    wrong.load_state_dict(model.state_dict())
    assert torch.equal(wrong.generator.proj.weight, wrong.tgt_embed[0].lut.weight)
    training_step(wrong)
    assert not torch.equal(wrong.generator.proj.weight, wrong.tgt_embed[0].lut.weight)
