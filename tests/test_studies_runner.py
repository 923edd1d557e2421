"""The runner of studies, their plans, and the record of what is measured."""

import json
import math
from dataclasses import asdict, replace

import pytest

from scripts.book import records
from scripts.book.records import load_record, recorded
from scripts.ch19_ablations import STUDY
from scripts.studies import block, classify, grid, recipes, runner, stacks, table3
from scripts.studies.runner import SWEEP, SWEEPS, Plan, Study, kept_at, study_command, these

STUDIES = (block, classify, grid, recipes, stacks, table3)


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


@pytest.mark.parametrize("step, diverged", [(-3, 9.0), (0, 1.5), (2, 9.0)])
def test_a_finer_sweep_goes_to_the_best_rate_in_steps_of_root_two(step, diverged):
    """By the mean of two seeds: the first alone would choose its neighbour."""
    place, best, runs = {"row": "a", "lr": 0.0084}, 2 ** (step / 2), []
    while (found := (plan := Plan(runs)).finer(place)) is None:
        for run in [run for run in plan if not these(runs, **run)]:
            shifted = run["lr"] / 0.0084 / best * 2 ** (0.3 - 0.06 * run["seed"])
            loss = math.log2(shifted) ** 2
            runs.append(run | {"loss": None if run["lr"] > 0.0084 * diverged else loss})
    assert found == {"row": "a", "lr": pytest.approx(0.0084 * best, rel=2e-3)}
    assert len(runs) == 2 * (3 + abs(step)) and not Plan(runs).sweep({"row": "a"}, 0.0084)


def square(setting, task):
    """Work for another process; it leaves a trace, so that calls can be counted."""
    with open(setting["trace"], "a") as trace:
        trace.write(f"{task['x']}\n")
    return {"loss": task["x"] ** 2 + setting["more"]}


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


def echo(setting, task):
    return {"loss": setting["epochs"]}


def test_a_command_keeps_its_record_where_it_is_asked_to(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "step_back", lambda: None)
    monkeypatch.setenv("SERIES_RUNS", str(tmp_path))
    command = study_command(
        "scripts.studies.squares", asdict(STUDY), lambda plan: plan.append({"x": 5}), echo
    )
    record = command.run(runner.Hours(hours=1, workers=1))
    assert record["runs"][0]["loss"] == STUDY.epochs and record["setting"] == asdict(STUDY)
    assert load_record("squares-multi30k", tmp_path / "results") == record
    assert record["command"] == "python -m scripts.studies.squares --save"


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


def test_what_is_kept_is_made_anew_for_another_key(tmp_path):
    path, made = tmp_path / "texts.json", iter("abc")
    content = [kept_at(path, {"key": key}, lambda: {"text": next(made)}) for key in (1, 1, 2)]
    assert [each["text"] for each in content] == ["a", "a", "b"] and content[2]["key"] == 2


# Plans


@pytest.mark.parametrize("study", STUDIES, ids=lambda study: study.__name__.split(".")[-1])
def test_a_plan_wants_the_runs_that_its_record_counts(study):
    """Each row's seeds, at the rate that its own sweep found; before that, only sweeps."""
    runs = load_record(f"{study.__name__.split('.')[-1]}-multi30k")["runs"]
    first, plan = Plan([]), Plan(runs)
    study.plan_runs(first)
    study.plan_runs(plan)
    assert all(run["seed"] == SWEEP for run in first if "lr" in run) and len(first) < len(plan)
    assert all(these(runs, **task) for task in plan)
    for run in runs:
        assert run.get("seed") in SWEEPS or [task for task in plan if task.items() <= run.items()]
    places = [
        {k: v for k, v in run.items() if k not in ("lr", "seed")} for run in first if "lr" in run
    ]
    for place in places:  # what is known at once is swept until worse rates surround the best
        losses = {run["lr"]: run["loss"] or math.inf for run in these(runs, **place, seed=SWEEP)}
        best = min((lr for lr in losses if {lr / 2, 2 * lr} <= {*losses}), key=losses.get)
        assert losses[best / 2] >= losses[best] <= losses[2 * best]
        if not these(runs, **place, seed=SWEEPS[-1]):  # no finer sweep
            assert {run["lr"] for run in these(runs, **place) if run["seed"] not in SWEEPS} <= {
                best
            }


def test_the_grids_rates_lie_between_those_of_its_corners():
    corners = dict(zip(grid.ENDS, (2.0, 8.0, 1.0, 4.0), strict=True))
    assert [grid.rate_at(*end, corners) for end in grid.ENDS] == [2.0, 8.0, 1.0, 4.0]
    assert grid.rate_at(16, 4, corners) == 4.0  # half way along one side
    assert 1.0 < grid.rate_at(24, 1, corners) < 2.0
