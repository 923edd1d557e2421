"""How rows are trained and scored: the textbook's numbers, when a run ends, which weights stay."""

import random
from dataclasses import asdict, replace

import pytest
import torch
from conftest import ROOT

from scripts.ch06_training import LabelSmoothing, batch_loss
from scripts.ch07_multi30k import make_batch, token_batches
from scripts.ch19_ablations import STUDY, STUDY_ROWS, THE_BASE, StudyRow
from scripts.core.data import prepare
from scripts.core.models import load_model
from scripts.core.settings import build_model, learning_rate
from scripts.corpora.load import load_corpus
from scripts.studies import block, grid, rows, stacks, table3
from scripts.studies.rows import bleu, data_of, one_run, outcome, part_indices, part_of, train_row
from scripts.studies.runner import SWEEP

SMALL = replace(STUDY, corpus="few", vocab=300, d_model=16, d_ff=16, heads=2, layers=1)
SMALL = replace(SMALL, epochs=2, warmup=4, max_tokens=2048, dropout=0.0)
TINY = asdict(SMALL)


@pytest.fixture(scope="module")
def few():
    """60 pairs of the sample corpus, 20 to validate."""
    data = prepare(SMALL)
    corpus = {"train": data.corpus["train"][:60], "val": data.corpus["val"][:20]}
    return replace(data, corpus=corpus, train=data.train[:60], val=data.val[:20])


def test_parts_of_a_corpus_lie_inside_each_other(few):
    parts = [part_indices(100, share) for share in (1, 2, 4, 8)]
    assert [len(part) for part in parts] == [100, 50, 25, 12]
    assert all({*small} < {*large} for large, small in zip(parts, parts[1:], strict=False))
    assert all(part == sorted(part) for part in parts) and parts[2] != list(range(25))
    assert len(part_indices(29_000, 16)) == 1812  # chapter 21 says so
    part, chosen = part_of(few, 9), part_indices(60, 9)
    assert part.train == [few.train[i] for i in chosen] and part.val is few.val


def by_plain_loop(config, data):
    """A training as chapters 4 to 7 have it, with torch's Adam: each epoch's loss."""
    torch.manual_seed(config.seed)
    model = build_model(config, len(data.tokenizer))
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.9, 0.98), eps=1e-9)
    epochs = [random.Random(f"{config.seed}:{n}") for n in range(1, config.epochs + 1)]
    plans = [token_batches(data.train, config.max_tokens, order) for order in epochs]
    rate_at, step, losses = learning_rate(config, sum(map(len, plans))), 0, []
    for plan in plans:
        for batch in (make_batch([data.train[i] for i in part]) for part in plan):
            step += 1
            optimizer.param_groups[0]["lr"] = rate_at(step)
            loss, _ = batch_loss(model.train(), batch, LabelSmoothing(config.smoothing))
            optimizer.zero_grad()
            (loss / batch.ntokens).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
            optimizer.step()
        batch = make_batch(data.val)
        _, nll = batch_loss(model.eval(), batch, LabelSmoothing(0.0))
        losses.append(nll.item() / batch.ntokens)
    return losses


@pytest.mark.parametrize("row", [StudyRow("base"), block.ROWS["2017"]], ids=["fast", "textbook"])
def test_a_rows_losses_are_the_textbooks(row, few):
    config = replace(SMALL, max_tokens=256, lr=0.01)
    _, losses, trained = train_row(row, config, few)
    assert losses == pytest.approx(by_plain_loop(config, few), rel=2e-4)
    assert losses[0] > losses[1] and trained[0] > trained[1]


KINDS = [(table3, THE_BASE), (table3, "no residual"), (block, "experts")]
KINDS += [(stacks, stacks.TWO), (stacks, "prefix, positions anew")]


@pytest.mark.parametrize(("study", "row"), KINDS)
def test_each_kind_of_row_learns_and_only_what_counts_is_translated(study, row):
    task = {"row": row, "lr": 0.004, "seed": SWEEP}
    run = study.work(TINY, task)
    assert run["loss"] == min(run["losses"]) and run["losses"][0] > run["losses"][1]
    counted = study.work(TINY, task | {"seed": 1})
    assert "bleu" not in run and 0 <= counted["bleu"] < 100
    assert counted["losses"] != run["losses"]


def test_a_row_uses_its_own_rate_dropout_and_settings(monkeypatch):
    configs = []
    monkeypatch.setattr(
        rows, "train_row", lambda row, config, data: configs.append(config) or (None, [1.0], [1.0])
    )
    one_run(block.ROWS["Muon"], TINY, {"lr": 0.01, "dropout": 0.3, "epochs": 7, "seed": SWEEP})
    one_run(STUDY_ROWS["post-norm"], TINY, {"lr": 0.02, "seed": SWEEP})
    muon, post = configs
    assert (muon.optimizer, muon.lr, muon.muon_lr) == ("muon", 0.01, 0.01)
    assert (muon.dropout, muon.epochs, muon.seed) == (0.3, 7, SWEEP)
    assert (post.norm_first, post.lr, post.dropout) == (False, 0.02, 0.0)


def test_a_cell_of_the_grid_learns_from_its_share_of_the_pairs():
    task = {"d_model": 16, "share": 8, "lr": 0.004, "seed": 1}
    run = grid.work(TINY | {"max_tokens": 128}, task)
    part = data_of("few", 300, 8)
    assert part.train == part_of(data_of("few", 300), 8).train
    assert run["tokens"] == sum(len(e.tgt) - 1 for e in part.train)
    assert "bleu" not in run and len(run["losses"]) <= grid.PASSES[8]


def test_every_row_is_decoded_by_the_same_search():
    """What the fast cache can't run gets a beam of 4, too: the same model, the same score."""
    trained = load_model(ROOT / "models" / "sample-de-en", "cpu")
    data = prepare(SMALL)
    data.corpus["val"] = [(de, f"{en} now") for de, en in load_corpus("sample")["val"][:30]]
    fast, plain = (bleu(StudyRow("base", way=way), trained, data) for way in ("fast", "apart"))
    assert fast == plain and 10 < fast["bleu"] < 95


def test_training_stops_when_patience_is_at_its_end_and_keeps_the_best(few, monkeypatch):
    scripted, seen = [3.0, 2.5, 2.0, 2.2, 2.1, 2.4, 1.0], []

    def validation_loss(model, row, config, data):
        seen.append([p.detach().clone() for p in model.parameters()])
        return scripted[len(seen) - 1]

    monkeypatch.setattr(rows, "validation_loss", validation_loss)
    model, losses, trained = train_row(StudyRow("base"), replace(SMALL, epochs=7), few)
    assert losses == scripted[: 3 + rows.PATIENCE]  # 1.0 is never seen
    assert len(trained) == len(losses)
    assert all(map(torch.equal, model.parameters(), seen[2]))
    assert not all(map(torch.equal, model.parameters(), seen[-1]))


def test_a_run_that_diverges_has_no_loss(few, monkeypatch):
    diverged = {"loss": None}
    assert table3.work(TINY, {"row": THE_BASE, "lr": 1e30, "seed": 1}) == diverged
    monkeypatch.setattr(rows, "validation_loss", lambda *_: float("nan"))
    assert outcome(lambda: train_row(StudyRow("base"), SMALL, few), lambda _: {}) == diverged
