"""Chapter 12: what it says of the records, and how sure it is."""

import itertools
import os
import random
from functools import partial

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from scripts.bench.accounts import kind_of
from scripts.bench.training import KINDS, BenchOptions, batches_to_time
from scripts.book.records import load_record
from scripts.ch06_training import PAD, LabelSmoothing
from scripts.ch07_multi30k import make_batch
from scripts.ch11_where_the_time_goes import SMALL
from scripts.ch12_going_fast import LinearCrossEntropy, how_sure
from scripts.engine.fast import FAST, Switches, rows_pay

STEPS = load_record("speed-steps")


@pytest.mark.parametrize(
    "rounds, control, told",
    [
        ([1.2, 1.3, 1.25], [0.9, 1.0, 1.1], "clear"),
        ([0.7, 0.8, 0.85], [0.9, 1.0, 1.1], "clear"),
        ([1.05, 1.3, 1.25], [0.9, 1.0, 1.1], "likely"),
        ([0.95, 0.7, 0.8], [0.9, 1.0, 1.1], "likely"),
        ([0.99, 1.3, 1.25], [0.9, 1.0, 1.1], "can't tell"),
        ([1.0, 1.3, 1.25], [0.9, 1.0, 1.1], "can't tell"),
        ([1.1, 1.3, 1.25], [0.9, 1.0, 1.1], "likely"),  # touches the control
    ],
)
def test_a_line_is_as_sure_as_its_weakest_round(rounds, control, told):
    for order in (rounds, rounds[::-1]):
        assert how_sure(order, control) == told


def test_equal_programs_are_clear_as_seldom_as_is_said():
    """Twice in C(10, 5): once every round above, once every round below."""
    rng = random.Random(0)
    draws = [[rng.random() for _ in range(10)] for _ in range(40_000)]
    share = sum(how_sure(d[:5], d[5:]) == "clear" for d in draws) / len(draws)
    assert abs(share - 1 / 126) < 5 * (1 / 126 / len(draws)) ** 0.5


def test_the_control_differs_from_ours_in_rows_alone():
    for contenders in (STEPS["contenders"], STEPS["half"]["contenders"]):
        ours, control = contenders["ours"], contenders["without rows"]
        assert control == ours | {"how": ours["how"] | {"packed": False}}


@pytest.mark.skipif(not os.environ.get("MULTI30K_DIR"), reason="needs Multi30k at hand")
def test_in_the_recorded_batches_rows_do_not_pay():
    """So both programs of the control ran the same code."""
    options = BenchOptions("steps", "multi30k", STEPS["rounds"], STEPS["count"])
    assert (options.max_tokens, SMALL.vocab) == (STEPS["max_tokens"], STEPS["shape"]["vocab"])
    for batch in batches_to_time("buckets", options):
        made = make_batch(batch)
        assert not rows_pay(made.src != PAD) and not rows_pay(made.tgt_y != PAD)
    assert Switches() == FAST and FAST.packed


def test_a_function_is_not_told_of_no_grad():
    """Why the caller says whether gradients are wanted. If this fails, PyTorch has learned it."""

    class Asked(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            asked.append((ctx.needs_input_grad, torch.is_grad_enabled()))
            return x.clone()

    asked = []
    with torch.no_grad():
        Asked.apply(torch.ones(2, requires_grad=True))
    assert asked == [((True,), False)]


@pytest.mark.parametrize("kind", [torch.float64, torch.float32])
def test_the_chunked_loss_is_the_same_whether_gradients_are_wanted(kind):
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(*s, dtype=kind) for s in ((9, 4), (11, 4), (11,)))
    labels = torch.arange(9)
    losses = [
        LinearCrossEntropy.apply(x, weight, bias, labels, 0.1, 4, False, wanted)
        for wanted in (True, False)
    ]
    assert all(a.equal(b) for a, b in zip(*losses, strict=True))


def peak_bytes(function):
    """The most bytes that `function()` holds at once, beside what there was before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    events = profiler.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return max(itertools.accumulate(size for _, size in changes))


def test_the_textbooks_loss_holds_five_tensors_as_large_as_the_logits_and_ours_two_chunks():
    rows, V, chunk, kind = 512, 2048, 128, torch.float32
    x, weight, bias = (
        torch.randn(*shape, dtype=kind, requires_grad=True) for shape in ((rows, 8), (V, 8), (V,))
    )
    labels, textbook = torch.arange(1, rows + 1), LabelSmoothing(0.1)
    ours = partial(LinearCrossEntropy.apply, x, weight, bias, labels, 0.1, chunk, False, True)
    losses = {
        5 * rows: lambda: textbook(torch.nn.functional.linear(x, weight, bias), labels)[0],
        2 * chunk: lambda: ours()[0],
    }
    for held, loss in losses.items():
        assert held <= peak_bytes(lambda: loss().backward()) / (4 * V) < held + chunk / 2  # noqa: B023


def test_the_account_books_the_loss_and_the_textbooks_layernorm_among_sums():
    for operation in ("sub", "mul", "div", "add_"):
        assert kind_of(f"aten::{operation}", KINDS) == "sums, relu, dropout's products"
    assert kind_of("aten::var_mean", KINDS) == "LayerNorm"


def test_the_records_fit_the_chapters_words():
    told = []
    for reports in (STEPS["reports"], STEPS["half"]["reports"]):
        duels = {name: one for name, one in reports.items() if name.startswith("without ")}
        control = duels.pop("without rows")["rounds"]
        sure = {name: how_sure(one["rounds"], control) for name, one in duels.items()}
        best = max(duels, key=lambda name: duels[name]["times"])  # noqa: B023
        assert best == "without dropout from 16 bits" and sure[best] == "clear"
        told += sure.values()
    assert [told.count(word) for word in ("clear", "likely", "can't tell")] == [5, 5, 6]
    before, after, half = (STEPS["accounts"][name] for name in ("textbook", "float32", "bf16"))
    products = "matrix products"
    assert abs(after[products] / before[products] - 1) < 0.05
    assert 0.2 < half[products] / after[products] < 0.3
    assert half["copies"] + half["Python, autograd, our random bits"] > half[products]
    times = {name: report["times"] for name, report in STEPS["reports"].items()}
    padding = times["textbook, padded to 72"] / times["textbook"]
    peers = load_record("speed-peers")["reports"]
    assert 4.5 < padding < 5.5 and padding > peers["textbook, float32"]["times"]
    assert peers["ours, bf16"]["peak_bytes"] < min(
        peers[name]["peak_bytes"] for name in peers if not name.startswith("ours")
    )


def test_the_two_precisions_learn_what_the_chapter_says():
    runs = load_record("precision-multi30k")["runs"]
    losses = [run["history"][-1]["val_loss"] for run in runs.values()]
    assert abs(losses[0] - losses[1]) < 0.005
    bleu = {name: run["chosen_by_val_bleu"]["best epoch"] for name, run in runs.items()}
    assert round(bleu["float32"] - bleu["bf16"], 1) == 0.9
