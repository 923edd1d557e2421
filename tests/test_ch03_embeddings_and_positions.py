"""Chapter 3: embeddings, sinusoids, learned positions, and what they refuse."""

import pytest
import torch

from scripts.ch03_embeddings_and_positions import (
    MAX_LEN,
    Embeddings,
    LearnedPositions,
    PositionalEncoding,
    look_back_test,
    sinusoids,
    train_look_back,
)

pytestmark = pytest.mark.usefixtures("float64")


def test_embedding_is_one_hot_times_table_times_root_of_d():
    embed = Embeddings(16, 50)
    ids = torch.randint(50, (2, 7))
    torch.testing.assert_close(embed(ids), torch.eye(50)[ids] @ embed.lut.weight * 4.0)
    torch.testing.assert_close(embed(ids.int()), embed(ids))
    with pytest.raises(TypeError, match="int64 or int32, not torch.float16"):
        embed(ids.half())


def test_sinusoids_are_precise_in_single_precision_too():
    position, pair = torch.arange(5000.0)[:, None], torch.arange(32.0)
    angle = position / 10_000 ** (2 * pair / 64)
    torch.set_default_dtype(torch.float32)
    single = sinusoids(5000, 64)
    assert single.dtype == torch.float32  # and only the result is rounded:
    assert (single[:, 0::2] - angle.sin()).abs().max() < 1e-7
    assert (single[:, 1::2] - angle.cos()).abs().max() < 1e-7


@pytest.mark.parametrize("kind", [PositionalEncoding, LearnedPositions])
def test_positions_one_at_a_time_equal_all_at_once(kind):
    add = kind(8, dropout=0.0, max_len=12)
    x = torch.randn(2, 12, 8)
    whole = add(x)
    torch.testing.assert_close(whole - x, add.pe.detach().expand(2, -1, -1))
    steps = [add(x[:, t : t + 1], start=t) for t in range(12)]
    torch.testing.assert_close(torch.cat(steps, 1), whole)


@pytest.mark.parametrize("kind", [PositionalEncoding, LearnedPositions])
def test_over_long_input_is_refused_even_where_it_would_broadcast(kind):
    add = kind(8, dropout=0.0)
    add(torch.zeros(1, MAX_LEN, 8))
    for tokens, start in ((MAX_LEN + 1, 0), (2, MAX_LEN - 1)):
        with pytest.raises(ValueError, match="257 tokens is longer than the maximum of 256"):
            add(torch.zeros(1, tokens, 8), start=start)


def test_sinusoids_are_a_buffer_and_learned_positions_a_parameter():
    fixed = PositionalEncoding(8)
    assert not list(fixed.parameters()) and not fixed.state_dict()  # so any length may be loaded
    assert fixed.to(torch.float32).pe.dtype == torch.float32
    assert [name for name, _ in LearnedPositions(8).named_parameters()] == ["pe"]


def test_erratum_26_odd_width_gets_a_clear_error():
    for make in (lambda: sinusoids(10, 7), lambda: PositionalEncoding(7)):
        with pytest.raises(ValueError, match="even d_model, not 7"):
            make()


@pytest.mark.audit
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_sines_go_on_only_after_many_places(seed):
    """Eight seeds: 0.17 to 0.21 right beyond training from ten places, 0.86 and more from 110."""
    few = train_look_back(PositionalEncoding(64, dropout=0.0), seed=seed)
    many = train_look_back(PositionalEncoding(64, dropout=0.0), last_start=100, seed=seed)
    assert look_back_test(few, 10)[0] > 0.95
    assert look_back_test(few, 20, first=10)[0] < 0.3
    assert look_back_test(few, 10, start=10)[0] < 0.45
    assert min(look_back_test(many, 10, start)[0] for start in (0, 50, 120, 180, 240)) > 0.75
    assert look_back_test(many, 20)[0] > 0.95  # words twice as long as any in training
