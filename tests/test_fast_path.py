"""The fast path gives the textbook's numbers; the counts of chapters 11 and 12 are right."""

import itertools
import math
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT
from tiny import example_batch
from torch import Tensor, nn
from torch.testing import assert_close

from scripts.book.instruments import count_flops, scramble
from scripts.ch03_embeddings_and_positions import LearnedPositions, PositionalEncoding
from scripts.ch04_encoder_decoder import EncoderDecoder, make_model
from scripts.ch06_training import BOS, EOS, Batch, LabelSmoothing, batch_loss
from scripts.ch07_multi30k import Example, make_batch
from scripts.ch11_where_the_time_goes import TINY, series_model, step_flops
from scripts.ch12_going_fast import LinearCrossEntropy, keep_mask
from scripts.core.static import longer_side, static_lengths
from scripts.fast.fast import (
    FAST,
    HALF,
    PLAIN,
    STATIC,
    FastPath,
    LinearProduct,
    LossInChunks,
    Switches,
    fast_loss,
)

CRITERION = LabelSmoothing(0.1)
VARIANTS = {
    "pre-norm, tied": {"norm_first": True, "tie": "all", "d_model": 32},
    "post-norm, untied": {"norm_first": False, "tie": "none", "d_model": 32},
    "learned positions": {"positions": LearnedPositions, "tie": "all"},
}


def small_model(dtype, positions=None, **options):
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    sizes = {"N": 2, "d_model": 16, "d_ff": 32, "h": 2, "dropout": 0.1}
    model = make_model(50, 50, **sizes | options)
    if positions:
        for embed in (model.src_embed, model.tgt_embed):
            embed[1] = positions(16, 0.1)
    scramble(model)
    return model.eval()


def name_of(switches):
    return ",".join(f"{k}={v}" for k, v in asdict(switches).items() if v)


def loss_and_gradients(
    loss_of: Callable[..., tuple[Tensor, Tensor]], model: EncoderDecoder, batch: Batch
) -> dict[str, Tensor]:
    """The two sums of the loss, and the gradient of every weight."""
    model.zero_grad()
    loss, nll = loss_of(model, batch, CRITERION)
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    return {"loss": loss.detach(), "nll": nll.detach()} | gradients


def each_switch() -> list[Switches]:
    """All off or all on; each alone on or off; PyTorch's attention."""
    on, off = ({k: v for k, v in asdict(all_).items() if k != "half"} for all_ in (FAST, PLAIN))
    steps = [replace(PLAIN, **{name: value}) for name, value in on.items()]
    steps += [replace(FAST, **{name: value}) for name, value in off.items()]
    return list(dict.fromkeys([PLAIN, FAST, *steps, STATIC, replace(FAST, attention="sdpa")]))


# The same numbers


@pytest.mark.parametrize(
    ("variant", "dtype"),
    [*((variant, "float64") for variant in VARIANTS), ("pre-norm, tied", "float32")],
)
def test_every_switch_gives_the_textbooks_numbers(variant, dtype):
    near, nearest = (1e-10, 1e-10) if dtype == "float64" else (1e-4, 1e-5)  # of sums: nearest
    model, batch = small_model(getattr(torch, dtype), **VARIANTS[variant]), example_batch(50)
    expected = loss_and_gradients(batch_loss, model, batch)
    for switches in each_switch():
        fast = loss_and_gradients(partial(fast_loss, switches=switches), model, batch)
        for name in expected:
            bound = nearest if name in ("loss", "nll") else near
            where = lambda text: f"{name_of(switches)}: {text}"  # noqa: B023, E731
            assert_close(fast[name], expected[name], rtol=bound, atol=bound, msg=where)


@pytest.mark.parametrize("switches", [FAST, replace(FAST, packed=False), STATIC], ids=name_of)
def test_a_batch_without_padding_is_no_special_case(switches):
    model = small_model(torch.float64)
    batch = make_batch([Example([7, 8, EOS], [BOS, 9, EOS])] * 3)
    losses = (batch_loss, partial(fast_loss, switches=switches))
    assert_close(*(loss_and_gradients(loss_of, model, batch) for loss_of in losses))


def test_too_long_a_sentence_is_refused_as_by_the_textbook():
    model = small_model(torch.float64, positions=partial(PositionalEncoding, max_len=4))
    with pytest.raises(ValueError, match="longer than the maximum of 4"):
        fast_loss(model, example_batch(50), CRITERION)


def test_without_gradients_only_the_logits_are_computed_and_the_loss_is_the_same():
    model, batch = small_model(torch.float64), example_batch(50)
    rows, labels = torch.randn(6, 16), torch.arange(6)
    with torch.no_grad():
        quiet = fast_loss(model, batch, CRITERION)
        product = count_flops(
            lambda: FastPath().rows_loss(model.generator, rows, labels, CRITERION)
        )
    assert_close(quiet, tuple(x.detach() for x in fast_loss(model, batch, CRITERION)))
    assert product == 2 * 6 * 16 * 50


# The pieces


@pytest.mark.parametrize("p", [0.0, 0.4])
def test_hand_written_backward_passes_are_the_derivatives(p):
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(2)
    shapes = ((5, 4), (6, 4), (6,), (3, 4), (3,))  # the last two: fewer columns out than in
    x, weight, bias, *narrow = (torch.randn(*shape, requires_grad=True) for shape in shapes)
    for onednn in (False, True):
        product = lambda *inputs: LinearProduct.apply(*inputs, onednn)  # noqa: E731, B023
        assert torch.autograd.gradcheck(product, (x, weight, bias))
        assert torch.autograd.gradcheck(product, (x, *narrow))
    labels = torch.tensor([0, 5, 2, 2, 1])
    for loss, chunk in itertools.product((LinearCrossEntropy, LossInChunks), (2, 5)):
        sums = lambda *inputs: loss.apply(*inputs, labels, p / 4, chunk)[0]  # noqa: E731, B023
        assert torch.autograd.gradcheck(sums, (x, weight, bias))


@pytest.mark.parametrize("p", [0.05, 0.5])
def test_masks_have_the_rate_and_follow_from_pytorchs_generator_alone(p):
    shape, like = (500, 1003), torch.empty(0)
    torch.manual_seed(4)
    mask, second = keep_mask(shape, p, like), keep_mask(shape, p, like)
    torch.manual_seed(4)
    assert mask.equal(keep_mask(shape, p, like)) and not mask.equal(second)
    assert mask.dtype == like.dtype and set(mask.unique().tolist()) == {0.0, 1.0}
    dropped = 1 - mask.double().flatten()
    for entry in range(4):  # of the four that 64 bits decide
        share = dropped[entry::4].mean().item()
        assert abs(share - p) < 5 * math.sqrt(p * (1 - p) / (mask.numel() / 4))
    for lag in (1, 2, 3, 4, 1003):
        together = ((dropped[:-lag] - p) * (dropped[lag:] - p)).mean().item() / (p * (1 - p))
        assert abs(together) < 5 / math.sqrt(mask.numel())


@pytest.mark.parametrize("switches", [FAST, PLAIN, replace(FAST, compiled=False)], ids=name_of)
def test_dropout_keeps_the_mean(switches):
    torch.manual_seed(4)
    out = FastPath(switches).dropped(torch.ones(1000, 100), 0.25)
    assert_close(out[out != 0], torch.full_like(out[out != 0], 4 / 3))
    assert abs(out.mean().item() - 1) < 0.01


@pytest.mark.parametrize("switches", [FAST, PLAIN, HALF], ids=["fast", "plain", "half"])
def test_dropout_reaches_every_place(switches):
    """Each site, when its rate is set, changes the loss; with all at 0 the loss is evaluation's."""
    dtype = torch.float32 if switches.half else torch.float64
    model, batch = small_model(dtype, dropout=0.0), example_batch(50)
    quiet = fast_loss(model, batch, CRITERION, switches)[0]
    model.train()
    assert_close(fast_loss(model, batch, CRITERION, switches)[0], quiet)
    sites = [module for module in model.modules() if isinstance(module, nn.Dropout)]
    embeddings, encoder, decoder = 2, 2 * (2 + 2), 2 * (3 + 3)
    assert len(sites) == embeddings + encoder + decoder
    for site in sites:
        site.p = 0.5
        assert fast_loss(model, batch, CRITERION, switches)[0] != quiet
        site.p = 0.0


@pytest.mark.parametrize("shape", [TINY, replace(TINY, N=3, d_ff=48, h=4, norm_first=False)])
@pytest.mark.parametrize("switches", [None, PLAIN, replace(FAST, onednn=False), STATIC])
def test_operations_by_hand_are_those_that_pytorch_counts(shape, switches):
    model = series_model(shape)
    batch = make_batch([Example([5] * 6 + [EOS], [BOS] + [6] * 4 + [EOS])] * 4)  # no padding
    loss_of = partial(fast_loss, switches=switches) if switches else batch_loss
    counted = count_flops(lambda: loss_of(model, batch, CRITERION)[0].backward())
    assert counted == step_flops(shape, [(7, 5)] * 4)


# Around the step


FAULTS = """
import resource, sys, threading, torch
from scripts.ch12_going_fast import keep_memory

size, is_kept, faults = int(sys.argv[1]), keep_memory(), []
for _ in range(4):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    thread = threading.Thread(target=torch.ones, args=(size,))
    thread.start()
    thread.join()
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(int(is_kept), *faults)
"""


@pytest.mark.parametrize("size", [20_000_000, pytest.param(3 * 2**28, marks=pytest.mark.audit)])
def test_memory_is_kept_from_one_thread_to_the_next(size):
    """A later thread gets the first one's pages; with a heap of its own it would get new ones.

    Not every later thread: a small block behind the freed one may leave too little room. And of
    more than 2³¹ − 1 bytes, the library would trim at each freed tensor.
    """
    output = subprocess.check_output([sys.executable, "-c", FAULTS, str(size)], cwd=ROOT)
    is_kept, first, *later = map(int, output.split())
    assert not is_kept or min(later) < first / 5


def test_static_widths_are_the_best_there_are():
    """By trying all choices: of cells, when each pair gets the narrowest width that holds it."""
    rng = random.Random(6)
    for shapes in (1, 2, 3):
        pairs = [Example([EOS] * rng.randint(2, 12), [BOS] * rng.randint(3, 12)) for _ in range(40)]
        sides = [longer_side(pair) for pair in pairs]

        def cells(widths, sides=sides):
            return sum(next(w for w in widths if side <= w) for side in sides)

        narrower = sorted({*sides} - {max(sides)})
        choices = itertools.combinations(narrower, shapes - 1)
        best = min(cells((*choice, max(sides))) for choice in choices)
        assert cells(static_lengths(pairs, shapes)) == best
    assert static_lengths(pairs[:1], 8) == [longer_side(pairs[0])]  # fewer widths than asked for


def test_pytorchs_attention_hears_that_the_mask_is_causal_and_sees_no_future():
    """Masks given as numbers would rule out its fastest kernel. The loss stays the textbook's."""
    model, batch = series_model(TINY).eval(), example_batch(TINY.vocab)
    with mock.patch.object(
        F, "scaled_dot_product_attention", wraps=F.scaled_dot_product_attention
    ) as asked:
        losses = fast_loss(model, batch, CRITERION, STATIC)
    assert_close(losses, batch_loss(model, batch, CRITERION))
    causal = [call for call in asked.call_args_list if call.kwargs["is_causal"]]
    assert len(causal) == TINY.N and all(call.args[3] is None for call in causal)


# Sixteen bits


@pytest.mark.parametrize(
    ("norm_first", "without"),
    [(True, {}), (False, {}), (True, {"compiled": False}), (False, {"fused_norm": False})],
)
def test_all_products_are_in_16_bits_and_all_sums_in_32(without, norm_first):
    """Wherever the norms are: what runs past the sublayers isn't rounded."""
    factors, sums = [], []

    class Watched(FastPath):
        def linear(self, layer, x):
            factors.append(x.dtype)
            return super().linear(layer, x)

        def dropped_sum(self, x, y, p):
            out = super().dropped_sum(x, y, p)
            sums.extend((x.dtype, out.dtype))
            return out

    model = small_model(torch.float32, norm_first=norm_first, d_model=32).train()
    x, _ = Watched(replace(HALF, **without)).target_rows(model, example_batch(50), CRITERION)
    encoder, decoder = 4 + 2, 4 + 4 + 2  # products in a layer
    assert factors == [torch.bfloat16] * 2 * (encoder + decoder) and x.dtype == torch.bfloat16
    assert sums == [torch.float32] * 2 * 2 * (2 + 3)
