"""How rows are trained: when that ends, which weights stay, how the rate falls; and the search."""

from dataclasses import replace

import pytest
import torch
from conftest import ROOT

from scripts.ch19_ablations import STUDY, StudyRow
from scripts.core.data import prepare
from scripts.core.models import load_model
from scripts.corpora.load import load_corpus
from scripts.studies import rows
from scripts.studies.rows import (
    PATIENCE,
    found_by,
    part_indices,
    part_of,
    train_row,
    translations,
)

SMALL = replace(STUDY, corpus="sample", vocab=500, d_model=16, d_ff=16, heads=2, warmup=2)


@pytest.fixture(scope="module")
def few():
    """60 pairs of the sample corpus, 20 to validate."""
    data = prepare(SMALL)
    corpus = {"train": data.corpus["train"][:60], "val": data.corpus["val"][:20]}
    return replace(data, corpus=corpus, train=data.train[:60], val=data.val[:20])


def test_parts_of_a_corpus_lie_inside_each_other():
    parts = [part_indices(100, share) for share in (1, 2, 4, 8)]
    assert [len(part) for part in parts] == [100, 50, 25, 12]
    assert all(set(small) < set(large) for large, small in zip(parts, parts[1:], strict=False))
    assert all(part == sorted(part) for part in parts)
    assert part_indices(100, 4) == parts[2] != list(range(25))
    assert len(part_indices(29_000, 16)) == 1812  # chapter 21 says so


def test_a_pair_and_its_encoding_stay_together(few):
    part = part_of(few, 9)
    assert len(part.train) == 60 // 9 and part.val is few.val
    pieces = few.tokenizer.encode(part.corpus["train"][5][1])
    assert part.train[5].tgt[1:-1] == pieces


def test_every_row_is_decoded_by_the_same_search():
    """What the engine's cache can't run gets a beam of 4, too: the same model, the same texts."""
    trained = load_model(ROOT / "models" / "sample-de-en", "cpu")
    sources = [german for german, _ in load_corpus("sample")["val"][:30]]
    texts = [translations(StudyRow("base", way=way), trained, sources) for way in ("fast", "apart")]
    assert texts[0] == texts[1] and len(set(texts[0])) > 20


def test_training_stops_when_patience_is_at_its_end_and_keeps_the_best(few, monkeypatch):
    wanted = [3.0, 2.5, 2.0, 2.2, 2.1, 2.4, 1.0]
    seen = []

    def scripted(model, row, config, data):
        seen.append([p.detach().clone() for p in model.parameters()])
        return wanted[len(seen) - 1]

    monkeypatch.setattr(rows, "validation_loss", scripted)
    config = replace(SMALL, epochs=7)
    model, losses, trained = train_row(StudyRow("base"), config, part_of(few, 2))
    assert losses == wanted[: 3 + PATIENCE]  # the 1.0 is never seen
    assert len(trained) == len(losses) and trained[-1] < trained[0]
    assert all(map(torch.equal, model.parameters(), seen[2]))
    assert not all(map(torch.equal, model.parameters(), seen[-1]))


def test_a_validation_that_overflows_is_a_run_that_diverged(few, monkeypatch):
    losses = iter([2.0, float("nan"), 1.0])
    monkeypatch.setattr(rows, "validation_loss", lambda *_: next(losses))
    config = replace(SMALL, epochs=3)
    found = found_by(lambda: train_row(StudyRow("base"), config, part_of(few, 2)), lambda _: {})
    assert found["loss"] is None and found["diverged"] == "the validation loss is nan"


def test_the_rate_runs_down_over_the_steps_that_are_made(few, monkeypatch):
    """Several batches accumulated are one step."""
    real, totals, steps = rows.learning_rate, [], []

    def counted(config, total):
        totals.append(total)
        return lambda step: steps.append(step) or real(config, total)(step)

    monkeypatch.setattr(rows, "learning_rate", counted)
    config = replace(SMALL, epochs=1, max_tokens=256, accumulate=2)
    train_row(StudyRow("base"), config, few)
    assert totals == [max(steps) - 1] and totals[0] > 1  # one more is asked for, but not made
