"""The study of the parts since 2017: its rows, its trainings, its record."""

import itertools
import math
from dataclasses import asdict, replace

import pytest
import torch
from saying import ran

from scripts.book.instruments import scramble
from scripts.book.records import load_record, save_record
from scripts.ch01_attention import padding_mask, subsequent_mask
from scripts.ch02_multi_head_attention import MultiHeadedAttention
from scripts.ch04_encoder_decoder import LayerNorm, PositionwiseFeedForward
from scripts.ch06_training import Batch, LabelSmoothing, batch_loss, greedy_decode
from scripts.ch22_todays_block import OpenAttention, PartsDecoding, parts_greedy
from scripts.engine.data import TrainingData, prepare
from scripts.engine.settings import PRESETS, TrainConfig, build_model
from scripts.studies import block, modern
from scripts.studies.block import parts_loss
from scripts.studies.modern import (
    ENDS,
    MODERN,
    VARIANTS,
    AlibiAttention,
    MixtureOfExperts,
    ModernOptions,
    Parts,
    active_parameters,
    alibi_slopes,
    compare_parts,
    main,
    model_of,
    parts_costs,
    parts_run,
    planned,
    study_config,
    trained_parts,
)

close = torch.testing.assert_close
CONFIG = replace(PRESETS["narrow"], d_model=32, d_ff=96, dropout=0.0, path="textbook")
SRC = torch.tensor([[5, 6, 7, 8, 9, 3], [5, 6, 7, 3, 0, 0]])
TGT = torch.tensor([[2, 11, 12, 13, 14], [2, 21, 22, 3, 0]])

pytestmark = pytest.mark.usefixtures("float64")


def shaken(layer):
    """A layer whose scores are far from even, so that a slip shows."""
    scramble(layer, size=0.2)
    return layer


def test_alibi_slopes_are_the_papers():
    assert alibi_slopes(8) == [2.0**-n for n in range(1, 9)]
    assert alibi_slopes(16)[:2] == [2**-0.5, 2**-1.0]


def test_alibi_by_loop_both_ways_and_with_padding():
    layer, x = shaken(AlibiAttention(4, 32, 0.0)), torch.randn(2, 6, 32)
    mask = padding_mask(SRC)
    layer(x, x, x, mask)
    q, (k, _) = layer.query_heads(x), layer.remember(x, x)
    for b, h, i in itertools.product(range(2), range(4), range(6)):
        seen = [j for j in range(6) if SRC[b, j] != 0]
        scores = [
            q[b, h, i] @ k[b, h, j] / math.sqrt(8) - 4.0 ** -(h + 1) * abs(i - j) for j in seen
        ]
        close(layer.attn[b, h, i, seen], torch.stack(scores).softmax(0))
    assert (layer.attn[1, :, :, 4:] == 0).all()


def test_without_exchange_it_is_chapter_8s_model():
    ours, theirs = model_of(Parts(), CONFIG, 50), build_model(CONFIG, 50)
    ours.load_state_dict(theirs.state_dict())
    masks = padding_mask(SRC), padding_mask(TGT) & subsequent_mask(5)
    close(ours(SRC, TGT, *masks), theirs(SRC, TGT, *masks))
    assert ours.generator.proj.weight is ours.src_embed[0].lut.weight
    table = model_of(MODERN, CONFIG, 500).tgt_embed[0].lut.weight
    assert abs(table.std() * 32**0.5 - 1) < 0.1  # fresh tables keep their scale


def test_the_modern_model_has_no_part_of_2017():
    model = model_of(MODERN, CONFIG, 50)
    old = (LayerNorm, PositionwiseFeedForward, MultiHeadedAttention)
    assert not [name for name, part in model.named_modules() if isinstance(part, old)]
    layer = model.decoder.layers[0]
    assert layer.self_attn.rotary == 4 and layer.src_attn.rotary == 0  # no distance across
    experts = layer.feed_forward.experts
    assert not torch.equal(experts[0].gate.weight, experts[1].gate.weight)


@pytest.mark.parametrize("name", ["rotary", "ALiBi", "window of 4", "linear attention"])
def test_what_speaks_of_distance_stays_inside_a_sentence(name):
    layer = model_of(VARIANTS[name], CONFIG, 50).decoder.layers[0]
    assert type(layer.src_attn) is OpenAttention and type(layer.self_attn) is not OpenAttention


def test_active_parameters():
    with torch.device("meta"):
        narrow = PRESETS["narrow"]
        active = {
            name: active_parameters(model_of(p, narrow, 2048)) for name, p in VARIANTS.items()
        }
        model = model_of(MODERN, narrow, 2048)
    for name in (
        "modern",
        "SwiGLU",
        "rotary",
        "ALiBi",
        "window of 4",
        "linear attention",
        "experts",
    ):
        assert abs(active[name] / active["2017"] - 1) < 0.01, name
    idle = sum(p.numel() for p in model.parameters()) - active["modern"]
    assert idle == 4 * 6 * 3 * 128 * 67  # four layers, six idle experts, three matrices


@pytest.mark.parametrize(
    "parts, message",
    [
        (Parts(attention="latent"), "brings its own rotary positions"),
        (Parts(attention="grouped", positions="rotary"), "with sinusoids only"),
    ],
)
def test_combinations_without_a_class_are_refused(parts, message):
    with pytest.raises(ValueError, match=message):
        model_of(parts, CONFIG, 50)


@pytest.mark.parametrize("name", VARIANTS)
def test_every_row_decodes_with_a_cache(name):
    model = shaken(model_of(VARIANTS[name], CONFIG, 50)).eval()
    mask = padding_mask(SRC)
    with torch.no_grad():
        whole = model.decode(model.encode(SRC, mask), mask, TGT, subsequent_mask(5))
        decoding = PartsDecoding(model, SRC, mask)
        for t in range(5):
            if t == 3:  # the first sentence leaves
                decoding.keep(torch.tensor([1]))
            rows = slice(1, 2) if t >= 3 else slice(0, 2)
            close(decoding.step(TGT[rows, t : t + 1]), whole[rows, t])
    ours = parts_greedy(model, SRC, mask, 9)
    assert torch.equal(ours, greedy_decode(model, SRC, mask, 9))


def test_what_a_token_costs_is_counted_from_real_tensors():
    numbers = {"2017": 64, "grouped-query, G = 2": 32, "multi-query": 16, "latent": 16}
    for name, wanted in (numbers | {"modern": 16}).items():
        decoding = PartsDecoding(model_of(VARIANTS[name], CONFIG, 50).eval(), SRC, None)
        decoding.step(TGT[:, :1])
        assert decoding.token_bytes() == 2 * 8 * wanted  # layers, bytes


@pytest.fixture(scope="module")
def few() -> TrainingData:
    """A little of the sample corpus."""
    data = prepare(replace(PRESETS["sample"], vocab=300))
    corpus = {name: pairs[:20] for name, pairs in data.corpus.items()}
    return replace(data, corpus=corpus, train=data.train[:400], val=data.val[:20])


def tiny(**changes):
    sizes = {"layers": 1, "d_ff": 36, "heads": 2, "max_tokens": 512, "warmup": 5}
    return replace(study_config("sample", 1, 2, 16), **sizes | changes)


def test_the_loss_adds_the_penalty_in_training_alone(monkeypatch):
    model, batch = model_of(MODERN, CONFIG, 50), Batch(SRC, TGT)
    criterion = LabelSmoothing(0.1)
    close(parts_loss(model.eval(), batch, criterion), batch_loss(model, batch, criterion))
    monkeypatch.setattr(block, "BALANCE", 0.5)
    loss, nll = parts_loss(model.train(), batch, criterion)
    plain, same = batch_loss(model, batch, criterion)
    mixtures = [part for part in model.modules() if isinstance(part, MixtureOfExperts)]
    assert len(mixtures) == 4
    close(loss - plain, 0.5 * batch.ntokens * sum(part.penalty for part in mixtures))
    close(nll, same)


def test_a_modern_model_learns_and_its_run_is_repeatable(few):
    torch.set_default_dtype(torch.float32)
    config = tiny(lr=0.01)
    first, again = (trained_parts(MODERN, config, few)[1] for _ in range(2))
    assert first == again
    assert first[1] < 0.8 * first[0]


def test_a_run_is_scored_on_the_test_set_only_if_asked(few):
    torch.set_default_dtype(torch.float32)
    run = parts_run(Parts(), tiny(epochs=1), few, tested=False)
    assert set(run["bleu"]) == {"val"} and run["active"] == run["parameters"]
    run = parts_run(Parts(), tiny(epochs=1), few, tested=True)
    assert set(run["bleu"]) == {"val", "test"} and "tok:13a" in run["signature"]


def test_costs_of_two_rows(few):
    torch.set_default_dtype(torch.float32)
    rows = {name: VARIANTS[name] for name in ("2017", "multi-query")}
    costs = parts_costs(rows, tiny(), few, rounds=1)
    assert costs["2017"]["cache_bytes_per_token"] == 2 * 16 * 4  # one layer, float32
    assert costs["multi-query"]["cache_bytes_per_token"] == 2 * 8 * 4
    assert all(value > 0 for cost in costs.values() for value in cost.values())


def test_the_ends_are_planned_first():
    plan = planned(ModernOptions(end_seeds=2, seeds=1))
    assert plan[:4] == [(1, "2017"), (1, "modern"), (2, "2017"), (2, "modern")]
    assert len(plan) == 4 + len(VARIANTS) - 2 and len(set(plan)) == len(plan)


def test_the_study_goes_on_where_it_stopped(monkeypatch, tmp_path):
    made = []

    def run(parts, config, data, tested):
        name = next(name for name, one in VARIANTS.items() if one == parts)
        if len(made) == 3:
            raise KeyboardInterrupt
        made.append((config.seed, name, tested))
        return {"seed": config.seed, "bleu": {"val": 1.0}, "cpu_seconds": 0}

    monkeypatch.setattr(modern, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(modern, "prepare", lambda config: None)
    monkeypatch.setattr(modern, "keep_memory", lambda: True)
    monkeypatch.setattr(modern, "parts_costs", lambda *_, **__: {"2017": {}})
    monkeypatch.setattr(modern, "parts_run", run)
    options = ModernOptions(corpus="sample", end_seeds=2, save=True)
    with pytest.raises(KeyboardInterrupt):
        compare_parts(options)
    stopped = load_record("since-2017-sample", tmp_path / "results")
    assert [len(row["runs"]) for row in stopped["rows"].values()] == [2, 1]
    monkeypatch.setattr(modern, "parts_costs", None)  # not measured again
    made.clear()
    made += [None] * 4  # no more interruptions
    record = compare_parts(options)
    assert made[4] == (2, "modern", True) and made[5] == (1, "RMSNorm", False)
    assert {name: len(row["runs"]) for name, row in record["rows"].items()} == {
        name: 1 + (name in ENDS) for name in VARIANTS
    }
    assert record["costs"] == {"2017": {}}
    made.clear()
    made += [None] * 4
    monkeypatch.setattr(modern, "parts_costs", lambda *_, **__: {"2017": {}})
    compare_parts(replace(options, epochs=1))  # another study begins anew
    assert len(made) == 4 + len(planned(options))


@pytest.mark.parametrize("argv", [["moder"], ["--corpus", "x"], ["--seedz", "1"]])
def test_mistakes_get_one_line(argv, capsys):
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1


def test_the_command_hands_its_options_over():
    assert main.run is compare_parts
    seen = []
    command = replace(main, run=seen.append)
    assert command(["--corpus", "sample", "--epochs", "1", "--save", "true"]) == 0
    assert seen == [ModernOptions(corpus="sample", epochs=1, save=True)]


@pytest.fixture(scope="module")
def record():
    return load_record("since-2017-multi30k")


def test_the_record_is_of_this_study(record):
    assert record["repeat"].startswith("python -m scripts.studies.modern")
    given = (record["config"]["epochs"], record["config"]["d_model"])
    config = TrainConfig(**record["config"])  # fields that came later have their defaults
    assert config == study_config("multi30k", 1, *given)
    assert set(record["rows"]) <= set(VARIANTS) and set(record["costs"]) == set(VARIANTS)
    for name, row in record["rows"].items():
        assert row["parts"] == asdict(VARIANTS[name])
        seeds = [run["seed"] for run in row["runs"]]
        assert seeds and len(set(seeds)) == len(seeds)
        assert all(("test_2016_flickr" in run["bleu"]) == (name in ENDS) for run in row["runs"])


def test_the_record_counts_as_the_code_counts(record):
    torch.set_default_dtype(torch.float32)
    config = TrainConfig(**record["config"])
    for name, row in record["rows"].items():
        with torch.device("meta"):
            model = model_of(VARIANTS[name], config, config.vocab)
        assert row["runs"][0]["active"] == active_parameters(model)
        assert row["runs"][0]["parameters"] == sum(p.numel() for p in model.parameters())


def test_a_record_survives_its_file(tmp_path, record):
    save_record("again", record, tmp_path)
    assert load_record("again", tmp_path) == record


def test_what_the_chapter_says_of_the_parts():
    said = ran("ch22")
    assert [int((part < 0.9).sum()) + 1 for part in (said.share, said.adams)] == [12, 60]
    since, found = said.since, said.found
    for name, perplexity in {"2017": 12.7, "modern": 14.0}.items():
        last = [run["train_ppl"][-1] for run in since["rows"][name]["runs"]]
        assert round(sum(last) / len(last), 1) == perplexity
    assert {"lr": 0.003, "epochs": 3}.items() <= since["config"].items()
    difference = {name: round(verdict.difference, 1) for name, verdict in found.items()}
    assert said.told == ["modern", "rotary"] and said.rows["latent"] == [25.78]
    assert {name for name, runs in said.rows.items() if len(runs) == 3} == {"2017", "modern"}
    p = sorted(verdict.p for verdict in found.values())  # Holm's second of eleven: times ten
    assert p[1] == found["rotary"].p and round(p[1], 3) == 0.004 and round(10 * p[1], 2) == 0.04
    assert (difference["rotary"], difference["modern"]) == (1.7, -2.7)
    assert (difference["RMSNorm"], difference["SwiGLU"]) == (-0.1, 0.3)
    assert (difference["grouped-query, G = 2"], difference["multi-query"]) == (-0.6, -1.3)
