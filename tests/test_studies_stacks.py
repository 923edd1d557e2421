"""Chapters 17 and 18: one stack by the fast path, its suspects, and classifiers of number."""

import random
from dataclasses import asdict, replace
from functools import cache

import pytest
import torch

from scripts.book.instruments import scramble
from scripts.ch06_training import BOS, EOS, UNK, LabelSmoothing
from scripts.ch07_multi30k import Example, make_batch
from scripts.ch17_small_gpt import asked_next, make_stack, stack_loss
from scripts.ch18_one_stack import NumberClassifier, asked_hidden, asked_pairs
from scripts.corpora.gaps import gap_item
from scripts.corpora.load import load_corpus
from scripts.studies import classify, gpt, prefix_causes, stacks

PAIRS = [
    Example([5, 6, 7, EOS], [BOS, 8, 9, EOS]),
    Example([9, EOS], [BOS, 5, 6, 7, 8, EOS]),
    Example([8, 7, 6, 5, 9, 9, EOS], [BOS, 6, EOS]),
]
CRITERION = LabelSmoothing(0.1)
SIZES = {"corpus": "sample", "layers": 1, "d_model": 16, "d_ff": 16, "heads": 2, "warmup": 2}
ROWS = stacks.ROWS | prefix_causes.ROWS
ONE_STACK = [name for name in ROWS if name != stacks.TWO]


def fresh(name, shaken=True):
    """A row, its loss and a small model in double precision."""
    torch.manual_seed(0)
    row, config = ROWS[name], replace(stacks.BASE, d_model=16, d_ff=32, heads=2)
    model = row.build(config, 12).double().eval()
    if shaken:
        scramble(model)
    return row, row.loss_of(config), model


# Translating with one stack


def test_two_stacks_and_one_weigh_the_same_but_for_norms():
    models = {name: row.build(stacks.BASE, stacks.BASE.vocab) for name, row in stacks.ROWS.items()}
    sizes = {name: sum(p.numel() for p in model.parameters()) for name, model in models.items()}
    two = sizes.pop(stacks.TWO)
    assert {*sizes.values()} == {two - 3 * stacks.BASE.d_model}


@pytest.mark.parametrize(
    ("norm_first", "positions"), [(True, "sinusoidal"), (False, "learned"), (True, "learned")]
)
def test_the_fast_path_gives_the_same_sums_and_gradients(norm_first, positions, float64):
    model = make_stack(20, 2, 16, 32, 4, dropout=0.0, norm_first=norm_first, positions=positions)
    scramble(model)
    draw = torch.Generator().manual_seed(0)
    for batch in (
        asked_next([[BOS, 5, 6, EOS], [BOS, EOS]]),
        asked_hidden([[BOS, *range(4, 18), EOS], [BOS, *[5, 6, 7] * 5, EOS]], 19, draw),
        asked_pairs(PAIRS, "prefix"),
    ):
        both = []
        for loss_of in (stack_loss, stacks.fast_stack_loss):
            model.zero_grad()
            sums = loss_of(model, batch, CRITERION)
            sums[0].backward()
            both.append([*sums, *(p.grad.clone() for p in model.parameters())])
        torch.testing.assert_close(*both, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ONE_STACK)
def test_training_and_decoding_see_the_same_positions(name):
    """A pair's loss is that of its steps, taken with the search's cache, in any company."""
    row, loss_of, model = fresh(name)
    together = 0.0
    for pair in PAIRS:
        _, nll = loss_of(model, make_batch([pair]), CRITERION)
        reading = row.search.keywords["reading"](model, torch.tensor([pair.src]), row.sees)
        steps = 0.0
        for token, following in zip(pair.tgt, pair.tgt[1:], strict=False):
            logits = reading.logits(reading.step(torch.tensor([[token]])))
            steps -= logits.log_softmax(-1)[0, following]
        torch.testing.assert_close(nll, steps)
        together += nll
    torch.testing.assert_close(loss_of(model, make_batch(PAIRS), CRITERION)[1], together)
    textbook = stack_loss(model, asked_pairs(PAIRS, row.sees), CRITERION)[1]
    assert torch.isclose(together, textbook) == (name[8:] in ("", "unchanged", "source asked, too"))
    ids = torch.tensor([[5, 6, EOS, BOS, 8, 9], [9, EOS, BOS, 5, 6, 7]])
    assert stacks.restarted(ids).tolist() == [[0, 1, 2, 0, 1, 2], [0, 1, 0, 1, 2, 3]]


@pytest.mark.parametrize("name", prefix_causes.ROWS)
def test_a_suspect_begins_as_the_plain_stack_and_then_learns(name, float64):
    """The target's loss is the same at first, and what was added gets a gradient."""
    row, loss_of, model = fresh(name, shaken=False)
    batch = make_batch(20 * PAIRS)  # enough to hide some
    _, plain_loss, plain = fresh(row.sees, shaken=False)
    loss, nll = plain_loss(plain, batch, CRITERION)
    sums = loss_of(model, batch, CRITERION)
    if row.suspect != "fixed":
        torch.testing.assert_close(sums, (loss, nll))
    asked = loss_of(model.train(), batch, CRITERION)
    assert (asked[0] > sums[0] + 1) == (row.suspect == "asked")
    asked[0].backward()
    added = {"own": model.reader.layers[0].self_attn.project_key.weight, "relative": model.offsets}
    if row.suspect in added:
        grad = added[row.suspect].grad
        assert grad.norm() > 0 and (row.suspect == "relative" or model.reader is not model.stack)


@pytest.mark.parametrize("sees", ["causal", "prefix"])
def test_a_source_is_asked_what_its_mask_hides(sees):
    ids = torch.tensor([[5, 6, 7, EOS, BOS, 8, 9], [9, EOS, BOS, 5, 6, 7, 8]]).repeat(200, 1)
    of_source = torch.arange(7) < (ids == BOS).int().argmax(1, keepdim=True)
    torch.manual_seed(0)
    read, labels = prefix_causes.source_question(ids, of_source, sees, 12)
    asked = labels > 0
    assert (read == ids)[~asked].all() and not asked[~of_source].any() and read.max() < 12
    if sees == "causal":
        assert read.equal(ids) and labels[0].tolist() == [6, 7, EOS, BOS, 0, 0, 0]
    else:  # and eight of ten can't be read
        assert labels[asked].equal(ids[asked]) and 0.7 < (read[asked] == UNK).double().mean() < 0.9


# A language model


@pytest.fixture
def few(monkeypatch, tmp_path):
    """Some pairs of the sample corpus for chapters 17 and 18, and an empty folder of runs."""
    corpus = {name: pairs[:400] for name, pairs in load_corpus("sample").items()}
    monkeypatch.setattr(gpt, "load_corpus", lambda name: {n: p[:40] for n, p in corpus.items()})
    monkeypatch.setattr(classify, "load_corpus", lambda name: corpus)
    monkeypatch.setattr(classify, "ROUND", 64)
    monkeypatch.setattr(classify, "ROUNDS", 3)
    monkeypatch.setenv("SERIES_RUNS", str(tmp_path))
    monkeypatch.setattr(classify, "gaps_of", cache(classify.gaps_of.__wrapped__))  # a fresh cache
    return corpus


def test_the_mini_gpt_and_its_rivals(few, monkeypatch, tmp_path):
    monkeypatch.setattr(gpt, "SIZES", gpt.SIZES | {"N": 1, "d_model": 16, "d_ff": 16})
    settings = {"CORPUS": "sample", "PASSES": 2, "CONTEXTS": (2, 4), "K": 4, "SHORT": 2}
    for name, value in settings.items():
        monkeypatch.setattr(gpt, name, value)
    record = gpt.measure(tmp_path)
    assert record["passes"][0]["val"] > record["passes"][1]["val"]
    assert record["bits"]["val"] == pytest.approx(record["passes"][1]["val"], abs=1e-2)  # 16 bits
    assert all(run["text"].startswith(gpt.PROMPT) for run in record["passes"])
    characters = sum(row["characters"] for row in record["where"])
    assert characters == sum(len(english) + 1 for _, english in few["test"][:40])
    by_group = sum(row["table"] * row["characters"] for row in record["where"]) / characters
    assert by_group == pytest.approx(record["table"]["test"], abs=1e-3)
    best = record["mixtures"]["two tables"]
    assert best["val"] < 1.1 * record["table"]["val"] and 0 < best["share"] < 1
    rows = [[BOS, *range(4, 14), EOS] for _ in range(50)]
    assert gpt.packed(rows, rows, 4) < 0.5 * gpt.packed(rows[:1], rows, 4)  # it remembers


# Classifiers

SMALL = replace(classify.BASE, **SIZES, vocab=300, epochs=1, dropout=0.0)


def test_a_caption_is_read_with_one_gap_and_its_loss_is_minus_log_p(few):
    tokenizer = classify.gaps_of("sample", 300).tokenizer
    items = [gap_item("Zwei Hunde laufen durch den Park."), gap_item("Ein Mann sitzt da.")]
    batch = classify.labelled(items, tokenizer)
    assert batch.plural.tolist() == [1, 0] and batch.ntokens == 2
    assert ((batch.ids == len(tokenizer)).sum(1) == 1).all()
    assert (batch.ids[:, 0] == BOS).all() and ((batch.ids == EOS).sum(1) == 1).all()
    model = NumberClassifier(stacks.one_stack(SMALL, len(tokenizer) + 1), len(tokenizer))
    torch.nn.init.normal_(model.head.weight)
    p = model(batch.ids).sigmoid()
    loss, _ = classify.number_loss(model, batch, CRITERION)
    torch.testing.assert_close(loss, -p[0].log() - (1 - p[1]).log())
    order = [i for part in classify.drawn(10, random.Random(0)) for i in part]
    assert sorted(order) == sorted([*range(10)] * 6)  # a round of 64: each equally often


def test_all_kinds_learn_from_the_same_captions_and_one_begins_as_the_masked_model(
    few, monkeypatch
):
    monkeypatch.setattr(classify, "MASKED", SMALL)
    gaps, begun, fit_best = classify.gaps_of("sample", 300), [], classify.fit_best
    drawn = random.Random(3).sample(gaps.items["train"], 60)
    masked = [*classify.masked_model(SMALL, gaps).parameters()]

    def fit(model, config, rounds, batch_of, *more):  # an encoder: the masked model is at hand
        as_masked = all(map(torch.equal, masked, model.encoder.parameters()))
        begun.append((as_masked, batch_of(range(60)).ids))
        return fit_best(model, config, rounds, batch_of, *more)

    monkeypatch.setattr(classify, "fit_best", fit)
    kinds = (classify.PRETRAINED, classify.SCRATCH, classify.BAG)
    task = {"labels": 60, "lr": 5e-3, "seed": 3}
    *runs, bag = (classify.work(asdict(SMALL), task | {"row": row}) for row in kinds)
    assert all(0.3 < run[name] <= 1 for run in (*runs, bag) for name in ("val", "test"))
    assert [as_masked for as_masked, _ in begun] == [True, False]
    read = classify.labelled(drawn, gaps.tokenizer).ids
    assert all(ids.equal(read) for _, ids in begun) and bag == classify.bag_run(gaps, drawn)
    assert bag["captions"]["test"] == len(gaps.items["test"])
    assert bag["singular"] == sum(not item.plural for item in gaps.items["test"])


def test_the_number_without_a_label(monkeypatch):
    """From what stands beside verbs, or from what a model expects: each verb on its own side."""
    texts = (
        "Zwei Hunde laufen hier .",
        "Ein Hund läuft .",
        "Ein Mann steht .",
        "Zwei gehen dort .",
    )
    items = [gap_item("Zwei Katzen springen dort."), gap_item("Ein Mann hat Hunde.")]
    parts = {"train": [*map(gap_item, texts)], "val": items, "test": items[:1]}
    gaps = replace(classify.gaps_of("sample", 300), items=parts)
    counted = classify.counts_run(gaps)
    assert counted == {"val": 1, "test": 1}
    model = stacks.one_stack(SMALL, len(gaps.tokenizer) + 1)
    spoken = []
    monkeypatch.setattr(
        classify,
        "expected_number",
        lambda _, ids, *verbs: spoken.extend(verbs) or torch.ones(len(ids)),
    )
    assert classify.asked_run(model, gaps) == {"val": 0.5, "test": 1}
    for ids, forms in zip(spoken, (classify.NUMBER, classify.PLURAL), strict=False):
        words = {gaps.tokenizer.decode([i]) for i in ids.tolist()}
        assert words and words <= {*forms}


def test_an_encoder_learns_a_few_captions_by_heart(few, monkeypatch):
    gaps = classify.gaps_of("sample", 300)
    some = gaps.items["train"][:16]
    assert {item.plural for item in some} == {True, False}
    monkeypatch.setattr(classify, "ROUND", 640)
    gaps = replace(gaps, items=dict.fromkeys(("val", "test"), some))
    run = classify.encoder_run(replace(SMALL, d_model=32, lr=1e-2), gaps, some, pretrained=False)
    assert run["test"] > 0.9
