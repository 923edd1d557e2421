"""Chapter 17: a decoder alone, its measure, its baseline, its question."""

import math
import random
from collections import Counter

import pytest
import torch

from scripts.book.instruments import scramble
from scripts.ch01_attention import subsequent_mask
from scripts.ch06_training import BOS, EOS, UNK, LabelSmoothing
from scripts.ch17_small_gpt import (
    Asked,
    Characters,
    KneserNey,
    asked_next,
    bits_per_character,
    discounts,
    gram_counts,
    make_stack,
    row_nats,
    sample_texts,
    sees_its_answer,
    stack_loss,
)

SIZES = {"N": 2, "d_model": 16, "d_ff": 32, "h": 4, "dropout": 0.0}
ROWS = [[BOS, 5, 6, 7, 8, EOS], [BOS, EOS], [BOS, 9, 10, EOS]]

pytestmark = pytest.mark.usefixtures("float64")


@pytest.fixture(params=["sinusoidal", "learned"])
def model(request):
    stack = make_stack(20, **SIZES, positions=request.param)
    scramble(stack)
    return stack


# The model


def test_dropout_reaches_the_stack():
    stack = make_stack(20, **SIZES | {"dropout": 1.0})
    ids, mask = torch.randint(4, 20, (2, 9)), subsequent_mask(9)
    assert stack.train()(ids, mask).std() == 0 < stack.eval()(ids, mask).std()


# The measure and the baseline


def test_characters_there_and_back():
    characters = Characters(["ab ba", "abc"], least=2)
    assert characters.alphabet == ["a", "b"] and characters.encode("") == [BOS, EOS]
    row = characters.encode("abc")
    assert (row[0], row[-2], row[-1]) == (BOS, UNK, EOS)
    assert characters.decode(row[1:]) == "ab□" and characters.decode([4, EOS, 5]) == "a"


def kneser_ney_by_hand(texts, off, token, context, nexts):
    """p(token | context) from the definitions; every count scans all `texts` again.

    Texts begin with "<" and end with ">"; `off` holds each order's discounts.
    """
    alphabet, order = sorted(set("".join(texts))), len(off)

    def times(gram):
        return sum(text.startswith(gram, i) for text in texts for i in range(len(text)))

    def count(gram):
        if len(gram) == order or gram.startswith("<"):
            return times(gram)
        return sum(times(before + gram) > 0 for before in alphabet)

    def p(context):
        counts = {v: count(context + v) for v in alphabet if v != "<"}
        total = sum(counts.values())
        lower = p(context[1:]) if context else 1 / nexts
        less = {v: off[len(context)][min(c, 3)] for v, c in counts.items()}
        remaining = counts.get(token, 0) - less.get(token, 0.0)
        return (remaining + sum(less.values()) * lower) / total if total else lower

    return p(context[max(0, len(context) - order + 1) :])


@pytest.mark.parametrize("order", [1, 2, 4])
def test_kneser_ney_against_its_definition(order):
    rng = random.Random(order)
    texts = ["".join(rng.choice("abc") for _ in range(rng.randint(1, 6))) for _ in range(12)]
    letters = Characters(texts, least=1)
    model = KneserNey(gram_counts([letters.encode(text) for text in texts], order), len(letters))
    ids = {"<": BOS, ">": EOS, "?": UNK, **letters.ids}
    nexts = [char for char in ids if char != "<"]
    bracketed = [f"<{text}>" for text in texts]
    for context in ("<", "<a", "ab", "bca", "<abc", "ccc"):
        past = tuple(ids[char] for char in context)
        probabilities = [model.probability(ids[c], past) for c in nexts]
        by_hand = [
            kneser_ney_by_hand(bracketed, model.discounts, c, context, len(nexts)) for c in nexts
        ]
        assert probabilities == pytest.approx(by_hand, abs=1e-12)
        assert sum(probabilities) == pytest.approx(1)
    row = letters.encode(texts[0])
    each = [model.probability(row[t], tuple(row[:t])) for t in range(1, len(row))]
    assert model.nats(row) == pytest.approx(-sum(map(math.log, each)))


def test_discounts_of_a_table_small_enough_for_a_pencil():
    table = Counter({(i,): count for i, count in enumerate((1, 1, 1, 1, 2, 2, 3, 4))})
    assert discounts(table) == (0.0, 0.5, 1.25, 1.0)  # n₁ = 4, n₂ = 2, n₃ = n₄ = 1, so Y = ½
    table = Counter({(i,): count for i, count in enumerate((1, 2, 3, 3, 3, 4))})
    assert discounts(table) == (0.0, 0.5, 1.0, 1.5)  # Y = ⅓, so d(2) = 2 − 3·⅓·3 would be −1


# The question


def test_a_batch_asks_what_its_rows_ask_alone(model):
    nats = row_nats(model, ROWS, size=2)
    for row, row_loss in zip(ROWS, nats, strict=True):  # alone, token by token
        x = model(torch.tensor([row[:-1]]), subsequent_mask(len(row) - 1))
        log_p = model.generator(x)[0].log_softmax(-1)
        by_token = [log_p[t, row[t + 1]].item() for t in range(len(row) - 1)]
        assert row_loss == pytest.approx(-sum(by_token))
    whole, plain = stack_loss(model, asked_next(ROWS), LabelSmoothing(0.1))
    alone = [stack_loss(model, asked_next([row]), LabelSmoothing(0.1))[0] for row in ROWS]
    torch.testing.assert_close(whole, sum(alone))
    assert plain.item() == pytest.approx(sum(nats))
    characters = asked_next(ROWS).ntokens
    assert characters == sum(len(row) - 1 for row in ROWS)
    assert bits_per_character(nats, ROWS) == pytest.approx(sum(nats) / math.log(2) / characters)


def test_a_mask_with_a_single_place_too_many_is_found():
    question = asked_next(ROWS)
    assert not sees_its_answer(question)
    leaking = question.mask.clone()
    leaking[0, 2, 3] = True
    assert sees_its_answer(Asked(question.ids, question.labels, leaking))


# Writing


def test_samples_follow_the_distribution(model):
    x = model(torch.tensor([[BOS]]), subsequent_mask(1))
    for temperature in (0.7, 1.5):
        shares = (model.generator(x)[0, 0] / temperature).softmax(-1)
        first = sample_texts(model, 4000, temperature, seed=1, max_len=1)[:, 0]
        assert (torch.bincount(first, minlength=20) / 4000 - shares).abs().max() < 0.03
