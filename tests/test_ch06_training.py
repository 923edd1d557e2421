"""Chapter 6: batches, label smoothing, schedules, accumulation, the loop, greedy decoding."""

import copy
import importlib.util
import inspect
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parameters_to_vector
from torch.optim.lr_scheduler import LambdaLR

from scripts.book.instruments import saved_bytes
from scripts.book.records import load_record
from scripts.ch01_attention import subsequent_mask
from scripts.ch06_training import (
    BOS,
    EOS,
    PAD,
    Batch,
    EpochReport,
    LabelSmoothing,
    batch_loss,
    copied,
    copy_batches,
    cosine_rate,
    greedy_decode,
    grouped,
    learn_to_copy,
    loss_curve,
    rate,
    run_epoch,
    smoothed_penalty,
    tiny_model,
    train_step,
)
from scripts.core.data import batches_of, epoch_plan, prepare
from scripts.core.settings import PRESETS, build_model, inverse_sqrt_rate
from scripts.exercises.ch06 import gradient_of
from scripts.studies import warm_up
from scripts.studies.runner import Plan, these

pytestmark = pytest.mark.usefixtures("float64")


def torch_smoothing(logits, labels, smoothing):
    """The reference: PyTorch's own loss, summed."""
    loss = nn.CrossEntropyLoss(label_smoothing=smoothing, ignore_index=PAD, reduction="sum")
    return loss(logits.flatten(0, -2), labels.flatten())


def small(seed=0, N=1):
    return tiny_model(seed, d_model=16, N=N)


def weights_of(model):
    return parameters_to_vector(model.parameters()).detach()


def joined(batches):
    """All rows of some copy batches as one batch."""
    width = max(batch.src.size(1) for batch in batches)
    src = torch.cat([F.pad(batch.src, (0, width - batch.src.size(1))) for batch in batches])
    return Batch(src, F.pad(src, (1, 0), value=BOS))


def step_gradient(model, group, criterion, clip=math.inf):
    """The gradient that `train_step` follows, on a copy."""
    twin = copy.deepcopy(model)
    train_step(twin, group, criterion, torch.optim.SGD(twin.parameters(), lr=1.0), clip)
    return gradient_of(twin)


# --- label smoothing ---


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
def test_label_smoothing_equals_torch_in_value_and_gradient(smoothing):
    logits = (3 * torch.randn(3, 5, 11)).requires_grad_()
    labels = torch.randint(1, 11, (3, 5))
    labels[0, 3:] = PAD
    ours, nll = LabelSmoothing(smoothing)(logits, labels)
    reference = torch_smoothing(logits, labels, smoothing)
    torch.testing.assert_close(ours, reference)
    torch.testing.assert_close(nll, torch_smoothing(logits, labels, 0.0))
    torch.testing.assert_close(*(torch.autograd.grad(loss, logits) for loss in (ours, reference)))


def test_erratum_08_smoothing_is_cross_entropy_over_all_tokens():
    """Of an even bet on V tokens each loss is ln V; the wrong one, over V − 2, says less."""
    logits, label = torch.zeros(1, 1000), torch.tensor([5])
    for loss in LabelSmoothing(0.1)(logits, label):
        assert math.isclose(loss.exp().item(), 1000)
    q = torch.full_like(logits, 0.1 / 998).scatter(-1, label[:, None], 0.9)
    q[:, PAD] = 0
    divergence = (torch.xlogy(q, q) - q * logits.log_softmax(-1)).sum()
    assert divergence.exp() < 900  # which is no perplexity


def test_erratum_09_pictures_hold_no_nan():
    p = torch.linspace(0.01, 1.0, 100)  # 1 is among them, where a rest of 0 meets log 0
    for smoothing in (0.0, 0.1):
        curve = smoothed_penalty(p, 14, smoothing)
        assert not curve.isnan().any() and curve[:-1].isfinite().all()
        logits = torch.cat((p[:-1, None], (1 - p[:-1, None]).expand(-1, 13) / 13), 1).log()
        criterion = LabelSmoothing(smoothing, padding_idx=-1)
        losses = [criterion(row, torch.zeros(1, dtype=torch.long))[0] for row in logits[:, None]]
        torch.testing.assert_close(curve[:-1], torch.stack(losses))
    assert smoothed_penalty(p, 14, 0.0)[-1] == 0


# --- schedule and clipping ---


@pytest.mark.parametrize("n", [1, 10, 4000, 4001, 99_999])
def test_rate_is_the_papers(n):
    expected = 512**-0.5 * min(n**-0.5, n * 4000**-1.5)
    assert math.isclose(rate(n, 512), expected)
    assert math.isclose(rate(n, 256), 2**0.5 * expected)
    assert math.isclose(inverse_sqrt_rate(n, rate(4000, 512), 4000), expected)


def test_cosine_rate_ends_just_after_the_last_step():
    rates = [cosine_rate(n, 1.0, 10, 100) for n in range(1, 102)]
    assert rates[:10] == [n / 10 for n in range(1, 11)]
    assert all(a > b for a, b in zip(rates[9:], rates[10:], strict=False))
    assert rates[99] > 0 and rates[100] == 0


def test_erratum_11_schedule_advances_once_an_optimizer_step():
    model = small()
    optimizer = torch.optim.Adam(model.parameters(), lr=1.0)
    scheduler = LambdaLR(optimizer, lambda done: rate(done + 1, 16, warmup=20))
    data = copy_batches(25, 1, seed=0)
    run_epoch(data, model, LabelSmoothing(), optimizer, scheduler, accumulate=10)
    assert scheduler.last_epoch == 3  # 25 micro-batches: steps of 10, 10 and 5


def test_erratum_12_steps_count_from_one():
    used, model = [], small()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer.register_step_pre_hook(lambda *_: used.append(optimizer.param_groups[0]["lr"]))
    scheduler = LambdaLR(optimizer, lambda done: rate(done + 1, 512, warmup=5))
    run_epoch(copy_batches(8, 1, seed=0), model, LabelSmoothing(), optimizer, scheduler)
    assert used == [rate(n, 512, warmup=5) for n in range(1, 9)]
    with pytest.raises(ValueError, match="from 1"):
        rate(0, 512)
    with pytest.raises(ValueError, match="from 1"):
        cosine_rate(0, 1.0, 10, 100)


def test_clipping_bounds_the_step_and_reports_the_norm_before():
    model, criterion = small(), LabelSmoothing(0.0)
    batch = next(copy_batches(1, 4, seed=0))
    free = step_gradient(model, [batch], criterion)
    short = step_gradient(model, [batch], criterion, clip=0.1)
    torch.testing.assert_close(short, free * 0.1 / free.norm(), rtol=1e-4, atol=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="clip must be at least 0"):  # PyTorch would turn around
        train_step(model, [batch], criterion, optimizer, clip=-1.0)
    report = run_epoch([batch], model, criterion, optimizer, clip=0.1)
    assert report.grad_norms == pytest.approx([free.norm().item()])


# --- accumulation ---


def test_erratum_10_groups_are_full_and_nothing_is_left_over():
    assert [[*group] for group in grouped(range(8), 3)] == [[0, 1, 2], [3, 4, 5], [6, 7]]
    micro = list(copy_batches(5, 2, seed=4))
    model, criterion = small(), LabelSmoothing(0.1)
    full = step_gradient(model, [joined(micro)], criterion)
    torch.testing.assert_close(step_gradient(model, micro, criterion), full)
    assert (step_gradient(model, micro[:1], criterion) - full).norm() > 0.05 * full.norm()


def test_a_step_that_is_no_number_is_refused_before_a_weight_has_changed():
    model, criterion, batches = small(), LabelSmoothing(0.1), [*copy_batches(2, 3, seed=0)]
    hook = model.generator.proj.weight.register_hook(lambda gradient: gradient / 0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    before = weights_of(model)
    with pytest.raises(FloatingPointError):
        train_step(model, batches, criterion, optimizer, 1.0)
    assert torch.equal(weights_of(model), before)
    assert not optimizer.state  # nor have Adam's averages changed
    hook.remove()


@pytest.mark.slow
def test_a_mean_of_means_is_nearly_right_on_real_batches():
    """On the sample corpus's: off by less than 4%."""
    config, criterion, errors = PRESETS["sample"], LabelSmoothing(0.1), []
    data = prepare(config)
    model = build_model(config, len(data.tokenizer)).float()
    plan = [indices for (indices,) in epoch_plan(config, data, 1)]
    for start in range(0, 32, 4):
        group = list(batches_of(data.train, plan[start : start + 4], torch.device("cpu")))
        means = sum(step_gradient(model, [batch], criterion) for batch in group) / 4
        right = step_gradient(model, group, criterion)
        errors.append(((means - right).norm() / right.norm()).item())
    assert min(errors) > 0.003 and max(errors) < 0.04


def test_the_record_of_warm_up_holds_its_plan():
    record, plan = load_record("warm-up-copy"), Plan([])
    warm_up.plan_runs(plan)
    assert len(plan) == len(record["runs"])
    assert all(len(these(record["runs"], **task)) == 1 for task in plan)


@pytest.mark.audit
@pytest.mark.parametrize("seed", [0, 3, 6])
def test_other_seeds_say_what_chapter_6_says(seed):
    """The record's run is repeated; a limit of 5 is rarely reached, one of 1 nearly always."""
    (run,) = these(load_record("warm-up-copy")["runs"], seed=seed % 5, peak=0.004, warmup=10)
    again = warm_up.copy_words({}, {"seed": seed % 5, "peak": 0.004, "warmup": 10})
    assert again["loss"] == pytest.approx(run["loss"], abs=0.01)
    worst, clipped = {}, {}
    for clip in (math.inf, 5, 1):
        _, losses, norms = learn_to_copy(clip=clip, broken=41, seed=seed)
        worst[clip], clipped[clip] = max(losses[41:]), sum(norm > clip for norm in norms)
    assert worst[math.inf] > 3.5 and worst[5] < 2 and worst[1] < 1.7
    assert 1 <= clipped[5] <= 10 and clipped[1] >= 74


# --- the loop ---


def test_erratum_13_each_run_has_a_state_of_its_own():
    data, model = list(copy_batches(3, 2, seed=0)), small()
    for _ in range(2):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        report = run_epoch(data, model, LabelSmoothing(), optimizer, accumulate=2)
        assert report.tokens == joined(data).ntokens and len(report.grad_norms) == 2


def test_erratum_14_validation_is_plain_pooled_and_without_gradients():
    model, criterion = small(), LabelSmoothing(0.1)
    data = [next(copy_batches(1, 9, seed=0)), next(copy_batches(1, 30, seed=0, lengths=(1, 1)))]
    assert saved_bytes(lambda: run_epoch(data, model, criterion)) == 0
    assert saved_bytes(lambda: batch_loss(model, data[0], criterion)) > 0

    whole = joined(data)
    logits = model.generator(model(whole.src, whole.tgt, whole.src_mask, whole.tgt_mask))
    plain = torch_smoothing(logits, whole.tgt_y, 0.0) / whole.ntokens
    for accumulate in (1, 2):  # whatever the groups are
        report = run_epoch(data, model, criterion, accumulate=accumulate)
        assert math.isclose(report.perplexity, plain.exp().item())
    ranks = [run_epoch([part], model, criterion) for part in data]
    mean_of_means = math.exp(sum(rank.nll / rank.tokens for rank in ranks) / 2)
    assert abs(mean_of_means / plain.exp() - 1) > 0.01  # the wrong versions
    assert abs(math.exp(report.loss_per_token) / plain.exp() - 1) > 0.01
    assert EpochReport(nll=1000.0, tokens=1).perplexity == math.inf  # more than a float can hold


def test_evaluation_switches_dropout_off_and_leaves_the_weights():
    model = small()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5
    data = list(copy_batches(2, 3, seed=0))
    before = weights_of(model)
    losses = {run_epoch(data, model.train(), LabelSmoothing()).nll for _ in range(3)}
    assert len(losses) == 1 and not model.training
    assert torch.equal(before, weights_of(model))


# --- the copy task and greedy decoding ---


def test_greedy_takes_the_likeliest_ends_each_row_and_ignores_the_company():
    model, batch = small(37, N=2), next(copy_batches(1, 5, seed=3))
    with torch.no_grad():  # one that is sure, and stops early
        model.generator.proj.weight.mul_(3)
        model.generator.proj.bias[EOS] = 1.0
    expected = []
    for source in batch.src:
        ids = torch.tensor([[BOS]])
        while ids[0, -1] != EOS:
            alone = source[source != PAD].unsqueeze(0)  # without padding
            logits = model.generator(model(alone, ids, None, subsequent_mask(ids.size(1))))
            ids = torch.cat((ids, logits[:, -1].argmax(-1, keepdim=True)), 1)
        expected.append(ids[0, 1:])
    assert len(set(map(len, expected))) > 2
    expected = nn.utils.rnn.pad_sequence(expected, batch_first=True, padding_value=PAD)
    for max_len in (2, 12):  # at twelve, it stops when every row has ended
        written = greedy_decode(model.train(), batch.src, batch.src_mask, max_len)
        assert torch.equal(written, expected[:, :max_len]) and model.training


def test_erratum_16_decoding_starts_where_training_started():
    start = inspect.signature(greedy_decode).parameters["start_symbol"].default
    batch = next(copy_batches(1, 4, seed=9))
    assert start == BOS and (batch.tgt[:, 0] == start).all()
    model = tiny_model(0, d_model=32)
    assert loss_curve(model, [batch] * 80)[-1] < 0.1  # learned by heart
    assert copied(model, batch).all()
    assert not copied(model, batch, start_symbol=PAD).all()  # the wrong start


# --- importing ---


def test_erratum_24_importing_the_chapter_runs_no_example(capsys):
    spec = importlib.util.find_spec("scripts.ch06_training")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert capsys.readouterr() == ("", "")
    assert hasattr(module, "learn_to_copy") and not hasattr(module, "copier")
