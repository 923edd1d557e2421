"""Chapter 9: which precision a run takes, that it is stored, and that both learn equally well."""

from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from test_ch09_training_run import TINY

from scripts.ch06_training import LabelSmoothing
from scripts.core.checkpoints import newest_state
from scripts.core.data import TrainingData, batches_of, prepare
from scripts.core.settings import PRESETS, build_model
from scripts.core.signals import Stopped
from scripts.fast import losses, run
from scripts.fast.losses import loss_function_of, resolved
from scripts.fast.run import fit, training_of
from scripts.studies import precision as study
from scripts.studies import waterfall as gpu

CPU = torch.device("cpu")
AUTO = replace(TINY, precision="auto", epochs=2)


@pytest.fixture(scope="module")
def data():
    whole = prepare(TINY)
    val = whole.corpus["val"][:40]
    corpus = {"train": whole.corpus["train"][:1500], "val": val, "test": val}
    return TrainingData(corpus, whole.tokenizer, whole.train[:1500], whole.val[:40])


@pytest.mark.parametrize("has, found", [(True, "bf16"), (False, "float32")])
def test_auto_asks_the_device_and_a_word_is_a_word(monkeypatch, has, found):
    monkeypatch.setattr(losses, "multiplies_bf16", lambda device: has)
    assert resolved(AUTO, CPU).precision == found
    for said in ("float32", "bf16"):
        assert resolved(replace(AUTO, precision=said), CPU).precision == said


@pytest.mark.parametrize("has", [True, False])
def test_a_run_says_once_that_its_16_bits_are_emulated(monkeypatch, data, tmp_path, capsys, has):
    """It isn't refused: a run that began elsewhere may go on here."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has)
    monkeypatch.setenv("SERIES_RUNS", str(tmp_path))
    monkeypatch.setattr(run, "prepare", lambda config: data)
    monkeypatch.setattr(run, "trained_to_end", Mock(side_effect=Stopped(2, 0)))
    for precision in ("auto", "bf16"):
        with pytest.raises(Stopped):
            run.run(replace(AUTO, precision=precision))
    assert capsys.readouterr().out.count("note: cpu emulates bf16") == (not has)


def test_times_of_emulated_16_bits_are_refused(monkeypatch, capsys):
    """They would take days, and say nothing of bfloat16."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    monkeypatch.setattr(study, "one_run", Mock(side_effect=AssertionError))
    assert study.main([]) == 2
    error = capsys.readouterr().err
    assert "AVX512-BF16" in error and error.count("\n") == 1
    monkeypatch.setattr(gpu, "Task", Mock(side_effect=AssertionError))
    with pytest.raises(ValueError, match="AVX512-BF16"):
        gpu.waterfall(gpu.WaterfallOptions(device="cpu"))


def test_what_ships_of_the_sample_corpus_is_float32_everywhere():
    assert PRESETS["sample"].precision == "float32"
    assert {PRESETS[name].precision for name in ("narrow", "small", "base")} == {"auto"}


def test_a_state_says_what_was_resolved_and_another_machine_has_its_own(
    monkeypatch, data, tmp_path
):
    """But a precision that was asked for is part of the recipe."""
    monkeypatch.setattr(losses, "multiplies_bf16", lambda device: True)
    training = training_of(AUTO, data, tmp_path)
    training.load()
    training.step()
    training.save()
    assert newest_state(tmp_path).meta["run"]["precision"] == "bf16"
    again = training_of(AUTO, data, tmp_path, resume=True)
    assert again.config.precision == "bf16" and again.steps_taken == 1
    monkeypatch.setattr(losses, "multiplies_bf16", lambda device: False)
    elsewhere = training_of(AUTO, data, tmp_path, resume=True)
    assert elsewhere.config.precision == "float32" and elsewhere.steps_taken == 1
    as_before = training_of(replace(AUTO, precision="bf16"), data, tmp_path, resume=True)
    assert elsewhere.resumed_on and not as_before.resumed_on
    (tmp_path / "asked").mkdir()
    training_of(replace(AUTO, precision="bf16"), data, tmp_path / "asked").save()
    with pytest.raises(ValueError, match=r"another --precision \(bf16, now float32\): resume with"):
        training_of(AUTO, data, tmp_path / "asked", resume=True)


@pytest.mark.parametrize(
    "changes", [{}, {"path": "textbook"}, {"r_drop": 1.0}], ids=["fast", "textbook", "r-drop"]
)
def test_each_way_to_compute_the_loss_has_its_16_bits(data, changes):
    torch.manual_seed(0)
    config = replace(TINY, dropout=0.0, **changes)
    model = build_model(config, len(data.tokenizer))
    batch = next(batches_of(data.train, [list(range(40))], CPU))
    sums, gradients = {}, {}
    for precision in ("float32", "bf16"):
        chosen = replace(config, precision=precision)
        loss_of = loss_function_of(chosen, CPU, training=True)
        model.zero_grad()
        loss, nll = loss_of(model, batch, LabelSmoothing())
        loss.backward()
        sums[precision] = torch.stack([loss.detach(), nll.detach()])
        gradients[precision] = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert all(one.dtype == torch.float32 for one in (*sums.values(), *gradients.values()))
    assert not sums["bf16"].equal(sums["float32"])  # it did round
    torch.testing.assert_close(sums["bf16"], sums["float32"], rtol=2e-3, atol=0.0)
    off = (gradients["bf16"] - gradients["float32"]).norm() / gradients["float32"].norm()
    assert off < 0.05


def test_the_sample_corpus_is_learned_alike_in_both_precisions(data, tmp_path):
    ends = {}
    for precision in ("float32", "bf16"):
        config = replace(AUTO, precision=precision, epochs=3, dropout=0.1, name=precision)
        folder = tmp_path / precision
        folder.mkdir()
        history = fit(config, data, folder)
        ends[precision] = history[-1]["val_loss"]
        assert history[-1]["val_loss"] < history[0]["val_loss"] - 0.2
        assert {"seconds", "cpu_seconds"} <= history[-1].keys()
    assert abs(ends["bf16"] / ends["float32"] - 1) < 0.05
