"""The study of chapters 22 to 24: its rows are what they say, and what is said of them is true."""

import math
import statistics
from dataclasses import asdict, replace

import pytest
import torch
from saying import ran

from scripts.book.instruments import scramble
from scripts.book.records import load_record
from scripts.book.verdict import pooled_spread, t_exceeded
from scripts.ch01_attention import subsequent_mask
from scripts.ch06_training import Batch, LabelSmoothing, batch_loss
from scripts.ch19_ablations import THE_BASE
from scripts.ch22_todays_block import RIVALS_OF_PARTS, block_means, block_runs, block_verdicts
from scripts.ch24_experts import MixtureOfExperts, active_parameters
from scripts.studies import block
from scripts.studies.runner import these

close = torch.testing.assert_close
CONFIG = replace(block.BASE, d_model=32, d_ff=96)
SRC = torch.tensor([[5, 6, 7, 8, 9, 3], [5, 6, 7, 3, 0, 0]])
TGT = torch.tensor([[2, 11, 12, 13, 14], [2, 21, 22, 3, 0]])

pytestmark = pytest.mark.usefixtures("float64")


def shaken(name):
    """A row's model whose scores are far from even, and whose outputs aren't zero."""
    model = block.ROWS[name].build(CONFIG, 50)
    scramble(model, size=0.2)
    return model.eval()


def test_what_a_token_costs_is_counted_from_real_tensors():
    numbers = {"rotary": 64, "today": 32, "grouped-query": 32, "multi-query": 16, "latent": 16}
    token = torch.randn(1, 1, 32)
    for name, wanted in numbers.items():
        kept = shaken(name).decoder.layers[0].self_attn.remember(token, token)
        assert sum(part.numel() for part in kept) == wanted


def test_active_parameters():
    with torch.device("meta"):
        models = {name: row.build(block.BASE, 2000) for name, row in block.ROWS.items()}
    active = {name: active_parameters(model) for name, model in models.items()}
    alike = {"RMSNorm", "SwiGLU", "ReLU²", "rotary", "QK-norm", "zeroed outputs", "Muon", "experts"}
    for name in alike | {"window of 4", "linear attention"}:
        assert abs(active[name] / active["2017"] - 1) < 0.01, name
    everything = sum(p.numel() for p in models["experts"].parameters())
    width = models["experts"].encoder.layers[0].feed_forward.experts[0].gate.out_features
    assert everything - active["experts"] == 4 * 6 * 3 * 64 * width  # layers, idle, matrices


def test_the_loss_adds_the_penalty_in_training_alone(monkeypatch):
    model, batch, criterion = shaken("experts"), Batch(SRC, TGT), LabelSmoothing(0.1)
    close(block.parts_loss(model, batch, criterion), batch_loss(model, batch, criterion))
    monkeypatch.setattr(block, "BALANCE", 0.5)
    loss, nll = block.parts_loss(model.train(), batch, criterion)
    plain, same = batch_loss(model, batch, criterion)
    mixtures = [part for part in model.modules() if isinstance(part, MixtureOfExperts)]
    assert len(mixtures) == 4
    close(loss - plain, 0.5 * batch.ntokens * sum(part.penalty for part in mixtures))
    close(nll, same)


def test_the_record_is_of_this_study():
    record = load_record("block-multi30k")
    assert record["setting"] == asdict(replace(block.BASE, corpus="multi30k"))
    assert {run["row"] for run in record["runs"]} == {*block.ROWS}
    runs = record["runs"]
    assert all(these(runs, **wanted) for wanted in block.wanted_runs(runs))
    assert {*RIVALS_OF_PARTS} == {*block.ROWS} - {"2017"}


# What the chapters say


def test_what_chapter_22_says_of_its_record():
    said, by_loss, means = block_verdicts(), block_verdicts("log p"), block_means(block.ROWS)
    wanted = {"rotary": 3.0, "Muon": 1.5, "today, Muon": 5.5, "zeroed outputs": -2.4}
    wanted |= {"today, not zeroed": 2.5, "SwiGLU": 0.8}
    assert {row: round(said[row].difference, 1) for row in wanted} == wanted
    here = ran("ch22").OF_THIS_CHAPTER
    told = {row for row in here if said[row].told}
    assert told == {*wanted, "today"} - {"SwiGLU"} and said["today"].difference > 0
    assert {row for row in here if by_loss[row].told} == told | {"SwiGLU"} and len(said) == 19
    assert round(by_loss["SwiGLU"].difference, 2) == 0.08
    assert {round(one.high - one.low, 1) for one in said.values()} == {1.7}
    drop = means.loc["2017"] - means.loc["rotary"]
    assert drop["last"] == pytest.approx(drop["loss"], abs=0.02)
    assert means["first"][["rotary", "SwiGLU"]].round(2).tolist() == [4.08, 4.08]
    gained = means["loss"]["2017"] - means["loss"][["rotary", "Muon"]]
    assert gained.round(2).tolist() == [0.18, 0.18]
    assert {means["lr"][row] for row in ("Muon", "today, Muon")} == {0.0336}
    bleu = block_runs().groupby("row")["bleu"].mean()
    steps = ["rotary", "today", "today, not zeroed", "today, Muon"]
    apart = [round(bleu[b] - bleu[a], 1) for a, b in zip(steps, steps[1:], strict=False)]
    assert apart == [-1.4, 2.5, 3.0] and round(bleu[steps[2]] - bleu["rotary"], 1) == 1.1
    longer = [
        run["bleu"]
        for run in these(load_record("table3-multi30k")["runs"], row=THE_BASE)
        if run["seed"] and not run["dropout"]
    ]
    assert round(sum(longer) / 3, 1) == 30.1


def test_what_chapter_22_says_of_the_sweeps():
    swept = [run for run in load_record("block-multi30k")["runs"] if run["seed"] == 0]
    at = {(run["row"], run["lr"]): round(run["loss"], 2) for run in swept if run["epochs"] == 3}
    assert (at["2017", 0.0084], at["zeroed outputs", 0.0084]) == (2.32, 2.90)
    assert (at["2017", 0.0042], at["zeroed outputs", 0.0042]) == (2.49, 2.53)
    lost = [at[row, 0.0168] - at[row, 0.0084] for row in ("2017", "QK-norm", "SwiGLU")]
    assert [round(more, 2) for more in lost] == [0.34, 0.05, 0.05]
    for row in ("Muon", "today, Muon"):  # barely
        half, best, double = (at[row, rate] for rate in (0.0168, 0.0336, 0.0672))
        assert 0 <= min(half, double) - best < 0.02


def test_what_chapter_22_says_of_nine_passes():
    said, rows = ran("ch22"), ["2017", "today"]
    leads = [said.longer, said.said["today"]]
    assert [round(one.difference, 1) for one in leads] == [2.9, 1.6]
    assert said.longer.told
    short, means = (block_means(rows, epochs=n) for n in (3, 9))
    lower = [(table.loc["2017"] - table.loc["today"])[["last", "loss"]] for table in (short, means)]
    assert [lead.round(2).tolist() for lead in lower] == [[0.15, 0.14], [0.21, 0.16]]
    growths = {"bleu": (1.3, 1.2), "loss": (-0.02, 0.04)}
    for what, (growth, width) in growths.items():
        groups = [block_runs(n).groupby("row")[what].agg(list)[rows] for n in (3, 9)]
        spread, freedom = pooled_spread([scores for group in groups for scores in group])
        leads = [group.map(statistics.mean).diff().iloc[1] for group in groups]
        found = leads[1] - leads[0], t_exceeded(0.05, freedom) * spread * math.sqrt(4 / 3)
        assert found == pytest.approx((growth, width), abs=0.05 if what == "bleu" else 0.005)
    swept = these(load_record("block-multi30k")["runs"], seed=0, epochs=9)
    best = {
        (row, dropout): min(run["loss"] for run in these(swept, row=row, dropout=dropout))
        for row in rows
        for dropout in block.LONG_DROPOUTS
    }
    costs = [best[row, 0.1] - best[row, 0.0] for row in rows]
    assert [round(cost, 2) for cost in costs] == [0.15, 0.11]


def test_a_fresh_model_with_zeroed_outputs_says_what_it_read():
    torch.manual_seed(0)
    model = block.ROWS["zeroed outputs"].build(block.BASE, 2000).eval()
    read = torch.randint(4, 2000, (1, 30))
    with torch.no_grad():
        x = model(torch.randint(4, 2000, (1, 9)), read, None, subsequent_mask(30))
    assert torch.equal(model.generator(x).argmax(-1), read)


def test_what_chapter_22_says_of_directions():
    said = ran("ch22")
    assert [int((part < 0.9).sum()) + 1 for part in (said.share, said.adams)] == [12, 60]


def test_what_chapter_23_says_of_its_record():
    said = block_verdicts()
    found = {row: (round(said[row].difference, 1), said[row].told) for row in ran("ch23").rows}
    assert found == {
        "grouped-query": (-0.4, False),
        "multi-query": (-0.2, False),
        "multi-query, across too": (-1.2, False),
        "latent, decoder alone": (-0.1, False),
        "latent": (-1.8, True),
        "latent, across too": (-2.8, True),
        "window of 4": (1.6, True),
        "linear attention": (0.4, False),
    }
    assert round(min(said["grouped-query"].low, said["multi-query"].low), 1) == -1.2
    assert said["multi-query, across too"].high < 0
    layer = block.ROWS["latent"].build(block.BASE, 50).decoder.layers[0].self_attn
    assert (layer.compress.out_features, layer.rotary, layer.d_k) == (24, 8, 16)


def test_what_chapter_24_says_of_its_record():
    said = block_verdicts()["experts"]
    assert not said.told and not block_verdicts("log p")["experts"].told
    assert (round(said.low, 1), round(said.high, 1)) == (-1.4, 0.3)
    with torch.device("meta"):
        models = [block.ROWS[row].build(block.BASE, 2000) for row in ("experts", "SwiGLU")]
    sizes = [sum(p.numel() for p in model.parameters()) for model in models]
    assert [round(size, -3) for size in sizes] == [620_000, 363_000]
