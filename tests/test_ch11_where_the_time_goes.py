"""Chapter 11: its shapes, floors and records; its answers on paper."""

import pytest
import torch
from torch.testing import assert_close

from scripts.book.records import load_record
from scripts.ch11_where_the_time_goes import (
    BASE,
    SMALL,
    Product,
    affine,
    flop_shares,
    forward_products,
    least_seconds,
    parameter_count,
    roof_seconds,
    step_flops,
)
from scripts.core.settings import PRESETS

EVEN = [(16, 16)] * 128


def test_the_shapes_are_those_of_chapter_9s_presets():
    """But for `small`'s dropout of 0.2."""
    for name, shape in (("small", SMALL), ("base", BASE)):
        preset = PRESETS[name]
        sizes = preset.layers, preset.d_model, preset.d_ff, preset.heads, preset.vocab
        assert sizes == (shape.N, shape.d_model, shape.d_ff, shape.h, shape.vocab)
        assert preset.norm_first is shape.norm_first and preset.tie == "all"
    assert (PRESETS["small"].dropout, SMALL.dropout) == (0.2, 0.1)
    assert load_record("speed-steps")["shape"] == vars(SMALL)


def test_least_time_is_that_of_its_slower_roof():
    assert roof_seconds(100, 10, 50, 10) == 2.0 and roof_seconds(100, 100, 50, 10) == 10.0
    flops, many = step_flops(SMALL, EVEN), 1e30
    assert_close(least_seconds(SMALL, EVEN, 1e11, many), flops / 1e11, rtol=1e-6, atol=0.0)
    traffic = 3 * sum(p.bytes for p in forward_products(SMALL, EVEN))
    adam = 28 * parameter_count(SMALL)
    found = least_seconds(SMALL, EVEN, many, 1e10)
    assert_close(found, (traffic + adam) / 1e10, rtol=1e-6, atol=0.0)


def test_the_shares_of_long_texts_go_to_attention():
    def share(shape, length):
        return flop_shares(shape, [(length, length)])["scores and weights · V"]

    shares = [share(SMALL, 2**n) for n in range(4, 14)]
    assert shares == sorted(shares) and shares[0] < 0.01 and shares[-1] > 0.8
    assert abs(6 * parameter_count(SMALL) * 2048 / step_flops(SMALL, EVEN) - 1) < 0.01  # the rule
    for shape in (SMALL, BASE):  # the chapter's formula
        half = int(14 * shape.d_model / 3 + shape.vocab / (6 * shape.N))
        assert share(shape, half) < 0.5 < share(shape, half + 1)


@pytest.mark.parametrize("onednn", [False, True])
def test_affine_is_linear(onednn):
    torch.manual_seed(0)
    x, weight, bias = torch.randn(5, 3), torch.randn(4, 3), torch.randn(4)
    for b in (bias, None):
        expected = torch.nn.functional.linear(x, weight, b)
        assert_close(affine(x, weight, b, onednn), expected)


def test_the_answers_on_paper():
    """Exercise 3: the figures in its folded answer."""
    rate, bandwidth = 60e12, 3e12
    assert rate / bandwidth == 20
    weights = parameter_count(BASE)
    assert round(weights / 1e6, 1) == 48.3
    flops, adam = 6 * weights * 2048 / rate, 28 * weights / bandwidth
    assert (round(1e3 * flops, 1), round(1e3 * adam, 1)) == (9.9, 0.5)
    assert round(1e3 * (flops + adam), 1) == 10.4
    assert round(1e3 * least_seconds(BASE, EVEN, rate, bandwidth), 1) == 10.7
    limited = {p.kind for p in forward_products(BASE, EVEN) if p.flops / p.bytes < 20}
    assert limited == {"scores and weights · V"}

    def intensity(n):
        product = Product("", 1, n, 512, 2048)
        return product.flops / product.bytes

    assert round(intensity(1), 1) == 0.5
    assert round(intensity(1) * bandwidth / rate, 3) == 0.025
    assert intensity(44) < 20 < intensity(45)
