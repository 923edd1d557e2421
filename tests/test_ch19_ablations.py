"""Chapter 19: operations do what they say, rows are trained as built, noise is judged."""

import math
import random
from dataclasses import asdict, replace

import pandas as pd
import pytest
import torch
from saying import ran
from scipy.stats import t as student
from scipy.stats import ttest_ind
from torch.nn import functional as F

from scripts.book.figures.ablations import ablation_chart
from scripts.book.records import load_record
from scripts.book.verdict import pooled_spread, t_exceeded, verdicts
from scripts.ch04_encoder_decoder import SublayerConnection
from scripts.ch06_training import LabelSmoothing, batch_loss
from scripts.ch19_ablations import (
    PATIENT,
    STUDY,
    STUDY_ROWS,
    TABLE3_PERPLEXITIES,
    THE_BASE,
    against_base,
    attentions,
    best_rates,
    by_torch,
    counted,
    drop_positions,
    drop_residuals,
    drop_scale,
    judged,
    last_word_moves,
    layer_parameters,
    learn_positions,
    loss_on,
    patient,
    set_d_k,
    study_of_nothing,
    two_sentences,
)
from scripts.core.settings import build_model
from scripts.studies.table3 import DROPOUTS

SHUFFLE = [3, 0, 6, 2, 5, 1, 4]


# Operations


@pytest.mark.parametrize(
    "sides, blind", [(("src", "tgt"), True), (("src",), True), (("tgt",), False)]
)
def test_without_positions_the_source_is_a_bag_of_words(sides, blind):
    model = patient(lambda model: drop_positions(model, sides))
    change = loss_on(model, two_sentences(SHUFFLE)) - loss_on(model, two_sentences())
    assert (abs(change) < 1e-10) == blind


def test_the_causal_mask_tells_a_positionless_decoder_the_order_from_two_layers_on():
    assert [last_word_moves(layers) for layers in (1, 2, 3)] == [False, True, True]


def test_learned_positions_learn_where_there_are_tokens():
    model = patient(learn_positions)
    batch_loss(model, two_sentences(), LabelSmoothing(0.1))[0].backward()
    for embed, length in ((model.src_embed, 7), (model.tgt_embed, 6)):
        reached = embed[1].pe.grad.abs().sum(dim=-1) > 0
        assert reached.tolist() == [True] * length + [False] * (len(reached) - length)
        assert embed[1].dropout.p == PATIENT.dropout


@pytest.mark.parametrize("norm_first", [True, False])
def test_without_the_residual_only_the_sublayer_is_left(norm_first):
    model = patient(drop_residuals, norm_first=norm_first)
    x = torch.randn(2, 5, 32, dtype=torch.float64)
    connections = [m for m in model.modules() if isinstance(m, SublayerConnection)]
    assert len(connections) == 2 * 2 + 2 * 3
    for bare in connections:
        normed = F.layer_norm(x, (32,), bare.norm.weight, bare.norm.bias, bare.norm.eps)
        sine = F.layer_norm(x.sin(), (32,), bare.norm.weight, bare.norm.bias, bare.norm.eps)
        torch.testing.assert_close(bare(x, torch.sin), normed.sin() if norm_first else sine)


def test_without_the_scale_nothing_is_divided_and_gradients_are_those_of_such_a_model():
    plain, unscaled = patient(), patient(drop_scale)
    for p, raw in zip(plain.parameters(), unscaled.parameters(), strict=True):
        assert p.shape == raw.shape  # in the same order
    x = torch.randn(2, 5, 32, dtype=torch.float64)
    for ours, theirs in zip(attentions(unscaled), attentions(plain), strict=True):
        raw = ours.project_query.parametrizations.weight.original
        with torch.no_grad():
            raw.copy_(theirs.project_query.weight)
            ours.project_query.parametrizations.bias.original.copy_(theirs.project_query.bias)
            for name in ("project_key", "project_value", "project_output"):
                getattr(ours, name).load_state_dict(getattr(theirs, name).state_dict())
        mine, reference = ours(x, x, x), by_torch(theirs, x, scale=1.0)
        torch.testing.assert_close(mine, reference)
        gradient = torch.autograd.grad(mine.sin().sum(), raw)[0]
        wanted = torch.autograd.grad(reference.sin().sum(), theirs.project_query.weight)[0]
        torch.testing.assert_close(gradient, wanted)


@pytest.mark.parametrize("d_k", [1, 3, 8, 11])
def test_keys_of_another_length(d_k):
    model = patient(lambda model: set_d_k(model, d_k))
    x = torch.randn(2, 5, 32, dtype=torch.float64)
    for attn in attentions(model):
        assert attn.project_query.out_features == attn.project_key.out_features == 4 * d_k
        assert attn.project_value.out_features == 32
        torch.testing.assert_close(attn(x, x, x), by_torch(attn, x))
    gone = 6 * 2 * (32 + 1) * 4 * (8 - d_k)
    assert layer_parameters(patient()) - layer_parameters(model) == gone


def test_layers_are_counted_without_tables_and_generator():
    model = build_model(STUDY, STUDY.vocab)
    everything = sum(p.numel() for p in model.parameters())
    assert everything - layer_parameters(model) == STUDY.vocab * STUDY.d_model + STUDY.vocab  # tied
    D, d_ff = STUDY.d_model, STUDY.d_ff
    attention, ff, norm = 4 * (D * D + D), 2 * D * d_ff + D + d_ff, 2 * D
    by_hand = 2 * (attention + ff + 2 * norm) + 2 * (2 * attention + ff + 3 * norm) + 2 * norm
    assert layer_parameters(model) == by_hand == 233_728


# Noise


def test_the_spread_is_that_within_rows():
    assert pooled_spread([[1.0, 3.0], [10.0, 12.0], [5.0]]) == (math.sqrt(2.0), 2)
    with pytest.raises(ValueError, match="twice"):
        pooled_spread([[1.0], [2.0], []])


def test_a_verdict_is_students_t_over_the_pooled_spread_and_holms_steps():
    rows = {"base": [1.0, 3.0], "far": [12.0, 14.0], "one run": [14.0], "other": [12.5, 14.5]}
    found = verdicts(rows, {"far": "base", "one run": "base", "other": "far"})
    assert list(found) == ["far", "one run", "other"]
    spread = math.sqrt(2.0)  # three rows of two runs, each 2.0 apart: 3 degrees of freedom
    assert found["far"].t == pytest.approx(11 / spread)
    assert found["one run"].t == pytest.approx(12 / (spread * math.sqrt(1.5)))
    assert (found["other"].difference, found["other"].told) == (0.5, False)
    for row in found:  # the printed table: with 3 degrees, 3.182 is exceeded once in 20 times
        one, error = found[row], found[row].difference / found[row].t
        assert one.p == pytest.approx(2 * student.sf(one.t, 3))
        assert (one.high - one.difference) / error == pytest.approx(3.182, abs=1e-3)
        assert one.low + one.high == pytest.approx(2 * one.difference)
    level = 2.5 * found["one run"].p  # the second step asks for level/2; Bonferroni for level/3
    told = verdicts(rows, {"far": "base", "one run": "base", "other": "far"}, level)
    assert [verdict.told for verdict in told.values()] == [True, True, False]
    with pytest.raises(ValueError, match="twice"):
        verdicts({"a": [1.0], "b": [2.0]}, {"a": "b"})


def test_large_effects_are_called_by_their_direction():
    rng, means = random.Random(1), {THE_BASE: 0.0, "up": 9.0, "down": -9.0, "a": 0.0, "b": 0.0}
    table = judged({name: [rng.gauss(mean, 1.0) for _ in range(3)] for name, mean in means.items()})
    assert table["verdict"].tolist() == ["worse", "better", "within noise", "within noise"]
    assert table["difference"]["up"] > 0 > table["difference"]["down"]


def test_a_study_of_nothing_has_the_real_one_s_runs(record):
    made, real = study_of_nothing(random.Random(0)), counted(record["runs"])
    assert {*map(len, made.values())} == {*map(len, real.values())} and len(made) <= len(real) + 1


# The record


@pytest.fixture(scope="module")
def record():
    return load_record("table3-multi30k")


def test_the_record_is_of_the_study_in_the_chapter_and_is_whole(record):
    assert record["command"].startswith("python -m scripts.studies.table3")
    setting = asdict(STUDY) | {"corpus": "multi30k"}
    assert setting.items() <= record["setting"].items()
    drops = {f"dropout {p}" for p in DROPOUTS if p}
    assert {*counted(record["runs"])} == {*STUDY_ROWS} | drops


def test_runs_that_diverged_and_those_of_a_sweep_do_not_count():
    runs = [{"row": "a", "dropout": 0.0, "seed": seed, "loss": 2.0 + seed} for seed in range(4)]
    runs += [{"row": "a", "dropout": 0.1, "seed": 1, "loss": 5.0}]
    runs += [{"row": "b", "dropout": 0.0, "seed": 1, "loss": None}]
    assert counted(runs) == {"a": [3.0, 4.0, 5.0], "dropout 0.1": [5.0]}


def test_the_best_rate_of_a_row_and_what_it_gains():
    tried = [("a", 1.0, 3.0), ("a", 2.0, 2.5), ("a", 4.0, None), ("b", 2.0, 1.0), ("b", 1.0, 2.0)]
    sweeps = pd.DataFrame(tried, columns=["row", "lr", "loss"])
    assert best_rates(sweeps, 1.0).to_dict("index") == {
        "a": {"best rate": 2.0, "gain": 0.5},
        "b": {"best rate": 2.0, "gain": 1.0},
    }


def test_every_row_of_table_3_stands_beside_the_papers(record):
    lettered = {name for name, row in STUDY_ROWS.items() if row.group in "ABCDE"}
    assert set(TABLE3_PERPLEXITIES) == lettered | {"dropout 0.1", "dropout 0.2"}
    table = judged(counted(record["runs"]))["paper's"]
    assert table["1 head"] == pytest.approx(math.log(5.29 / 4.92))
    assert table["dropout 0.2"] == pytest.approx(math.log(4.95 / 5.77))  # against no dropout
    assert set(table.dropna().index) == set(TABLE3_PERPLEXITIES)


def test_the_chart_draws_every_run_and_cuts_only_what_it_marks(record):
    losses = counted(record["runs"])
    table, mean = judged(losses), sum(losses[THE_BASE]) / 3
    drawn = ablation_chart(table, losses, THE_BASE, {"1 head": "A"}).to_dict()
    runs = [(name, loss - mean) for name in table.index for loss in losses[name]]
    far = {name for name, x in runs if x > 0.65}
    near = [x for _, x in runs if x <= 0.65]
    sizes = sorted(len(rows) for rows in drawn["datasets"].values())
    assert sizes == sorted([1, len(TABLE3_PERPLEXITIES), len(far), len(near)])


# What the chapter says.


def test_what_the_chapter_says_of_chance():
    alarms = ran("ch19").alarms
    assert alarms["all rows together"] <= 10 < 70 < alarms["each row at 5%"] < 90


def test_what_the_chapter_says_of_the_base_and_of_rates():
    said = ran("ch19")
    table = said.of_base.pivot(index="dropout", columns="lr", values="loss")
    assert (table.diff().iloc[1:] > 0).all(axis=None) and (table.idxmin(axis=1) == 0.0084).all()
    assert table.min(axis=1).round(2).tolist() == [2.10, 2.17, 2.28, 2.52]
    rates, gain = said.rates["best rate"] / said.rate, said.rates["gain"]
    assert rates[rates != 1].round(3).to_dict() == {
        "1 layer": 2,
        "d_model 32": 2,
        "d_model 128": 0.5,
        "no residual": 0.125,
        "post-norm": 0.5,
        "post-norm, no warm-up": 0.5,
    }
    assert gain["post-norm, no warm-up"] > 1.4 and gain["d_model 128"].round(2) == 0.18


def test_what_the_chapter_says_of_rows():
    said = ran("ch19")
    difference, verdict, bleu = said.judgement["difference"], said.judgement["verdict"], said.bleus
    assert verdict.index[0] == "d_model 128" and set(verdict[:2]) == {"better"}
    noise = {"d_ff 512", "learned positions", "2 heads", "1 head", "8 heads"}
    assert {*verdict.index[verdict == "within noise"]} == noise | {"no positions in the decoder"}
    wanted = {
        "d_model 128": -0.24, "d_model 32": 0.39, "d_ff 128": 0.05, "no √d_k": 0.23,
        "post-norm": 0.15, "post-norm, no warm-up": 0.32, "no warm-up": 0.18, "1 layer": 0.10,
        "4 layers": 0.04, "dropout 0.1": 0.19, "no smoothing": -0.07, "smoothing 0.2": 0.14,
    }  # fmt: skip
    assert difference[[*wanted]].round(2).to_dict() == wanted
    rounded = {name: round(score, 1) for name, score in bleu.items()}
    assert (rounded["d_model 128"], rounded[THE_BASE]) == (33.1, 30.1)
    assert rounded["no residual"] < 2 and 25 < rounded["no positions in the encoder"] < 25.5
    lower = [bleu[THE_BASE] - bleu[name] for name in ("no smoothing", "smoothing 0.2")]
    assert [round(less, 1) for less in lower] == [0.4, 0.4]
    assert 4 < difference["d_model 128"] / said.judgement["paper's"]["d_model 128"] < 4.5
    assert difference["no positions in the decoder"].round(2) == 0.03
    assert said.judgement["paper's"]["dropout 0.1"].round(2) == -0.16
    assert 0.3 < said.share < 0.36
    assert {"4 layers", "dropout 0.1"} < {*said.signs[~said.signs].index}
    changed = said.again[said.again != verdict[said.again.index]]
    assert {*changed.index} == {"d_ff 512", "no positions in the decoder"}
    assert 0.02 < said.single < 0.03 < 0.04 < said.first < 0.05


def test_what_the_chapter_says_of_the_paper_and_of_single_rows():
    said = ran("ch19")
    difference, paper = said.judgement["difference"], said.judgement["paper's"]
    assert 2.4 < difference["d_model 32"] / paper["d_model 32"] < 2.6
    post = difference["post-norm, no warm-up"] - difference["post-norm"]
    assert [round(more, 2) for more in (post, difference["no warm-up"])] == [0.17, 0.18]
    scores = counted(said.runs, "bleu")
    by_bleu = verdicts(scores, against_base(scores))
    assert not by_bleu["no smoothing"].told and not by_bleu["smoothing 0.2"].told
    four = ttest_ind(said.by_row["4 layers"], said.by_row[THE_BASE], equal_var=False)
    assert round(four.pvalue, 2) == 0.08
    with torch.device("meta"):
        wide = build_model(replace(STUDY, d_model=128), STUDY.vocab)
    assert round(layer_parameters(wide) / layer_parameters(said.base_model), 1) == 2.8
    assert 0.035 < t_exceeded(0.05 / 7, said.freedom) * said.spread * (2 / 3) ** 0.5 < 0.045
    assert 0.044 < 2 * said.spread * 2**0.5 < 0.047


def test_what_the_chapter_says_of_finer_rates():
    """The vertex of a parabola through the best rate and its neighbours, over the rate's log."""

    def gain(row):
        tried = ran("ch19").without.query("row == @row").set_index("lr")["loss"]
        best = tried.idxmin()
        low, high = (tried[best * factor] - tried[best] for factor in (0.5, 2))
        return (high - low) ** 2 / (8 * (high + low))

    rows = {
        "1 layer": 0.09,
        "4 layers": 0.04,
        "no warm-up": 0.08,
        "post-norm, no warm-up": 0.15,
        THE_BASE: 0.01,
    }
    assert {row: round(gain(row), 2) for row in rows} == rows
