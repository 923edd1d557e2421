"""Races: all do the same work in fair turns, ratios are of one round, and records are of them."""

import itertools
import math
import statistics
from collections import Counter
from dataclasses import asdict, replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT
from test_steps_agree import Recorded
from tiny import example_batch
from torch.testing import assert_close

from scripts.book.figures.speed import speed_frame
from scripts.book.records import load_record
from scripts.ch04_encoder_decoder import to_torch_transformer
from scripts.ch06_training import BOS, EOS, PAD, LabelSmoothing
from scripts.ch07_multi30k import FIXED_WIDTH, Example, source_ids
from scripts.ch11_where_the_time_goes import BASE, SMALL, TINY, series_model
from scripts.ch14_leaving_home import export_ctranslate2
from scripts.core.models import load_model
from scripts.corpora.load import load_corpus
from scripts.fast import passes
from scripts.fast.fast import FAST, fast_loss
from scripts.studies import race_decoding, race_training, waterfall
from scripts.studies.peers import PEERS, TorchTransformer, peer_loss
from scripts.studies.race_training import (
    OURS,
    OURS_HALF,
    WITHOUT,
    Contender,
    RaceOptions,
    Worker,
    batch_as,
    batches_to_time,
    lengths_of,
    peer_contenders,
    race,
    step_contenders,
)
from scripts.studies.waterfall import STAGES, Racer, Task, WaterfallOptions

SHAPE = {"N": 1, "d_model": 16, "d_ff": 16, "h": 2, "vocab": 1000}
FEW = RaceOptions(corpus="sample", rounds=3, count=2, max_tokens=200)


# Training steps.


def test_pytorchs_transformer_with_our_weights_has_our_loss():
    """Otherwise the race would be against something else."""
    torch.manual_seed(7)
    shape = replace(TINY, norm_first=True)
    model, peer = series_model(shape).double().eval(), TorchTransformer(shape).double().eval()
    peer.embed[0].lut.weight.data.copy_(model.tgt_embed[0].lut.weight)
    peer.generator.bias.data.copy_(model.generator.proj.bias)
    peer.body.load_state_dict(to_torch_transformer(model).double().state_dict())
    parts = example_batch(TINY.vocab), LabelSmoothing(0.1)
    assert_close(peer_loss(peer, *parts)[0], fast_loss(model, *parts)[0])


def test_batches_hold_their_budget_and_predicted_tokens_count():
    for kind in ("fixed", "buckets"):
        batches = batches_to_time(kind, replace(FEW, max_tokens=400, count=5))
        assert len(batches) == 5
        for examples in batches:
            batch = batch_as(kind, examples)
            width = max(batch.src.size(1), batch.tgt.size(1))
            assert batch.src.numel() <= 400 and batch.tgt.numel() <= 400
            assert width == FIXED_WIDTH if kind == "fixed" else width <= 40
            assert batch.ntokens == sum(target for _, target in lengths_of(examples))
    assert lengths_of([Example([5, EOS], [BOS, 7, EOS])]) == [(2, 2)]  # bos is given


def test_a_race_is_of_pairs_in_processes_and_its_record_is_whole(monkeypatch):
    monkeypatch.setattr(race_training, "matrix_rate", lambda kind=None: 1e9)
    contenders = {
        "ours": replace(OURS, shape=SHAPE),
        "padded": Contender(shape=SHAPE, batches="fixed"),
        "nn.Transformer, float32": Contender("nn.Transformer", shape=SHAPE),
    }
    record = race(contenders, FEW)
    reports = record["reports"]
    assert (record["corpus"], record["count"], record["shape"]["N"]) == ("sample", 2, 1)
    assert record["contenders"] == {name: asdict(one) for name, one in contenders.items()}
    assert reports.keys() == contenders.keys() and record["left_out"] == []
    for name, report in reports.items():
        assert 0 < report["lowest"] <= report["tokens_per_second"] <= report["highest"]
        assert report["peak_bytes"] > 0
        assert report["mfu"] == pytest.approx(report["flops_per_second"] / 1e9, abs=1e-4)
        if name != "ours":
            assert report["times"] == sorted(report["rounds"])[1]
    sizes = {name: report["parameters"] for name, report in reports.items()}
    assert len({*sizes.values()}) == 1  # the same model everywhere


class Told:
    """A worker that says beforehand how long it takes."""

    def __init__(self, contender, options):
        self.contender = contender
        timed.append(contender)

    def round(self):
        turns.append(self.contender.threads)
        return float(self.contender.threads)

    def finish(self):
        return {"flops_per_second": 1.0}


timed, turns = [], []


def test_each_is_first_in_turn_and_a_ratio_is_of_one_round(monkeypatch):
    turns.clear()
    monkeypatch.setattr(race_training, "Worker", Told)
    monkeypatch.setattr(race_training, "matrix_rate", lambda kind=None: 1e9)
    contenders = {"one": replace(OURS, threads=2), "other": replace(OURS, threads=5)}
    report = race(contenders, replace(FEW, rounds=2))["reports"]["other"]
    assert turns == [2, 5, 5, 2] and (report["times"], report["rounds"]) == (2.5, [2.5, 2.5])


@pytest.mark.parametrize("name, count", [("peers", 9), ("steps", 11), ("base", 1)])
def test_what_the_processor_lacks_is_left_out_and_named(name, count, monkeypatch, capsys):
    """No product of 16 bits is timed, and such a record doesn't take the place of a whole one."""
    timed.clear()
    saved = {}
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    monkeypatch.setattr(race_training, "Worker", Told)
    monkeypatch.setattr(race_training, "matrix_rate", lambda kind=None: 1e9)
    monkeypatch.setattr(race_training, "memory_bandwidth", lambda: 1e9)
    monkeypatch.setattr(race_training, "measured_operations", lambda: [])
    monkeypatch.setattr(race_training, "step_account", lambda one, batches: timed.append(one))
    monkeypatch.setattr(race_training, "save_record", saved.__setitem__)
    assert race_training.main([name, "--corpus", "sample", "--save"]) == 0
    ((stem, record),) = saved.items()
    assert stem == f"speed-{name}-float32" and not any(one.half for one in timed)
    assert len(record["left_out"]) == count and "bf16" not in record["reference"]
    assert capsys.readouterr().out.splitlines()[-1].startswith("left out")


def test_a_dead_contender_is_an_error_and_not_a_hang():
    with pytest.raises(RuntimeError):
        Worker(Contender(shape={"h": 7}), FEW)  # 256 isn't a multiple


@pytest.mark.parametrize("ours", [OURS, OURS_HALF], ids=["float32", "bf16"])
def test_each_row_of_the_steps_differs_in_one_thing(ours):
    contenders = step_contenders(ours)
    flat = {name: asdict(one) | {"how": None} | asdict(one.how) for name, one in contenders.items()}
    for name, other in flat.items():
        apart = sum(flat["ours"][key] != other[key] for key in other)
        assert apart == (name not in ("ours", "ours again")), name
    switches = set(asdict(FAST)) - {"half"}
    assert switches == {key for change in WITHOUT.values() for key in change}


def test_every_peer_races_in_both_precisions_with_and_without_kept_memory():
    models = [one.model for one in peer_contenders().values()]
    settings = {(one.model, one.autocast, one.keep_memory) for one in peer_contenders().values()}
    assert all(models.count(model) == 4 for model in PEERS) and len(settings) == 4 * 4


def test_a_point_of_growth_and_an_account_are_of_one_step(monkeypatch):
    recorded = next(p for p in load_record("speed-growth")["points"] if p["axis"] == "tokens")
    monkeypatch.setattr(race_training, "best_seconds", lambda lap, repeats: lap())
    point = race_training.growth_point("tokens", recorded["value"], None)
    assert point.keys() == recorded.keys() and point["seconds"] > 0
    assert all(point[key] == recorded[key] for key in ("axis", "value", "path", "flops"))
    assert point["bytes"] == pytest.approx(recorded["bytes"], rel=0.02)
    spent = race_training.step_account(replace(OURS, shape=SHAPE), batches_to_time("buckets", FEW))
    assert [*spent] == [*race_training.KINDS, "Python and autograd"]
    assert spent["matrix products"] > 0 and spent["Adam and clipping"] > 0
    assert spent["our functions in C"] > 0 or not passes.suits(torch.empty(1))


def test_records_are_of_the_contenders_that_the_module_names():
    peers, steps = load_record("speed-peers"), load_record("speed-steps")
    for one in (*steps["contenders"].values(), *steps["half"]["contenders"].values()):
        (one["how"] or {}).pop("joint_projections", None)  # a switch that is gone
    for recorded, contenders in (
        (peers["contenders"], peer_contenders()),
        (steps["contenders"], step_contenders(OURS)),
        (steps["half"]["contenders"], step_contenders(OURS_HALF)),
    ):
        assert {name: asdict(one) for name, one in contenders.items()}.items() <= recorded.items()
    assert load_record("speed-base")["shape"] == asdict(BASE) and peers["shape"] == asdict(SMALL)
    reports = peers["reports"]  # as claimed: 3 times the best peer as it comes, 1.5 at its best
    rivals = [name for name in reports if name.split(",")[0] in PEERS]
    assert min(reports[n]["times"] for n in rivals if n.endswith(", float32")) >= 3
    assert min(reports[n]["times"] for n in rivals if n.endswith("bf16, memory kept")) >= 1.5
    assert reports["ours, float32"]["times"] >= 1.8


# Decoding.


@pytest.fixture(scope="module")
def trained():
    return load_model(ROOT / "models" / "sample-de-en", "cpu")


@pytest.mark.parametrize("beam", [1, 4])
def test_the_programs_write_the_same_texts(trained, tmp_path, beam):
    export_ctranslate2(trained, tmp_path)
    pairs = load_corpus("sample")["test"][:20]
    rows = sorted((source_ids(german, trained.tokenizer) for german, _ in pairs), key=len)[::-1]
    ways = {
        "textbook": partial(race_decoding.textbook, trained),
        "CTranslate2": race_decoding.CTranslate2(trained, tmp_path, "float32", 1),
        "ours": partial(race_decoding.ours, trained, "float32"),
    }
    decode = trained.tokenizer.decode
    texts = {name: [decode(list(ids)) for ids in way(rows, beam)] for name, way in ways.items()}
    assert texts["textbook"] == texts["CTranslate2"] == texts["ours"]


def test_programs_take_turns_the_first_round_warms_up_and_the_median_counts(trained, monkeypatch):
    clock, now = [], [0.0]
    monkeypatch.setattr(race_decoding.time, "perf_counter", lambda: now[0])
    costs = {"ours, float32": 2.0, "CTranslate2, float32": 1.0}

    def run(name, rows, beam):
        clock.append((name, beam))
        now[0] += costs[name] * beam * (10 if len(clock) <= 4 else 1)
        return [[4, EOS]] * 6

    ways = {name: partial(run, name) for name in costs}
    reports = race_decoding.race(ways, [([4, EOS], "a")] * 6, trained, rounds=3, threads=1)
    assert clock == [(name, beam) for beam in (1, 4) for name in costs] * 4
    frame = speed_frame({"reports": reports, "sentences": 6}).set_index(["program", "beam"])
    assert frame.loc[("ours, float32", 1), "sentences_per_second"] == 3.0
    assert frame.loc[("CTranslate2, float32", 4), "sentences_per_second"] == 1.5
    assert (frame.loc["ours, float32", ["ratio", "lowest", "highest"]] == 0.5).all(axis=None)
    times = itertools.chain([0.5], itertools.cycle([0.01]))
    monkeypatch.setattr(race_decoding, "taken", lambda work: next(times))
    alone, _ = race_decoding.one_at_a_time({"ours": lambda rows, beam: None}, [[4, EOS]] * 30)
    assert alone == {"program": "ours", "beam": 1, "first": 500.0, "p50": 10.0, "p99": 10.0}


@pytest.mark.parametrize("has", [True, False])
def test_a_tiny_race_has_a_whole_record_or_names_what_is_left_out(has, monkeypatch, capsys):
    saved = {}
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: has)
    monkeypatch.setattr(race_decoding, "save_record", saved.__setitem__)
    monkeypatch.setattr(race_decoding, "scores", lambda *_: [])
    monkeypatch.setattr(race_decoding, "BATCHES", (8,))
    model = str(ROOT / "models/sample-de-en")
    argv = ["--model", model, "--sentences", "15", "--rounds", "1", "--save"]
    assert race_decoding.main(argv) == 0
    ((name, record),) = saved.items()
    assert name == ("decoding-speed" if has else "decoding-speed-float32")
    assert {*load_record("decoding-speed")} - {*record} <= {"repeat"}
    assert record["left_out"] == ([] if has else ["ours, int8"])
    programs = {report["program"] for report in record["reports"]}
    kinds = {"ours, float32", "CTranslate2, float32", "CTranslate2, int8", "textbook"}
    assert programs - {"ours, int8", "ours, exact stop"} == kinds
    assert ("ours, int8" in programs) is has and record["accounts"]["ours, float32"]["4"]["copies"]
    assert ("left out" in capsys.readouterr().out) is not has


# The waterfall.


@pytest.fixture(scope="module")
def task():
    """The tiny task, without dropout: then all stages learn the same."""
    task = Task(WaterfallOptions(device="cpu", tiny=True))
    task.shape = replace(task.shape, dropout=0.0)
    return task


@pytest.fixture
def graphed(monkeypatch):
    """The last stage runs on a CPU, too."""
    monkeypatch.setitem(waterfall.KINDS, "graphed", Recorded)


def test_all_stages_learn_the_same_from_the_same_pairs(graphed, monkeypatch, task):
    seen, function_of = Counter(), waterfall.loss_function_of

    def noting(config, *parts, **named):
        loss_of = function_of(config, *parts, **named)

        def noted(model, batch, criterion):
            for target in batch.tgt_y.tolist():
                seen[tuple(token for token in target if token != PAD)] += 1
            return loss_of(model, batch, criterion)

        return noted

    monkeypatch.setattr(waterfall, "loss_function_of", noting)
    pairs = [task.examples[i] for (batch,) in task.plan for i in batch]
    expected = Counter(tuple(pair.tgt[1:]) for pair in pairs)
    losses = None
    for name, stage in STAGES.items():
        racer = Racer(replace(stage, precision="float32"), task)
        first = racer.loss
        seen.clear()
        racer.lap()
        assert Counter({target: n for target, n in seen.items() if target}) == expected, name
        losses = losses or (first, racer.loss)
        assert losses[1] < losses[0]
        assert_close((first, racer.loss), losses, rtol=1e-5, atol=0.0, msg=name)
        assert bool(racer.optimizer.param_groups[0]["fused"]) is name.startswith(
            ("our", "few", "rec")
        )


def test_a_loss_that_is_not_finite_ends_the_race(task):
    racer = Racer(STAGES["textbook, float32"], task)
    with torch.no_grad():
        next(racer.model.parameters()).fill_(math.nan)
    with pytest.raises(FloatingPointError):
        racer.lap()


def test_a_stages_ratios_are_of_the_same_round(monkeypatch, task):
    slow, reference = (
        SimpleNamespace(seconds=[99.0, *seconds], task=task, loss=1.0, peak_bytes=0)
        for seconds in ([2.0, 6.0, 9.0], [1.0, 2.0, 9.0])
    )
    monkeypatch.setattr(waterfall, "ROUNDS", 3)
    report = Racer.report(slow, reference, 1e9)  # 6 / 2, the ratio of the medians, would be 3
    assert (report["times"], report["rounds"]) == (2.0, [2, 3, 1]) and "peak_bytes" not in report


def test_the_tiny_waterfall_names_what_it_lacks(monkeypatch):
    record = waterfall.waterfall(WaterfallOptions(device="cpu", tiny=True))
    assert record["not_run"] == ["recorded", "peak_bytes"]
    assert {*load_record("gpu-waterfall-small")} >= {*record}
    assert list(record["stages"]) == [name for name in STAGES if name != "recorded"]
    for report in record["stages"].values():
        assert report["times"] == statistics.median(report["rounds"])
        mfu = record["useful"] / report["seconds_per_step"] / record["matrix_rate"]
        assert_close(report["mfu"], mfu, rtol=1e-2, atol=1e-4)
    assert record["stages"][record["reference"]]["times"] == 1.0
