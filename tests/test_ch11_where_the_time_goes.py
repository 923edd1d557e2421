"""Chapter 11: its shapes and floors."""

from functools import partial

import torch
from torch import nn
from torch.testing import assert_close

from scripts.book.instruments import moved_bytes, two_passes
from scripts.book.records import load_record
from scripts.ch11_where_the_time_goes import (
    BASE,
    SMALL,
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


def test_moved_bytes_are_those_of_each_operation():
    """Read and written; views and memory only asked for move nothing. x · x reads x once.

    A batch of products is seen anew by `_unsafe_view`, which doesn't call itself a view; random
    numbers are written only.
    """
    x = torch.ones(10)
    assert moved_bytes(lambda: x.view(2, 5) + x.view(2, 5)) == 3 * x.nbytes
    assert moved_bytes(lambda: torch.empty_like(x).add_(x)) == 3 * x.nbytes
    assert moved_bytes(lambda: x * x) == 2 * x.nbytes
    heads = torch.ones(2, 3, 5, 5)
    assert moved_bytes(lambda: heads @ heads.mT) == 3 * heads.nbytes
    assert moved_bytes(lambda: torch.empty_like(x).bernoulli_(0.5)) == x.nbytes


def test_two_passes_derive_by_inputs_and_weights():
    """Of the first result; what can't have a gradient is left alone."""
    x, mask, scale = torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bool), nn.Linear(3, 1)
    grads = two_passes(partial(scale, x))()
    assert [g.shape for g in grads] == [(2, 3), (1, 3), (1,)] and grads[2].item() == 2.0
    [grad] = two_passes(partial(lambda x, mask: (x.masked_fill(mask, 0.0), x), x, mask))()
    assert not grad.any() and not x.requires_grad
