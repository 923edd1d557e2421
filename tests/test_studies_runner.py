"""The runner of studies, their plans, and the record of what is measured."""

import json
import math
import zlib
from dataclasses import replace

import pytest

from scripts.book import records
from scripts.book.records import load_record, recorded
from scripts.ch19_ablations import STUDY, STUDY_ROWS, THE_BASE
from scripts.studies import block, classify, gpt, grid, recipes, runner, stacks, table3
from scripts.studies.runner import SEEDS, SWEEP, Hours, Plan, Study, on_record, study_command, these

STUDIES = (block, classify, gpt, grid, recipes, stacks, table3)


def valley(best, diverged=math.inf):
    """A loss by rate, lowest at `best`; none from `diverged` on."""
    return lambda rate: None if rate >= diverged else 1 + math.log2(rate / best) ** 2


def swept(loss):
    """The best rate of a sweep from 1, and all rates in the order in which they were tried."""
    runs = []
    while (best := (plan := Plan(runs)).sweep({"row": "a"}, 1.0)) is None:
        missing = [run for run in plan if not these(runs, **run)]
        runs.append(missing[0] | {"loss": loss(missing[0]["lr"])})
        assert len(runs) < 20
    return best["lr"], [run["lr"] for run in runs]


@pytest.mark.parametrize("best", [0.25, 0.5, 1.0, 2.0, 8.0])
def test_a_sweep_goes_on_until_the_best_rate_has_worse_ones_on_both_sides(best):
    chosen, rates = swept(valley(best))
    assert chosen == best and {best / 2, 2 * best} <= {*rates}
    assert len(rates) == len({*rates}) <= 3 + abs(math.log2(best))


def test_a_sweep_stops_where_runs_diverge():
    assert swept(valley(4.0, diverged=2.0)) == (1.0, [0.5, 1.0, 2.0])
    with pytest.raises(ValueError):
        swept(valley(4.0, diverged=0.0))


def square(setting, wanted):
    """Work for another process; it leaves a trace, so that calls can be counted."""
    with open(setting["trace"], "a") as trace:
        trace.write(f"{wanted['x']}\n")
    return {"loss": wanted["x"] ** 2 + setting["more"]}


def first_two_then_best(plan):
    """Two runs, of which one is named twice; when they are done, a third that rests on them."""
    plan += [{"x": 3}, {"x": -2}, {"x": 3}]
    if all(these(plan.runs, **run) for run in plan):
        plan.append({"x": min(plan.runs, key=lambda run: run["loss"])["x"] + 10})


@pytest.fixture
def study(tmp_path):
    setting = {"trace": str(tmp_path / "trace"), "more": 0}
    return Study("squares", setting, first_two_then_best, square)


def test_a_stopped_study_goes_on_with_what_is_missing(study, tmp_path):
    path = tmp_path / "squares.json"
    assert study.go_on("a command", tmp_path, hours=0)["runs"] == []  # begins none
    first = study.go_on("a command", tmp_path, hours=1, workers=3)
    assert sorted(run["loss"] for run in first["runs"]) == [4, 9, 64]
    assert first["runs"][-1]["x"] == 8 and json.loads(path.read_text()) == first
    path.write_text(json.dumps({**first, "runs": first["runs"][:1]}))  # as if it had been killed
    again = study.go_on("another", tmp_path, hours=1)
    assert again["runs"][0] == first["runs"][0] and again["command"] == "a command"
    assert sorted(run["loss"] for run in again["runs"]) == [4, 9, 64]
    assert len((tmp_path / "trace").read_text().split()) == 3 + 2


def test_a_record_in_another_setting_is_left_alone(study, tmp_path):
    path = tmp_path / "squares.json"
    record = {"command": "a command", "setting": study.setting | {"gone": 1}, "runs": [{"x": 3}]}
    path.write_text(json.dumps(record))
    assert study.record("a command", tmp_path) == record  # this code has no setting "gone"
    another = replace(study, setting=study.setting | {"more": 1})
    with pytest.raises(ValueError, match="squares.json holds a study in another setting"):
        another.go_on("a command", tmp_path, hours=1)
    assert json.loads(path.read_text()) == record


def echo(setting, wanted):
    return {"loss": setting["epochs"]}


def test_a_command_keeps_its_record_where_it_is_asked_to(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "step_back", lambda: None)
    monkeypatch.setenv("SERIES_RUNS", str(tmp_path))
    command = study_command(
        "scripts.studies.squares", STUDY, lambda plan: plan.append({"x": 5}), echo
    )
    record = command.run(Hours(hours=1, workers=1, corpus="sample"))
    assert record["runs"][0]["loss"] == STUDY.epochs and record["setting"]["corpus"] == "sample"
    assert load_record("squares-sample", tmp_path / "results") == record
    assert record["command"] == "python -m scripts.studies.squares --corpus sample --save"


def test_what_is_measured_replaces_no_record_of_another_command(monkeypatch, capsys):
    saved = {}
    monkeypatch.setattr(records, "save_record", saved.__setitem__)
    record = recorded("new", "a command", lambda: {"x": 5}, save=False)
    assert json.loads(capsys.readouterr().out) == record and record["x"] == 5 and not saved
    record = recorded("new", "a command", lambda: {"x": 5}, save=True)
    assert saved == {"new": record} and record["repeat"] == "a command"
    with pytest.raises(
        ValueError, match="is what `python -m scripts.studies.judging --save` makes"
    ):
        recorded("decoding-multi30k", "a command", lambda: 1 / 0, save=True)  # it measures nothing


def test_the_record_of_another_run_is_refused(tmp_path):
    path = tmp_path / "record.json"
    assert on_record(path, STUDY) is None
    record = {"config": json.loads(json.dumps(vars(STUDY))), "lesson": {"risk": 1.0}}
    path.write_text(json.dumps(record))
    assert on_record(path, STUDY, {"risk": 1.0}) == record
    for config, lesson in ((STUDY, {}), (replace(STUDY, lr=1.0), {"risk": 1.0})):
        with pytest.raises(ValueError, match="holds another run"):
            on_record(path, config, lesson)


# Plans


def place_of(run):
    return {key: value for key, value in run.items() if key not in ("lr", "seed", "loss", "risk")}


def made_up(run):
    """A loss with its own best rate for each row, and least at the second of several dropouts."""
    place = place_of(run)
    best = 1e-3 * 2.0 ** (1 + zlib.crc32(repr(place).encode()) % 4)
    apart = abs(place.get("dropout", 0.1) - 0.1) + abs(place.get("epochs", 16) - 16) / 100
    loss = valley(best)(run.get("lr", best)) + apart
    return {"loss": loss, "risk": loss}


def simulated(study, limit=400):
    """All runs of a study, in their order, with made-up losses."""
    runs, study = [], Study("x", {}, study.plan_runs, study.work)
    while missing := study.missing(runs):
        assert len(runs) < limit
        runs.append(missing[0] | made_up(missing[0]))
    return runs


def rate_of(runs, **place):
    """The one rate of the runs that count."""
    counted = [run for run in these(runs, **place) if run["seed"] != SWEEP]
    assert [run["seed"] for run in counted] == [*SEEDS]
    (rate,) = {run["lr"] for run in counted}
    return rate


@pytest.mark.parametrize("study", STUDIES, ids=lambda study: study.__name__.split(".")[-1])
def test_what_counts_uses_the_rate_that_its_own_sweep_found(study):
    runs = simulated(study)
    places = [place_of(run) for run in these(runs, seed=SWEEP)]
    assert places
    for place in places:
        losses = {run["lr"]: run["loss"] for run in these(runs, **place, seed=SWEEP)}
        best = min(losses, key=losses.get)
        assert losses[best / 2] > losses[best] < losses[2 * best]
        counted = [run for run in these(runs, **place) if run["seed"] != SWEEP]
        assert {run["lr"] for run in counted} <= {best}
        assert len(counted) in (0, len(SEEDS), len(classify.DRAWS))
    record = load_record(f"{study.__name__.split('.')[-1]}-multi30k")
    whole = Study("x", {}, study.plan_runs, study.work)
    assert not whole.missing(record["runs"])


def test_table_3_asks_three_seeds_of_each_row_with_the_bases_best_dropout():
    runs = simulated(table3)
    base = rate_of(runs, row=THE_BASE, dropout=0.1)
    for row in STUDY_ROWS:
        rate = rate_of(runs, row=row, dropout=0.1)
        assert (row in table3.SWEPT) == bool(these(runs, row=row, seed=SWEEP)) or row == THE_BASE
        assert row in table3.SWEPT or rate == base
    assert all(rate_of(runs, row=THE_BASE, dropout=dropout) for dropout in table3.DROPOUTS)


def test_the_block_asks_the_same_of_both_blocks_and_of_each_part():
    runs = simulated(block)
    assert all(rate_of(runs, row=row, epochs=block.SHORT) for row in block.ROWS)
    for row in (block.OLD, block.NEW):
        assert len(these(runs, row=row, epochs=block.SHORT, seed=SWEEP)) >= 4  # rates
        assert rate_of(runs, row=row, epochs=block.LONG, dropout=0.1)
        assert not these(runs, row=row, epochs=block.LONG, dropout=0.0, seed=SEEDS[0])


def test_the_grids_rates_lie_between_those_of_its_corners():
    runs = simulated(grid)
    swept = {(run["d_model"], run["share"]) for run in these(runs, seed=SWEEP)}
    assert swept == {*grid.ENDS} == {(16, 1), (16, 16), (96, 1), (96, 16)}
    assert all(rate_of(runs, d_model=w, share=s) for w in grid.WIDTHS for s in grid.PASSES)
    corners = dict(zip(grid.ENDS, (2.0, 8.0, 1.0, 4.0), strict=True))
    assert [grid.rate_at(*end, corners) for end in grid.ENDS] == [2.0, 8.0, 1.0, 4.0]
    assert grid.rate_at(16, 4, corners) == 4.0  # half way along one side
    assert 1.0 < grid.rate_at(24, 1, corners) < 2.0


def test_the_best_of_several_places_goes_on():
    for study, row in ((gpt, gpt.MODEL), (recipes, recipes.PART)):
        runs = simulated(study)
        swept = these(runs, row=row, seed=SWEEP)
        best = min(swept, key=lambda run: run["loss"])
        (counted,) = {(r["lr"], r.get("dropout")) for r in these(runs, row=row) if r["seed"]}
        assert counted == (best["lr"], best.get("dropout"))
    rate = rate_of(runs, row=recipes.ALL)
    assert {run["before_lr"] for run in these(runs, row=recipes.RISK)} == {rate}
    rate = rate_of(runs, row=recipes.REVERSE)
    assert {run["reverse_lr"] for run in these(runs, row=recipes.GREEDY)} == {rate}
