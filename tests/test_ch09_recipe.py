"""Chapter 9's recipe: its ingredients against independent references."""

import copy
import math
import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import kl_div

from scripts import ROOT, train
from scripts.ch06_training import Batch, LabelSmoothing, batch_loss
from scripts.ch08_decoding import plain_translate
from scripts.core.checkpoints import load_tensors, weights
from scripts.core.data import TrainingData, batches_of, epoch_examples, prepare, split_anew
from scripts.core.models import STORED_DTYPE, load_model, save_model
from scripts.core.optimizers import Muon, make_optimizer
from scripts.core.settings import PRESETS, TrainConfig, build_model
from scripts.core.watching import gpu_row, in_words
from scripts.fast import losses as fast_losses
from scripts.fast import run as fast_run
from scripts.fast.fast import FAST, PLAIN, FastPath
from scripts.fast.losses import loss_function_of, r_drop_loss
from scripts.fast.run import average_if_better, fit

SAMPLE, CPU = PRESETS["sample"], torch.device("cpu")


@pytest.fixture(scope="module")
def data():
    return prepare(SAMPLE)


def test_merges_are_skipped_at_the_rate_that_is_asked(data):
    """None at 0, all at 1, and more at higher rates; the text stays the same."""
    texts = [text for pair in data.corpus["train"][:300] for text in pair]
    pieces = {p: split_anew(texts, data.tokenizer, p, seed=0) for p in (0.0, 0.1, 0.3, 1.0)}
    for rows in pieces.values():
        assert [data.tokenizer.decode(row) for row in rows] == texts
    assert pieces[0.0] == [data.tokenizer.encode(text) for text in texts]
    letters = [len(text) + 1 for text in texts]  # a "▁" for each space, and one at the start
    assert [len(row) for row in pieces[1.0]] == letters
    counts = [sum(map(len, rows)) for rows in pieces.values()]
    assert counts == sorted(counts) and len(set(counts)) == 4
    # "▁a" is one merge: it falls apart if that merge is skipped.
    assert data.tokenizer.pieces("a") == ["▁a"]
    apart = sum(len(row) == 2 for row in split_anew(["a"] * 10_000, data.tokenizer, 0.1, seed=0))
    assert abs(apart / 10_000 - 0.1) < 5 * (0.1 * 0.9 / 10_000) ** 0.5


def test_an_epochs_pieces_depend_on_seed_and_epoch_alone(data):
    few = replace(data, corpus=data.corpus | {"train": data.corpus["train"][:40]})
    config = replace(SAMPLE, bpe_dropout=0.2)
    assert epoch_examples(config, few, 1) == epoch_examples(config, few, 1)
    assert epoch_examples(config, few, 1) != epoch_examples(config, few, 2)
    assert epoch_examples(SAMPLE, few, 1) is few.train


def test_r_drop_without_dropout_is_the_loss(data):
    torch.manual_seed(0)
    model = build_model(replace(SAMPLE, dropout=0.0), len(data.tokenizer)).double()
    (batch,) = batches_of(data.train, [[0, 1, 2, 3]], torch.device("cpu"))
    plain = batch_loss(model, batch, LabelSmoothing())
    found = r_drop_loss(model, batch, LabelSmoothing(), weight=5.0)
    torch.testing.assert_close(found, plain, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("how", [FAST, PLAIN], ids=["no padding", "padding"])
def test_r_drop_is_the_papers_with_torchs_kl_div(data, how):
    """Two passes with dropout on, their cross-entropies, and the KL both ways by PyTorch."""
    rows_of = FastPath(how).target_rows
    torch.manual_seed(0)
    model = build_model(replace(SAMPLE, dropout=0.3), len(data.tokenizer)).double().train()
    (batch,) = batches_of(data.train, [[0, 1, 2, 3]], CPU)
    torch.manual_seed(1)
    found, nll = r_drop_loss(model, batch, LabelSmoothing(), weight=3.0, rows_of=rows_of)
    torch.manual_seed(1)
    twice = Batch(batch.src.repeat(2, 1), batch.full.repeat(2, 1))
    x, labels = rows_of(model, twice, LabelSmoothing())
    p, q = model.generator(x).log_softmax(dim=-1).chunk(2)
    labels = labels[: len(p)]
    real = labels != 0
    assert real.all() == (how is FAST) and not p.equal(q)
    ce = sum(LabelSmoothing()(one, labels)[0] for one in (p, q)) / 2
    kl = partial(kl_div, reduction="sum", log_target=True)  # kl(q, p) is KL(p || q)
    expected = ce + 3.0 / 4 * (kl(q[real], p[real]) + kl(p[real], q[real]))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    assert found > ce and nll > 0


def gradients_of(config, data):
    """The loss and the gradients of one batch, for the same weights whatever `config` says."""
    torch.manual_seed(0)
    model = build_model(replace(SAMPLE, dropout=0.0, layers=1), len(data.tokenizer))
    (batch,) = batches_of(data.train, [list(range(16))], CPU)
    loss, _ = loss_function_of(config, CPU, training=True)(model, batch, LabelSmoothing())
    loss.backward()
    assert all(p.grad.dtype == p.dtype == torch.float32 for p in model.parameters())
    return loss.detach(), [p.grad for p in model.parameters()]


@pytest.mark.parametrize("changes", [{}, {"path": "textbook", "precision": "bf16"}])
def test_compiling_changes_nothing(data, monkeypatch, changes):
    """A captured graph gives the same loss and gradients; generating code would need g++."""
    plain = replace(SAMPLE, layers=1, **changes)  # capturing each layer takes time
    exact, gradients = gradients_of(plain, data)
    calls, compiled = [], torch.compile

    def light(function, **options):
        calls.append(options)
        return compiled(function, backend="eager", **options)

    fast_losses.compiled.cache_clear()
    monkeypatch.setattr(torch, "compile", light)
    found, others = gradients_of(replace(plain, compile=True), data)
    for _ in range(3):  # as each validation does
        loss_function_of(replace(plain, compile=True), CPU)
    assert calls == [{"dynamic": True}]
    fast_losses.compiled.cache_clear()
    close = (
        {"rtol": 1e-2, "atol": 1.0} if plain.precision == "bf16" else {"rtol": 1e-5, "atol": 1e-4}
    )
    torch.testing.assert_close(found, exact, rtol=close["rtol"], atol=0)
    for one, other in zip(gradients, others, strict=True):
        torch.testing.assert_close(other, one, **close)


def test_the_fused_optimizer_steps_alike(data):
    config, after = replace(SAMPLE, layers=1), []
    for fused in (True, False):
        torch.manual_seed(0)
        model = build_model(config, len(data.tokenizer))
        optimizer = make_optimizer(replace(config, fused=fused), model)
        for _ in range(3):
            for p in model.parameters():
                p.grad = torch.randn_like(p)
            optimizer.param_groups[0]["lr"] = 1e-3
            optimizer.step()
        after.append([p.detach().clone() for p in model.parameters()])
    for one, other in zip(*after, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("init", "spread"), [("scaled", 128**-0.5), ("xavier", (2 / 1128) ** 0.5)])
def test_tables_start_with_the_spread_asked_for(init, spread):
    model = build_model(replace(SAMPLE, embedding_init=init), 1000)
    table = model.tgt_embed[0].lut.weight
    assert table is model.generator.proj.weight
    assert table.std().item() == pytest.approx(spread, rel=0.02)


def test_muon_and_adam_act_as_one_and_go_on_after_loading(data):
    config = replace(SAMPLE, optimizer="muon", layers=1)
    torch.manual_seed(0)
    model = build_model(config, len(data.tokenizer))
    one = make_optimizer(config, model)
    held = [id(p) for group in one.param_groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in model.parameters())
    gradients = [torch.randn_like(p) for p in model.parameters()]

    def step(optimizer, parameters):
        for p, gradient in zip(parameters, gradients, strict=True):
            p.grad = gradient.clone()
        for group in optimizer.param_groups:
            group["lr"] = 1e-3
        optimizer.step()

    step(one, model.parameters())
    twin = build_model(config, len(data.tokenizer))
    twin.load_state_dict(model.state_dict())
    other = make_optimizer(config, twin)
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    step(one, model.parameters())
    step(other, twin.parameters())
    assert all(map(torch.equal, model.parameters(), twin.parameters()))


@pytest.mark.parametrize("optimizer", ["adam", "muon"])
def test_on_a_gpu_rates_and_counts_are_on_the_device(monkeypatch, optimizer):
    """Otherwise a recording would keep the first rate. These weights are a GPU's in name only."""
    asked = []
    kind = SimpleNamespace(Adam=lambda groups, **how: asked.append(how) or torch.optim.SGD(groups))
    with FakeTensorMode():
        model = nn.Module()
        model.generator = nn.Module()
        model.generator.proj, model.inner = nn.Linear(2, 2), nn.Linear(2, 2)
        for part in (model.generator.proj, model.inner):
            part.weight = nn.Parameter(torch.empty(2, 2, device="cuda:0"))
            part.bias = nn.Parameter(torch.empty(2, device="cuda:0"))
        monkeypatch.setattr(torch.optim, "Adam", kind.Adam)
        made = make_optimizer(TrainConfig(optimizer=optimizer), model)
        rates = [how["lr"] for how in asked] + [made.param_groups[0]["lr"]] * (optimizer == "muon")
    (adam,) = asked
    assert adam["fused"] and adam["capturable"]
    assert len({id(rate) for rate in rates}) == len(rates) == len(made.param_groups)
    assert all(rate.device.type == "cuda" and rate.shape == () for rate in rates)


@pytest.mark.parametrize("shape", [(24, 24), (40, 16), (16, 40)])
def test_our_muon_is_pytorchs(shape):
    """PyTorch's came with 2.9, waits for the device and takes matrices one by one."""
    torch.manual_seed(0)
    start = [torch.randn(shape) for _ in range(3)]
    ours, theirs = ([nn.Parameter(p.clone()) for p in start] for _ in range(2))
    optimizers = [Muon(ours, lr=torch.tensor(0.1))]
    if hasattr(torch.optim, "Muon"):
        optimizers.append(torch.optim.Muon(theirs, lr=0.1, weight_decay=0.0))
    for _ in range(4):
        gradients = [torch.randn(shape) for _ in start]
        for parameters in (ours, theirs):
            for p, gradient in zip(parameters, gradients, strict=True):
                p.grad = gradient.clone()
        for optimizer in optimizers:
            optimizer.step()
    for one, other, before in zip(ours, theirs, start, strict=True):
        if len(optimizers) == 2:
            moved = one - before
            assert (one - other).norm() < 0.02 * moved.norm()  # both round to 16 bits on the way
        singular = torch.linalg.svdvals((one - before).detach()) / (0.1 * 4)
        assert singular.max() < 1.3 * max(1, shape[0] / shape[1]) ** 0.5


@pytest.mark.parametrize("mean_is", ["better", "worse"])
def test_the_better_of_best_epoch_and_mean_is_kept(data, tmp_path, monkeypatch, mean_is):
    """By validation BLEU, made up here; the result names both candidates."""
    few = TrainingData(data.corpus, data.tokenizer, data.train[:60], data.val[:8])
    config = replace(SAMPLE, layers=1, d_model=16, d_ff=32, epochs=3, average=2, device="cpu")
    bleu = {"better": [1.0, 3.0, 2.0, 4.0], "worse": [1.0, 3.0, 2.0, 2.5]}[mean_is]
    scores = iter(bleu)

    def bleu_of() -> dict[str, float]:
        return {"val_bleu": next(scores)}

    monkeypatch.setattr(
        fast_run, "validate", lambda *_: {"val_loss": 1.0, "val_ppl": 1.0} | bleu_of()
    )
    history = fit(config, few, tmp_path)
    if mean_is == "worse":  # another machine had found a mean better, and stored it
        other = load_model(tmp_path)
        torch.nn.init.zeros_(next(other.model.parameters()))
        save_model(tmp_path, other)
    chosen = average_if_better(config, few, tmp_path, history)
    assert chosen == {"best epoch": 3.0, "mean of the last 2": bleu[-1]}
    last = [load_tensors(tmp_path / f"epoch-00{epoch}.safetensors")[0] for epoch in (2, 3)]
    kept = weights(load_model(tmp_path).model)
    for name, tensor in kept.items():
        mean = (last[0][name] + last[1][name]) / 2
        wanted = mean if mean_is == "better" else last[0][name]
        torch.testing.assert_close(tensor, wanted.to(STORED_DTYPE).float(), rtol=2e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("german", "english"),
    [
        ("Ein kleiner Hund rennt über die grüne Wiese.", {"dog", "green", "grass"}),
        ("Zwei Frauen sitzen auf einer Bank und lesen Zeitung.", {"women", "bench", "newspaper"}),
        ("Ein Mann in einem roten Hemd spielt Gitarre.", {"man", "red", "shirt", "guitar"}),
        ("Drei Kinder bauen eine Sandburg am Strand.", {"children", "sand", "castle", "beach"}),
        ("Eine Gruppe von Menschen wartet im Regen auf den Bus.", {"people", "rain", "bus"}),
    ],
)
def test_the_shipped_model_translates_five_sentences(shipped_model, german, english):
    """None is from the corpus. No word that another machine's rounding may change is required."""
    found = [plain_translate(shipped_model, [german], beam)[0] for beam in (1, 5)]
    for text in found:
        assert english <= set(text.lower().rstrip(".").split()), text


@pytest.fixture(scope="module")
def shipped_model():
    return load_model(ROOT / "models" / "multi30k-de-en", "cpu")


# What watches


def test_a_gpu_row_is_gputils(monkeypatch):
    """A machine with two GPUs, as GPUtil would see it; if it sees none, the row is empty."""
    cards = [
        SimpleNamespace(uuid=f"GPU-{i}", load=0.1 * i, memoryUsed=1000.0 * i, temperature=40.0 + i)
        for i in (1, 2)
    ]
    monkeypatch.setitem(sys.modules, "GPUtil", SimpleNamespace(getGPUs=lambda: cards))
    visible = SimpleNamespace(uuid="2")  # PyTorch sees only the second, as its first
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: visible)
    row = gpu_row(torch.device("cuda:0"))
    assert row == {"gpu_load": 0.2, "gpu_mib": 2000.0, "gpu_celsius": 42.0}
    assert "GPU 20%, 2,000 MiB, 42 °C" in in_words(
        {"epoch": 1, "train_loss": 1.0, "val_ppl": 2.0, "val_bleu": 3.0, "seconds": 4.0, **row}, 2
    )
    cards[1].temperature = math.nan  # "[N/A]"
    assert gpu_row(torch.device("cuda:0")) == {}
    cards.clear()
    assert gpu_row(torch.device("cuda:0")) == gpu_row(CPU) == {}


def test_wandb_gets_each_epochs_row_offline(data, tmp_path, monkeypatch):
    """W&B's own offline mode, in its own folder: nothing is sent, and the run is on disk."""
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    rows, log = [], wandb.Run.log
    monkeypatch.setattr(
        wandb.Run, "log", lambda run, row, **how: (rows.append(row), log(run, row, **how))
    )
    few = TrainingData(
        data.corpus | {"val": data.corpus["val"][:4]}, data.tokenizer, data.train[:60], data.val[:4]
    )
    config = replace(SAMPLE, layers=1, d_model=16, d_ff=32, epochs=2, device="cpu", tracker="wandb")
    history = fit(config, few, tmp_path)
    assert rows == history and len(history) == 2
    assert [path.suffix for path in tmp_path.glob("wandb/offline-run-*/*.wandb")] == [".wandb"]


def test_a_missing_tracker_is_said_before_training(data, tmp_path, monkeypatch):
    config = replace(SAMPLE, tracker="wandb", device="cpu")
    wandb = pytest.importorskip("wandb")
    unknown = mock.Mock(side_effect=wandb.errors.UsageError("No API key configured."))
    monkeypatch.setattr(wandb, "init", unknown)
    with pytest.raises(ValueError, match=r"\(No API key configured.\): run `wandb login`"):
        fit(config, data, tmp_path)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match="pip install wandb"):
        fit(config, data, tmp_path)


def test_a_full_gpu_is_said_in_one_line(monkeypatch, capsys):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(train, "run", full)
    assert train.main(["--preset", "sample"]) == 2
    error = capsys.readouterr().err
    assert "--max_tokens" in error and error.count("\n") == 1
