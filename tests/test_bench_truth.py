"""A minute of truth: kinds that agree are said to agree, and one that errs is found."""

import pytest
import torch
from test_engine_steps import Recorded

from scripts.bench import truth as bench
from scripts.bench.truth import Trial, truth
from scripts.engine.steps import KINDS, StaticStep

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def found():
    return truth(CPU, tiny=True, kinds=KINDS | {"graphed": Recorded})


def test_all_kinds_agree_to_the_bit_on_a_cpu(found):
    assert found["agrees"] and len(found["compared"]) == 3 * 2 * 2 * 2
    assert all(row["same bits"] for row in found["compared"])
    assert {row["dropout"] for row in found["compared"]} == {0.0, 0.2}
    assert [row["same bits"] for row in found["resumed"]] == [True] * 6


def test_what_needs_a_gpu_is_named(found):
    assert found["waits"] == {} and len(found["not_run"]) == 2
    assert {row["kind"] for row in truth(CPU, tiny=True)["compared"]} == {"eager", "static"}


class Forgetful(StaticStep):
    """Drops the last pair of each batch."""

    def cut(self, rows, shapes):
        rows = rows.clone()
        rows[-1] = self.corpus.filler
        return super().cut(rows, shapes)


class Drawing(StaticStep):
    """Draws a random number of its own before each step, as warm-ups would."""

    def __call__(self, number):
        torch.rand(1)
        super().__call__(number)


class Unclipped(StaticStep):
    """Forgets to bound the gradient."""

    def __init__(self, *given, **named):
        super().__init__(*given, **named)
        self.clip = 1e9


@pytest.mark.parametrize("kind", [Forgetful, Drawing, Unclipped])
def test_a_kind_that_errs_is_found(kind):
    rows = truth(CPU, tiny=True, kinds={"eager": KINDS["eager"], "static": kind})
    assert not rows["agrees"]
    wrong = {row["dropout"] for row in rows["compared"] if not row["within"]}
    assert wrong == ({0.2} if kind is Drawing else {0.0, 0.2})


def test_a_resume_without_the_random_state_is_found(monkeypatch):
    monkeypatch.setattr(bench, "set_rng_states", lambda states, device: None)
    found = truth(CPU, tiny=True, kinds={"eager": KINDS["eager"]})
    assert not found["agrees"] and all(row["within"] for row in found["compared"])


def test_pairs_fill_their_batches():
    """Or the kinds would compute on other numbers, and draw other masks."""
    trial = Trial(StaticStep, bench.TrainConfig(layers=1, d_model=16, d_ff=16, heads=2), CPU, 4)
    for step, shapes in zip(trial.take.plan, trial.take.shapes, strict=True):
        assert [(len(batch), len(trial.pairs[batch[0]].src)) for batch in step] == [
            (rows, width) for width, rows in shapes
        ]
