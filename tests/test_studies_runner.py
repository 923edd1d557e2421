"""The runner of studies: sweeps that end between worse rates, runs that are done once."""

import json
import math
from dataclasses import asdict, replace

import pytest
import torch

from scripts.ch06_training import BOS, EOS, Batch, LabelSmoothing
from scripts.ch19_ablations import STUDY, STUDY_ROWS, THE_BASE
from scripts.studies import block, grid, rows, runner, table3
from scripts.studies.rows import SEEDS, SWEEP, data_of, part_of
from scripts.studies.runner import Hours, Study, best_rate, complete, go_on, sweep, these
from scripts.studies.table3 import DROPOUTS, SWEPT, work


def valley(best, diverged=math.inf):
    """A loss by rate, lowest at `best`; none from `diverged` on."""

    def loss(rate):
        return None if rate >= diverged else 1 + math.log2(rate / best) ** 2

    return loss


def swept(loss, start=1.0):
    """The rates of a whole sweep, in the order in which they were tried, and the best."""
    runs = []
    while missing := [rate for rate in sweep(runs, start) if not these(runs, lr=rate)]:
        assert len(runs) < 20
        runs.append({"lr": missing[0], "loss": loss(missing[0])})
    return [run["lr"] for run in runs], best_rate(runs)


@pytest.mark.parametrize("best", [0.25, 0.5, 1.0, 2.0, 8.0])
def test_a_sweep_goes_on_until_the_best_rate_has_worse_ones_on_both_sides(best):
    rates, found = swept(valley(best))
    assert found == best and {best / 2, 2 * best} <= {*rates}
    assert len(rates) == len({*rates}) <= 3 + abs(math.log2(best))


def test_a_sweep_stops_where_runs_diverge():
    assert swept(valley(4.0, diverged=2.0)) == ([0.5, 1.0, 2.0], 1.0)
    with pytest.raises(ValueError):
        swept(valley(4.0, diverged=0.0))


def square(setting, wanted):
    """Work for another process; it leaves a trace, so that calls can be counted."""
    with open(setting["trace"], "a") as trace:
        trace.write(f"{wanted['x']}\n")
    return {"loss": wanted["x"] ** 2 + setting["more"]}


def first_two_then_best(runs):
    """Two runs; when they are done, a third that rests on them."""
    wanted = [{"x": 3}, {"x": -2}]
    if all(these(runs, **one) for one in wanted):
        wanted.append({"x": min(runs, key=lambda run: run["loss"])["x"] + 10})
    return wanted


def a_study(tmp_path, more=0):
    """Three runs, the last of which waits for the others."""
    setting = {"trace": str(tmp_path / "trace"), "more": more}
    return Study("squares", setting, first_two_then_best, square)


def test_runs_are_done_once_and_the_record_is_all_that_the_next_call_needs(tmp_path):
    study = a_study(tmp_path)
    assert complete(study, "a command", tmp_path, hours=0)["runs"] == []  # begins none
    first = complete(study, "a command", tmp_path, hours=1, workers=2)
    assert sorted(run["loss"] for run in first["runs"]) == [4, 9, 64]
    assert first["runs"][-1]["x"] == 8 and first["command"] == "a command"
    assert json.loads((tmp_path / "squares.json").read_text()) == first
    kept = {**first, "runs": first["runs"][:1]}
    (tmp_path / "squares.json").write_text(json.dumps(kept))  # as if it had been killed
    again = complete(study, "another", tmp_path, hours=1)
    assert again["runs"][0] == first["runs"][0] and again["command"] == "a command"
    assert sorted(run["loss"] for run in again["runs"]) == [4, 9, 64]
    assert len((tmp_path / "trace").read_text().split()) == 3 + 2


def test_a_record_in_another_setting_is_left_alone(tmp_path):
    complete(a_study(tmp_path), "a command", tmp_path, hours=1)
    before = (tmp_path / "squares.json").read_bytes()
    with pytest.raises(ValueError, match="squares.json holds a study in another setting"):
        complete(a_study(tmp_path, more=1), "a command", tmp_path, hours=1)
    assert (tmp_path / "squares.json").read_bytes() == before


def test_what_a_plan_names_twice_is_run_once(tmp_path):
    plan = lambda runs: [{"x": x} for x in (1, 2, 4, 2, 4, 8)]  # noqa: E731
    study = replace(a_study(tmp_path), plan=plan)
    assert study.missing([{"x": 4, "loss": 16}]) == [{"x": 1}, {"x": 2}, {"x": 8}]
    complete(study, "a command", tmp_path, hours=1, workers=3)
    assert sorted((tmp_path / "trace").read_text().split()) == ["1", "2", "4", "8"]


def simulated(plan, loss_of, limit=400):
    """All runs of a plan, in their order, with made-up losses."""
    runs = []
    while missing := [one for one in plan(runs) if not these(runs, **one)]:
        assert len(runs) < limit
        runs.append(missing[0] | {"loss": loss_of(missing[0])})
    return runs


def counted(runs, **place):
    """The one rate at which the fresh seeds of a row were run."""
    seeds = [run for run in these(runs, **place) if run["seed"] != SWEEP]
    assert [run["seed"] for run in seeds] == [*SEEDS]
    (rate,) = {run["lr"] for run in seeds}
    return rate


def row_loss(run):
    """A made-up loss: least without dropout, each swept row with its own best rate."""
    best = STUDY.lr * 2.0 ** ((SWEPT.index(run["row"]) % 4 - 2) if run["row"] in SWEPT else 1)
    return valley(best)(run["lr"]) + run["dropout"]


def test_table_3_asks_three_fresh_seeds_of_each_row_at_its_own_rate():
    runs = simulated(table3.wanted_runs, row_loss)
    assert {run["row"] for run in runs[: 3 * len(DROPOUTS)]} == {THE_BASE}  # all else rests on it
    for row in STUDY_ROWS:
        rate = counted(runs, row=row, dropout=0.0)
        best = row if row in SWEPT else THE_BASE
        assert rate == best_rate(these(runs, row=best, dropout=0.0, seed=SWEEP))
    for dropout in DROPOUTS:
        assert counted(runs, row=THE_BASE, dropout=dropout) == 2 * STUDY.lr
    assert not [run for run in runs if run["row"] != THE_BASE and run["dropout"]]


def part_loss(run):
    """A made-up loss: a best rate for each part; dropout helps 2017's block in long runs."""
    best = block.BASE.lr * 2.0 ** (len(run["row"]) % 4 - 1)
    helped = run["epochs"] == block.LONG and run["row"] == block.OLD
    return valley(best)(run["lr"]) + (-1 if helped else 1) * run["dropout"]


def test_the_study_of_the_block_asks_the_same_of_both_blocks_and_of_each_part():
    runs = simulated(block.wanted_runs, part_loss)
    for row in block.ROWS:
        rate = counted(runs, row=row, epochs=block.SHORT)
        assert rate == block.BASE.lr * 2.0 ** (len(row) % 4 - 1)
    for row, dropout in {block.OLD: 0.1, block.NEW: 0.0}.items():
        assert len(these(runs, row=row, epochs=block.SHORT, seed=SWEEP)) >= 4  # rates
        rate = counted(runs, row=row, epochs=block.LONG)
        assert rate == block.BASE.lr * 2.0 ** (len(row) % 4 - 1)
        seeds = these(runs, row=row, epochs=block.LONG, dropout=dropout)
        assert {*SEEDS} < {run["seed"] for run in seeds}
    assert {run["epochs"] for run in runs} == {block.SHORT, block.LONG}


def cell_loss(run):
    """A made-up loss: small models, and little data, want higher rates."""
    best = grid.BASE.lr * (2 if run["d_model"] < 40 else 1) * (2 if run["share"] > 4 else 1)
    return 2 + abs(math.log(run["lr"] / best))


def test_the_grids_rates_are_swept_at_its_corners_and_lie_between_them_inside():
    runs = simulated(grid.wanted_runs, cell_loss)
    swept = {(run["d_model"], run["share"]) for run in these(runs, seed=SWEEP)}
    assert swept == {(16, 1), (16, 16), (96, 1), (96, 16)}
    rates = {
        (width, share): counted(runs, d_model=width, share=share)
        for width in grid.WIDTHS
        for share in grid.PASSES
    }
    lr = grid.BASE.lr
    assert [rates[end] for end in grid.ENDS] == pytest.approx([2 * lr, 4 * lr, lr, 2 * lr])
    assert rates[16, 4] == pytest.approx(2 * lr * 2**0.5, rel=5e-3)  # half way along one side
    assert rates[96, 16] > rates[96, 2] > rates[96, 1] < rates[24, 1] < rates[16, 1]


@pytest.mark.parametrize("name", block.ROWS)
def test_a_part_is_in_the_place_it_is_named_after(name):
    row = block.ROWS[name]
    config = row.config(replace(block.BASE, d_model=32, d_ff=48), lr=0.01)
    assert config.step == "textbook"
    assert (config.optimizer == "muon") == ("Muon" in name)
    model = row.build(config, 50)
    kinds = {type(part).__name__ for part in model.modules()}
    assert ("MultiHeadedAttention" in kinds) == (len(KINDS[name] & ATTENTIONS) == 0)
    old = {"MultiHeadedAttention", "OpenAttention", "PositionwiseFeedForward", "LayerNorm"}
    new = {kind for kind in kinds - old if kind.endswith(("Attention", "ReLU", "GLU", "Norm"))}
    assert new | {"MixtureOfExperts"} & kinds == KINDS[name]
    across = type(model.decoder.layers[0].src_attn).__name__
    assert (across in KINDS[name]) == name.endswith("across too")
    positions = model.src_embed[1].pe.any() and model.tgt_embed[1].pe.any()
    assert positions == (
        not KINDS[name] & {"RotaryAttention", "TodaysAttention", "LatentAttention"}
    )
    zeroed = not model.decoder.layers[0].self_attn.project_output.weight.any()
    assert zeroed == (name in ("zeroed outputs", *TODAY))
    assert model.generator.proj.weight is model.src_embed[0].lut.weight


def test_the_encoders_padding_visits_no_expert():
    row = block.ROWS["experts"]
    model = row.build(replace(block.BASE, d_model=32, d_ff=48), 50)
    src = torch.tensor([[5, 6, 7, EOS], [5, EOS, 0, 0]])
    batch = Batch(src, torch.tensor([[BOS, 8, 9, EOS], [BOS, 8, 9, EOS]]))
    row.loss_of(block.BASE)(model, batch, LabelSmoothing(0.1))
    assert {layer.feed_forward.visits.sum().item() for layer in model.encoder.layers} == {2 * 6}


TODAY = ("today", "today, Muon")
KINDS = dict.fromkeys([*TODAY, "today, not zeroed"], {"TodaysAttention", "SwiGLU", "RMSNorm"}) | {
    "2017": set(),
    "RMSNorm": {"RMSNorm"},
    "SwiGLU": {"SwiGLU"},
    "ReLU²": {"SquaredReLU"},
    "rotary": {"RotaryAttention"},
    "QK-norm": {"NormedAttention", "RMSNorm"},
    "zeroed outputs": set(),
    "Muon": set(),
    "grouped-query": {"GroupedAttention"},
    "multi-query": {"GroupedAttention"},
    "multi-query, across too": {"GroupedAttention"},
    "latent": {"LatentAttention", "RMSNorm"},
    "latent, decoder alone": {"RotaryAttention", "LatentAttention", "RMSNorm"},
    "latent, across too": {"LatentAttention", "RMSNorm"},
    "window of 4": {"WindowedAttention"},
    "linear attention": {"LinearAttention"},
    "experts": {"MixtureOfExperts", "SwiGLU"},
}
ATTENTIONS = {kind for kinds in KINDS.values() for kind in kinds if kind.endswith("Attention")}


def test_the_command_keeps_the_record_where_it_is_asked_to(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "step_back", lambda: None)
    monkeypatch.setenv("SERIES_RUNS", str(tmp_path))
    options = Hours(hours=1, workers=1, corpus="sample")
    given = ("scripts.studies.squares", STUDY, lambda runs: [{"x": 5}], epochs)
    record = go_on(options, *given)
    assert record["runs"][0]["loss"] == STUDY.epochs
    assert record["setting"]["corpus"] == "sample"
    assert (tmp_path / "results" / "squares-sample.json").is_file()
    assert record["command"] == "python -m scripts.studies.squares --corpus sample --save true"


def epochs(setting, wanted):
    """Work that says what it was given."""
    return {"loss": setting["epochs"]}


@pytest.fixture
def tiny():
    """A setting in which a row is trained in a second."""
    config = replace(STUDY, corpus="few", vocab=300, d_model=16, d_ff=16, layers=1)
    return asdict(replace(config, epochs=2, heads=2, warmup=4, max_tokens=4096))


def test_the_swept_rate_is_muons_too(tiny, monkeypatch):
    seen = []
    found = None, [1.0], [1.0]
    monkeypatch.setattr(rows, "train_row", lambda row, config, data: seen.append(config) or found)
    rows.one_run(block.ROWS["Muon"], tiny, {"lr": 0.01, "seed": SWEEP})
    assert (seen[0].optimizer, seen[0].lr, seen[0].muon_lr) == ("muon", 0.01, 0.01)


@pytest.mark.parametrize("row", [THE_BASE, "no residual"])
def test_a_run_is_that_of_its_row_and_only_what_counts_is_translated(tiny, row):
    wanted = {"row": row, "dropout": 0.0, "lr": 0.004, "seed": SWEEP}
    found = work(tiny, wanted)
    assert found["loss"] == min(found["losses"]) and len(found["losses"]) == 2
    assert "bleu" not in found and found["losses"][0] > found["losses"][1]
    again, counted = work(tiny, wanted), work(tiny, wanted | {"seed": 1})
    assert again["losses"] == found["losses"] != counted["losses"]
    assert 0 <= counted["bleu"] < 100
    assert work(tiny, wanted | {"dropout": 0.5})["losses"] != found["losses"]


def test_a_run_that_diverges_has_no_loss(tiny):
    found = work(tiny, {"row": THE_BASE, "dropout": 0.0, "lr": 1e30, "seed": 1})
    assert found["loss"] is None and found["diverged"] and "bleu" not in found


def test_a_cell_of_the_grid_learns_from_its_share_of_the_pairs(tiny):
    tiny |= {"d_model": 64, "max_tokens": 128}
    wanted = {"d_model": 16, "share": 8, "lr": 0.004, "seed": 1}
    found = grid.work(tiny, wanted)
    assert "bleu" not in found and len(found["losses"]) <= grid.PASSES[8]
    whole = data_of("few", tiny["vocab"])
    assert data_of("few", tiny["vocab"], 8).train == part_of(whole, 8).train
    assert found["tokens"] == sum(len(e.tgt) - 1 for e in part_of(whole, 8).train)
    assert found["loss"] > grid.work(tiny, wanted | {"share": 4})["loss"]
