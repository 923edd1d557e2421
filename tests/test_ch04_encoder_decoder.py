"""Chapter 4: the parts against PyTorch's, the whole against nn.Transformer, the slips refused."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from scripts.ch01_attention import padding_mask, subsequent_mask
from scripts.ch02_multi_head_attention import MultiHeadedAttention
from scripts.ch04_encoder_decoder import (
    PAPER_ROWS,
    Encoder,
    EncoderDecoder,
    EncoderLayer,
    Generator,
    LayerNorm,
    PositionwiseFeedForward,
    SublayerConnection,
    WrongPostNorm,
    clones,
    count_table,
    expand_biases,
    first_change,
    initialise,
    is_post_norm,
    make_model,
    padding_effect,
    parameters_by_code,
    parameters_by_hand,
    runs_alike,
    scramble,
    storage_addresses,
    to_torch_transformer,
    torch_layer_state,
    torch_vectors,
    wrong_dropout_model,
    wrong_initialise,
    wrong_layer_norm,
    wrong_stack,
    wrong_tying,
)

SMALL = {"N": 2, "d_model": 16, "d_ff": 32, "h": 4, "dropout": 0.0}
SRC = torch.tensor([[2, 11, 12, 13, 14, 15, 3], [2, 21, 22, 3, 0, 0, 0]])  # (B, S)
TGT = torch.tensor([[2, 31, 32, 33, 34], [2, 41, 42, 0, 0]])  # (B, T)


@pytest.fixture(autouse=True)
def double_precision():
    """Equal means equal to twelve digits; the seed is the same for every test."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)


def masks() -> tuple[torch.Tensor, torch.Tensor]:
    return padding_mask(SRC), padding_mask(TGT) & subsequent_mask(TGT.size(1))


def training_step(model: EncoderDecoder) -> None:
    logits = model.generator(model(SRC, TGT, *masks()))
    F.cross_entropy(logits.flatten(0, 1), TGT.flatten()).backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()


# LayerNorm and the residual connection


@pytest.mark.parametrize("size", [2, 8, 33])
def test_layer_norm_is_pytorchs_forward_and_gradient(size):
    ours, theirs = LayerNorm(size), nn.LayerNorm(size)
    scramble(ours)
    theirs.load_state_dict(ours.state_dict())
    data = torch.cat((torch.randn(4, size), 1e-4 * torch.randn(4, size), torch.ones(1, size)))
    results = []
    for norm in (ours, theirs):
        x = data.clone().requires_grad_()
        y = norm(x)
        results.append((y, *torch.autograd.grad(y.sin().sum(), (x, norm.weight, norm.bias))))
    for mine, reference in zip(*results, strict=True):
        assert mine.isfinite().all()
        torch.testing.assert_close(mine, reference, rtol=1e-9, atol=1e-9)


def test_layer_norm_looks_at_one_token_only():
    x = torch.randn(3, 5, 8)
    changed = x.clone()
    changed[0, 0] += torch.randn(8)
    norm = LayerNorm(8)
    assert torch.equal(norm(x)[1:], norm(changed)[1:])
    assert torch.equal(norm(x)[0, 1:], norm(changed)[0, 1:])
    torch.testing.assert_close(norm(5 * x + 3), norm(x), rtol=1e-3, atol=1e-3)


def test_erratum_02_layer_norm_has_biased_variance_and_eps_under_the_root():
    x = torch.randn(50, 8)
    reference = F.layer_norm(x, (8,))
    torch.testing.assert_close(LayerNorm(8)(x), reference)
    torch.testing.assert_close(
        LayerNorm(8)(x).var(-1, correction=0), torch.ones(50), atol=1e-3, rtol=0
    )
    assert (wrong_layer_norm(x) - reference).abs().max() > 0.05
    torch.testing.assert_close(
        wrong_layer_norm(x).var(-1, correction=0), torch.full((50,), 7 / 8), atol=1e-3, rtol=0
    )
    faint = 1e-4 * x  # where ε counts
    torch.testing.assert_close(LayerNorm(8)(faint), F.layer_norm(faint, (8,)))
    assert wrong_layer_norm(faint).abs().max() > 5 * LayerNorm(8)(faint).abs().max()


def test_erratum_01_norm_placement_is_what_it_says():
    x, matrix = torch.randn(2, 5, 16), torch.randn(16, 16)

    def sublayer(x):
        return (x @ matrix).tanh()

    post, pre = SublayerConnection(16, 0.0), SublayerConnection(16, 0.0, norm_first=True)
    torch.testing.assert_close(post(x, sublayer), F.layer_norm(x + sublayer(x), (16,)))
    torch.testing.assert_close(pre(x, sublayer), x + sublayer(F.layer_norm(x, (16,))))
    assert is_post_norm(post, 16) and not is_post_norm(pre, 16)
    assert not is_post_norm(WrongPostNorm(16, 0.0), 16)  # it says post-norm and is pre-norm
    default = make_model(10, 10, **SMALL)
    assert all(
        is_post_norm(part, 16) for layer in default.encoder.layers for part in layer.sublayer
    )
    assert all(
        is_post_norm(part, 16) for layer in default.decoder.layers for part in layer.sublayer
    )


def test_final_norms_belong_to_pre_norm_only():
    for norm_first in (False, True):
        model = make_model(10, 10, **SMALL, norm_first=norm_first)
        for stack in (model.encoder, model.decoder):
            assert isinstance(stack.norm, LayerNorm) == norm_first


def test_residual_dropout_spares_the_road():
    """With everything dropped, pre-norm is the identity."""
    connection = SublayerConnection(8, dropout=1.0, norm_first=True).train()
    x = torch.randn(2, 3, 8)
    assert torch.equal(connection(x, lambda x: x * 7), x)


# Feed-forward, stacks, generator


def test_feed_forward_is_two_convolutions_of_width_one():
    ours = PositionwiseFeedForward(16, 32, dropout=0.0)
    first, second = nn.Conv1d(16, 32, 1), nn.Conv1d(32, 16, 1)
    for conv, linear in ((first, ours.expand), (second, ours.contract)):
        conv.load_state_dict({"weight": linear.weight.unsqueeze(-1), "bias": linear.bias})
    x = torch.randn(2, 5, 16)
    by_conv = second(first(x.mT).relu()).mT
    torch.testing.assert_close(ours(x), by_conv)
    ours(x).sin().sum().backward()
    by_conv.sin().sum().backward()
    torch.testing.assert_close(first.weight.grad.squeeze(-1), ours.expand.weight.grad)
    torch.testing.assert_close(second.weight.grad.squeeze(-1), ours.contract.weight.grad)


def test_erratum_28_stacked_layers_are_different_objects():
    layer = EncoderLayer(
        16, MultiHeadedAttention(4, 16), PositionwiseFeedForward(16, 32), dropout=0.1
    )

    def count(module):
        return sum(p.numel() for p in module.parameters())

    assert count(clones(layer, 6)) == 6 * count(layer)
    assert len({id(part) for part in clones(layer, 6)}) == 6
    assert count(wrong_stack(layer, 6)) == count(layer)
    assert len({id(part) for part in wrong_stack(layer, 6)}) == 1
    model = make_model(10, 10, **SMALL | {"N": 6})
    assert len({id(part) for part in (*model.encoder.layers, *model.decoder.layers)}) == 12
    addresses = [p.data_ptr() for p in model.parameters()]
    assert len(addresses) == len(set(addresses))  # nothing is shared that shouldn't be


def test_the_generator_gives_logits():
    generator = Generator(16, 11)
    x = torch.randn(2, 3, 16)
    torch.testing.assert_close(generator(x), x @ generator.proj.weight.T + generator.proj.bias)


# The factory


def test_erratum_03_dropout_zero_reaches_every_part():
    assert runs_alike(make_model(50, 60, **SMALL), SRC, TGT)
    assert not runs_alike(wrong_dropout_model(50, 60, **SMALL), SRC, TGT)
    model = make_model(50, 60, **SMALL | {"dropout": 0.3})
    assert {m.p for m in model.modules() if isinstance(m, nn.Dropout)} == {0.3}
    assert not runs_alike(model, SRC, TGT)


def test_erratum_04_biases_start_at_zero_and_layers_differ():
    model = make_model(50, 60, **SMALL | {"N": 6})
    for stack in (model.encoder.layers, model.decoder.layers):
        assert (expand_biases(stack) == 0).all()
        weights = [layer.feed_forward.expand.weight for layer in stack]
        assert all(not torch.equal(weights[0], other) for other in weights[1:])
    for module in model.modules():
        if isinstance(module, nn.Linear):
            assert (module.bias == 0).all()

    parts = (MultiHeadedAttention(4, 16), PositionwiseFeedForward(16, 32))
    wrong = Encoder(EncoderLayer(16, *parts, dropout=0.1), 6)
    wrong_initialise(wrong)
    biases = expand_biases(wrong.layers)
    assert (biases != 0).any() and (biases == biases[0]).all()
    initialise(wrong)
    assert (expand_biases(wrong.layers) == 0).all()


def test_matrices_have_xaviers_spread_and_tables_one_over_root_d():
    model = make_model(300, 300, N=1, d_model=128, d_ff=512, h=4)
    for module in model.modules():
        if isinstance(module, nn.Linear) and module is not model.generator.proj:
            fan_out, fan_in = module.weight.shape
            bound = math.sqrt(6 / (fan_in + fan_out))
            assert module.weight.abs().max() <= bound
            assert abs(module.weight.std() / (bound / math.sqrt(3)) - 1) < 0.02
    tied = make_model(300, 300, N=1, d_model=128, d_ff=512, h=4, tie="all")
    for table in (model.src_embed[0].lut, model.tgt_embed[0].lut, tied.generator.proj):
        assert abs(table.weight.std() * math.sqrt(128) - 1) < 0.02


def test_erratum_07_tied_tables_share_storage():
    for tie, tables in (("none", 3), ("decoder", 2), ("all", 1)):
        model = make_model(60, 60, **SMALL, tie=tie)
        assert len(set(storage_addresses(model))) == tables
        training_step(model)
        assert len(set(storage_addresses(copy.deepcopy(model).float()))) == tables
    assert torch.equal(model.generator.proj.weight, model.src_embed[0].lut.weight)

    wrong = make_model(60, 60, **SMALL)
    wrong_tying(wrong)
    assert torch.equal(wrong.generator.proj.weight, wrong.tgt_embed[0].lut.weight)
    assert len(set(storage_addresses(wrong))) == 3
    training_step(wrong)
    assert not torch.equal(wrong.generator.proj.weight, wrong.tgt_embed[0].lut.weight)


def test_tied_gradient_is_the_sum_over_uses():
    tied, untied = make_model(60, 60, **SMALL, tie="all"), make_model(60, 60, **SMALL)
    untied.load_state_dict(tied.state_dict())
    for model in (tied, untied):
        model.generator(model(SRC, TGT, *masks())).sin().sum().backward()
    uses = (untied.src_embed[0].lut, untied.tgt_embed[0].lut, untied.generator.proj)
    torch.testing.assert_close(tied.src_embed[0].lut.weight.grad, sum(u.weight.grad for u in uses))


@pytest.mark.parametrize("tie", ["none", "decoder", "all"])
@pytest.mark.parametrize("width", [None, 8])
@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
def test_every_choice_runs_and_loads_again(tie, width, positions):
    options = {"tie": tie, "width": width, "positions": positions, "max_len": 9}
    model = make_model(60, 60, **SMALL, **options)
    vectors = model(SRC, TGT, *masks())
    assert vectors.shape == (2, 5, 16) and model.generator(vectors).shape == (2, 5, 60)
    again = make_model(60, 60, **SMALL, **options)
    again.load_state_dict(model.state_dict())
    torch.testing.assert_close(again(SRC, TGT, *masks()), vectors)
    with pytest.raises(ValueError, match="longer than the maximum of 9"):
        model(torch.ones(1, 10, dtype=torch.int64), TGT[:1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tie": "all"}, "one vocabulary"),
        ({"tie": "everything"}, "tie must be"),
        ({"positions": "sinus"}, "positions must be"),
        ({"h": 3}, "not a multiple"),
    ],
)
def test_what_does_not_fit_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make_model(50, 60, **SMALL | options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bool, torch.int16])
def test_ids_of_the_wrong_dtype_are_refused(dtype):
    model = make_model(50, 60, **SMALL)
    with pytest.raises(TypeError, match="token ids must be int64 or int32"):
        model(SRC.to(dtype), TGT)
    with pytest.raises(TypeError, match="token ids must be int64 or int32"):
        model(SRC, TGT.to(dtype))
    torch.testing.assert_close(model(SRC.int(), TGT.int()), model(SRC, TGT))


def test_positions_are_a_buffer():
    model = make_model(50, 60, **SMALL)
    assert not list(model.src_embed[1].parameters())
    assert not any(name.endswith("pe") for name in model.state_dict())
    assert copy.deepcopy(model).float().src_embed[1].pe.dtype == torch.float32
    before = model.src_embed[1].pe.clone()
    training_step(model)
    assert torch.equal(model.src_embed[1].pe, before)


# Counts


@pytest.mark.parametrize("tie", ["none", "decoder", "all"])
@pytest.mark.parametrize("norm_first", [False, True])
def test_parameters_by_hand_and_by_code(tie, norm_first):
    options = {"tie": tie, "norm_first": norm_first}
    model = make_model(31, 31, 3, 12, 20, 4, **options)
    by_hand = parameters_by_hand(31, 3, 12, 20, **options)
    assert by_hand == parameters_by_code(model)
    assert sum(by_hand.values()) == sum(p.numel() for p in model.parameters())


def test_the_papers_sizes_are_met_within_three_percent():
    table = count_table()
    assert table["paper, millions"].tolist() == [row[-1] for row in PAPER_ROWS.values()]
    assert (abs(table["in millions"] / table["paper, millions"] - 1) < 0.03).all()


# The whole


def check_parity(norm_first: bool) -> None:
    """Outputs and all gradients equal nn.Transformer's, on scrambled weights and padded batches."""
    model = make_model(50, 60, **SMALL, norm_first=norm_first)
    scramble(model)
    theirs = to_torch_transformer(model)
    mine, reference = model(SRC, TGT, *masks()), torch_vectors(theirs, model, SRC, TGT)
    torch.testing.assert_close(mine, reference, rtol=1e-9, atol=1e-9)
    tables = (model.src_embed[0].lut, model.tgt_embed[0].lut)
    inputs = []
    for vectors in (reference, mine):
        model.zero_grad()
        vectors[TGT != 0].sin().sum().backward()
        inputs.append([table.weight.grad.clone() for table in tables])
    torch.testing.assert_close(*inputs)
    pairs = zip(
        [*model.encoder.layers, *model.decoder.layers],
        [*theirs.encoder.layers, *theirs.decoder.layers],
        strict=True,
    )
    for layer, reference_layer in pairs:
        gradients = copy.deepcopy(layer)
        for holder, p in zip(gradients.parameters(), layer.parameters(), strict=True):
            holder.data = p.grad
        state = torch_layer_state(gradients)
        assert state.keys() == reference_layer.state_dict().keys()
        for name, gradient in state.items():
            wanted = reference_layer.get_parameter(name).grad
            torch.testing.assert_close(gradient, wanted, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("norm_first", [False, True])
def test_parity_with_nn_transformer(norm_first):
    check_parity(norm_first)


@pytest.mark.parametrize("norm_first", [False, True])
def test_parity_notices_planted_faults(norm_first, monkeypatch):
    def unbiased(self, x):
        return wrong_layer_norm(x) * self.weight + self.bias

    def swapped(self, x, sublayer):
        self.norm_first = not norm_first
        return right_connection(self, x, sublayer)

    def no_relu(self, x):
        return self.contract(self.expand(x))

    right_connection = SublayerConnection.forward
    faults = (
        (LayerNorm, unbiased),
        (SublayerConnection, swapped),
        (PositionwiseFeedForward, no_relu),
    )
    for part, fault in faults:
        with monkeypatch.context() as planted, pytest.raises(AssertionError):
            planted.setattr(part, "forward", fault)
            check_parity(norm_first)
    with monkeypatch.context() as planted, pytest.raises(AssertionError):
        planted.setattr("scripts.ch01_attention.math.sqrt", lambda x: 1.0)
        check_parity(norm_first)


def test_plain_nn_transformer_has_two_norms_more_than_post_norm():
    model = make_model(50, 60, **SMALL)
    scramble(model)
    plain = to_torch_transformer(model, final_norms=True)
    gap = (torch_vectors(plain, model, SRC, TGT) - model(SRC, TGT, *masks())).abs().max()
    assert gap > 0.1


@pytest.mark.parametrize("norm_first", [False, True])
def test_causality_by_perturbation(norm_first):
    model = make_model(50, 60, **SMALL, norm_first=norm_first).eval()
    for at in range(TGT.size(1)):
        assert first_change(model, SRC[:1], TGT[:1], at) == at
        assert first_change(model, SRC[:1], TGT[:1], at, causal=False) == 0


@pytest.mark.parametrize("norm_first", [False, True])
def test_padding_changes_nothing(norm_first):
    model = make_model(50, 60, **SMALL, norm_first=norm_first).eval()
    for extra in (1, 4):
        assert padding_effect(model, SRC[:1], TGT[:1], extra) < 1e-12
        assert padding_effect(model, SRC[:1], TGT[:1], extra, mask=False) > 1e-2
    alone = model(SRC[1:, :4], TGT[1:, :3], None, subsequent_mask(3))
    torch.testing.assert_close(model(SRC, TGT, *masks())[1:, :3], alone)


def test_a_source_of_padding_alone_gives_no_nan():
    model = make_model(50, 60, **SMALL)
    src = torch.zeros(1, 4, dtype=torch.int64)
    vectors = model(src, TGT[:1], padding_mask(src), subsequent_mask(5))
    vectors.sum().backward()
    assert vectors.isfinite().all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_decoding_step_by_step_equals_decoding_at_once():
    model = make_model(50, 60, **SMALL).eval()
    memory = model.encode(SRC, padding_mask(SRC))
    at_once = model(SRC, TGT, padding_mask(SRC), subsequent_mask(5))
    for t in range(1, 6):
        step = model.decode(memory, padding_mask(SRC), TGT[:, :t], subsequent_mask(t))
        torch.testing.assert_close(step[:, -1], at_once[:, t - 1])


def test_an_untrained_models_loss_is_near_log_v():
    model = make_model(1000, 1000, N=2, d_model=64, d_ff=128, h=4, dropout=0.0, tie="all").eval()
    src, tgt = torch.randint(4, 1000, (2, 32, 10))
    with torch.no_grad():
        logits = model.generator(model(src, tgt[:, :-1], None, subsequent_mask(9)))
    loss = F.cross_entropy(logits.flatten(0, 1), tgt[:, 1:].flatten()).item()
    assert abs(loss - math.log(1000) - 0.5) < 0.3
