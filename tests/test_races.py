"""Races: all do the same work in fair turns, ratios are of one round, and records are of them."""

import itertools
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial

import pytest
import torch
from conftest import ROOT
from parity import to_torch_transformer
from test_steps_agree import Recorded
from tiny import example_batch
from torch.testing import assert_close

from scripts.book.figures.decoding import speed_frame
from scripts.book.records import load_record
from scripts.ch06_training import BOS, EOS, LabelSmoothing
from scripts.ch07_multi30k import FIXED_WIDTH, Example
from scripts.ch11_where_the_time_goes import BASE, SMALL, TINY, series_model
from scripts.ch14_leaving_home import export_ctranslate2
from scripts.core.models import load_model
from scripts.corpora.load import load_corpus
from scripts.fast import translating
from scripts.fast.fast import FAST, fast_loss
from scripts.studies import race_decoding, race_training, waterfall
from scripts.studies.peers import PEERS, TorchTransformer, peer_loss
from scripts.studies.race_training import (
    OURS,
    OURS_HALF,
    STAIRS,
    WITHOUT,
    Contender,
    Runner,
    batches_of,
    compiled_contenders,
    lengths_of,
    peer_contenders,
    race,
    stair_contenders,
    step_contenders,
)
from scripts.studies.rows import data_of
from scripts.studies.subject import encoded
from scripts.studies.turns import against, in_turns
from scripts.studies.waterfall import STAGES, Racer, Task

SHAPE = replace(SMALL, N=1, d_model=16, d_ff=16, h=2, vocab=1000)
CPU = torch.device("cpu")


def test_laps_take_turns_after_one_to_warm_up_and_a_ratio_is_of_one_round():
    turns, lasts = [], {"a": iter([99, 2, 6, 9]), "b": iter([99, 1, 2, 9])}

    def lap(name):
        turns.append(name)
        return next(lasts[name])

    times = in_turns({name: partial(lap, name) for name in lasts}, rounds=3)
    assert turns == ["b", "a", "a", "b", "b", "a", "a", "b"]  # each is first in turn
    assert against(times["a"], times["b"]) == {"times": 2.0, "rounds": [2, 3, 1]}  # not 6 / 2


# Training steps.


@pytest.fixture
def sample(monkeypatch):
    """Races are of the sample corpus, and no rate of the machine is measured."""
    examples = data_of("sample", 1000)
    monkeypatch.setattr(race_training, "data_of", lambda corpus, vocab: examples)
    monkeypatch.setattr(race_training.ch11, "matrix_rates", lambda kind=None: [1e9])


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


@pytest.mark.parametrize("batching", ["fixed", "random", "length"])
def test_batches_hold_their_budget_and_predicted_tokens_count(sample, batching):
    batches = batches_of(batching, count=5, max_tokens=400)
    runner = Runner(Contender(batching=batching, shape=SHAPE), batches)
    assert len(batches) == len(runner.batches) == 5
    for examples, batch in zip(batches, runner.batches, strict=True):
        sides = batch.src, batch.tgt
        assert all(side.numel() <= 400 for side in sides)
        assert {side.size(1) == FIXED_WIDTH for side in sides} == {batching == "fixed"}
        assert batch.ntokens == sum(target for _, target in lengths_of(examples))
    assert runner.targets == sum(batch.ntokens for batch in runner.batches)
    report = runner.report([1.0, 2.0, 4.0], {"matrix_rate": 1e9})
    assert report["seconds_per_step"] == round(2 * runner.targets / 5, 4)
    assert report["mfu"] == pytest.approx(runner.flops / (2 * runner.targets) / 1e9, abs=1e-4)
    assert lengths_of([Example([5, EOS], [BOS, 7, EOS])]) == [(2, 2)]  # bos is given


def test_a_race_is_of_pairs_in_processes_and_its_record_is_whole(sample):
    contenders = {
        "ours": replace(OURS, shape=SHAPE),
        "padded": Contender("nn.Transformer", shape=SHAPE, batching="fixed"),
    }
    record = race(contenders, rounds=3, count=2, max_tokens=200)
    reports = record["reports"]
    assert (record["reference"], record["rounds"], record["shape"]["N"]) == ("ours", 3, 1)
    assert record["contenders"] == {name: asdict(one) for name, one in contenders.items()}
    assert reports.keys() == contenders.keys()
    for name, report in reports.items():
        assert report["peak_bytes"] > 0 and report["mfu"] > 0
        if name != "ours":
            assert report["times"] == sorted(report["rounds"])[1]
    sizes = {name: report["parameters"] for name, report in reports.items()}
    assert len({*sizes.values()}) == 1  # the same model everywhere
    dead = Contender(shape=replace(SHAPE, h=7))  # 16 isn't a multiple
    with pytest.raises(RuntimeError):  # an error, and not a hang
        race({"ours": contenders["ours"], "dead": dead}, 1, 1, 200)


@pytest.mark.parametrize("name, count", [("peers", 9), ("steps", 0), ("base", 1)])
def test_what_the_processor_lacks_is_left_out_and_named(sample, name, count, monkeypatch, capsys):
    """No product of 16 bits is timed, and such a record doesn't take the place of a whole one."""
    timed = []

    def process(workers, context, begin, parts):
        return nullcontext(timed.append(parts[0]))

    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    monkeypatch.setattr(race_training, "ProcessPoolExecutor", process)
    monkeypatch.setattr(race_training, "ask", lambda one, *words: 1.0 if len(words) < 2 else {})
    assert race_training.main([name]) == 0
    assert timed and not any(one.half for one in timed)
    assert capsys.readouterr().out.count("bf16") == count
    assert race_training.main([name, "--save"]) == 2


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
    settings = [(one.model, one.autocast, one.keep_memory) for one in peer_contenders().values()]
    assert {*itertools.product(PEERS, (False, True), (False, True))} <= {*settings}


def test_growth_is_of_one_step(sample, monkeypatch):
    points = [p for p in load_record("speed-growth")["points"] if p["path"] == "textbook"]
    axes = race_training.AXES
    values = [(p["axis"], p["value"]) for p in points if p["axis"] in axes]
    assert values == [(axis, n) for axis in axes for n in axes[axis]]
    monkeypatch.setattr(race_training.ch11, "best_seconds", lambda lap, repeats: lap() or 1.0)
    monkeypatch.setattr(race_training, "AXES", {"length": {8: axes["length"][8]}})
    (point,) = race_training.race_growth()["points"]
    recorded = next(p for p in points if (p["axis"], p["value"]) == ("length", 8))
    assert point["flops"] == recorded["flops"]


def test_records_are_of_the_contenders_that_the_module_names():
    peers, steps = load_record("speed-peers"), load_record("speed-steps")
    stairs, climbed = load_record("speed-stairs"), stair_contenders()
    assert stairs["lines"].keys() == STAIRS.keys() and stairs["reports"].keys() == climbed.keys()
    assert climbed["C"] == climbed["the same again"] == replace(OURS_HALF, threads=1)
    for reports, contenders in (
        (peers["reports"], peer_contenders()),
        (load_record("speed-compiled")["reports"], compiled_contenders()),
        (steps["reports"], step_contenders(OURS)),
        (steps["half"]["reports"], step_contenders(OURS_HALF)),
    ):
        assert contenders.keys() <= reports.keys()
    assert load_record("speed-base")["shape"] == asdict(BASE) and peers["shape"] == asdict(SMALL)


def test_what_chapter_12_says_of_others_and_of_the_finished_program():
    peers, compiled = (load_record(f"speed-{name}")["reports"] for name in ("peers", "compiled"))
    others = {name: peers[f"{name}, bf16, memory kept"] for name in ("textbook", *PEERS)}
    assert all(min(other["rounds"]) > 1.4 for other in others.values())
    nearest = min(others, key=lambda name: others[name]["times"])
    memory = others[nearest]["peak_bytes"] / peers["ours, bf16"]["peak_bytes"]
    assert (nearest, round(others[nearest]["times"], 1)) == ("x-transformers", 1.8)
    assert 1.9 < memory < 2.1
    kept, usual = others["textbook"]["peak_bytes"], peers["textbook, bf16"]["peak_bytes"]
    assert round(kept / usual, 2) == 1.15
    after = {name: compiled[f"{name}, bf16, memory kept, compiled"]["rounds"] for name in others}
    slower = {name for name in others if min(after[name]) > max(others[name]["rounds"])}
    faster = {name for name in others if max(after[name]) < min(others[name]["rounds"])}
    assert (slower, faster) == ({"textbook", "MarianMTModel"}, set())
    half = load_record("speed-steps")["half"]["reports"]
    sizes = [half[name]["peak_bytes"] / 2**20 for name in ("ours", "without loss in chunks")]
    assert 0.5 < sizes[0] / sizes[1] < 0.6
    control, adam = half["ours again"]["rounds"], half["without the fused Adam"]["rounds"]
    assert min(adam) < max(control)  # no more than chance


# Decoding.


@pytest.fixture(scope="module")
def trained():
    return load_model(ROOT / "models" / "sample-de-en", "cpu")


@pytest.mark.parametrize("beam", [1, 4])
def test_the_programs_write_the_same_texts(trained, tmp_path, beam):
    export_ctranslate2(trained, tmp_path)
    rows, _ = encoded(trained, load_corpus("sample")["test"][:20])
    rows.sort(key=len, reverse=True)
    ways = {
        "textbook": partial(race_decoding.textbook, trained),
        "CTranslate2": race_decoding.CTranslate2(trained, tmp_path, "float32", 1),
        "ours": partial(race_decoding.ours, trained, "float32"),
    }
    texts = {name: race_decoding.texts_of(trained, way(rows, beam)) for name, way in ways.items()}
    assert texts["textbook"] == texts["CTranslate2"] == texts["ours"]


def test_a_program_is_timed_and_scored_and_compared_with_ours(trained, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(race_decoding.time, "perf_counter", lambda: now[0])
    costs = {"ours, float32": 2.0, "CTranslate2, float32": 1.0}

    def run(name, rows, beam):
        now[0] += costs[name] * beam
        return [[4, EOS]] * 5 + [[4 + len(name), EOS]]

    ways = {name: partial(run, name) for name in costs}
    reports = race_decoding.race(ways, [([4, EOS], "a")] * 6, trained, rounds=3, threads=1)
    assert [report["same_as_ours"] for report in reports] == [6, 5, 6, 5]
    frame = speed_frame({"reports": reports, "sentences": 6}).set_index(["program", "beam"])
    assert frame.loc[("ours, float32", 1), "sentences_per_second"] == 3.0
    assert frame.loc[("CTranslate2, float32", 4), "sentences_per_second"] == 1.5
    assert (frame.loc["ours, float32", ["ratio", "lowest", "highest"]] == 0.5).all(axis=None)
    times = itertools.chain([0.5], itertools.cycle([0.01]))
    monkeypatch.setattr(race_decoding, "seconds_of", lambda work: next(times))
    alone, _ = race_decoding.one_at_a_time({"ours": lambda rows, beam: None}, [[4, EOS]] * 30)
    assert alone == {"program": "ours", "beam": 1, "p50": 10.0, "p99": 10.0}  # the first isn't one


def test_the_record_says_what_chapter_13_says():
    record = load_record("decoding-speed")
    for count in (1000, 300):
        race = speed_frame(record, count).set_index(["program", "beam"])
        ours = race.loc[["ours, float32", "ours, int8"]]
        assert ours["ratio"].between(1.05, 1.35).all()  # 1.1 to 1.3
        assert ours.xs(4, level="beam")["lowest"].gt(1).all()
        rates = ours["sentences_per_second"].unstack("program")
        assert (rates["ours, int8"] / rates["ours, float32"]).between(1.35, 1.75).all()
        assert race.loc["CTranslate2, float32", "same_as_ours"].eq(count).all()
    exact = speed_frame(record).set_index(["program", "beam"])
    changed = 1000 - exact["same_as_ours"].drop(
        ["ours, float32", "CTranslate2, float32"], level="program"
    )
    assert changed.pop(("ours, exact stop", 4)) == 38
    assert (changed.min(), changed.max()) == (35, 62)
    bleu = exact["bleu"].unstack("program")
    for program in ("ours, int8", "CTranslate2, int8"):
        assert (bleu[program] - bleu["ours, float32"]).abs().max() < 0.101
    alone = {(r["program"], r["beam"]): r["p50"] for r in record["one_at_a_time"]}
    for beam in (1, 4):
        assert alone["ours, float32", beam] > alone["CTranslate2, float32", beam]
        assert 0.9 < alone["ours, int8", beam] / alone["CTranslate2, int8", beam] < 1


@pytest.mark.parametrize("has", [True, False])
def test_a_tiny_race_has_a_whole_record_or_leaves_8_bits_out(trained, has, monkeypatch, capsys):
    monkeypatch.setattr(race_decoding, "fast_in_8_bits", lambda: has)
    monkeypatch.setattr(translating, "fast_in_8_bits", lambda: has)
    monkeypatch.setattr(race_decoding, "BATCHES", (8,))
    record = race_decoding.race_decoding(trained, load_corpus("sample"), sentences=15, rounds=1)
    assert {*load_record("decoding-speed")} >= {*record} >= {"split", "one_at_a_time"}
    programs = {report["program"] for report in record["reports"]}
    others = {"ours, float32", "ours, exact stop", "CTranslate2, float32", "CTranslate2, int8"}
    assert programs == others | {"textbook"} | ({"ours, int8"} if has else set())
    if not has:
        assert race_decoding.main(["--save"]) == 2 and "AVX512-VNNI" in capsys.readouterr().err


# The waterfall.


@pytest.fixture(scope="module")
def task():
    """A tiny task, without dropout: then all stages learn the same."""
    shape = replace(SMALL, N=1, d_model=16, d_ff=32, h=2, vocab=300, dropout=0.0)
    return Task(shape, 128, "few", CPU)


def test_all_stages_learn_the_same(monkeypatch, task):
    """A pair more or less, or another weight of one, would show in the loss."""
    monkeypatch.setitem(waterfall.KINDS, "graphed", Recorded)  # the last stage, on a CPU, too
    losses = None
    for name, stage in STAGES.items():
        racer = Racer(replace(stage, precision="float32"), task)
        first = racer.loss
        racer.lap()
        losses = losses or (first, racer.loss)
        assert losses[1] < losses[0]
        assert_close((first, racer.loss), losses, rtol=1e-5, atol=0.0, msg=name)
        ours = name.startswith(("our", "few", "rec"))
        assert bool(racer.optimizer.param_groups[0]["fused"]) is ours


def test_the_tiny_waterfall_has_what_the_record_has(task):
    record, recorded = waterfall.waterfall(task), load_record("gpu-waterfall-small")
    assert {*recorded} >= {*record}
    assert [*record["stages"]] == [*STAGES][:-1] == [*recorded["stages"]][:-1]
    last = record["stages"].pop(record["reference"])
    assert last["times"] == 1.0 and last["loss"] > 0
    assert {*recorded["stages"]["recorded"]} >= {*last}
