"""A run's ingredients against independent references: data, losses, optimizers, precision."""

import math
import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from tiny import RUN, few_pairs
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import kl_div

from scripts.ch06_training import BOS, UNK, Batch, LabelSmoothing, batch_loss
from scripts.ch07_multi30k import Example
from scripts.core import data as core_data
from scripts.core.data import (
    TrainingData,
    batches_of,
    epoch_examples,
    epoch_plan,
    prepare,
    split_anew,
)
from scripts.core.optimizers import Muon, make_optimizer
from scripts.core.settings import PRESETS, TrainConfig, build_model, pick_device
from scripts.core.watching import gpu_row, in_words
from scripts.fast import losses
from scripts.fast.fast import FAST, PLAIN, FastPath
from scripts.fast.losses import loss_function_of, r_drop_loss, resolved

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(scope="module")
def data() -> TrainingData:
    return few_pairs()


def model_and_batch(data, dtype=torch.float64, **changes):
    """The tiny model, the same each time, and a batch of sixteen pairs."""
    torch.manual_seed(0)
    model = build_model(replace(RUN, **changes), len(data.tokenizer)).to(dtype)
    (batch,) = batches_of(data.train, [list(range(16))], CPU)
    return model, batch


# What is read


def test_pieces_come_from_the_training_split_alone(monkeypatch):
    """ERRATA 18: otherwise the vocabulary knows what the model will be tested on."""
    pairs = [("ein Hund", "a dog"), ("ein roter Ball", "a red ball")] * 20
    corpus = {"train": pairs, "val": [("xylophon", "xylophone")] * 99, "test": pairs}
    monkeypatch.setattr(core_data, "load_corpus", lambda *named: corpus)
    tokenizer = prepare(replace(RUN, vocab=40)).tokenizer
    assert UNK not in tokenizer.encode("roter Ball") and UNK in tokenizer.encode("xylophon")


def test_a_plan_does_not_depend_on_what_was_planned_before():
    data = TrainingData({}, None, [Example([n], [BOS, n]) for n in range(200)], [])
    config = PRESETS["sample"]
    alone = epoch_plan(config, data, 3)
    for epoch in (1, 2):
        epoch_plan(config, data, epoch)
    assert epoch_plan(config, data, 3) == alone != epoch_plan(config, data, 2)
    assert alone != epoch_plan(replace(config, seed=2), data, 3)


def test_merges_are_skipped_at_the_rate_that_is_asked(data):
    """None at 0, all at 1; the text stays the same."""
    texts = [text for pair in data.corpus["train"] for text in pair]
    pieces = {p: split_anew(texts, data.tokenizer, p, seed=0) for p in (0.0, 0.3, 1.0)}
    for rows in pieces.values():
        assert [data.tokenizer.decode(row) for row in rows] == texts
    assert pieces[0.0] == [data.tokenizer.encode(text) for text in texts]
    letters = [len(text) + 1 for text in texts]  # a "▁" for each space, and one at the start
    assert [len(row) for row in pieces[1.0]] == letters
    # "▁a" is one merge: it falls apart if that merge is skipped.
    assert data.tokenizer.pieces("a") == ["▁a"]
    apart = sum(len(row) == 2 for row in split_anew(["a"] * 10_000, data.tokenizer, 0.1, seed=0))
    assert abs(apart / 10_000 - 0.1) < 5 * (0.1 * 0.9 / 10_000) ** 0.5
    config = replace(RUN, bpe_dropout=0.2)
    first, again, second = (epoch_examples(config, data, epoch) for epoch in (1, 1, 2))
    assert first == again != second and epoch_examples(RUN, data, 1) is data.train


# Losses


@pytest.mark.parametrize("switches", [FAST, PLAIN], ids=["no padding", "padding"])
def test_r_drop_is_the_papers_with_torchs_kl_div(data, switches):
    """Two passes with dropout on, their cross-entropies, and the KL both ways by PyTorch."""
    model, batch = model_and_batch(data, dropout=0.3)
    torch.manual_seed(1)
    loss, nll = r_drop_loss(model.train(), batch, LabelSmoothing(), 3.0, switches)
    torch.manual_seed(1)
    twice = Batch(batch.src.repeat(2, 1), batch.full.repeat(2, 1))
    x, labels = FastPath(switches).target_rows(model, twice, LabelSmoothing())
    p, q = model.generator(x).log_softmax(dim=-1).chunk(2)
    labels = labels[: len(p)]
    real = labels != 0
    assert real.all() == (switches is FAST) and not p.equal(q)
    ce = sum(LabelSmoothing()(half, labels)[0] for half in (p, q)) / 2
    kl = partial(kl_div, reduction="sum", log_target=True)  # kl(q, p) is KL(p || q)
    expected = ce + 3.0 / 4 * (kl(q[real], p[real]) + kl(p[real], q[real]))
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    assert loss > ce and nll > 0


@pytest.mark.parametrize("changes", [{"step": "eager"}, {"step": "textbook"}, {"r_drop": 1.0}])
def test_each_way_to_compute_the_loss_is_the_textbooks_and_has_its_16_bits(data, changes):
    model, batch = model_and_batch(data, torch.float32, dropout=0.0)
    sums, gradients = [], []
    for precision in ("float32", "bf16"):
        config = replace(RUN, precision=precision, **changes)
        loss_of = loss_function_of(config, CPU, training=True)
        model.zero_grad()
        loss, nll = loss_of(model, batch, LabelSmoothing())
        loss.backward()
        sums.append(torch.stack([loss.detach(), nll.detach()]))
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert {x.dtype for x in (*sums, *gradients)} == {torch.float32}
    plain = torch.stack(batch_loss(model, batch, LabelSmoothing()))
    torch.testing.assert_close(sums[0], plain, rtol=1e-5, atol=0.0)
    if "step" in changes:
        loss_of = loss_function_of(replace(RUN, **changes), CPU)
        assert (getattr(loss_of, "func", loss_of) is batch_loss) is (changes["step"] == "textbook")
    assert not sums[1].equal(sums[0])  # it did round
    torch.testing.assert_close(sums[1], sums[0], rtol=2e-3, atol=0.0)
    assert (gradients[1] - gradients[0]).norm() < 0.05 * gradients[0].norm()


def test_the_kind_of_a_step_and_its_precision_are_decided_once(monkeypatch):
    """`auto` takes what suits the device; a word is a word."""
    assert resolved(RUN, CPU).step == "eager" and resolved(RUN, GPU).step == "graphed"
    for changes, world in (({"bpe_dropout": 0.1}, 1), ({}, 2)):
        assert resolved(replace(RUN, **changes), GPU, world).step == "eager"
        with pytest.raises(ValueError, match="--step graphed"):
            resolved(replace(RUN, step="graphed", **changes), GPU, world)
    assert resolved(replace(RUN, accumulate=2), GPU).step == "static"
    with pytest.raises(ValueError, match="on a GPU"):
        resolved(replace(RUN, step="graphed"), CPU)
    # A model from a GPU is validated here all the same.
    assert callable(loss_function_of(replace(RUN, step="graphed"), CPU))
    for has, chosen in ((True, "bf16"), (False, "float32")):
        monkeypatch.setattr(losses, "multiplies_bf16", lambda device, has=has: has)
        words = {"auto": chosen, "float32": "float32", "bf16": "bf16"}
        for word, precision in words.items():
            assert resolved(replace(RUN, precision=word), CPU).precision == precision
    assert PRESETS["sample"].precision == "float32"  # what ships is the same everywhere


def test_a_device_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for has_cuda, name, words in (
        (False, "a toaster", "no device 'a toaster' here: choose auto, cpu$"),
        (False, "meta", "no device 'meta'"),
        (False, "cuda", "no device 'cuda'"),
        (True, "cuda:1", "choose auto, cpu, cuda, cuda:0"),
    ):
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_cuda=has_cuda: has_cuda)
        with pytest.raises(ValueError, match=words):
            pick_device(name)


# Weights


@pytest.mark.parametrize("optimizer", ["adam", "muon"])
def test_on_a_gpu_rates_and_counts_are_on_the_device(monkeypatch, optimizer):
    """Otherwise a recording would keep the first rate. These weights are a GPU's in name only."""
    adam = Mock(side_effect=lambda groups, **options: torch.optim.SGD(groups))
    monkeypatch.setattr(torch.optim, "Adam", adam)
    with FakeTensorMode():
        model = nn.Module()
        model.generator = nn.Module()
        model.generator.proj, model.inner = nn.Linear(2, 2), nn.Linear(2, 2)
        for part in (model.generator.proj, model.inner):
            part.weight = nn.Parameter(torch.empty(2, 2, device="cuda:0"))
            part.bias = nn.Parameter(torch.empty(2, device="cuda:0"))
        built = make_optimizer(TrainConfig(optimizer=optimizer), model)
    options = adam.call_args.kwargs
    rates = [options["lr"], *[built.param_groups[0]["lr"]] * (optimizer == "muon")]
    ratios = [group["initial_lr"] for group in built.param_groups]
    assert ratios == pytest.approx([10.0, 1.0][-len(ratios) :])  # of muon_lr and lr, to lr
    trained = [id(p) for group in built.param_groups for p in group["params"]]
    assert sorted(trained) == sorted(id(p) for p in model.parameters())
    assert options["fused"] and options["capturable"]
    assert (options["betas"], options["eps"]) == ((0.9, 0.98), 1e-9)  # the paper's
    assert len({id(rate) for rate in rates}) == len(rates) == len(built.param_groups)
    assert all(rate.device.type == "cuda" and rate.shape == () for rate in rates)


@pytest.mark.parametrize("shape", [(24, 24), (40, 16), (16, 40)])
def test_our_muon_is_pytorchs(shape):
    """PyTorch's came with 2.9, waits for the device and takes matrices one by one."""
    torch.manual_seed(0)
    start = torch.randn(3, *shape)
    optimizers = [partial(Muon, lr=torch.tensor(0.1))]
    if hasattr(torch.optim, "Muon"):
        optimizers.append(partial(torch.optim.Muon, lr=0.1, weight_decay=0.0))
    moves = []
    for make in optimizers:
        matrices, generator = [nn.Parameter(p.clone()) for p in start], torch.Generator()
        optimizer = make(matrices)
        for _ in range(4):
            for p in matrices:
                p.grad = torch.randn(shape, generator=generator)
            optimizer.step()
        moves.append(torch.stack([p.detach() for p in matrices]) - start)
    gaps = (moves[0] - moves[-1]).norm(dim=(1, 2)) / moves[0].norm(dim=(1, 2))
    assert (gaps < 0.02).all()  # both round to 16 bits on the way
    singular = torch.linalg.svdvals(moves[0]) / (0.1 * 4)
    assert singular.max() < 1.3 * max(1, shape[0] / shape[1]) ** 0.5


def test_a_gpu_row_is_gputils(monkeypatch):
    """A machine with two GPUs, as GPUtil would see it; if it sees none, the row is empty."""
    first = SimpleNamespace(uuid="GPU-1", load=0.1, memoryUsed=1000.0, temperature=41.0)
    second = SimpleNamespace(uuid="GPU-2", load=0.2, memoryUsed=2000.0, temperature=42.0)
    monkeypatch.setitem(sys.modules, "GPUtil", SimpleNamespace(getGPUs=lambda: [first, second]))
    visible = SimpleNamespace(uuid="2")  # PyTorch sees only the second, as its first
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: visible)
    row = gpu_row(GPU)
    assert row == {"gpu_load": 0.2, "gpu_mib": 2000.0, "gpu_celsius": 42.0}
    row |= dict.fromkeys(("epoch", "train_loss", "val_ppl", "val_bleu", "seconds"), 1)
    assert "GPU 20%, 2,000 MiB, 42 °C" in in_words(row, 2)
    second.temperature = math.nan  # "[N/A]"
    assert gpu_row(GPU) == gpu_row(CPU) == {}
