"""Chapter 3: embeddings, sinusoids and their properties, learned positions, and order."""

import numpy as np
import pytest
import torch

from scripts.ch01_attention import subsequent_mask
from scripts.ch02_multi_head_attention import MultiHeadedAttention
from scripts.ch03_embeddings_and_positions import (
    MAX_LEN,
    Embeddings,
    LearnedPositions,
    PositionalEncoding,
    equivariance_gap,
    sinusoids,
)
from scripts.ch04_encoder_decoder import make_model

pytestmark = pytest.mark.usefixtures("float64")


def test_embedding_is_one_hot_times_table_times_root_of_d():
    embed = Embeddings(16, 50)
    ids = torch.randint(50, (2, 7))
    torch.testing.assert_close(embed(ids), torch.eye(50)[ids] @ embed.lut.weight * 4.0)
    assert sum(p.numel() for p in embed.parameters()) == 50 * 16
    torch.testing.assert_close(embed(ids.int()), embed(ids))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bool, torch.int16])
def test_ids_of_a_wrong_dtype_are_refused_by_name(dtype):
    with pytest.raises(TypeError, match=f"int64 or int32, not {dtype}"):
        Embeddings(8, 10)(torch.ones(1, 3).to(dtype))


def test_words_start_above_positions_thanks_to_root_of_d():
    embed, ids = Embeddings(512, 300), torch.arange(300)
    place = sinusoids(300, 512).norm(dim=-1)
    torch.testing.assert_close(place, torch.full((300,), 16.0))  # √(512/2), exactly
    assert embed(ids).norm(dim=-1).min() > place.max()
    assert embed.lut(ids).norm(dim=-1).max() < place.min() / 10  # without the factor
    assert abs(embed(ids).std() - 1) < 0.02


def test_scaling_the_table_draws_no_more_random_numbers():
    """Shipped weights depend on the order of draws: one normal number per entry, and no others."""
    torch.manual_seed(3)
    embed, after = Embeddings(8, 10), torch.rand(1)
    torch.manual_seed(3)
    torch.testing.assert_close(embed.lut.weight, torch.randn(10, 8) * 8**-0.5)
    assert torch.equal(after, torch.rand(1))


def by_slices(length, d):
    """The formula as well-known code writes it: right for an even width, a crash for an odd one."""
    angle = np.arange(length)[:, None] / 10_000 ** (np.arange(0, d, 2) / d)
    table = np.zeros((length, d))
    table[:, 0::2], table[:, 1::2] = np.sin(angle), np.cos(angle)
    return table


def test_sinusoids_are_precise_in_single_precision_too():
    exact = sinusoids(5000, 64)
    torch.set_default_dtype(torch.float32)
    single = sinusoids(5000, 64)
    assert single.dtype == torch.float32
    assert (single.double() - exact).abs().max() < 1e-7  # rounding of the result, nothing more
    careless = torch.sin(torch.arange(5000.0)[:, None] * 10_000.0 ** (-torch.arange(0, 64, 2) / 64))
    assert (careless.double() - exact[:, 0::2]).abs().max() > 1e-5


def encoder_without_positions():
    model = make_model(10, 10, N=2, d_model=16, d_ff=32, h=4, dropout=0.0)
    return model.encoder


def test_without_positions_attention_and_encoder_are_permutation_equivariant():
    x, places = torch.randn(5, 16), sinusoids(5, 16)
    attend = MultiHeadedAttention(4, 16, dropout=0.0)
    encoder = encoder_without_positions()
    assert equivariance_gap(lambda x: attend(x, x, x), x) < 1e-12
    assert equivariance_gap(encoder, x) < 1e-12
    assert equivariance_gap(lambda x: encoder(x + places), x) > 0.01
    assert equivariance_gap(lambda x: attend(x, x, x, subsequent_mask(5)), x) > 0.01


@pytest.mark.parametrize("kind", [PositionalEncoding, LearnedPositions])
def test_positions_one_at_a_time_equal_all_at_once(kind):
    add = kind(8, dropout=0.0, max_len=12)
    x = torch.randn(2, 12, 8)
    whole = add(x)
    steps = [add(x[:, t : t + 1], start=t) for t in range(12)]
    torch.testing.assert_close(torch.cat(steps, 1), whole)
    torch.testing.assert_close(whole - x, add.pe.detach().expand(2, -1, -1))


@pytest.mark.parametrize("kind", [PositionalEncoding, LearnedPositions])
def test_over_long_input_is_refused_even_where_it_would_broadcast(kind):
    add = kind(8, dropout=0.0)
    add(torch.zeros(1, MAX_LEN, 8))
    with pytest.raises(ValueError, match="257 tokens is longer than the maximum of 256"):
        add(torch.zeros(1, MAX_LEN + 1, 8))
    two = torch.zeros(1, 2, 8)
    unguarded = two + add.pe[255:257]  # one row left, and it broadcasts: no error, one position
    assert torch.equal(unguarded[0, 0], unguarded[0, 1])
    with pytest.raises(ValueError, match="257 tokens"):
        add(two, start=255)


def test_sinusoids_are_a_buffer_and_learned_positions_a_parameter():
    fixed, learned = PositionalEncoding(8), LearnedPositions(8)
    assert not list(fixed.parameters()) and not fixed.state_dict()
    assert fixed.to(torch.float32).pe.dtype == torch.float32
    assert [name for name, _ in learned.named_parameters()] == ["pe"]
    longer = PositionalEncoding(8, max_len=512)
    longer.load_state_dict(fixed.state_dict())  # another length is no obstacle


def test_learned_positions_learn_only_where_tokens_stood():
    add = LearnedPositions(8, dropout=0.0, max_len=20)
    add(torch.randn(4, 6, 8)).square().sum().backward()
    rows = add.pe.grad.abs().sum(-1)
    assert (rows[:6] > 0).all() and (rows[6:] == 0).all()


def test_dropout_acts_on_the_sum_in_training_only():
    add = PositionalEncoding(64, dropout=0.5)
    x = torch.randn(4, 50, 64)
    dropped = (add(x) == 0).double().mean()
    assert 0.4 < dropped < 0.6
    torch.testing.assert_close(add.eval()(x), x + sinusoids(50, 64))


@pytest.mark.parametrize("d_model", [3, 7, 513])
def test_erratum_26_odd_width_gets_a_clear_error(d_model):
    with pytest.raises(ValueError, match=f"even d_model, not {d_model}"):
        sinusoids(10, d_model)
    with pytest.raises(ValueError, match="even d_model"):
        PositionalEncoding(d_model)
    with pytest.raises(ValueError) as crash:  # by slices, it names sizes, not the cause
        by_slices(10, d_model)
    assert "d_model" not in str(crash.value)
