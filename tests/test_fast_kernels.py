"""The compiled functions do what PyTorch's do, and nothing needs them; decoding in few bits."""

import copy
import ctypes
import itertools
import pickle
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from scripts import ROOT
from scripts.book.instruments import scramble
from scripts.ch01_attention import padding_mask
from scripts.ch04_encoder_decoder import make_model
from scripts.ch06_training import BOS, EOS, PAD
from scripts.ch07_multi30k import source_ids
from scripts.core.models import load_model
from scripts.corpora.load import load_corpus
from scripts.fast import compiled, decoding, kernels, translating
from scripts.fast.decoding import (
    PACKED,
    CachedDecoding,
    Packed8,
    PreparedModel,
    fast_in_8_bits,
)
from scripts.fast.kernels import Layers, round_rows
from scripts.fast.translating import DecodeOptions, decode_ids, prepared, translate


@pytest.fixture(params=["compiled", "PyTorch's"])
def way(request, monkeypatch):
    """Once as on this machine, once as on a machine without a compiler."""
    if request.param == "PyTorch's":
        monkeypatch.setattr(compiled, "loaded", lambda name: None)


@pytest.fixture(scope="module")
def trained():
    return load_model(ROOT / "models" / "sample-de-en", "cpu")


@pytest.fixture(scope="module")
def rows(trained):
    pairs = load_corpus("sample")["test"][:60]
    return [source_ids(german, trained.tokenizer) for german, _ in pairs]


@pytest.mark.parametrize(
    "shape", [(5, 1, 8, 20, 32), (3, 4, 4, 7, 16), (2, 2, 1, 9, 256), (2, 2, 2, 5, 6)]
)
@pytest.mark.parametrize("mask", ["each", "shared", "none"])
def test_attention_over_a_cache_is_attention(way, shape, mask):
    """Queries are part of wider rows, keys and values part of a tensor with room to grow."""
    B, k, H, L, d = shape
    torch.manual_seed(sum(shape))
    q = torch.randn(B * k, 3 * H * d)[:, : H * d]
    past = torch.randn(2, B, H, L + 5, d)[..., :L, :]
    allowed = torch.rand(B, 1 if mask == "shared" else k, L) < 0.5
    allowed[..., 0] = True
    allowed = None if mask == "none" else allowed
    heads = q.reshape(B, k, H, d).transpose(1, 2).double()
    wide = None if allowed is None else allowed.unsqueeze(1)
    expected = F.scaled_dot_product_attention(heads, *past.double(), wide)
    expected = expected.transpose(1, 2).flatten(2).flatten(0, 1).float()
    torch.testing.assert_close(kernels.attend(q, past, allowed), expected, atol=1e-5, rtol=1e-4)
    if allowed is not None:  # hidden keys may hold anything
        past.masked_fill_(~allowed.any(1)[:, None, :, None], 1e4)
        torch.testing.assert_close(kernels.attend(q, past, allowed), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("k", [1, 8, 200])
@pytest.mark.parametrize("width", [5, 1000, 1024])
def test_the_best_of_a_row_are_topks(way, k, width):
    torch.manual_seed(k + width)
    logits = 5 * torch.randn(6, width)
    logits[0] += 1000  # must not overflow
    top, place, total = kernels.best_of_rows(logits, k)
    expected = logits.topk(min(k, width))
    assert top.equal(expected.values) and place.equal(expected.indices)
    torch.testing.assert_close(total, logits.logsumexp(1, keepdim=True))
    assert kernels.best_of_rows(logits, k, total=False)[2] is None


@pytest.mark.parametrize("name", ["kernels", "passes"])
def test_it_is_compiled_once_and_nothing_depends_on_it(name, tmp_path, monkeypatch):
    path = compiled.built(name, tmp_path) if compiled.loaded(name) else None
    monkeypatch.setenv("CC", "false")
    assert path is None or compiled.built(name, tmp_path) == path  # not compiled again
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    for compiler in ("false", "no-such-compiler"):
        monkeypatch.setenv("CC", compiler)
        assert compiled.loaded.__wrapped__(name) is None
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", Mock(side_effect=RuntimeError("no home directory")))
    assert compiled.loaded.__wrapped__(name) is None


@pytest.mark.parametrize("precision", PACKED)
@pytest.mark.parametrize("sizes", [(64, 128), (36, 44)])
def test_products_of_fewer_bits_are_near(way, precision, sizes):
    """For few rows and for many, which go different ways; those of integers give the same bits."""
    torch.manual_seed(0)
    D, F = sizes
    linears, norm = [nn.Linear(D, F // 4), nn.Linear(D, F - F // 4)], nn.LayerNorm(D)
    scramble(norm)
    packed, bound = PACKED[precision](*linears), {"float32": 1e-6, "int8": 2e-2}[precision]
    for rows in (1, 3, 8, 32, 80):
        x, more = torch.randn(rows, 2 * D)[:, :D], torch.randn(rows, F)
        with torch.no_grad():
            y = torch.cat([linear(norm(x)) for linear in linears], dim=1)
            cases = (None, False, y), (more, False, y + more), (None, True, y.relu())
            for addend, relu, expected in cases:
                product = packed(x, norm, addend, relu)
                assert (product - expected).norm() <= bound * expected.norm()
                assert precision != "int8" or product.equal(packed.many(x, norm, addend, relu))


def test_products_of_bytes_are_exact_on_a_processor_with_avx2_alone(tmp_path, monkeypatch):
    """Even those of the largest numbers, whose sums don't fit into 16 bits."""
    if compiled.loaded("kernels") is None or torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("no compiler, or a processor without AVX2")
    flags = [flag.replace("native", "x86-64-v3") for flag in compiled.FLAGS]
    monkeypatch.setattr(compiled, "FLAGS", flags)
    library = ctypes.CDLL(compiled.built("kernels", tmp_path))
    monkeypatch.setattr(compiled, "loaded", lambda name: library)
    linear = nn.Linear(64, 48, bias=True).requires_grad_(False)
    linear.weight[:16] = 1.0
    x = torch.randn(45, 64)
    x[:5], x[5:9] = 1.0, -1.0
    packed, ((whole_w, units), (whole, unit)) = Packed8(linear), map(round_rows, (linear.weight, x))
    exact = unit.unsqueeze(1) * units * (whole.double() @ whole_w.double().T) + linear.bias
    for rows in (1, 6, 45):
        assert packed.few.takes(x[:rows])
        torch.testing.assert_close(packed(x[:rows]).double(), exact[:rows])


@pytest.mark.parametrize(
    ("precision", "norm_first"), [("float32", True), ("float32", False), ("int8", True)]
)
def test_a_decoder_in_one_call_is_its_layers(precision, norm_first):
    """Two sentences of different lengths, and a beam whose prefixes change places."""
    torch.manual_seed(0)
    model = make_model(40, 40, 2, 64, 96, 2, norm_first=norm_first).eval()
    scramble(model, size=0.1)
    few, many = (PreparedModel(model, precision) for _ in range(2))
    maps = [part for layer in (*many.readers, *many.writers) for part in vars(layer).values()]
    for part in (*maps, many.vocabulary, many.source_map):
        if isinstance(part, PACKED["float32"]):
            part.few.most = 0
    many.few = Layers(many.writers, model.decoder.norm)
    src = torch.tensor([[5, 6, 7, 8, EOS], [9, EOS, PAD, PAD, PAD]])
    ways = [CachedDecoding(ready, src, padding_mask(src)) for ready in (few, many)]
    tokens, L = torch.full((2, 1), BOS), 1
    near = {"rtol": 0, "atol": 1e-4}
    with torch.inference_mode():
        for _ in range(7):
            x, expected = (decoding.step(tokens) for decoding in ways)
            torch.testing.assert_close(x, expected, **near)
            torch.testing.assert_close(*(way.logits(expected) for way in ways), **near)
            torch.testing.assert_close(*(way.past[..., :L, :] for way in ways), **near)
            origin, tokens = torch.randint(tokens.size(1), (2, 3)), torch.randint(4, 40, (2, 3))
            for decoding in ways:
                decoding.follow(origin)
            L += 3
    past = ways[0].past
    assert not many.few.takes(x, past)
    assert few.few.takes(x, past) == (precision == "float32" or kernels.multiplies_bytes() > 0)


# Decoding in few bits


@pytest.mark.parametrize("beam", [1, 4])
def test_fewer_bits_write_nearly_the_same_texts(trained, rows, beam, monkeypatch):
    monkeypatch.setattr(translating, "fast_in_8_bits", lambda: True)  # or it is refused
    texts = (
        decode_ids(trained, rows, DecodeOptions(beam=beam, precision=precision))
        for precision in ("float32", "int8")
    )
    assert sum(list(a) == list(b) for a, b in zip(*texts, strict=True)) >= 54


def test_auto_takes_what_the_machine_has(monkeypatch):
    """Exact products can be slow ones: then the screen, too, would cost more than it saves."""
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    auto, bits = DecodeOptions(precision="auto"), DecodeOptions(precision="int8")
    for vnni, rows in itertools.product((True, False), (0, 32, 1000)):
        monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda vnni=vnni: vnni)
        monkeypatch.setattr(decoding, "multiplies_bytes", lambda rows=rows: rows)
        fast = rows > 32 or vnni
        assert fast_in_8_bits() == fast
        assert auto.precision_on(cpu) == ("int8" if fast else "float32")
        assert auto.precision_on(gpu) == "float32"
        assert replace(auto, sample=True).precision_on(cpu) == "float32"
        for device in (cpu, gpu) if not fast else (gpu,):
            with pytest.raises(ValueError, match=f"{device} .*: use --precision auto"):
                bits.precision_on(device)
    assert DecodeOptions().precision_on(cpu) == "float32"  # the library's default is exact


def test_a_model_is_made_ready_once_until_its_weights_change(trained):
    ready = prepared(trained)
    assert prepared(trained) is ready and prepared(trained, "int8") is not ready
    before = translate(trained, ["Ein Hund schläft."])
    for copied in (copy.deepcopy(trained), pickle.loads(pickle.dumps(trained))):
        assert not copied.ready and trained.ready
        assert translate(copied, ["Ein Hund schläft."]) == before
    weight = copied.model.decoder.layers[-1].feed_forward.contract.weight  # read only when packed
    with torch.no_grad():
        weight.mul_(-9)
    assert translate(copied, ["Ein Hund schläft."]) != before
    # A fused step raises no version number of what it writes.
    ready, weights = prepared(copied), list(copied.model.parameters())
    optimizer = torch.optim.Adam(weights, lr=0.1, fused=True)
    for p in weights:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert prepared(copied) is not ready and prepared(copied) is prepared(copied)
