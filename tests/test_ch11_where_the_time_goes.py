"""Chapter 11: its shapes, floors and records; its exercises; its answers on paper."""

import statistics

import pytest
import torch
from exercising import assert_told_apart, rejection
from torch.testing import assert_close

from scripts.book.records import load_record
from scripts.ch06_training import PAD
from scripts.ch11_where_the_time_goes import (
    BASE,
    SMALL,
    Product,
    affine,
    flop_shares,
    forward_products,
    least_seconds,
    parameter_count,
    roof_seconds,
    step_flops,
)
from scripts.core.settings import PRESETS
from scripts.exercises import ch11 as ours
from scripts.exercises.ch11 import PretendDevice, stopwatch, token_rate
from scripts.studies.race_training import AXES, growth_setting

EVEN = [(16, 16)] * 128


def test_the_shapes_are_those_of_chapter_9s_presets():
    """But for `small`'s dropout of 0.2."""
    for name, shape in (("small", SMALL), ("base", BASE)):
        preset = PRESETS[name]
        sizes = preset.layers, preset.d_model, preset.d_ff, preset.heads, preset.vocab
        assert sizes == (shape.N, shape.d_model, shape.d_ff, shape.h, shape.vocab)
        assert preset.norm_first is shape.norm_first and preset.tie == "all"
    assert (PRESETS["small"].dropout, SMALL.dropout) == (0.2, 0.1)


def test_least_time_is_that_of_its_slower_roof():
    assert roof_seconds(100, 10, 50, 10) == 2.0 and roof_seconds(100, 100, 50, 10) == 10.0
    flops, many = step_flops(SMALL, EVEN), 1e30
    assert_close(least_seconds(SMALL, EVEN, 1e11, many), flops / 1e11, rtol=1e-6, atol=0.0)
    traffic = 3 * sum(p.bytes for p in forward_products(SMALL, EVEN))
    adam = 28 * parameter_count(SMALL)
    found = least_seconds(SMALL, EVEN, many, 1e10)
    assert_close(found, (traffic + adam) / 1e10, rtol=1e-6, atol=0.0)


def test_the_shares_of_long_texts_go_to_attention():
    def share(shape, length):
        return flop_shares(shape, [(length, length)])["scores and weights · V"]

    shares = [share(SMALL, 2**n) for n in range(4, 14)]
    assert shares == sorted(shares) and shares[0] < 0.01 and shares[-1] > 0.8
    assert abs(6 * parameter_count(SMALL) * 2048 / step_flops(SMALL, EVEN) - 1) < 0.01  # the rule
    for shape in (SMALL, BASE):  # the chapter's formula
        half = int(14 * shape.d_model / 3 + shape.vocab / (6 * shape.N))
        assert share(shape, half) < 0.5 < share(shape, half + 1)


def test_the_records_floor_and_account_fit_the_chapters_words():
    record = load_record("speed-steps")
    assert record["shape"] == {**vars(SMALL)}
    reports = record["reports"]
    step, floor = reports["textbook, memory kept"]["seconds_per_step"], record["floor_seconds"]
    assert round(step, 2) == 0.65 and round(step / floor, 1) == 3.7
    rate, bandwidth = record["matrix_rate"], record["bandwidth"]
    assert floor < least_seconds(SMALL, EVEN, rate, bandwidth)  # fewer real tokens
    booked = record["accounts"]["textbook"]
    total, adam = sum(booked.values()), 28 * parameter_count(SMALL) / bandwidth
    assert round(total, 2) == 0.70 and booked.pop("our functions in C") == 0
    assert 0 < adam < floor / 20
    gap = total - floor
    assert gap > total / 2  # the chart's title
    booked["products"] = booked.pop("matrix products") + booked.pop("attention's products")
    least = {"products": floor - adam, "Adam and clipping": adam}
    of_gap = {kind: (seconds - least.get(kind, 0)) / gap for kind, seconds in booked.items()}
    largest = sorted(of_gap, key=of_gap.get, reverse=True)[:3]
    assert largest == ["products", "PyTorch's random bits", "sums, relu, dropout's products"]
    assert 0.45 < of_gap["products"] < 0.5
    assert 0.32 < of_gap["PyTorch's random bits"] + of_gap["sums, relu, dropout's products"] < 0.35


def test_the_records_operations_fit_the_chapters_words():
    record = load_record("speed-steps")
    rate, bandwidth = record["matrix_rate"], record["bandwidth"]
    operations = {o["operation"]: o for o in record["operations"]}
    of_roof = {
        name: roof_seconds(o["flops"], o["bytes"], rate, bandwidth) / o["seconds"]
        for name, o in operations.items()
    }
    large = {"Q, K, V", "feed-forward, out", "feed-forward, back"}
    assert all(0.4 < of_roof[name] < 0.5 for name in large) and round(of_roof["logits"], 2) == 0.31
    assert all(0.3 < of_roof[name] < 0.6 for name in large | {"logits", "scores"})
    assert {name for name, share in of_roof.items() if share > 1} == {"Adam", "residual sum"}
    of_sum = operations["residual sum"]
    for name in ("LayerNorm", "softmax of scores", "scores"):
        assert operations[name]["bytes"] < of_sum["bytes"]
        assert 3 <= round(operations[name]["seconds"] / of_sum["seconds"]) <= 5
    assert round(of_roof["dropout"], 2) == 0.03 and round(of_roof["cross-entropy"], 2) == 0.05


def test_growth_varies_one_axis_at_a_time():
    middle = (SMALL, 64, 32)
    assert growth_setting("length", 32) == growth_setting("depth", 3) == middle
    for axis, values in AXES.items():
        for value in values:
            shape, sentences, length = growth_setting(axis, value)
            assert sentences * length == (value if axis == "tokens" else 2048)
            assert shape.d_ff == 4 * shape.d_model
    points = load_record("speed-growth")["points"]
    assert {(p["axis"], p["value"]) for p in points} == {(a, v) for a in AXES for v in AXES[a]}
    for point in points:
        shape, sentences, length = growth_setting(point["axis"], point["value"])
        assert point["flops"] == step_flops(shape, [(length, length)] * sentences)


@pytest.mark.parametrize("onednn", [False, True])
def test_affine_is_linear(onednn):
    torch.manual_seed(0)
    x, weight, bias = torch.randn(5, 3), torch.randn(4, 3), torch.randn(4)
    for b in (bias, None):
        expected = torch.nn.functional.linear(x, weight, b)
        assert_close(affine(x, weight, b, onednn), expected)


def test_the_answers_on_paper():
    """Exercise 3: the figures in its folded answer."""
    rate, bandwidth = 60e12, 3e12
    assert rate / bandwidth == 20
    weights = parameter_count(BASE)
    assert round(weights / 1e6, 1) == 48.3
    flops, adam = 6 * weights * 2048 / rate, 28 * weights / bandwidth
    assert (round(1e3 * flops, 1), round(1e3 * adam, 1)) == (9.9, 0.5)
    assert round(1e3 * (flops + adam), 1) == 10.4
    assert round(1e3 * least_seconds(BASE, EVEN, rate, bandwidth), 1) == 10.7
    limited = {p.kind for p in forward_products(BASE, EVEN) if p.flops / p.bytes < 20}
    assert limited == {"scores and weights · V"}

    def intensity(n):
        product = Product("", 1, n, 512, 2048)
        return product.flops / product.bytes

    assert round(intensity(1), 1) == 0.5
    assert round(intensity(1) * bandwidth / rate, 3) == 0.025
    assert intensity(44) < 20 < intensity(45)


# Exercises: the likeliest mistakes


def padded_rate(batches, seconds):
    return sum(batch.tgt_y.numel() for batch in batches) / sum(seconds)


def mean_of_rates(batches, seconds):
    rates = [token_rate([b], [s]) for b, s in zip(batches, seconds, strict=True)]
    return statistics.mean(rates)


def inputs_rate(batches, seconds):
    return sum(int((b.tgt != PAD).sum()) for b in batches) / sum(seconds)


def sentences_rate(batches, seconds):
    return sum(len(b.src) for b in batches) / sum(seconds)


def impatient_stopwatch(work, wait, clock, rounds):
    """Reads the clock while the device is still at work."""
    return stopwatch(work, lambda: None, clock, rounds)


def rounds_of(work, wait, clock, rounds):
    times = []
    for _ in range(rounds):
        wait()
        start = clock()
        work()
        wait()
        times.append(clock() - start)
    return times


def cold_stopwatch(work, wait, clock, rounds):
    return statistics.median(rounds_of(work, wait, clock, rounds))


def counting_the_first(work, wait, clock, rounds):
    return statistics.mean(rounds_of(work, wait, clock, rounds + 1))


def hasty_stopwatch(work, wait, clock, rounds):
    """The first call isn't timed, but still runs when the clock starts."""
    work()
    start = clock()
    work()
    wait()
    return statistics.median([clock() - start, *rounds_of(work, wait, clock, rounds - 1)])


def warmed_up(choose):
    def stopwatch(work, wait, clock, rounds):
        work()
        return choose(rounds_of(work, wait, clock, rounds))

    return stopwatch


WRONG = {
    "token_rate": {
        "it would be 91.0": padded_rate,
        "it would be 73.6": mean_of_rates,
        "it would be 68.0": inputs_rate,
        "it would be 9.0": sentences_rate,
    },
    "stopwatch": {
        "You timed only the order": impatient_stopwatch,
        "The first call is in your time": cold_stopwatch,
        "before you start: 0.25 s, but you get 5.25": hasty_stopwatch,
        "seconds: 0.5 s, but you get 2.10": warmed_up(statistics.mean),
        "seconds: 0.5 s, but you get 0.25": warmed_up(min),
        "middle two's mean: 0.75 s, but you get 1.00": warmed_up(lambda t: sorted(t)[len(t) // 2]),
        "middle two's mean: 0.75 s, but you get 0.50": warmed_up(statistics.median_low),
        "seconds: 0.5 s, but you get 0.55": warmed_up(lambda t: 1.1 * statistics.median(t)),
    },
}


@pytest.mark.parametrize("name", WRONG)
def test_each_mistake_has_a_message_of_its_own(name):
    assert_told_apart(getattr(ours, f"check_{name}"), WRONG[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_our_solutions_and_other_right_answers_pass(dtype):
    def with_three_warm_ups(work, wait, clock, rounds):
        for _ in range(3):
            work()
            wait()
        return statistics.median(rounds_of(work, wait, clock, rounds))

    torch.set_default_dtype(dtype)
    ours.check_token_rate(token_rate)
    ours.check_token_rate(lambda b, s: sum(x.ntokens for x in b) / sum(s))
    ours.check_stopwatch(stopwatch)
    ours.check_stopwatch(with_three_warm_ups)
    assert "The first call" in rejection(ours.check_stopwatch, counting_the_first)


def test_the_pretend_device_keeps_time():
    device = PretendDevice(1.0, 0.5)
    device.work()
    assert device.clock() == device.launch  # giving an order takes no time to speak of
    device.wait()
    assert device.clock() == device.launch + 1.0
    device.work()
    device.wait()
    assert device.clock() == 2 * device.launch + 1.5
