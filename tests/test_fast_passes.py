"""The compiled passes of a training step give PyTorch's numbers and gradients."""

import itertools
import math
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT
from torch import Tensor
from torch.testing import assert_close

from scripts.ch12_going_fast import keep_scale
from scripts.fast import passes
from scripts.fast.compiled import P, loaded
from scripts.fast.passes import Attend, Drop, NormRows

pytestmark = pytest.mark.skipif(loaded("passes") is None, reason="needs a C compiler with OpenMP")
KINDS = {"float32": torch.float32, "bf16": torch.bfloat16}
NEAR = {"float32": {"rtol": 1e-5, "atol": 1e-5}, "bf16": {"rtol": 2**-7, "atol": 2**-7}}


def gradients(function, inputs: list[Tensor], probe: Tensor) -> list[Tensor]:
    """What `function` gives, and the gradients of its product with `probe`."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad((out * probe.to(out.dtype)).sum(), leaves)]


def assert_rate(dropped: Tensor, p: float) -> None:
    """Whether a share p of the entries is True, up to five standard deviations."""
    assert abs(dropped.double().mean() - p) < 5 * math.sqrt(p * (1 - p) / dropped.numel())


# Dropout


def philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10: four words of 32 bits, from a counter of four and a key of two."""
    a, b, c, d = counter
    for i in range(10):
        first, second = key[0] + i * 0x9E3779B9, key[1] + i * 0xBB67AE85
        x, y = 0xD2511F53 * a, 0xCD9E8D57 * c  # 64 bits each
        words = (y >> 32) ^ b ^ first, y, (x >> 32) ^ d ^ second, x
        a, b, c, d = (word % 2**32 for word in words)
    return [a, b, c, d]


@pytest.mark.parametrize("seed, row", [(0, 0), (2**62 + 12345, 3), (7, 2**33 + 5)])
def test_random_bits_are_philoxs(seed, row):
    authors_answer = [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert philox([0, 0, 0, 0], [0, 0]) == authors_answer
    bits = torch.empty(512, dtype=torch.int16)
    loaded("passes").draw(P(seed), P(row), P(512), P(bits.data_ptr()))
    words = bits.view(torch.int32).tolist()
    for block in (0, 1, 37, 63):
        expected = philox([block, row % 2**32, row >> 32, 0], [seed % 2**32, seed >> 32])
        assert [word % 2**32 for word in words[4 * block : 4 * block + 4]] == expected


@pytest.mark.parametrize(("kind", "p"), [("float32", 0.05), ("bf16", 0.5)])
def test_masks_have_the_rate_and_are_the_same_on_the_way_back(kind, p):
    torch.manual_seed(0)
    ones = torch.ones(301, 1003, dtype=KINDS[kind])
    out, by_x = gradients(lambda x: Drop.apply(x, None, p), [ones], ones)
    assert out.equal(by_x)
    assert set(out.float().unique().tolist()) == {0.0, torch.tensor(keep_scale(p)).to(out).item()}
    assert_rate(out == 0, p)
    flat = (out == 0).double().flatten() - p
    for lag in (1, 2, 4, 8, 256, 1003):
        together = (flat[:-lag] * flat[lag:]).mean().item() / (p * (1 - p))
        assert abs(together) < 5 / math.sqrt(out.numel())
    assert not Drop.apply(ones, None, p).equal(out)  # each call has its own


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("p", [0.0, 0.4])
def test_sums_with_dropout_and_relu_are_pytorchs_with_that_mask(kind, p):
    torch.manual_seed(1)
    x, more, probe = torch.randn(40, 17).T, torch.randn(17, 40), torch.randn(17, 40)
    x = x.to(KINDS[kind])  # a view, not contiguous
    torch.manual_seed(2)
    mask = Drop.apply(torch.ones_like(x), None, p).float()
    cases = (
        (lambda x: Drop.apply(x, None, p, True), lambda x: x.relu() * mask.to(x), [x]),
        (lambda x, y: Drop.apply(x, y, p), lambda x, y: y + x.float() * mask, [x, more]),
    )
    for compiled, plain, inputs in cases:
        torch.manual_seed(2)
        both = (gradients(function, inputs, probe) for function in (compiled, plain))
        assert_close(*both, **NEAR[kind])  # of the same kinds, too


def test_16_bits_are_the_nearest_and_what_is_not_finite_stays_so():
    torch.manual_seed(0)
    x, weight, bias = torch.randn(64, 32), torch.ones(32), torch.zeros(32)
    exact, half = (NormRows.apply(x, weight, bias, 1e-5, kind) for kind in KINDS.values())
    assert half.equal(exact.bfloat16())
    odd = torch.tensor([[math.inf, -math.inf, math.nan, 3.4e38, 1e-40, -0.0]] * 2)
    half = Drop.apply(odd.bfloat16(), torch.zeros_like(odd), 0.0)
    assert_close(half, odd.bfloat16().float(), equal_nan=True)
    back = gradients(lambda x: Drop.apply(x, None, 0.0), [odd.bfloat16()], odd)[1]
    assert_close(back, odd.bfloat16(), equal_nan=True)


# LayerNorm


@pytest.mark.parametrize("kind", KINDS)
def test_layernorm_is_pytorchs(kind, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)  # the bits don't depend on it: below
    torch.manual_seed(3)
    x, probe = 3 * torch.randn(7, 33) + 2, torch.randn(7, 33).to(KINDS[kind])
    inputs = [x, torch.randn(33), torch.randn(33)]
    compiled, plain = (
        gradients(norm, inputs, probe.float())
        for norm in (
            lambda *inputs: NormRows.apply(*inputs, 1e-5, KINDS[kind]),
            lambda x, *rest: F.layer_norm(x, (33,), *rest),
        )
    )
    assert compiled[0].dtype == KINDS[kind] and compiled[1].dtype == torch.float32
    assert_close(compiled, plain, check_dtype=False, **NEAR[kind])


# Attention


def textbooks(rows, others, lengths, h, causal, masks=None):
    """Sentence by sentence, head by head; `masks` (h, T, S) are what dropout does to weights."""
    queries, keys = lengths
    D = rows.size(1) // (3 if others is None else 1)
    q, k, v = rows.split(D, 1) if others is None else (rows, *others.split(D, 1))
    sides = zip(q.split(queries), k.split(keys), v.split(keys), strict=True)
    heads = []
    for b, parts in enumerate(sides):
        q, k, v = (x.unflatten(1, (h, -1)).transpose(0, 1) for x in parts)  # (h, T or S, d)
        scores = q @ k.mT / math.sqrt(q.size(-1))
        if causal:
            scores += torch.full(scores.shape[-2:], -math.inf).triu(1)
        weights = scores.softmax(-1) * (1 if masks is None else masks[b])
        heads.append((weights @ v).transpose(0, 1).flatten(1))
    return torch.cat(heads)


def starts(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)])


SIDES = {
    "looks back": ([5, 1, 16, 17, 40], None, True),
    "looks around": ([5, 1, 16, 17, 40], None, False),
    "looks across": ([5, 1, 16, 33, 2], [7, 30, 1, 16, 18], False),
}


def compare(side, kind, h, d, p=0.0, masks=None):
    """Our attention of random rows beside the textbook's in float64, with gradients."""
    queries, keys, causal = SIDES[side]
    torch.manual_seed(4)
    rows = torch.randn(sum(queries), h * d * (3 if keys is None else 1), dtype=KINDS[kind])
    others = [] if keys is None else [torch.randn(sum(keys), 2 * h * d, dtype=KINDS[kind])]
    lengths, probe = (queries, keys or queries), torch.randn(len(rows), h * d, dtype=KINDS[kind])
    places = tuple(starts(n) for n in lengths)

    def attend(rows, others=None):
        torch.manual_seed(5)
        return Attend.apply(rows, others, places, h, causal, p)

    def reference(rows, others=None):
        return textbooks(rows, others, lengths, h, causal, masks)

    compiled = gradients(attend, [rows, *others], probe)
    expected = gradients(reference, [x.double() for x in (rows, *others)], probe.double())
    assert_close(compiled, [x.to(compiled[0].dtype) for x in expected], **NEAR[kind])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("side", SIDES)
def test_attention_is_the_textbooks(side, kind):
    compare(side, kind, h=2, d=16)
    compare(side, kind, h=1, d=48)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("side", SIDES)
def test_attention_drops_weights_and_sends_gradients_through_the_others(side, kind):
    """The masks show when each value is a row of the identity and all weights are equal."""
    h, d, p = 2, 48, 0.25
    queries, keys, causal = SIDES[side]
    N, places, masks = sum(queries), (starts(queries), starts(keys or queries)), []
    values = torch.cat([torch.eye(n, d) for n in keys or queries]).repeat(1, h)
    if keys is None:
        rows, others = torch.cat((torch.zeros(N, 2 * h * d), values), 1), None
    else:
        rows = torch.zeros(N, h * d)
        others = torch.cat((torch.zeros(sum(keys), h * d), values), 1)
    torch.manual_seed(5)
    thinned = Attend.apply(rows, others, places, h, causal, p).unflatten(1, (h, d))
    for part, n in zip(thinned.split(queries), keys or queries, strict=True):
        masks.append(keep_scale(p) * (part[..., :n] != 0).transpose(0, 1).double())  # (h, T, S)
    assert_rate(torch.cat([m[:, -1].flatten() for m in masks]) == 0, p)  # the last sees all keys
    assert not masks[0][0].equal(masks[0][1])  # each head has its own
    compare(side, kind, h, d, p, masks)


def test_attention_takes_sentences_without_tokens_and_parts_of_wider_rows():
    torch.manual_seed(6)
    rows, wide = torch.randn(3, 32), torch.randn(5, 200)
    others = wide[:, 64:128]  # keys and values of one layer among several
    places = (torch.tensor([0, 3, 3]), torch.tensor([0, 5, 5]))
    out = Attend.apply(rows, others, places, 2, False, 0.0)
    assert_close(out, textbooks(rows, others, ([3], [5]), 2, False))
    no_keys = (torch.tensor([0, 3]), torch.tensor([0, 0]))
    assert Attend.apply(rows, others[:0], no_keys, 2, False, 0.0).eq(0).all()


# The loss


@pytest.mark.parametrize("kind", KINDS)
def test_probabilities_are_the_softmax(kind):
    torch.manual_seed(7)
    logits = (torch.randn(9, 1000) * torch.logspace(-2, 2, 9)[:, None]).to(KINDS[kind])
    wide, near = logits.double(), 2**-7 if kind == "bf16" else 1e-4
    log_z = passes.softmax_rows_(logits, 0.0, torch.float32)
    assert_close(log_z.double(), wide.logsumexp(1, keepdim=True), rtol=1e-6, atol=1e-5)
    assert_close(logits.double(), wide.softmax(1), rtol=near, atol=1e-9)
    # What is no number stays none: else no sum would show that a run has diverged.
    odd = torch.tensor([[math.nan, 1.0], [0.0, -math.inf]], dtype=KINDS[kind])
    assert passes.softmax_rows_(odd, 0.0, torch.float32).isnan().flatten().tolist() == [True, False]
    assert_close(odd[1].float(), torch.tensor([1.0, 0.0]))


# All of them


def test_the_same_bits_come_again_and_on_any_number_of_threads(monkeypatch):
    x, rows, places = torch.randn(50, 64), torch.randn(79, 96), (starts([5, 1, 16, 17, 40]),) * 2

    def everything(threads):
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
        torch.manual_seed(8)
        parts = gradients(lambda x: Drop.apply(x, None, 0.3), [x], x)
        weight, bias = torch.ones(64), torch.zeros(64)
        parts += gradients(lambda x: NormRows.apply(x, weight, bias, 1e-5, x.dtype), [x], x)
        attend = lambda rows: Attend.apply(rows, None, places, 2, True, 0.3)  # noqa: E731
        return [*parts, *gradients(attend, [rows], torch.ones(len(rows), 32))]

    first = everything(1)
    for threads in (1, 2, 3):
        assert all(a.equal(b) for a, b in zip(first, everything(threads), strict=True))


LIBRARIES = """
import torch
from scripts.fast.passes import Drop
Drop.apply(torch.ones(64, 64), None, 0.5)
print(len({line.split()[-1] for line in open("/proc/self/maps") if "libgomp" in line}))
"""


def test_there_is_one_set_of_threads():
    """A second set would get in the way of PyTorch's: each spins for a while after its work."""
    assert subprocess.check_output([sys.executable, "-c", LIBRARIES], cwd=ROOT) == b"1\n"
