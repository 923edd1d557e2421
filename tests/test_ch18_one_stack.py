"""Chapter 18: one stack, three masks, three questions, and what it costs."""

import os
import random
import statistics

import pandas as pd
import pytest
import torch
from scipy.stats import ttest_1samp
from torch import nn

from scripts.book.figures.understanding import by_mask
from scripts.book.instruments import count_flops, scramble
from scripts.book.records import load_record
from scripts.ch01_attention import padding_mask, subsequent_mask
from scripts.ch04_encoder_decoder import make_model, torch_layer_state
from scripts.ch06_training import BOS, EOS, PAD, LabelSmoothing
from scripts.ch07_multi30k import Example, pad_rows
from scripts.ch17_small_gpt import make_stack, stack_loss
from scripts.ch18_one_stack import (
    AfterSource,
    NumberClassifier,
    asked_hidden,
    asked_pairs,
    expected_number,
    features,
    fit_bag_of_words,
    hide_some,
    pair_products,
    prefix_mask,
    share_given_away,
    share_right,
    stack_products,
)
from scripts.ch19_ablations import STUDY
from scripts.corpora.gaps import GapItem, gap_item, german_gaps
from scripts.studies.rows import data_of

SIZES = {"N": 2, "d_model": 16, "d_ff": 32, "h": 4, "dropout": 0.0}
EXAMPLES = [
    Example([5, 6, 7, 8, 9, EOS], [BOS, 8, 9, EOS]),
    Example([5, EOS], [BOS, 8, 9, 10, 11, 12, EOS]),
    Example([5, 6, EOS], [BOS, EOS]),
]
BOTH_MASKS = pytest.mark.parametrize("sees", ["causal", "prefix"])

pytestmark = pytest.mark.usefixtures("float64")


@pytest.fixture
def model():
    stack = make_stack(20, **SIZES)
    scramble(stack)
    return stack


# Masks and questions


@pytest.mark.parametrize("norm_first", [True, False])
def test_the_layer_is_pytorchs_under_every_mask(norm_first):
    model = make_stack(20, **SIZES, norm_first=norm_first)
    assert model.generator.proj.weight is model.embed[0].lut.weight
    layer = model.stack.layers[0]
    scramble(layer)
    reference = nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True, norm_first=norm_first)
    reference.load_state_dict(torch_layer_state(layer))
    x = torch.randn(2, 7, 16)
    masks = prefix_mask(torch.tensor([0, 3, 7]), 7)
    for P, mask in zip((0, 3, 7), masks, strict=True):
        assert mask.tolist() == [[s <= t or s < P for s in range(7)] for t in range(7)]
        torch.testing.assert_close(layer(x, mask[None]), reference(x, src_mask=~mask))


@BOTH_MASKS
def test_pairs_ask_the_target_and_padding_changes_nothing(model, sees):
    batch = asked_pairs(EXAMPLES, sees)
    sources = torch.tensor([len(e.src) if sees == "prefix" else 0 for e in EXAMPLES])
    masks = prefix_mask(sources, batch.ids.size(1))
    assert torch.equal(batch.mask.expand_as(masks), masks)
    for example, ids, labels in zip(EXAMPLES, batch.ids, batch.labels, strict=True):
        asked = labels != PAD
        assert labels[asked].tolist() == example.tgt[1:]
        assert ids[asked].tolist() == example.tgt[:-1]
    whole = stack_loss(model, batch, LabelSmoothing(0.1))[0]
    alone = [stack_loss(model, asked_pairs([e], sees), LabelSmoothing(0.1))[0] for e in EXAMPLES]
    torch.testing.assert_close(whole, sum(alone))


def test_hiding_keeps_to_its_shares():
    ids = torch.randint(0, 40, (100, 300), generator=torch.Generator().manual_seed(0))
    hidden, labels = hide_some(ids, 40, torch.Generator().manual_seed(1))
    asked = labels != PAD
    assert torch.equal(hidden[~asked], ids[~asked]) and torch.equal(labels[asked], ids[asked])
    assert (ids[asked] > EOS).all() and (hidden[asked] > EOS).all() and hidden.max() == 40
    assert abs(asked.sum() / (ids > EOS).sum() - 0.15) < 0.02
    assert abs((hidden[asked] == 40).double().mean() - 0.8) < 0.02
    given_away = (hidden[asked] == ids[asked]).double().mean()
    assert share_given_away(hidden, labels) == given_away.item()
    assert abs(given_away - (0.1 + 0.1 / 36)) < 0.02
    rows = [[BOS, 5, 6, 7, 8, EOS], [BOS, 9, EOS]]
    batch = asked_hidden(rows, 20, torch.Generator().manual_seed(0))
    assert torch.equal(batch.mask, padding_mask(pad_rows(rows)))


# Translating


@BOTH_MASKS
def test_each_step_gives_what_the_whole_row_gives(model, sees):
    """Sources of several lengths, step by step; after the third step the second text leaves."""
    src, targets = pad_rows([e.src for e in EXAMPLES]), torch.randint(4, 20, (3, 5))
    decoding = AfterSource(model, src, sees)
    steps = [decoding.step(targets[:, t : t + 1]) for t in range(3)]
    decoding.keep(torch.tensor([2, 0]))
    steps += [decoding.step(targets[[2, 0], t : t + 1]).flip(0) for t in (3, 4)]
    for i, (example, target) in enumerate(zip(EXAMPLES, targets, strict=True)):
        row = torch.tensor([example.src + target.tolist()])
        prefix = torch.tensor([len(example.src) if sees == "prefix" else 0])
        whole = model(row, prefix_mask(prefix, row.size(1)))[0, len(example.src) :]
        by_steps = [x[i if len(x) == 3 else i // 2] for x in (steps[:3] if i == 1 else steps)]
        torch.testing.assert_close(torch.stack(by_steps), whole[: len(by_steps)])


def test_a_masks_runs_are_found_by_change_and_seed():
    rows = ("causal, unchanged", "prefix, place, too")
    runs = [
        {"row": row, "seed": seed, "bleu": 10 * i + seed, "losses": [3, i]}
        for seed in (2, 1)
        for i, row in enumerate(rows)
    ]
    losses, bleu = by_mask(pd.DataFrame(runs))
    assert bleu["causal"].to_dict() == {("unchanged", 2): 2, ("unchanged", 1): 1}
    assert bleu["prefix"].to_dict() == {("position, too", 2): 12, ("position, too", 1): 11}
    assert losses.loc["prefix", 2].tolist() == [1, 1] and losses[1].eq(3).all()


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
    verb, no_verb = [("Er steht da.", "")], [("Ein Hund.", "")]
    gaps = german_gaps({"train": no_verb, "val": [], "first": verb, "second": verb})
    assert {split: len(items) for split, items in gaps.items()} == {"train": 0, "val": 0, "test": 2}


def test_the_bag_of_words_is_at_its_optimum():
    rng = random.Random(0)
    items = [  # a word may occur twice, and counts once
        GapItem((rng.choice("ab"), rng.choice("ab")), (rng.choice("cd"),), rng.random() < 0.4)
        for _ in range(80)
    ]
    logits = fit_bag_of_words(items, penalty=2.0, steps=200)(items)
    columns = {feature for item in items for feature in features(item)}
    table = torch.tensor([[float(f in features(item)) for f in columns] for item in items])
    plural = torch.tensor([float(item.plural) for item in items])
    wrong_by = logits.sigmoid() - plural
    weight = -(wrong_by @ table) / 2.0  # where the gradient is 0
    assert (logits - table @ weight).std() < 1e-4 and abs(wrong_by.sum()) < 1e-4
    assert share_right(plural - 0.5, items) == 1 and share_right(0.5 - plural, items) == 0


def test_neither_padding_nor_company_changes_a_class(model):
    classifier = NumberClassifier(model, gap=19)
    scramble(classifier)
    rows = [[BOS, 5, 19, 6, 7, EOS], [BOS, 19, EOS], [BOS, 8, 9, 19, EOS]]
    alone = torch.cat([classifier(torch.tensor([row])) for row in rows])
    torch.testing.assert_close(classifier(pad_rows(rows)), alone)
    x = model(torch.tensor(rows[:1]), torch.ones(1, 1, 6, dtype=torch.bool))  # only at the gap
    torch.testing.assert_close(alone[0], classifier.head(x[0, 2])[0])


def test_a_masked_model_is_asked_at_the_gap(model):
    rows = [[BOS, 5, 19, 6, 7, EOS], [BOS, 19, EOS]]
    logits = expected_number(model, pad_rows(rows), torch.tensor([5, 6]), torch.tensor([7]))
    for row, logit in zip(rows, logits, strict=True):
        x = model(torch.tensor([row]), torch.ones(1, 1, len(row), dtype=torch.bool))
        p = model.generator(x)[0, row.index(19)].softmax(-1)
        torch.testing.assert_close(logit, (p[7] / (p[5] + p[6])).log())


# What it costs


def test_products_by_formula_and_by_pytorchs_count():
    D, d_ff, S, T = 16, 48, 14, 11
    sizes = {"d_model": D, "d_ff": d_ff, "h": 4, "norm_first": True}
    with torch.device("meta"):
        stack, pair = make_stack(30, 5, **sizes).eval(), make_model(30, 30, 3, **sizes).eval()
        ids = torch.zeros(1, S + T, dtype=torch.int64)
        counted = count_flops(stack, ids, subsequent_mask(S + T))
        assert counted == 2 * stack_products(5, D, d_ff, S + T)
        counted = count_flops(pair, ids[:, :S], ids[:, :T])
        assert counted == 2 * pair_products(3, D, d_ff, S, T)


@pytest.mark.audit
@pytest.mark.skipif(not os.environ.get("MULTI30K_DIR"), reason="needs Multi30k at hand")
def test_captions_have_20_and_19_pieces_on_average():
    pairs = data_of("multi30k", STUDY.vocab).train
    sides = [[len(pair.src) for pair in pairs], [len(pair.tgt) - 1 for pair in pairs]]
    assert [round(statistics.mean(lengths)) for lengths in sides] == [20, 19]


def test_two_changes_together_close_the_lag_of_the_prefix_mask_and_none_alone():
    runs = pd.DataFrame(load_record("prefix-causes-multi30k")["runs"])
    losses, scores = by_mask(runs)
    in_loss = losses.loc["prefix"] - losses.loc["causal"]
    in_bleu = scores["causal"] - scores["prefix"]
    together, alone = "own weights and relative positions", "relative positions"
    others = in_bleu.drop(together)
    assert (others.groupby("change").size() == 3).all() and (others > 0).all()
    assert in_bleu[together].min() < 0 < in_bleu[together].max()
    reach = {  # where the intervals begin and end
        change: ttest_1samp(lags, 0).confidence_interval()
        for change, lags in in_bleu.groupby("change")
    }
    at_zero = {change for change, interval in reach.items() if interval.low < 0}
    assert at_zero == {together, alone, "source asked, too"} and 1 <= reach[together].high < 1.1
    more = in_bleu[alone] - in_bleu[together]
    assert ttest_1samp(more, 0).confidence_interval().low < 0 < more.min()
    asked = "source asked, too"
    assert (in_loss.loc[asked] < 0).all(axis=None)
    bleu = runs.groupby("row")["bleu"].mean()
    for sees in ("causal", "prefix"):
        assert bleu[f"{sees}, {asked}"] < bleu[f"{sees}, unchanged"]
        assert bleu[f"{sees}, {together.replace('position', 'place')}"] > bleu[f"{sees}, unchanged"]
    levels = pd.DataFrame({"causal": losses.loc["causal"][5], "lag": in_loss[5]})
    ranked = levels.groupby("change").mean().drop(asked).sort_values("causal")
    assert (ranked["lag"].diff().iloc[1:] > -0.002).all()  # the better, the smaller
    ranked = ranked.loc[["targets from position 128", "unchanged"]]
    assert 0.6 < ranked["lag"].iloc[0] / ranked["lag"].iloc[1] < 0.7
    assert abs(ranked["causal"].diff().iloc[1]) < 0.02
