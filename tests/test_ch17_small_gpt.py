"""Chapter 17: a decoder alone, its measure, its rival, its question, and the model that ships."""

import math
import random

import pytest
import torch

from scripts import ROOT
from scripts.book.instruments import scramble
from scripts.book.records import load_record, sha256
from scripts.ch01_attention import subsequent_mask
from scripts.ch06_training import BOS, EOS, UNK, LabelSmoothing
from scripts.ch17_small_gpt import (
    Asked,
    Characters,
    KneserNey,
    asked_next,
    bits_per_character,
    character_nats,
    continued,
    grams,
    load_gpt,
    make_stack,
    mixed,
    places_in_words,
    sees_its_answer,
    stack_loss,
)
from scripts.fast.decoding import StackDecoding
from scripts.studies.gpt import card

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


# The measure and the rival


def test_characters_there_and_back():
    characters = Characters(["ab ba", "abc"], least=2)
    assert characters.alphabet == "ab" and characters.encode("") == [BOS, EOS]
    row = characters.encode("abc")
    assert (row[0], row[-2], row[-1]) == (BOS, UNK, EOS)
    assert characters.decode(row[1:]) == "ab□" and characters.decode([4, EOS, 5]) == "a"


def kneser_ney_by_hand(texts, discounts, gram, size):
    """p of a gram's last character from the definitions; every count scans all `texts` again."""
    K, alphabet = len(discounts) - 1, sorted({*"".join(texts), "⟨", "⟩"})
    whole = [grams(text, K + 1) for text in texts]

    def count(gram):
        """How often it ends a place in the texts; if shorter: after how many characters."""
        if len(gram) == K + 1:
            return sum(each.count(gram) for each in whole)
        return sum(count(before + gram) > 0 for before in alphabet)

    def p(context, char):
        counts = [count(context + v) for v in alphabet]
        total, d = sum(counts), discounts[K - len(context)]
        lower = p(context[1:], char) if context else 1 / size
        saved = sum(min(c, d) for c in counts)
        return (max(count(context + char) - d, 0) + saved * lower) / total if total else lower

    return p(gram[:-1], gram[-1])


@pytest.mark.parametrize("K", [0, 1, 3])
def test_kneser_ney_against_its_definition(K):
    rng = random.Random(K)
    texts = ["".join(rng.choice("abc") for _ in range(rng.randint(1, 6))) for _ in range(12)]
    model = KneserNey(texts, K, 5)
    discounts = [level.d for level in model.levels]
    assert all(0 < d < 1 for d in discounts)
    for text in ("", "a", "abba", "bca", "cccc"):
        for gram in grams(text, K + 1):
            each = [model.probability(gram[:-1] + char) for char in "abc⟩□"]
            by_hand = [
                kneser_ney_by_hand(texts, discounts, gram[:-1] + char, 5) for char in "abc⟩□"
            ]
            assert each == pytest.approx(by_hand, abs=1e-12)
            assert sum(each) == pytest.approx(1)
        by_character = [model.probability(gram) for gram in grams(text, K + 1)]
        assert model.nats(text) == pytest.approx([-math.log(p) for p in by_character])


def test_a_mixture_is_a_mean_of_probabilities():
    table, model = torch.rand(2, 9)
    both = mixed(-table.log(), -model.log(), 0.3)
    torch.testing.assert_close((-both).exp(), 0.3 * table + 0.7 * model)


def test_places_in_words():
    assert "".join(place[0] for place in places_in_words("A dog, two.")) == "1n12lnn12lnn"


# The question


def test_a_batch_asks_what_its_rows_ask_alone(model):
    nats = character_nats(model, ROWS, size=2)
    for row, row_loss in zip(ROWS, nats, strict=True):  # alone, token by token
        x = model(torch.tensor([row[:-1]]), subsequent_mask(len(row) - 1))
        log_p = model.generator(x)[0].log_softmax(-1)
        by_token = [log_p[t, row[t + 1]].item() for t in range(len(row) - 1)]
        assert row_loss == pytest.approx([-log_p for log_p in by_token])
    whole, plain = stack_loss(model, asked_next(ROWS), LabelSmoothing(0.1))
    alone = [stack_loss(model, asked_next([row]), LabelSmoothing(0.1))[0] for row in ROWS]
    torch.testing.assert_close(whole, sum(alone))
    assert plain.item() == pytest.approx(sum(map(sum, nats)))
    characters = asked_next(ROWS).ntokens
    assert characters == sum(len(row) - 1 for row in ROWS)
    assert bits_per_character(nats) == pytest.approx(plain.item() / math.log(2) / characters)


def test_a_mask_with_a_single_place_too_many_is_found():
    question = asked_next(ROWS)
    assert not sees_its_answer(question)
    leaking = question.mask.clone()
    leaking[0, 2, 3] = True
    assert sees_its_answer(Asked(question.ids, question.labels, leaking))


# Writing


def test_samples_follow_the_distribution_behind_the_prompt():
    characters = Characters(["abcdefgh"], least=1)
    model = make_stack(len(characters), **SIZES)
    scramble(model)
    ids = torch.tensor([characters.encode("ab")[:-1]])
    x = model(ids, subsequent_mask(3))[0, -1]
    for temperature in (0.7, 1.5):
        shares = (model.generator(x) / temperature).softmax(-1)
        texts = continued(model, characters, "ab", 4000, temperature, max_len=3)
        assert all(text.startswith("ab") for text in texts)
        for char, i in characters.ids.items():
            assert abs(texts.count("ab" + char) / 4000 - shares[i]) < 0.03


def test_step_by_step_is_the_whole_row(model):
    ids, decoding = torch.randint(4, 20, (5, 9)), StackDecoding(model)
    by_steps = torch.stack([decoding.step(ids[:, t : t + 1]) for t in range(9)], dim=1)
    torch.testing.assert_close(by_steps, model(ids, subsequent_mask(9)))


# What ships


def test_the_shipped_model_is_the_one_on_record():
    record, folder = load_record("gpt-multi30k"), ROOT / "models/gpt-multi30k"
    assert record["weights_sha256"] == sha256(folder / "model.safetensors")
    assert (folder / "README.md").read_text("utf-8") == card(record)
    assert sum(path.stat().st_size for path in folder.iterdir()) < 2 * 10**6
    model, characters = load_gpt(folder)
    captions = ["A man in a blue shirt is standing on a ladder.", "Two dogs run through the snow."]
    bits = bits_per_character(character_nats(model, [*map(characters.encode, captions)]))
    assert bits < record["bits"]["test"]  # frequent ones
