"""Chapter 7: what is fast gives the same numbers; what is counted and timed is what is said."""

import importlib.util
import inspect
import itertools
import json
import math
import random
import subprocess
import sys
from dataclasses import asdict, replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT
from torch import nn
from torch.testing import assert_close

from scripts import ch07_going_fast as ch07
from scripts.ch01_attention import attention, count_flops
from scripts.ch04_encoder_decoder import make_model, scramble
from scripts.ch05_training import BOS, EOS, PAD, LabelSmoothing, batch_loss, run_epoch
from scripts.ch06_multi30k import FIXED_WIDTH, Example, make_batch
from scripts.ch07_going_fast import (
    BASE,
    FAST,
    PEERS,
    PLAIN,
    SMALL,
    STATIC,
    TINY,
    AttentionCore,
    BenchOptions,
    Contender,
    Layout,
    LinearCrossEntropy,
    OneDnnLinear,
    ReluDropout,
    ResidentCorpus,
    StaticStep,
    Switches,
    batch_as,
    batches_to_time,
    each_switch,
    example_batch,
    fast_loss,
    forward_products,
    keep_mask,
    keep_scale,
    loss_and_gradients,
    race,
    series_model,
    static_lengths,
    static_plan,
    step_flops,
    waterfall_contenders,
)

CRITERION = LabelSmoothing(0.1)
VARIANTS = {
    "pre-norm, tied": {"norm_first": True, "tie": "all"},
    "post-norm, untied": {"norm_first": False, "tie": "none"},
    "learned positions": {"positions": "learned", "tie": "all"},
    "narrow tables": {"width": 8, "tie": "all"},
}


@pytest.fixture(autouse=True)
def keep_default_dtype():
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


def small_model(dtype, **options):
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    sizes = {"N": 2, "d_model": 16, "d_ff": 32, "h": 2, "dropout": 0.1}
    model = make_model(50, 50, **sizes | options)
    scramble(model)
    return model.eval()


def name_of(how):
    return ",".join(f"{k}={v}" for k, v in asdict(how).items() if v)


def examples(count, longest, seed=0, vocab=50):
    rng = random.Random(seed)

    def ids(n):
        return [rng.randrange(EOS + 1, vocab) for _ in range(n)]

    sizes = [(rng.randint(1, longest), rng.randint(1, longest)) for _ in range(count)]
    return [Example([*ids(s), EOS], [BOS, *ids(t), EOS]) for s, t in sizes]


# The same numbers


@pytest.mark.filterwarnings("ignore:linear_cross_entropy")  # it says that it ignores its options
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    "dtype, outputs, gradients", [("float64", 1e-10, 1e-10), ("float32", 1e-5, 1e-4)]
)
def test_every_switch_gives_the_textbooks_numbers(variant, dtype, outputs, gradients):
    model = small_model(getattr(torch, dtype), **VARIANTS[variant])
    batch = example_batch(50)
    expected = loss_and_gradients(batch_loss, model, batch)
    for how in [*each_switch(), STATIC, replace(FAST, loss="torch")]:
        found = loss_and_gradients(partial(fast_loss, how=how), model, batch)
        for name in expected:
            if name == "nll" and how.loss == "torch":
                continue  # PyTorch's function returns one loss
            tolerance = outputs if name in ("loss", "nll") else gradients
            close = {"rtol": tolerance, "atol": tolerance}
            assert_close(found[name], expected[name], **close, msg=lambda m: f"{name_of(how)}: {m}")  # noqa: B023


@pytest.mark.parametrize("how", [FAST, replace(FAST, packed=False), STATIC], ids=name_of)
def test_a_batch_without_padding_is_no_special_case(how):
    model = small_model(torch.float64)
    batch = make_batch([Example([7, 8, EOS], [BOS, 9, EOS])] * 3)
    expected = loss_and_gradients(batch_loss, model, batch)
    assert_close(
        loss_and_gradients(partial(fast_loss, how=how), model, batch),
        expected,
        rtol=1e-10,
        atol=1e-10,
    )


def test_a_training_by_the_fast_path_is_the_textbooks():
    reports = []
    for loss_of, fused in ((batch_loss, False), (fast_loss, True)):
        model = small_model(torch.float64, dropout=0.0)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, fused=fused)
        batches = [make_batch(examples(8, 9, seed)) for seed in range(12)]
        reports.append(run_epoch(batches, model, CRITERION, optimizer, clip=1.0, loss_of=loss_of))
        reports[-1].after = run_epoch(batches, model, CRITERION, loss_of=loss_of)
    assert math.isclose(reports[0].loss, reports[1].loss, rel_tol=1e-9)
    assert math.isclose(reports[0].after.nll, reports[1].after.nll, rel_tol=1e-8)
    assert_close(reports[0].grad_norms, reports[1].grad_norms, rtol=1e-8, atol=0.0)
    assert reports[0].after.nll < reports[0].nll  # it did learn


def test_too_long_a_sentence_is_refused_as_by_the_textbook():
    model = small_model(torch.float64, max_len=4)
    with pytest.raises(ValueError, match="longer than the maximum of 4"):
        fast_loss(model, make_batch(examples(3, 9)), CRITERION)


def test_without_gradients_nothing_is_kept_and_the_loss_is_the_same():
    model, batch = small_model(torch.float64), example_batch(50)
    with torch.no_grad():
        quiet = fast_loss(model, batch, CRITERION)
    loud = fast_loss(model, batch, CRITERION)
    assert not quiet[0].requires_grad and loud[0].requires_grad
    assert_close(quiet[0], loud[0].detach())


def test_evaluation_has_no_dropout_and_training_has():
    model, batch = small_model(torch.float64, dropout=0.5), example_batch(50)
    assert fast_loss(model, batch, CRITERION)[0] == fast_loss(model, batch, CRITERION)[0]
    model.train()
    assert fast_loss(model, batch, CRITERION)[0] != fast_loss(model, batch, CRITERION)[0]


# The pieces


def fixed_seed(function):
    def call(*inputs):
        torch.manual_seed(1)
        return function(*inputs)

    return call


@pytest.mark.parametrize("p", [0.0, 0.4])
def test_hand_written_backward_passes_are_the_derivatives(p):
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(2)
    q, k, v = (torch.randn(2, 2, n, 3, requires_grad=True) for n in (3, 4, 4))
    bias = torch.zeros(2, 1, 1, 4)
    bias[1, ..., 2:] = -math.inf
    core = fixed_seed(lambda q, k, v: AttentionCore.apply(q, k, v, bias, p))
    assert torch.autograd.gradcheck(core, (q, k, v))
    x = torch.randn(5, 4, requires_grad=True)
    assert torch.autograd.gradcheck(fixed_seed(lambda x: ReluDropout.apply(x * 1.0, p)), (x,))
    weight, bias = (torch.randn(*shape, requires_grad=True) for shape in ((6, 4), (6,)))
    assert torch.autograd.gradcheck(OneDnnLinear.apply, (x, weight, bias))
    labels = torch.tensor([0, 5, 2, 2, 1])
    for chunk in (2, 5):
        loss = lambda *w: LinearCrossEntropy.apply(*w, labels, p / 4, chunk, False)[0]  # noqa: E731, B023
        assert torch.autograd.gradcheck(loss, (x, weight, bias))


def test_attention_core_without_dropout_is_chapter_1s_and_pytorchs():
    torch.set_default_dtype(torch.float64)
    q, k, v = (torch.randn(3, 2, n, 4) for n in (5, 6, 6))
    bias = torch.zeros(3, 1, 1, 6)
    bias[0, ..., 4:] = -math.inf
    ours = AttentionCore.apply(q, k, v, bias, 0.0)
    assert_close(ours, attention(q, k, v, bias)[0])
    assert_close(ours, F.scaled_dot_product_attention(q, k, v, bias))


def test_attention_core_drops_weights_and_not_outputs():
    """With V the identity the output is the dropped weights: zeros, or the weight over 1 − p."""
    torch.manual_seed(3)
    q, k = torch.randn(2, 50, 2, 16, 8, dtype=torch.float64)
    v = torch.eye(16, dtype=torch.float64).expand(50, 2, 16, 16)
    plain, dropped = (AttentionCore.apply(q, k, v, None, p) for p in (0.0, 0.25))
    assert_close(dropped[dropped != 0], (plain * keep_scale(0.25))[dropped != 0])
    share = (dropped == 0).double().mean().item()
    assert abs(share - 0.25) < 5 * math.sqrt(0.25 * 0.75 / dropped.numel())


@pytest.mark.parametrize("p", [0.05, 0.1, 0.3, 0.5])
def test_masks_have_the_rate_and_their_entries_are_independent(p):
    torch.manual_seed(4)
    mask = keep_mask((500, 1003), p, torch.empty(0))
    assert mask.dtype == torch.get_default_dtype() and set(mask.unique().tolist()) == {0.0, 1.0}
    dropped = 1 - mask.double()
    assert abs(dropped.mean().item() - p) < 5 * math.sqrt(p * (1 - p) / mask.numel())
    flat = dropped.flatten() - p
    for lag in (1, 2, 3, 4, 1003):
        together = (flat[:-lag] * flat[lag:]).mean().item() / (p * (1 - p))
        assert abs(together) < 5 / math.sqrt(mask.numel())
    assert abs(mask.mean().item() * keep_scale(p) - 1) < 0.01
    assert not torch.equal(mask, keep_mask((500, 1003), p, torch.empty(0)))


@pytest.mark.parametrize("how", [FAST, PLAIN], ids=["fast", "plain"])
def test_dropout_reaches_every_place_at_its_rate(how):
    """Each site, when its rate is set, changes the loss; with all at 0 it is evaluation's."""
    model, batch = small_model(torch.float64, dropout=0.0), example_batch(50)
    quiet = fast_loss(model, batch, CRITERION, how)[0]
    model.train()
    assert_close(fast_loss(model, batch, CRITERION, how)[0], quiet)
    sites = [module for module in model.modules() if isinstance(module, nn.Dropout)]
    assert len(sites) == 2 + 2 * (2 + 2) + 2 * (
        3 + 3
    )  # embeddings; sublayers, attention, feed-forward
    for site in sites:
        site.p = 0.5
        assert fast_loss(model, batch, CRITERION, how)[0] != quiet
        site.p = 0.0


def test_onednn_gives_mkls_numbers_and_gradients():
    torch.manual_seed(5)
    inputs = [torch.randn(*shape, requires_grad=True) for shape in ((37, 24), (40, 24), (40,))]
    results = [function(*inputs) for function in (OneDnnLinear.apply, F.linear)]
    assert_close(*results, rtol=1e-5, atol=1e-5)
    probe = torch.randn_like(results[0])
    found, expected = (torch.autograd.grad((r * probe).sum(), inputs) for r in results)
    assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_layout_keeps_order_and_forgets_no_token():
    real = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1]]).bool()
    layout = Layout(real, packed=True)
    ids = torch.arange(9).view(3, 3)
    assert layout.rows(ids).tolist() == [0, 1, 3, 6, 7, 8]
    assert layout.positions.tolist() == [0, 1, 0, 0, 1, 2]
    bias = layout.bias(torch.float32)
    assert torch.equal(bias == 0, real[:, None, None]) and (bias[bias != 0] == -math.inf).all()
    x = torch.randn(6, 2, dtype=torch.float64, requires_grad=True)
    there = lambda x: layout.gather(layout.spread(x) * 2)  # noqa: E731
    assert_close(there(x), 2 * x)
    assert torch.autograd.gradcheck(there, (x,))


def test_chunked_loss_takes_large_logits_and_confident_mistakes():
    torch.set_default_dtype(torch.float64)
    x, weight, bias = torch.randn(6, 3) * 400, torch.randn(9, 3), torch.randn(9)
    labels = torch.arange(6)
    found = LinearCrossEntropy.apply(x, weight, bias, labels, 0.1, 4, False)
    expected = LabelSmoothing(0.1, padding_idx=-1)(F.linear(x, weight, bias), labels)
    assert all(value.isfinite() for value in found)
    assert_close(found, expected)


def test_varlen_attention_has_no_dropout_still():
    """Why the chapter leaves it: the day this fails, it is worth another look."""
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return  # an older PyTorch has none at all
    varlen = importlib.import_module("torch.nn.attention.varlen")
    assert not any("drop" in name for name in inspect.signature(varlen.varlen_attn).parameters)


# Counting


@pytest.mark.parametrize("shape", [TINY, replace(TINY, N=3, d_ff=48, h=4, norm_first=False)])
@pytest.mark.parametrize("how", [None, PLAIN, replace(FAST, onednn=False), STATIC])
def test_operations_by_hand_are_those_that_pytorch_counts(shape, how):
    model = series_model(shape)
    batch = make_batch([Example([5] * 6 + [EOS], [BOS] + [6] * 4 + [EOS])] * 4)  # no padding
    loss_of = batch_loss if how is None else partial(fast_loss, how=how)
    counted = count_flops(lambda: loss_of(model, batch, CRITERION)[0].backward())
    in_place = 2 * 4 * 5 * shape.d_model * shape.vocab  # the counter doesn't know addmm_
    counted += in_place if how and how.loss == "ours" else 0
    assert counted == step_flops(shape, [(7, 5)] * 4)


def test_least_time_is_that_of_its_slower_roof():
    lengths = [(16, 16)] * 128
    flops, many = step_flops(SMALL, lengths), 1e30
    assert_close(ch07.least_seconds(SMALL, lengths, 1e11, many), flops / 1e11, rtol=1e-6, atol=0.0)
    traffic = 3 * sum(p.bytes for p in forward_products(SMALL, lengths))
    adam = 28 * ch07.parameter_count(SMALL)
    assert_close(
        ch07.least_seconds(SMALL, lengths, many, 1e10), (traffic + adam) / 1e10, rtol=1e-6, atol=0.0
    )


def test_fitted_exponent_is_the_slope():
    values = [1, 3, 9, 27]
    assert math.isclose(ch07.fitted_exponent(values, [5 * v**1.5 for v in values]), 1.5)


# Batches and races


def test_batches_of_each_kind_hold_their_budget():
    pairs = examples(300, 20)
    for kind in ("fixed", "random", "buckets"):
        batches = batches_to_time(kind, pairs, 400, 5)
        assert len(batches) == 5
        for batch in batches:
            made = batch_as(kind, batch)
            width = max(made.src.size(1), made.tgt.size(1))
            assert made.src.numel() <= 400 and made.tgt.numel() <= 400 or len(batch) == 1
            assert width == FIXED_WIDTH if kind == "fixed" else width <= 22
            assert made.ntokens == sum(len(e.tgt) - 1 for e in batch)


def test_a_race_steps_everyone_and_reports(monkeypatch):
    shape = {"N": 1, "d_model": 16, "d_ff": 16, "h": 2, "vocab": 50}
    contenders = {
        "textbook": Contender(shape=shape, batches="fixed"),
        "ours": Contender(shape=shape, how=asdict(FAST), fused_adam=True, keep_memory=True),
        "nn.Transformer": Contender("nn.Transformer", shape=shape),
    }
    options = BenchOptions(rounds=2, count=2, max_tokens=200)
    reports, rates, fed = race(contenders, examples(60, 9), options)
    assert list(reports) == list(contenders) and len(rates) == 2
    for name, report in reports.items():
        assert 0 < report["lowest"] <= report["tokens_per_second"] <= report["highest"]
        assert report["peak_bytes"] > 0 and len(fed[name]) == 2
    assert reports["textbook"]["parameters"] == reports["nn.Transformer"]["parameters"]


THREADS_THAT_COME_AND_GO = """
import resource, threading, torch
from scripts.ch07_going_fast import keep_memory

kept, faults = keep_memory(), []
for _ in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    thread = threading.Thread(target=torch.ones, args=(20_000_000,))  # 80 MB, 19,500 pages
    thread.start()
    thread.join()
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(int(kept), *faults)
"""


def test_memory_is_kept_from_one_thread_to_the_next():
    """The second thread gets the first one's pages: where it has a heap of its own, all are new."""
    command = [sys.executable, "-c", THREADS_THAT_COME_AND_GO]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    kept, first, second = map(int, answer.split())
    assert not kept or second < first / 5


def test_a_dead_contender_is_an_error_and_not_a_hang(tmp_path):
    worker = ch07.Worker(
        Contender(shape={"h": 7}), [examples(2, 3)], tmp_path
    )  # 256 is no multiple
    with pytest.raises((RuntimeError, BrokenPipeError)):
        worker.step(0)
    worker.process.wait()


def test_the_waterfall_changes_one_thing_at_a_time():
    steps, losers = waterfall_contenders()
    flat = [asdict(c) | {"how": None} | (c.how or asdict(PLAIN)) for c in steps.values()]
    for before, after in itertools.pairwise(flat):
        assert sum(before[name] != after[name] for name in before) == 1
    final = flat[-1]
    assert Switches(**list(steps.values())[-1].how) == FAST
    for name, contender in losers.items():
        other = asdict(contender) | {"how": None} | (contender.how or asdict(PLAIN))
        if name != "textbook, torch.compile":
            assert sum(final[key] != other[key] for key in final) == 1, name


@pytest.mark.parametrize(
    "argv", [[], ["peer"], ["peers", "--rounds", "x"], ["steps", "--fast", "1"]]
)
def test_a_mistake_on_the_command_line_gets_one_line(argv, capsys):
    assert ch07.main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1


def test_the_gpu_benchmark_says_what_it_lacks(capsys):
    if torch.cuda.is_available():
        return
    assert ch07.main(["gpu"]) == 2 and "needs a GPU" in capsys.readouterr().err


# Static shapes


def test_static_widths_are_the_best_there_are():
    rng = random.Random(6)
    for shapes in (1, 2, 3):
        some = [Example([EOS] * rng.randint(2, 12), [BOS] * rng.randint(3, 12)) for _ in range(40)]
        sides = [ch07.longer_side(e) for e in some]
        best = min(
            ch07.cells(choice, sides)
            for choice in itertools.combinations(sorted(set(sides)), shapes)
            if choice[-1] == max(sides)
        )
        assert ch07.cells(static_lengths(some, shapes), sides) == best
    assert static_lengths(some[:1], 8) == [ch07.longer_side(some[0])]  # fewer widths than asked for


def test_a_static_plan_has_every_pair_once_in_few_shapes():
    pairs = examples(200, 30)
    widths = static_lengths(pairs, 8)
    plan = static_plan(pairs, widths, 256, random.Random(0))
    assert sorted(i for _, _, indices in plan for i in indices) == list(range(200))
    assert len({(width, size) for width, size, _ in plan}) <= 8
    corpus = ResidentCorpus(pairs, "cpu")
    for width, size, indices in plan:
        batch = corpus.batch(indices, width, size)
        assert batch.src.shape == batch.tgt.shape == batch.tgt_y.shape == (size, width)
        for row, i in enumerate(indices):
            assert [t for t in batch.src[row].tolist() if t != PAD] == pairs[i].src
            assert [t for t in batch.full[row].tolist() if t != PAD] == pairs[i].tgt
        assert (batch.tgt_y[len(indices) :] == PAD).all()  # fillers teach nothing


@pytest.mark.parametrize("precision, tolerance", [("float32", 1e-4), ("bfloat16", 0.02)])
def test_a_static_step_is_the_textbooks_step(precision, tolerance):
    pairs = examples(5, 6)
    twins = [small_model(torch.float32, dropout=0.0) for _ in range(2)]
    optimizers = [torch.optim.SGD(twin.parameters(), lr=0.1) for twin in twins]
    report = run_epoch([make_batch(pairs)], twins[0], CRITERION, optimizers[0], clip=1.0)
    step = StaticStep(twins[1], CRITERION, optimizers[1], 1.0, getattr(torch, precision))
    sums = step(ResidentCorpus(pairs, "cpu").batch(range(5), width=9, size=8))
    assert_close(sums[:2].tolist(), [report.loss, report.nll], rtol=tolerance, atol=0.0)
    assert sums[2] == report.tokens
    for expected, found in zip(twins[0].parameters(), twins[1].parameters(), strict=True):
        assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ch07.gpu_stages())
def test_every_stage_of_the_gpu_benchmark_runs_on_a_cpu_too(name):
    shape = replace(TINY, N=1)
    report = ch07.gpu_stage(
        ch07.gpu_stages()[name], shape, examples(60, 9), 64, 2, torch.device("cpu")
    )
    assert report["seconds_per_step"] > 0 and report["flops_per_second"] > 0


def test_nothing_in_a_static_step_waits_for_the_data():
    """On the meta device numbers don't exist, so a decision that depends on them raises."""
    with torch.device("meta"):
        model = series_model(TINY)
        batch = ch07.Rectangles(torch.ones(4, 6).long(), torch.ones(4, 7).long())
        loss, nll = fast_loss(model, batch, CRITERION, STATIC)
    assert loss.shape == nll.shape == ()
    with torch.device("meta"), pytest.raises((RuntimeError, NotImplementedError)):
        fast_loss(model, batch, CRITERION, FAST)


# The records


def record(name):
    return json.loads((ROOT / "results" / f"speed-{name}.json").read_text("utf-8"))


def rate(record, name):
    return record["reports"][name]["tokens_per_second"]


def test_records_are_of_the_contenders_that_the_chapter_names():
    steps, losers = waterfall_contenders()
    assert record("steps")["contenders"] == {n: asdict(c) for n, c in (steps | losers).items()}
    peers = {n: asdict(c) for n, c in ch07.peer_contenders().items()}
    assert record("peers")["contenders"] == peers
    assert record("base")["shape"] == asdict(BASE) and record("peers")["shape"] == asdict(SMALL)


def test_the_recorded_speed_holds_what_the_chapter_claims():
    peers = record("peers")
    ours, best = rate(peers, "ours, buckets"), max(rate(peers, f"{p}, buckets") for p in PEERS)
    assert ours >= 1.3 * best and ours >= 5 * rate(peers, "textbook, fixed")
    memory = {name: report["peak_bytes"] for name, report in peers["reports"].items()}
    assert memory["ours, buckets"] < min(memory[f"{p}, buckets"] for p in PEERS)
    assert record("base")["reports"]["ours"]["mfu"] >= 0.6


def test_recorded_utilisation_follows_from_operations_and_time():
    base = record("base")
    account = base["account"]
    seconds = base["reports"]["ours"]["seconds_per_step"]
    assert 0.7 < sum(account.values()) / seconds < 1.5  # the profiler's total, in a run of its own
    assert account["matrix products"] > 0.6 * sum(account.values())
