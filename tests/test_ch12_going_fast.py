"""Chapter 12: how sure a duel is, what the loss in chunks holds, and the figures of its prose."""

import itertools
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from scripts.book.records import load_record
from scripts.ch06_training import LabelSmoothing
from scripts.ch12_going_fast import AttentionCore, LinearCrossEntropy, how_sure, keep_scale

STEPS, PEERS = load_record("speed-steps"), load_record("speed-peers")


@pytest.mark.parametrize(
    ("rounds", "verdict"),
    [
        ([1.2, 1.3, 1.25], "clear"),
        ([0.7, 0.8, 0.85], "clear"),
        ([1.1, 1.3, 1.25], "likely"),  # touches the control
        ([0.95, 0.7, 0.8], "likely"),
        ([1.0, 1.3, 1.25], "can't tell"),
    ],
)
def test_a_line_is_as_sure_as_its_weakest_round(rounds, verdict):
    for order in (rounds, rounds[::-1]):
        assert how_sure(order, [0.9, 1.0, 1.1]) == verdict


def test_equal_programs_are_clear_as_seldom_as_is_said():
    """In 2 of C(10, 5) cases: every round above, or every round below."""
    ranks = set(range(10))
    halves = [(rounds, ranks - set(rounds)) for rounds in itertools.combinations(ranks, 5)]
    assert len(halves) == 252
    assert sum(how_sure(*half) == "clear" for half in halves) == 2


@pytest.mark.parametrize("size", [1, 400])
def test_the_loss_in_chunks_is_the_textbooks_whether_gradients_are_wanted_or_not(size):
    """For large logits and confident mistakes, too."""
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(*s, dtype=torch.float64) for s in ((9, 4), (11, 4), (11,)))
    x, labels = size * x, torch.arange(9)
    expected = LabelSmoothing(0.1, padding_idx=-1)(F.linear(x, weight, bias), labels)
    for wanted in (True, False):
        found = LinearCrossEntropy.apply(x, weight, bias, labels, 0.1, 4, False, wanted)
        torch.testing.assert_close(found, expected)


def test_attentions_dropout_takes_weights_and_not_outputs():
    """If V is the identity, the output is the dropped weights: 0, or the weight over 1 − p."""
    torch.manual_seed(3)
    q, k = torch.randn(2, 50, 2, 16, 8, dtype=torch.float64)
    v = torch.eye(16, dtype=torch.float64).expand(50, 2, 16, 16)
    plain, dropped = (AttentionCore.apply(q, k, v, None, p) for p in (0.0, 0.25))
    stays = dropped != 0
    torch.testing.assert_close(dropped[stays], (plain * keep_scale(0.25))[stays])
    assert abs(stays.double().mean() - 0.75) < 5 * math.sqrt(0.25 * 0.75 / stays.numel())


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
        5 * rows: lambda: textbook(F.linear(x, weight, bias), labels)[0],
        2 * chunk: lambda: ours()[0],
    }
    for held, loss in losses.items():
        assert held <= peak_bytes(lambda: loss().backward()) / (4 * V) < held + chunk / 2  # noqa: B023


def test_the_duels_fit_the_chapters_words():
    verdicts, both = [], (STEPS["reports"], STEPS["half"]["reports"])
    for reports in both:
        duels = {name: duel for name, duel in reports.items() if name.startswith("without ")}
        control = reports["ours again"]["rounds"]
        verdicts += [how_sure(duel["rounds"], control) for duel in duels.values()]
    assert [verdicts.count(word) for word in ("clear", "likely", "can't tell")] == [15, 2, 3]
    wide, half = both
    more = {n for n in half if min(half[n]["rounds"] or [0]) > max(wide[n]["rounds"] or [9])}
    parts = {"LayerNorm in one kernel", "attention by hand", "loss in chunks"}
    parts |= {"dropout from 16 bits", "small things in C"}
    assert more == {f"without {part}" for part in parts}
    assert round(wide["without oneDNN's products"]["times"], 1) == 1.4
    padding = wide["textbook, padded to 72"]["times"] / wide["textbook"]["times"]
    assert 4.5 < padding < 5.5 and round(wide["textbook"]["times"], 1) == 2.2
    assert round(PEERS["reports"]["textbook, float32"]["times"], 1) == 4.7


def test_the_account_fits_the_chapters_words():
    accounts, alone = STEPS["accounts"], {o["operation"]: o["seconds"] for o in STEPS["operations"]}
    total = {name: sum(account.values()) for name, account in accounts.items()}
    products = {
        name: account["matrix products"] + account["attention's products"]
        for name, account in accounts.items()
    }
    rest = {name: round(1000 * (total[name] - products[name])) for name in total}
    assert rest == {"textbook": 278, "float32": 90, "bf16": 72}
    assert round(1000 * accounts["float32"]["our functions in C"]) == 36
    assert 0.72 < products["float32"] / total["float32"] < 0.78
    assert 1 / 3 < products["bf16"] / products["float32"] < 0.4
    step, floor = STEPS["reports"]["ours"]["seconds_per_step"], STEPS["floor_seconds"]
    assert (round(step, 2), round(step / floor, 1)) == (0.33, 1.9)
    assert 1.7 < alone["dropout"] / alone["feed-forward, out"] < 2  # "nearly twice as long"


def test_two_precisions_and_a_gpu_fit_the_chapters_words():
    pairs = [
        load_record(name)["runs"] for name in ("precision-multi30k-earlier", "precision-multi30k")
    ]
    for (wide, half), gap in zip((pair.values() for pair in pairs), (0.9, 0.05), strict=True):
        losses = [run["history"][-1]["val_loss"] for run in (wide, half)]
        bleu = [run["chosen_by_val_bleu"]["best epoch"] for run in (wide, half)]
        assert abs(losses[0] - losses[1]) < 0.005 and abs(bleu[0] - bleu[1] - gap) < 0.05
        assert all(
            half["test"][s]["bleu"] < test["bleu"] + 0.05 for s, test in wide["test"].items()
        )
    textbook, half, *_, static, recorded = load_record("gpu-waterfall-small")["stages"].values()
    assert half["times"] > textbook["times"] and round(static["times"]) == 9
    assert recorded["mfu"] == 0.025 and recorded["times"] == 1
