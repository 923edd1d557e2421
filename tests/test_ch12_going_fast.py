"""Chapter 12: what it says about the records, and how sure it is."""

import itertools
from functools import partial

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from scripts.book.records import load_record
from scripts.ch06_training import LabelSmoothing
from scripts.ch12_going_fast import LinearCrossEntropy, how_sure
from scripts.studies.race_training import KINDS, kind_of

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
    """In 2 of C(10, 5) cases: every round above, or every round below."""
    ranks = set(range(10))
    halves = [(ours, ranks - set(ours)) for ours in itertools.combinations(ranks, 5)]
    assert len(halves) == 252 == 2 * 126
    assert sum(how_sure(*half) == "clear" for half in halves) == 2


def test_the_control_is_ours_again():
    for contenders in (STEPS["contenders"], STEPS["half"]["contenders"]):
        assert contenders["ours again"] == contenders["ours"]


def test_a_function_is_not_told_of_no_grad():
    """Why the caller says whether gradients are wanted. If this fails, PyTorch now tells it."""

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
    """The most bytes that `function()` holds at once, besides what there was before."""
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


def test_the_record_of_the_steps_fits_the_chapters_words():
    told, worth = [], []
    for reports in (STEPS["reports"], STEPS["half"]["reports"]):
        duels = {name: one for name, one in reports.items() if name.startswith("without ")}
        control = reports["ours again"]["rounds"]
        sure = {name: how_sure(one["rounds"], control) for name, one in duels.items()}
        told += sure.values()
        worth.append({name.removeprefix("without "): one["times"] for name, one in duels.items()})
        joint = duels["without joint projections"]["rounds"]
        assert sure["without joint projections"] != "clear" and abs(sum(joint) / 5 - 1) < 0.02
    assert [told.count(word) for word in ("clear", "likely", "can't tell")] == [15, 2, 3]
    assert max(STEPS["half"]["reports"]["ours again"]["rounds"]) < 1
    wide, half = STEPS["reports"], STEPS["half"]["reports"]
    more = {
        name for name in half if min(half[name]["rounds"] or [0]) > max(wide[name]["rounds"] or [9])
    }
    assert more == {
        "without LayerNorm in one kernel",
        "without attention by hand",
        "without loss in chunks",
        "without dropout from 16 bits",
        "without small things in C",
    }
    assert round(worth[0]["oneDNN's products"], 1) == 1.4
    times = {name: report["times"] for name, report in STEPS["reports"].items()}
    padding = times["textbook, padded to 72"] / times["textbook"]
    peers = load_record("speed-peers")["reports"]
    assert 4.5 < padding < 5.5 and round(times["textbook"], 1) == 2.2
    assert round(peers["textbook, float32"]["times"], 1) == 4.7
    assert peers["ours, bf16"]["peak_bytes"] < min(
        peers[name]["peak_bytes"] for name in peers if not name.startswith("ours")
    )


def test_the_account_fits_the_chapters_words():
    accounts = STEPS["accounts"]
    kinds = ("matrix products", "attention's products")
    products = {name: sum(one[kind] for kind in kinds) for name, one in accounts.items()}
    around = {
        name: round(1000 * (sum(accounts[name].values()) - products[name])) for name in products
    }
    assert 0.72 < products["float32"] / sum(accounts["float32"].values()) < 0.78
    assert products["bf16"] / sum(accounts["bf16"].values()) > 0.5
    assert 1 / 3 < products["bf16"] / products["float32"] < 0.4
    assert (around["textbook"], around["float32"], around["bf16"]) == (278, 90, 72)
    step, floor = STEPS["reports"]["ours"]["seconds_per_step"], STEPS["floor_seconds"]
    assert (round(step, 2), round(step / floor, 1)) == (0.33, 1.9)
    alone = {one["operation"]: one["seconds"] for one in STEPS["operations"]}
    assert 1.7 < alone["dropout"] / alone["feed-forward, out"] < 2  # "nearly twice as long"
    assert round(1000 * accounts["float32"]["our functions in C"]) == 36
    peers = load_record("speed-peers")
    gain = peers["matrix_rate_bf16"] / peers["matrix_rate"]
    assert 1.9 < gain < 2.2
    share = products["float32"] / sum(accounts["float32"].values())
    assert min(peers["reports"]["ours, float32"]["rounds"]) > 1 / (1 - share + share / gain)
    shrunk = products["bf16"] / products["float32"]
    assert round(1 / (1 - share + share * shrunk), 1) == 1.9
    sizes = {name: one["parameters"] for name, one in peers["reports"].items()}
    for name in ("MarianMTModel", "x-transformers"):
        assert 1.013 < sizes[f"{name}, bf16"] / sizes["ours, bf16"] < 1.017


def test_the_two_precisions_learn_what_the_chapter_says():
    pair = load_record("precision-multi30k")
    assert pair["times_as_fast"]["seconds"] >= 1.6
    wide, half = pair["runs"].values()
    losses = [run["history"][-1]["val_loss"] for run in (wide, half)]
    assert round(abs(losses[0] - losses[1]), 3) == 0.002
    bleu = [run["chosen_by_val_bleu"]["best epoch"] for run in (wide, half)]
    assert abs(bleu[0] - bleu[1]) < 0.1
    apart = [test["bleu"] - half["test"][split]["bleu"] for split, test in wide["test"].items()]
    assert round(bleu[0] - bleu[1], 2) == 0.05 and round(max(apart), 2) == 0.35 > min(apart) > 0.05
    assert round(pair["times_as_fast"]["seconds"], 2) == 1.65
    before = load_record("precision-multi30k-earlier")["runs"]
    vals = [run["chosen_by_val_bleu"]["best epoch"] for run in before.values()]
    losses = [run["history"][-1]["val_loss"] for run in before.values()]
    assert round(vals[0] - vals[1], 1) == 0.9 and abs(losses[0] - losses[1]) < 0.005
    wide, half = (run["test"] for run in before.values())
    apart = [round(wide[split]["bleu"] - half[split]["bleu"], 1) for split in wide]
    assert (min(apart), max(apart)) == (0, 0.4)


def test_what_the_chapter_says_of_a_gpu():
    textbook, half, *_, static, recorded = load_record("gpu-waterfall-small")["stages"].values()
    assert half["times"] > textbook["times"] and round(static["times"]) == 9
    assert recorded["mfu"] == 0.025 and recorded["times"] == 1
