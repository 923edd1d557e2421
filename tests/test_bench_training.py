"""Races of training steps: all get the same batches, are paired round by round, and recorded."""

import time
from dataclasses import asdict, replace

import pytest
import torch
from tiny import example_batch
from torch.testing import assert_close

from scripts.bench import training
from scripts.bench.accounts import account
from scripts.bench.peers import PEERS, TorchTransformer, peer_loss
from scripts.bench.training import (
    OURS,
    OURS_HALF,
    WITHOUT,
    BenchOptions,
    Contender,
    Worker,
    batch_as,
    batches_to_time,
    lengths_of,
    peer_contenders,
    race,
    step_contenders,
)
from scripts.book.records import load_record
from scripts.ch04_encoder_decoder import to_torch_transformer
from scripts.ch06_training import BOS, EOS, LabelSmoothing
from scripts.ch07_multi30k import FIXED_WIDTH, Example
from scripts.ch11_where_the_time_goes import BASE, SMALL, TINY, series_model
from scripts.fast import passes
from scripts.fast.fast import fast_loss

SHAPE = {"N": 1, "d_model": 16, "d_ff": 16, "h": 2, "vocab": 1000}


@pytest.fixture
def rates(monkeypatch):
    """A machine that multiplies 16 bits: its matrix rates, without measuring."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    known = {torch.float32: 1e9, torch.bfloat16: 5e9}
    monkeypatch.setattr(training, "matrix_rate", lambda kind=torch.float32: known[kind])


def test_pytorchs_transformer_with_our_weights_has_our_loss():
    """Otherwise the race would be against something else."""
    torch.manual_seed(7)
    model = series_model(replace(TINY, norm_first=True)).double().eval()
    peer = TorchTransformer(replace(TINY, norm_first=True)).double().eval()
    peer.embed[0].lut.weight.data.copy_(model.tgt_embed[0].lut.weight)
    peer.generator.bias.data.copy_(model.generator.proj.bias)
    peer.body.load_state_dict(to_torch_transformer(model).double().state_dict())
    given = example_batch(TINY.vocab), LabelSmoothing(0.1)
    assert_close(peer_loss(peer, *given)[0], fast_loss(model, *given)[0])


def test_batches_of_each_kind_hold_their_budget():
    for kind in ("fixed", "buckets"):
        batches = batches_to_time(kind, BenchOptions(corpus="sample", max_tokens=400, count=5))
        assert len(batches) == 5
        for batch in batches:
            made = batch_as(kind, batch)
            width = max(made.src.size(1), made.tgt.size(1))
            assert made.src.numel() <= 400 and made.tgt.numel() <= 400
            assert width == FIXED_WIDTH if kind == "fixed" else width <= 40
            assert made.ntokens == sum(len(e.tgt) - 1 for e in batch)


def test_a_pace_is_for_predicted_tokens_alone():
    """The start sign is given, not predicted."""
    assert lengths_of([Example([5, EOS], [BOS, 7, EOS])]) == [(2, 2)]


def test_a_race_is_of_pairs_and_two_processes_are_alive(rates, monkeypatch):
    contenders = {
        "ours": replace(OURS, shape=SHAPE),
        "padded": Contender(shape=SHAPE, batches="fixed"),
        "nn.Transformer, bf16": Contender("nn.Transformer", shape=SHAPE, autocast=True),
    }
    alive, most = set(), []
    start, finish = Worker.__init__, Worker.finish

    def started(self, *given):
        start(self, *given)
        alive.add(self)
        most.append(len(alive))

    def finished(self):
        alive.discard(self)
        return finish(self)

    monkeypatch.setattr(Worker, "__init__", started)
    monkeypatch.setattr(Worker, "finish", finished)
    options = BenchOptions(corpus="sample", rounds=3, count=2, max_tokens=200)
    record = race(contenders, options)
    reports = record["reports"]
    assert (record["matrix_rate"], record["matrix_rate_bf16"]) == (1e9, 5e9)
    assert (record["corpus"], record["count"], record["shape"]["N"]) == ("sample", 2, 1)
    assert record["contenders"] == {name: asdict(one) for name, one in contenders.items()}
    assert reports.keys() == contenders.keys() and max(most) == 2 and not alive
    for name, report in reports.items():
        assert 0 < report["lowest"] <= report["tokens_per_second"] <= report["highest"]
        assert report["peak_bytes"] > 0
        rate = 5e9 if "bf16" in name else 1e9
        assert report["mfu"] == pytest.approx(report["flops_per_second"] / rate, abs=1e-4)
        if name != "ours":
            assert len(report["rounds"]) == 3
            assert report["times"] == sorted(report["rounds"])[1]
    assert reports["ours"]["parameters"] == reports["nn.Transformer, bf16"]["parameters"]


def test_a_ratio_is_that_of_times_for_the_same_tokens(rates, monkeypatch):
    """With processes that say beforehand how long they take."""

    class Told:
        def __init__(self, contender, options):
            self.pace = contender.threads

        def round(self):
            return float(self.pace)

        def finish(self):
            return {"flops_per_second": 1.0}

    monkeypatch.setattr(training, "Worker", Told)
    contenders = {"one": replace(OURS, threads=2), "other": replace(OURS, threads=5)}
    reports = race(contenders, BenchOptions(corpus="sample", rounds=2))["reports"]
    assert reports["other"]["times"] == 2.5 and reports["other"]["rounds"] == [2.5, 2.5]


@pytest.mark.parametrize("benchmark, count", [("peers", 9), ("steps", 11), ("base", 1)])
def test_what_the_processor_lacks_is_left_out_and_named(benchmark, count, monkeypatch, capsys):
    """No product of 16 bits is timed, and such a record doesn't take the place of a whole one."""
    timed, saved = [], {}

    class Noted:
        def __init__(self, contender, options):
            timed.append(contender)

        def round(self):
            return 1.0

        def finish(self):
            return {"flops_per_second": 1.0}

    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    monkeypatch.setattr(training, "matrix_rate", lambda: 1e9)  # of 32 bits alone
    monkeypatch.setattr(training, "Worker", Noted)
    monkeypatch.setattr(training, "step_account", lambda one, batches: timed.append(one))
    monkeypatch.setattr(training, "measured_operations", lambda: [])
    monkeypatch.setattr(training, "memory_bandwidth", lambda: 1e9)
    monkeypatch.setattr(training, "save_record", saved.__setitem__)
    assert training.main([benchmark, "--corpus", "sample", "--save", "true"]) == 0
    ((name, record),) = saved.items()
    assert name == f"speed-{benchmark}-float32" and not any(one.half for one in timed)
    assert len(record["left_out"]) == count and "bf16" not in record["reference"]
    assert all(left.endswith("bf16") or "bf16, memory kept" in left for left in record["left_out"])
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.startswith("left out") and all(left in said for left in record["left_out"])


def test_a_dead_contender_is_an_error_and_not_a_hang():
    with pytest.raises(RuntimeError):
        Worker(Contender(shape={"h": 7}), BenchOptions(corpus="sample"))  # 256 isn't a multiple


@pytest.mark.parametrize("ours", [OURS, OURS_HALF], ids=["float32", "bf16"])
def test_each_row_of_the_steps_differs_in_one_thing(ours):
    contenders = step_contenders(ours)
    flat = {name: asdict(one) | {"how": None} | asdict(one.how) for name, one in contenders.items()}
    for name, other in flat.items():
        apart = sum(flat["ours"][key] != other[key] for key in other)
        assert apart == (name not in ("ours", "ours again")), name
    switches = set(asdict(training.FAST)) - {"half"}
    assert switches == {key for change in WITHOUT.values() for key in change}


def test_every_peer_races_in_both_precisions_with_and_without_kept_memory():
    contenders = peer_contenders()
    for model in ("textbook", *PEERS):
        settings = {
            (one.autocast, one.keep_memory)
            for name, one in contenders.items()
            if name.startswith(f"{model}, ")
        }
        assert len(settings) == 4, model


def test_a_point_of_growth_is_a_step_of_that_size(monkeypatch):
    recorded = next(p for p in record("growth")["points"] if p["axis"] == "tokens")
    monkeypatch.setattr(training, "best_seconds", lambda lap, repeats: lap())
    found = training.growth_point("tokens", recorded["value"], None)
    assert found.keys() == recorded.keys() and found["seconds"] > 0
    assert all(found[key] == recorded[key] for key in ("axis", "value", "path", "flops"))
    assert found["bytes"] == pytest.approx(recorded["bytes"], rel=0.02)


def test_an_account_leaves_out_the_profilers_start_and_end():
    took = []

    def work():
        start = time.perf_counter()
        for _ in range(3000):
            torch.ones(1)
        took.append(time.perf_counter() - start)

    found = account(work, {"ones": "aten::*"}, "the rest")
    assert sum(found.values()) < took[0] + 0.03 and found["ones"] > 0


def test_an_account_is_of_a_step():
    batches = batches_to_time("buckets", BenchOptions(corpus="sample", max_tokens=200, count=2))
    found = training.step_account(replace(OURS, shape=SHAPE), batches)
    assert [*found][:-1] == [*training.KINDS] and len(found) == 10
    assert found["matrix products"] > 0 and found["Adam and clipping"] > 0
    assert found["our functions in C"] > 0 or not passes.suits(torch.empty(1))


@pytest.mark.parametrize(
    "argv", [[], ["peer"], ["peers", "--rounds", "x"], ["steps", "--fast", "1"]]
)
def test_a_mistake_on_the_command_line_gets_one_line(argv, capsys):
    assert training.main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1


# The records


def record(name):
    return load_record(f"speed-{name}")


def are_of(recorded, contenders):
    """Whether a record has these contenders; `speed-steps` still has a switch that is gone."""
    wanted = {name: asdict(one) for name, one in contenders.items()}
    for one in (one for one in recorded.values() if one["how"]):
        one["how"].pop("joint_projections", None)
    return wanted.items() <= recorded.items()


def test_records_are_of_the_contenders_that_the_module_names():
    peers, steps = record("peers"), record("steps")
    assert are_of(peers["contenders"], peer_contenders())
    assert peers["contenders"].keys() == peer_contenders().keys()
    assert are_of(steps["contenders"], step_contenders(OURS))
    assert are_of(steps["half"]["contenders"], step_contenders(OURS_HALF))
    assert record("base")["shape"] == asdict(BASE) and peers["shape"] == asdict(SMALL)


def test_the_recorded_race_holds_what_is_claimed():
    """1.8 times our own float32; 3 times the best peer as it comes, 1.5 times it at its best."""
    reports = record("peers")["reports"]
    rivals = [name for name in reports if name.split(",")[0] in PEERS]
    float32 = reports["ours, float32"]["times"]
    assert float32 >= 1.8
    assert min(reports[n]["times"] for n in rivals if n.endswith(", float32")) >= 3
    assert min(reports[n]["times"] for n in rivals if n.endswith("bf16, memory kept")) >= 1.5
    assert min(reports[n]["times"] for n in rivals if n.endswith(", float32")) >= 1.75 * float32
    kept = [n for n in rivals if n.endswith("float32, memory kept")]
    assert min(reports[n]["times"] for n in kept) >= 1.44 * float32
    lean = min(reports[n]["peak_bytes"] for n in rivals)
    assert all(reports[f"ours, {kind}"]["peak_bytes"] < lean for kind in ("bf16", "float32"))


def test_recorded_utilisation_follows_from_operations_and_time():
    base = record("base")
    account = base["account"]
    seconds = base["reports"]["ours"]["seconds_per_step"]
    assert 0.7 < sum(account.values()) / seconds < 1.5  # the profiler's total, in a run of its own
    assert account["matrix products"] > 0.6 * sum(account.values())
    assert base["reports"]["ours"]["mfu"] >= 0.6
