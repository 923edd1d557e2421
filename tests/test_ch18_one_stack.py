"""Chapter 18: one stack, three masks, three questions; its checker distinguishes mistakes."""

import math
import os
import random
import statistics

import pytest
import torch
from exercising import assert_told_apart
from saying import ran
from torch import nn

from scripts.book.instruments import count_flops, scramble
from scripts.book.records import load_record
from scripts.book.verdict import pass_together
from scripts.ch01_attention import padding_mask, subsequent_mask
from scripts.ch04_encoder_decoder import make_model, torch_layer_state
from scripts.ch06_training import BOS, EOS, PAD, UNK, LabelSmoothing
from scripts.ch07_multi30k import Example, make_batch, pad_rows
from scripts.ch17_small_gpt import Asked, make_stack, sees_its_answer, stack_loss
from scripts.ch18_one_stack import (
    AfterSource,
    NumberClassifier,
    PaddedPositions,
    WordsAndPairs,
    asked_hidden,
    asked_pairs,
    fit_bag_of_words,
    hide_some,
    pair_products,
    prefix_mask,
    share_given_away,
    share_right,
    stack_greedy,
    stack_products,
)
from scripts.ch19_ablations import STUDY
from scripts.corpora.gaps import GapItem, gap_item, german_gaps
from scripts.exercises.ch18 import check_hide_words, hide_words
from scripts.studies.rows import data_of
from scripts.studies.runner import these

SIZES = {"N": 2, "d_model": 16, "d_ff": 32, "h": 4, "dropout": 0.0}
EXAMPLES = [
    Example([5, 6, 7, 8, 9, EOS], [BOS, 8, 9, EOS]),
    Example([5, EOS], [BOS, 8, 9, 10, 11, 12, EOS]),
    Example([5, 6, EOS], [BOS, EOS]),
]

pytestmark = pytest.mark.usefixtures("float64")


@pytest.fixture(params=[True, False], ids=["pre-norm", "post-norm"])
def model(request):
    torch.manual_seed(0)
    made = make_stack(20, **SIZES, norm_first=request.param)
    scramble(made)
    return made


# Masks and questions


def test_a_prefix_mask_place_by_place():
    mask = prefix_mask(torch.tensor([0, 2, 5]), 5)
    for b, P in enumerate((0, 2, 5)):
        assert mask[b].tolist() == [[s <= t or s < P for s in range(5)] for t in range(5)]


@pytest.mark.parametrize("norm_first", [True, False])
def test_the_layer_is_pytorchs_under_every_mask(norm_first):
    layer = make_stack(20, **SIZES, norm_first=norm_first).stack.layers[0]
    scramble(layer)
    theirs = nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True, norm_first=norm_first)
    theirs.load_state_dict(torch_layer_state(layer))
    x = torch.randn(2, 7, 16)
    for P in (0, 3, 7):
        mask = prefix_mask(torch.tensor([P]), 7)
        torch.testing.assert_close(layer(x, mask), theirs(x, src_mask=~mask[0]))


@pytest.mark.parametrize("sees", ["causal", "prefix"])
def test_who_depends_on_whom(model, sees):
    batch = asked_pairs(EXAMPLES, sees)
    x = model(batch.ids, batch.mask)
    for t in range(7, batch.ids.size(1)):
        later = batch.ids.clone()
        later[:, t:] = 13
        torch.testing.assert_close(model(later, batch.mask)[:, :t], x[:, :t])
    source = batch.ids.clone()
    source[0, 4] = 13  # the first source's last token but one
    first = model(source, batch.mask)[0, 0]
    assert torch.equal(first, x[0, 0]) == (sees == "causal")


@pytest.mark.parametrize("sees", ["causal", "prefix"])
def test_padding_at_the_end_changes_nothing(model, sees):
    whole = stack_loss(model, asked_pairs(EXAMPLES, sees), LabelSmoothing(0.1))[0]
    alone = [stack_loss(model, asked_pairs([e], sees), LabelSmoothing(0.1))[0] for e in EXAMPLES]
    torch.testing.assert_close(whole, sum(alone))


def test_pairs_ask_the_target_and_nothing_else():
    batch = asked_pairs(EXAMPLES, "prefix")
    assert batch.ntokens == make_batch(EXAMPLES).ntokens
    for example, ids, labels in zip(EXAMPLES, batch.ids, batch.labels, strict=True):
        asked = labels != PAD
        assert labels[asked].tolist() == example.tgt[1:]
        assert ids[asked].tolist() == example.tgt[:-1]


def test_a_source_that_is_asked_and_seen_is_found():
    for sees in ("causal", "prefix"):
        batch = asked_pairs(EXAMPLES, sees)
        assert not sees_its_answer(batch)
        following = torch.cat((batch.ids[:, 1:], batch.labels[:, -1:]), dim=1)
        assert sees_its_answer(Asked(batch.ids, following, batch.mask)) == (sees == "prefix")


def test_hiding_keeps_to_its_shares():
    ids = torch.randint(0, 40, (100, 300), generator=torch.Generator().manual_seed(0))
    hidden, labels = hide_some(ids, 40, torch.Generator().manual_seed(1))
    asked = labels != PAD
    assert torch.equal(hidden[~asked], ids[~asked]) and torch.equal(labels[asked], ids[asked])
    assert (ids[asked] > EOS).all() and (hidden[asked] > EOS).all() and hidden.max() == 40
    assert abs(asked.sum() / (ids > EOS).sum() - 0.15) < 0.02
    assert abs((hidden[asked] == 40).double().mean() - 0.8) < 0.02
    assert abs((hidden[asked] == ids[asked]).double().mean() - (0.1 + 0.1 / 36)) < 0.02
    assert share_given_away(hidden, labels) < 0.15
    assert share_given_away(hidden, ids.masked_fill(ids <= EOS, PAD)) > 0.7


def test_a_question_about_hidden_words_hides_padding():
    rows = [[BOS, 5, 6, 7, 8, EOS], [BOS, 9, EOS]]
    batch = asked_hidden(rows, 20, torch.Generator().manual_seed(0))
    assert torch.equal(batch.mask, padding_mask(pad_rows(rows)))


# Translating


def greedy_by_formula(model, source, sees, steps):
    """What `stack_greedy` gives for one source, by running the whole row for every token."""
    row = [*source, BOS]
    while len(row) < len(source) + 1 + steps and row[-1] != EOS:
        prefix = torch.tensor([len(source) if sees == "prefix" else 0])
        x = model(torch.tensor([row]), prefix_mask(prefix, len(row)))
        row.append(int(model.generator(x[0, -1]).argmax()))
    return row[len(source) + 1 :]


@pytest.mark.parametrize("sees", ["causal", "prefix"])
def test_the_cache_gives_what_the_whole_row_gives(model, sees):
    src = pad_rows([e.src for e in EXAMPLES])
    found = stack_greedy(model, src, None, 9, sees).tolist()
    for example, ids in zip(EXAMPLES, found, strict=True):
        alone = greedy_by_formula(model, example.src, sees, 9)
        assert ids == alone + [PAD] * (len(ids) - len(alone))
    start = torch.full((len(src), 1), BOS)
    right, wrong = (kind(model, src, sees).step(start) for kind in (AfterSource, PaddedPositions))
    torch.testing.assert_close(right[0], wrong[0])
    assert (right[1:] - wrong[1:]).abs().amax(1).min() > 1e-3


@pytest.mark.parametrize("sees", ["causal", "prefix"])
def test_each_step_gives_what_the_whole_row_gives(model, sees):
    """Vectors, not only the likeliest token, for sources of several lengths, step by step."""
    src, targets = pad_rows([e.src for e in EXAMPLES]), torch.randint(4, 20, (3, 5))
    decoding = AfterSource(model, src, sees)
    steps = torch.stack([decoding.step(targets[:, t : t + 1]) for t in range(5)], dim=1)
    for example, target, x in zip(EXAMPLES, targets, steps, strict=True):
        row = torch.tensor([example.src + target.tolist()])
        prefix = torch.tensor([len(example.src) if sees == "prefix" else 0])
        whole = model(row, prefix_mask(prefix, row.size(1)))[0]
        torch.testing.assert_close(x, whole[len(example.src) :])


def test_rows_that_leave_take_their_cache_along(model):
    src = pad_rows([e.src for e in EXAMPLES])
    tokens, kept = torch.tensor([[BOS], [7], [9]]), torch.tensor([2, 0])
    whole, part = (AfterSource(model, src, "prefix") for _ in range(2))
    whole.step(tokens), part.step(tokens)
    part.keep(kept)
    torch.testing.assert_close(part.step(tokens[kept]), whole.step(tokens)[kept])


# The class


def test_the_rule_for_gaps():
    item = gap_item("Ein Mann mit zwei Hunden läuft, ohne Leine.")
    before = ("Ein", "Mann", "mit", "zwei", "Hunden")
    assert item == GapItem(before, (",", "ohne", "Leine", "."), False)
    assert gap_item("Zwei Hunde laufen im Park.").plural
    for text in (
        "Ein Hund.",
        "Er steht und sitzt.",
        "Kinder lieben es zu laufen im Park.",
        "Sie laufen.",
        "Ein Mann kann im Park laufen und mehr.",
    ):
        assert gap_item(text) is None
    corpus = {"train": [("Ein Hund.", "")], "val": [], "a": [("Er steht da.", "")]}
    assert {
        name: len(items) for name, items in german_gaps(corpus | {"b": corpus["a"]}).items()
    } == {
        "train": 0,
        "val": 0,
        "test": 2,
    }


def test_the_bag_of_words_is_at_its_optimum():
    rng = random.Random(0)
    items = [
        GapItem((rng.choice("ab"),), (rng.choice("cd"),), rng.random() < 0.4) for _ in range(80)
    ]
    logits = fit_bag_of_words(items, penalty=2.0, steps=200)
    table = WordsAndPairs(items)
    dense = torch.zeros(len(items), len(table.ids))
    for i, item in enumerate(items):
        for feature in table.features(item):
            dense[i, table.ids[feature]] += 1
    plural = torch.tensor([float(item.plural) for item in items])
    wrong_by = logits(items).sigmoid() - plural
    weight = -(wrong_by @ dense) / 2.0  # where the gradient is 0
    offset = logits(items) - dense @ weight
    assert offset.std() < 1e-4 and abs(wrong_by.sum()) < 1e-4
    flat = fit_bag_of_words(items, penalty=1e9)(items).sigmoid()
    torch.testing.assert_close(flat, plural.mean().expand_as(flat), atol=1e-4, rtol=0)
    assert share_right(plural - 0.5, items) == 1 and share_right(0.5 - plural, items) == 0


def test_neither_padding_nor_company_changes_a_class(model):
    classifier = NumberClassifier(model, gap=19)
    scramble(classifier)
    rows = [[BOS, 5, 19, 6, 7, EOS], [BOS, 19, EOS], [BOS, 8, 9, 19, EOS]]
    alone = torch.cat([classifier(torch.tensor([row])) for row in rows])
    torch.testing.assert_close(classifier(pad_rows(rows)), alone)
    x = model(torch.tensor(rows[:1]), torch.ones(1, 1, 6, dtype=torch.bool))  # only at the gap
    torch.testing.assert_close(alone[0], classifier.head(x[0, 2])[0])


# What it costs


def test_two_and_two_layers_weigh_as_much_as_five():
    with torch.device("meta"):
        one = make_stack(2000, 5, 64, 128)
        two = make_model(2000, 2000, 2, 64, 128, 4, norm_first=True, tie="all")
    sizes = [sum(p.numel() for p in model.parameters()) for model in (one, two)]
    assert sizes[0] == pytest.approx(sizes[1], rel=1e-3)


def test_tied_tables_are_one(model):
    assert model.generator.proj.weight is model.embed[0].lut.weight


def test_products_by_formula_and_by_pytorchs_count():
    D, d_ff, S, T = 16, 48, 14, 11
    sizes = {"d_model": D, "d_ff": d_ff, "h": 4, "norm_first": True}
    with torch.device("meta"):
        one, two = make_stack(30, 5, **sizes).eval(), make_model(30, 30, 3, **sizes).eval()
        ids = torch.zeros(1, S + T, dtype=torch.int64)
        counted = count_flops(one, ids, subsequent_mask(S + T))
        assert counted == 2 * stack_products(5, D, d_ff, S + T)
        counted = count_flops(two, ids[:, :S], ids[:, :T])
        assert counted == 2 * pair_products(3, D, d_ff, S, T)


# What the chapter says


def test_what_the_chapter_says_of_number():
    said = ran("ch18")
    runs = load_record("classify-multi30k")["runs"]
    assert len(said.counted) == 3 * 3 * 8 and (said.total, said.hard) == (940, 379)
    for kind in said.encoders:
        for labels in (100, 1000, 0):
            done = [run for run in runs if (run["row"], run["labels"]) == (kind, labels)]
            swept = sorted((run["lr"], run["loss"]) for run in done if run["seed"] == 0)
            best = min(swept, key=lambda pair: pair[1])
            assert swept[0] != best != swept[-1]  # worse ones on both sides
            assert {run["lr"] for run in done if run["seed"]} == {best[0]}
    ratios = {row: math.exp(found.difference) for row, found in said.compared["test"].items()}
    few, _, every = sorted({labels for _, labels in ratios})
    assert ratios["pretrained", few] < 1 / 3 and 0.4 < ratios["pretrained", every] < 0.6
    for found in said.compared.values():
        assert {row[0] for row, verdict in found.items() if verdict.told} == {"pretrained"}
        assert sum(verdict.told for verdict in found.values()) == 3
    together = [verdict.p for found in said.compared.values() for verdict in found.values()]
    assert sum(pass_together(together)) == 9  # eighteen tests
    means = said.counted.groupby(["row", "captions"])["test"].mean()
    lead = means["pretrained", every] - means[said.bag, every]
    assert round(lead * said.total) == 13
    assert (
        said.counted[said.counted["captions"] == every].groupby("row")["test"].std()[said.bag] == 0
    )
    thousand = said.counted.query("row == 'pretrained' and labels == 1000")
    assert len(thousand) == 8
    assert all(losses.index(min(losses)) == 11 for losses in thousand["losses"])


def test_what_the_chapter_says_of_one_stack_and_two():
    said, runs = ran("ch18"), load_record("stacks-multi30k")["runs"]
    for row in said.RIVALS.keys() | {"encoder-decoder"}:
        swept = sorted((run["lr"], run["loss"]) for run in these(runs, row=row, seed=0))
        best = min(swept, key=lambda pair: pair[1])
        assert swept[0] != best != swept[-1]  # worse ones on both sides
        counted = [run for run in runs if run["row"] == row and run["seed"]]
        assert [(run["lr"], run["seed"]) for run in counted] == [(best[0], n) for n in (1, 2, 3)]
    bleu, nats = said.by_score.values()
    assert [found.told for found in bleu.values()] == [False, True, False, True]
    assert [found.told for found in nats.values()] == [True, True, False, True]
    assert sum(pass_together([v.p for part in (bleu, nats) for v in part.values()])) == 5
    rounded = {row: tuple(round(x, 2) for x in found[:3]) for row, found in bleu.items()}
    assert rounded["causal"][1:] == (-0.70, 0.76)
    assert round(bleu["prefix"].difference, 1) == -3.4
    assert round(bleu["prefix, positions anew"].difference, 1) == 1.7
    assert round(nats["causal"].difference, 2) == -0.05
    apart = said.kinds.loc["prefix"] - said.kinds.loc["causal"]
    assert 0.7 < apart["trained"] / apart["loss"] < 0.8
    assert round(said.including, 1) == 1.7


@pytest.mark.skipif(not os.environ.get("MULTI30K_DIR"), reason="needs Multi30k at hand")
def test_captions_are_on_average_as_long_as_the_chapter_says():
    said, pairs = ran("ch18"), data_of("multi30k", STUDY.vocab).train
    sides = [[len(pair.src) for pair in pairs], [len(pair.tgt) - 1 for pair in pairs]]
    assert [round(statistics.mean(lengths)) for lengths in sides] == [said.S, said.T]
    assert STUDY.vocab == said.V


# The exercise


def hide_pieces(ids, starts, gap, generator):
    chosen = (torch.rand(ids.shape, generator=generator) < 0.15) & (ids > EOS)
    return ids.masked_fill(chosen, gap), ids.masked_fill(~chosen, PAD)


def hide_more(ids, starts, gap, generator):
    word = starts.long().cumsum(0) - 1
    chosen = (torch.rand(int(word[-1]) + 1, generator=generator)[word] < 0.3) & (ids > EOS)
    return ids.masked_fill(chosen, gap), ids.masked_fill(~chosen, PAD)


def hide_and_ask_all(ids, starts, gap, generator):
    hidden, _ = hide_words(ids, starts, gap, generator)
    return hidden, ids.masked_fill(ids <= EOS, PAD)


def hide_unknown(ids, starts, gap, generator):
    return hide_words(ids.masked_fill(ids == UNK, UNK + EOS), starts, gap, generator)


def hide_for_ever(ids, starts, gap, generator):
    hidden, labels = hide_words(ids, starts, gap, generator)
    ids.copy_(hidden)
    return ids, labels


def hide_at_random(ids, starts, gap, generator):
    return hide_words(ids, starts, gap, torch.Generator().manual_seed(generator.seed()))


def hide_unasked(ids, starts, gap, generator):
    hidden, labels = hide_words(ids, starts, gap, generator)
    return hidden.masked_fill(ids == 50, gap), labels


def test_mistakes_with_whole_words_are_told_apart():
    wrong = {
        "Only a part of a word": hide_pieces,
        "not 15%": hide_more,
        "that isn't hidden": hide_and_ask_all,
        "special token": hide_unknown,
        "itself was changed": hide_for_ever,
        "one seed": hide_at_random,
        "its label is PAD": hide_unasked,
    }
    assert_told_apart(check_hide_words, wrong)
