"""The waterfall on a GPU, as far as a CPU can tell: the same pairs, in turns, one change a stage.

`Recorded` stands in for a recording. Where a GPU is needed, `pretend_gpu` says the CPU is one.
"""

import math
import statistics
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from test_steps_agree import Recorded
from torch.testing import assert_close

from scripts.bench import gpu
from scripts.bench.gpu import OF_A_GPU, STAGES, Racer, Task
from scripts.ch06_training import PAD
from scripts.ch11_where_the_time_goes import step_flops
from scripts.ladder.agenda import Settings

TINY = Settings("cpu", tiny=True)


@pytest.fixture(autouse=True)
def graphed(monkeypatch):
    """The last stage runs here, too."""
    monkeypatch.setitem(gpu.KINDS, "graphed", Recorded)


@pytest.fixture(scope="module")
def task() -> Task:
    """A tiny task."""
    return Task("small", TINY)


@pytest.fixture
def plain(monkeypatch, task) -> Task:
    """The tiny task without dropout: then all stages learn the same."""
    monkeypatch.setattr(task, "shape", gpu.replace(task.shape, dropout=0.0))
    return task


# The stages


def test_a_stage_has_one_thing_more_than_the_one_before():
    changes = [{"precision"}, {"path", "fused"}, {"step"}, {"step"}]
    stages = [vars(stage) for stage in STAGES.values()]
    for less, more, wanted in zip(stages, stages[1:], changes, strict=False):
        assert {name for name in less if less[name] != more[name]} == wanted
    assert [stage["step"] for stage in stages] == ["eager"] * 3 + ["static", "graphed"]


def test_every_stage_trains_on_the_same_pairs(monkeypatch, task):
    seen = Counter()

    def noting(config, *given, own=gpu.loss_function_of, **named):
        loss_of = own(config, *given, **named)

        def noted(model, batch, criterion):
            for source, target in zip(batch.src.tolist(), batch.tgt_y.tolist(), strict=True):
                seen[tuple(tuple(t for t in side if t != PAD) for side in (source, target))] += 1
            return loss_of(model, batch, criterion)

        return noted

    monkeypatch.setattr(gpu, "loss_function_of", noting)
    pairs = [task.examples[i] for (batch,) in task.plan for i in batch]
    wanted = Counter((tuple(pair.src), tuple(pair.tgt[1:])) for pair in pairs)
    for name, stage in STAGES.items():
        racer = Racer(stage, task)  # a recording runs warm-ups
        seen.clear()
        racer.lap()
        real = Counter({pair: times for pair, times in seen.items() if pair[1]})  # not the filler
        assert real == wanted, name
        assert sum(times * len(pair[1]) for pair, times in real.items()) == sum(task.labels)


def test_all_stages_learn_the_same(plain):
    """The same weights at first, the same Adam at the same rate."""
    wanted = Racer(STAGES["textbook, float32"], plain)
    losses = [wanted.loss]
    wanted.lap()
    losses.append(wanted.loss)
    assert losses[1] < losses[0]
    for name, stage in STAGES.items():
        assert_close(Racer(stage, plain).loss, losses[0], rtol=1e-2, atol=0.0, msg=name)
        racer = Racer(gpu.replace(stage, precision="float32"), plain)
        assert_close(racer.loss, losses[0], rtol=1e-5, atol=0.0, msg=name)
        racer.lap()
        assert_close(racer.loss, losses[1], rtol=1e-5, atol=0.0, msg=name)


def test_the_textbooks_adam_is_not_fused_and_the_last_stages_is(task):
    """And the textbook's is the fastest of those that wait: a GPU's default."""
    for stage in STAGES.values():
        racer = Racer(stage, task)
        (group,) = racer.optimizer.param_groups
        assert bool(group["fused"]) is (stage.path == "fast")
        assert bool(group["foreach"]) is (stage.path == "textbook")
        assert (group["betas"], group["eps"], group["amsgrad"]) == ((0.9, 0.98), 1e-9, False)
        assert group["lr"] == gpu.RATE * group["initial_lr"] == gpu.RATE


def test_only_the_first_stages_wait_for_every_step():
    """`asks` depends on the device and the optimizer: here, those that a GPU would have."""
    for name, stage in STAGES.items():
        with torch.device("meta"):  # not a CPU
            model = torch.nn.Linear(2, 2)
        take = gpu.KINDS["eager"](model, None, gpu.adam_of(stage, model), None)
        assert take.asks is (stage.path == "textbook"), name


def test_a_loss_that_is_not_finite_ends_the_race(task):
    for stage in STAGES.values():
        racer = Racer(stage, task)
        with torch.no_grad():
            next(racer.model.parameters()).fill_(math.nan)
        with pytest.raises(FloatingPointError):
            racer.lap()


def test_useful_operations_are_those_of_real_tokens(task):
    pairs = [[task.examples[i] for i in batch] for (batch,) in task.plan]
    wanted = [step_flops(task.shape, [(len(e.src), len(e.tgt) - 1) for e in b]) for b in pairs]
    assert sum(wanted) == task.flops


# The race


def test_a_lap_ends_when_the_device_is_done(monkeypatch, task):
    """On a device with its own clock: queued work takes its time when it is waited for."""
    racer, queue, now = Racer(STAGES["recorded"], task), [], [0.0]
    look = racer.take.look

    def wait():
        now[0] += sum(queue)
        return look()

    monkeypatch.setattr(gpu, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(racer.take, "look", wait)
    monkeypatch.setattr(racer.take, "run", lambda *_: queue.append(10.0) or torch.ones(3))
    racer.take.recorded.clear()
    racer.lap()
    assert racer.seconds[-1] == 10.0 * len(queue) > 0


def test_ratios_are_of_the_same_round(monkeypatch, task):
    slow, reference = (
        SimpleNamespace(seconds=[99.0, *seconds], task=task, loss=1.0, peak_bytes=0)
        for seconds in ([2.0, 6.0, 9.0], [1.0, 2.0, 9.0])
    )
    monkeypatch.setattr(gpu, "ROUNDS", 3)
    found = gpu.report(slow, reference, 1e9)  # 6 / 2, the ratio of the medians, would be 3
    assert found["times"] == 2.0 and found["rounds"] == [2, 3, 1] and "peak_bytes" not in found
    found = gpu.report(reference, reference, 1e9)
    assert found["rounds"] == [1.0] * 3
    assert found["seconds_per_step"] == 2.0 / len(task.plan)


# The record


def test_the_tiny_waterfall_runs_on_a_cpu_and_names_what_it_lacks():
    record = gpu.waterfall("small", TINY)
    assert record["not_run"] == [*OF_A_GPU] == ["recorded", "peak_bytes"]
    assert list(record["stages"]) == [name for name in STAGES if name != "recorded"]
    assert record["reference"] == "few shapes, corpus on the device"
    assert record["shape"]["N"] == 1 and record["count"] == 2
    for report in record["stages"].values():
        assert len(report["rounds"]) == gpu.ROUNDS
        assert report["times"] == statistics.median(report["rounds"])
        wanted = record["useful"] / report["seconds_per_step"] / record["matrix_rate"]
        assert_close(report["mfu"], wanted, rtol=1e-2, atol=1e-4)
        assert 0 < report["loss"] < 1.5 * math.log(300)
    assert record["stages"][record["reference"]]["times"] == 1.0


@pytest.fixture
def pretend_gpu(monkeypatch, task):
    """A device that is called a GPU, and whose work the CPU does; gives what it was told."""
    told = []

    class Device:
        type = "cuda"

    def cpu_task(size, settings):
        return SimpleNamespace(**vars(task) | {"device": Device})

    class OnCpu(Racer):
        def __init__(self, stage, given):
            told.append("racer")
            super().__init__(stage, task)
            self.task = given

    monkeypatch.setattr(gpu, "product_rate", lambda device: 2e9)
    monkeypatch.setattr(gpu, "Task", cpu_task)
    monkeypatch.setattr(gpu, "Racer", OnCpu)
    return told


def test_on_a_gpu_every_stage_is_run(pretend_gpu):
    record = gpu.waterfall("small", TINY)
    assert pretend_gpu.count("racer") == len(STAGES)
    assert list(record["stages"]) == list(STAGES) and record["not_run"] == []
    assert record["reference"] == "recorded"
    assert all(report["peak_bytes"] == 0 for report in record["stages"].values())


def test_the_peak_is_of_the_racer_alone(monkeypatch, task):
    """With a GPU's counters, read before the racer is made and after its first lap."""
    told = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: told.append("reset"))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: told.append("before") or 100)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: told.append("after") or 350)
    monkeypatch.setattr(Racer, "lap", lambda racer: told.append("lap"))
    racer = Racer(STAGES["bf16"], task)
    assert racer.peak_bytes == 250 and told == ["before", "lap", "after"]
