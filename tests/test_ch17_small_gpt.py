"""Chapter 17: a decoder alone, its measure, its baseline; each checker distinguishes mistakes."""

import math
import os
import random
from collections import Counter
from operator import itemgetter

import pytest
import torch
from exercising import assert_told_apart
from saying import ran
from torch import nn

from scripts.book.exercises import check
from scripts.book.instruments import scramble
from scripts.book.records import load_record
from scripts.ch01_attention import subsequent_mask
from scripts.ch04_encoder_decoder import make_model, torch_layer_state
from scripts.ch06_training import BOS, EOS, UNK, LabelSmoothing
from scripts.ch17_small_gpt import (
    Asked,
    Characters,
    KneserNey,
    StackDecoding,
    asked_next,
    bits_per_character,
    discounts,
    gram_counts,
    learn,
    make_stack,
    row_nats,
    sample_texts,
    sees_its_answer,
    stack_loss,
)
from scripts.corpora.load import load_corpus
from scripts.exercises.ch17 import (
    bits_from_pieces,
    check_bits_from_pieces,
    check_packed_mask,
    packed_mask,
)
from scripts.studies import gpt
from scripts.studies.runner import SEEDS

SIZES = {"N": 2, "d_model": 16, "d_ff": 32, "h": 4, "dropout": 0.0}
ROWS = [[BOS, 5, 6, 7, 8, EOS], [BOS, EOS], [BOS, 9, 10, EOS]]

pytestmark = pytest.mark.usefixtures("float64")


@pytest.fixture(params=["sinusoidal", "learned"])
def model(request):
    torch.manual_seed(0)
    made = make_stack(20, **SIZES, positions=request.param)
    scramble(made)
    return made


# The model


def test_a_decoder_layer_without_a_source_is_an_encoder_layer(model):
    layer, paired = model.stack.layers[0], make_model(9, 9, **SIZES, norm_first=True)
    scramble(paired)
    decoder = paired.decoder.layers[0]
    for silent in decoder.src_attn.project_output.parameters():
        nn.init.zeros_(silent)
    layer.self_attn.load_state_dict(decoder.self_attn.state_dict())
    layer.feed_forward.load_state_dict(decoder.feed_forward.state_dict())
    for ours, theirs in zip(layer.sublayer, decoder.sublayer[::2], strict=True):
        ours.load_state_dict(theirs.state_dict())
    x, memory, mask = torch.randn(2, 7, 16), torch.randn(2, 5, 16), subsequent_mask(7)
    torch.testing.assert_close(layer(x, mask), decoder(x, memory, None, mask))


def test_the_causal_stack_is_pytorchs(model):
    theirs = nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True, norm_first=True)
    x, mask = torch.randn(2, 7, 16), subsequent_mask(7)
    for layer in model.stack.layers:
        theirs.load_state_dict(torch_layer_state(layer))
        torch.testing.assert_close(layer(x, mask), theirs(x, src_mask=~mask[0]))


def test_no_prediction_depends_on_what_comes_later(model):
    ids, mask = torch.randint(4, 20, (2, 9)), subsequent_mask(9)
    x = model(ids, mask)
    for t in range(1, 9):
        later = ids.clone()
        later[:, t:] = 4 + (later[:, t:] - 3) % 16  # another token everywhere
        changed = (model(later, mask) - x).abs().amax(dim=(0, 2))
        assert changed[:t].max() == 0 < changed[t]


def test_dropout_reaches_the_stack():
    torch.manual_seed(0)
    made = make_stack(20, **SIZES | {"dropout": 1.0})
    ids, mask = torch.randint(4, 20, (2, 9)), subsequent_mask(9)
    assert made.train()(ids, mask).std() == 0 < made.eval()(ids, mask).std()


def test_positions_are_learned_or_sinusoids():
    with pytest.raises(ValueError, match="rotary"):
        make_stack(20, positions="rotary")
    short = make_stack(20, **SIZES, positions="learned", max_len=8)
    with pytest.raises(ValueError, match="9"):
        short(torch.zeros(1, 9, dtype=torch.int64), subsequent_mask(9))


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
        kept = counts.get(token, 0) - less.get(token, 0.0)
        return (kept + sum(less.values()) * lower) / total if total else lower

    return p(context[max(0, len(context) - order + 1) :])


@pytest.mark.parametrize("order", [1, 2, 3, 5])
def test_kneser_ney_against_its_definition(order):
    rng = random.Random(order)
    texts = ["".join(rng.choice("abc") for _ in range(rng.randint(1, 6))) for _ in range(12)]
    letters = Characters(texts, least=1)
    model = KneserNey(gram_counts([letters.encode(text) for text in texts], order), len(letters))
    ids = {"<": BOS, ">": EOS, "?": UNK, **letters.ids}
    nexts = [char for char in ids if char != "<"]
    bracketed = [f"<{text}>" for text in texts]
    for context in ("<", "<a", "ab", "bca", "<abc", "cab", "ccc"):
        found = [model.probability(ids[c], tuple(ids[h] for h in context)) for c in nexts]
        hand = [
            kneser_ney_by_hand(bracketed, model.discounts, c, context, len(nexts)) for c in nexts
        ]
        assert found == pytest.approx(hand, abs=1e-12) and sum(found) == pytest.approx(1)


def test_discounts_of_a_table_small_enough_for_a_pencil():
    table = Counter({(i,): count for i, count in enumerate((1, 1, 1, 1, 2, 2, 3, 4))})
    assert discounts(table) == (0.0, 0.5, 1.25, 1.0)  # n₁ = 4, n₂ = 2, n₃ = n₄ = 1, so Y = ½
    table = Counter({(i,): count for i, count in enumerate((1, 2, 3, 3, 3, 4))})
    assert discounts(table) == (0.0, 0.5, 1.0, 1.5)  # Y = ⅓, so d(2) = 2 − 3·⅓·3 would be −1


def test_estimated_discounts_keep_the_sum_at_one():
    rng = random.Random(0)
    rows = [
        [BOS, *(4 + min(rng.randrange(6), rng.randrange(6)) for _ in range(9)), EOS]
        for _ in range(150)
    ]
    model = KneserNey(gram_counts(rows, 4), 10)
    assert any(discount != (0.0, 0.5, 1.0, 1.5) for discount in model.discounts)
    for row in rows[:20]:
        for t in range(1, len(row)):
            found = [model.probability(token, tuple(row[:t])) for token in (UNK, *range(EOS, 10))]
            assert sum(found) == pytest.approx(1) and min(found) > 0


def test_a_rows_nats_are_its_characters_in_turn():
    model = KneserNey(gram_counts(ROWS, 3), 12)
    for row in ROWS:
        each = [model.probability(row[t], tuple(row[:t])) for t in range(1, len(row))]
        assert model.nats(row) == pytest.approx(-sum(map(math.log, each)))


def test_one_measure_for_every_model(model):
    rows = [[BOS, 5, 6, 7, EOS], [BOS, EOS]]
    assert bits_per_character([4 * math.log(8), math.log(8)], rows) == pytest.approx(3)
    total = stack_loss(model, asked_next(rows), LabelSmoothing(0.0))[1].item()
    found = bits_per_character(row_nats(model, rows, size=1), rows)
    assert found == pytest.approx(total / math.log(2) / 5)


# The question and the training


def test_a_batch_asks_what_its_rows_ask_alone(model):
    nats = row_nats(model, ROWS, size=2)
    for row, value in zip(ROWS, nats, strict=True):  # alone, token by token
        x = model(torch.tensor([row[:-1]]), subsequent_mask(len(row) - 1))
        log_p = model.generator(x)[0].log_softmax(-1)
        assert value == pytest.approx(-sum(log_p[t, row[t + 1]].item() for t in range(len(x[0]))))
    whole = stack_loss(model, asked_next(ROWS), LabelSmoothing(0.1))[0]
    alone = [stack_loss(model, asked_next([row]), LabelSmoothing(0.1))[0] for row in ROWS]
    torch.testing.assert_close(whole, sum(alone))


def test_questions_that_contain_their_answers_are_found():
    right = asked_next(ROWS)
    assert right.ntokens == sum(len(row) - 1 for row in ROWS) and not sees_its_answer(right)
    assert sees_its_answer(Asked(right.ids, right.ids, right.mask))
    assert sees_its_answer(Asked(right.ids, right.labels, right.mask.mT))
    one = right.mask.clone()
    one[0, 2, 3] = True  # a single place too many
    assert sees_its_answer(Asked(right.ids, right.labels, one))


def test_learning_makes_a_step_a_batch_and_asks_less_of_each(model):
    batch = asked_next(ROWS)
    reports = [learn(model, 10 * [batch], warmup=2) for _ in range(3)]
    assert [len(report.grad_norms) for report in reports] == [10, 10, 10]
    assert reports[2].nll < reports[1].nll < reports[0].nll


# Writing


def test_the_cache_gives_what_the_whole_row_gives(model):
    ids, decoding = torch.randint(4, 20, (3, 9)), StackDecoding(model)
    by_steps = torch.stack([decoding.step(ids[:, t : t + 1]) for t in range(9)], dim=1)
    torch.testing.assert_close(by_steps, model(ids, subsequent_mask(9)))


def test_rows_that_leave_take_their_cache_along(model):
    tokens, kept = torch.tensor([[BOS], [7], [9]]), torch.tensor([2, 0])
    whole, part = StackDecoding(model), StackDecoding(model)
    whole.step(tokens), part.step(tokens)
    part.keep(kept)
    torch.testing.assert_close(part.step(tokens[kept]), whole.step(tokens)[kept])


def test_samples_follow_the_distribution(model):
    x = StackDecoding(model).step(torch.full((1, 1), BOS))
    for temperature in (0.7, 1.5):
        wanted = (model.generator(x)[0] / temperature).softmax(-1)
        first = sample_texts(model, 4000, temperature, seed=1, max_len=1)[:, 0]
        assert (torch.bincount(first, minlength=20) / 4000 - wanted).abs().max() < 0.03
    assert torch.equal(sample_texts(model, 5, 1.0, 3, 9), sample_texts(model, 5, 1.0, 3, 9))


def test_a_temperature_near_zero_takes_the_likeliest(model):
    (found,) = sample_texts(model, 1, temperature=1e-6, seed=0, max_len=12).tolist()
    row = [BOS]
    while len(row) < 13 and row[-1] != EOS:
        x = model(torch.tensor([row]), subsequent_mask(len(row)))
        row.append(int(model.generator(x[0, -1]).argmax()))
    assert found == row[1:]


# What the chapter says


def test_what_the_chapter_says_of_tables():
    said = ran("ch17")
    past = tuple(said.characters.encode("xyz")[1:-1])
    assert said.seven.total[past[1:]] == 0 < said.seven.total[past[2:]]
    z, o, a_space = said.characters.encode("zo ")[1:-1]
    assert said.counts[0][(z,)] == said.counts[1][z, o] == 63
    assert [g for g in said.counts[2] if g[1:] == (z, o)] == [(a_space, z, o)]
    words = {text.split()[1] for text in said.texts["train"] if text.startswith("The do")}
    assert words == {"doctor", "doctors", "donkey", "donkeys", "dogs"}
    assert said.ngrams["bits per character"].is_monotonic_decreasing


def test_what_the_chapter_says_of_its_own_models():
    said = ran("ch17")
    assert said.by_triples < said.found < said.by_pairs
    assert (sample_texts(said.copier, 3, 0.5, seed=1, max_len=20) == BOS).all()
    assert round(math.log2(len(said.characters) - 2), 1) == 5.3 < said.nexts_cost


def test_what_the_chapter_says_of_the_recorded_trainings():
    record = load_record("gpt-multi30k")
    setting = record["setting"]
    assert (setting["layers"], setting["d_model"], setting["epochs"]) == (4, 128, 8)
    assert setting["optimizer"] == "muon"
    said = ran("ch17")
    assert said.tried["epochs"].eq(gpt.SHORT).all() and len(said.models) == len(SEEDS)
    assert [(run["seed"], run["dropout"]) for run in said.models] == [(s, 0.0) for s in SEEDS]
    copied = {heat: part["copied"] for heat, part in said.models[0]["samples"].items()}
    assert copied == {"0.5": 1, "0.8": 0, "1": 0, "1.5": 0}
    bits = said.tried.groupby("dropout")["bits"].min()
    assert bits.is_monotonic_increasing and bits[0.1] - bits[0.0] > 0.2
    for run in said.models:
        *_, before_last, last = run["losses"]
        assert 0.12 < (last - run["trained"][-1]) / math.log(2) < 0.135
        assert abs(before_last - last) < 0.002


# The record


def test_the_mini_gpts_beside_the_tables_on_record():
    said = ran("ch17")
    bits = [run[said.test] for run in said.models]
    least = {row: min(one[said.test] for one in orders) for row, orders in said.tables.items()}
    for orders in said.tables.values():  # what validation chooses is best on the test, too
        assert min(orders, key=itemgetter("val")) == min(orders, key=itemgetter(said.test))
    *_, eight, nine, ten, _, best, _, _ = said.tables["n-grams"]
    assert (best["order"], best[said.test]) == (12, least["n-grams"])
    assert all(0.001 < one - best[said.test] < 0.005 for one in bits)
    behind = [run["val"] - best["val"] for run in said.models]
    assert min(behind) > 0.004 and round(max(behind), 3) == 0.013
    assert all(abs(one - ten[said.test]) < 0.003 for one in bits)
    assert max(bits) < nine[said.test] < eight[said.test]
    assert round(least["PPM"] - max(bits), 2) == round(least["PPM"] - sum(bits) / 3, 2) == 0.02
    assert round(best["entries"], -5) == 3_400_000 and said.models[0]["parameters"] < 850_000


@pytest.mark.skipif(not os.environ.get("MULTI30K_DIR"), reason="needs Multi30k at hand")
def test_the_words_that_it_writes_beside_those_of_training():
    def words(texts):
        return [word for text in texts for word in text.rstrip(".").lower().split()]

    captions = [english for _, english in load_corpus("multi30k")["train"]]
    some = words(captions[:200])
    assert round(len(set(some)) / len(some), 2) == 0.30
    known, first = set(words(captions)), ran("ch17").models[0]
    shown = words(part["texts"][0] for part in first["samples"].values())
    new = ["rown", "ofsion"]
    assert [word for word in shown if word not in known] == new


# Exercises


def pieces_of(texts, tokenizer):
    return sum(len(tokenizer.encode(text)) for text in texts)


def in_nats(nats, texts, tokenizer):
    return bits_from_pieces(nats, texts, tokenizer) * math.log(2)


def without_ends(nats, texts, tokenizer):
    return nats * pieces_of(texts, tokenizer) / sum(map(len, texts)) / math.log(2)


def ends_above_alone(nats, texts, tokenizer):
    pieces = pieces_of(texts, tokenizer) + len(texts)
    return nats * pieces / sum(map(len, texts)) / math.log(2)


def ends_below_alone(nats, texts, tokenizer):
    characters = sum(map(len, texts)) + len(texts)
    return nats * pieces_of(texts, tokenizer) / characters / math.log(2)


def mean_of_means(nats, texts, tokenizer):
    return sum(bits_from_pieces(nats, [text], tokenizer) for text in texts) / len(texts)


def test_mistakes_with_pieces_are_told_apart():
    wrong = {
        "per piece": lambda nats, texts, tokenizer: nats / math.log(2),
        "These are nats": in_nats,
        "ends are missing": without_ends,
        "count as pieces, but not as characters": ends_above_alone,
        "count as characters, but not as pieces": ends_below_alone,
        "mean of means": mean_of_means,
        "should give": lambda nats, texts, tokenizer: 0.0,
    }
    assert_told_apart(check_bits_from_pieces, wrong)


def test_a_rounded_answer_is_right():
    check(lambda *given: torch.tensor(bits_from_pieces(*given)).float(), "bits_from_pieces")


def same(owner):
    return owner[:, :, None] == owner[:, None, :]


def real(owner):
    return (owner >= 0)[:, :, None]


def itself(owner):
    return torch.eye(owner.size(1), dtype=torch.bool)


def test_mistakes_with_packing_are_told_apart():
    causal = subsequent_mask(8)
    wrong = {
        "sees the one before it": lambda owner: (
            causal & real(owner) & real(owner).mT | itself(owner)
        ),
        "sees a later one": lambda owner: same(owner) & real(owner) | itself(owner),
        "doesn't see itself": lambda owner: same(owner) & causal & real(owner),
        "Padding looks at another": lambda owner: same(owner) & causal,
        "in its own text": lambda owner: packed_mask(owner) & torch.ones(8, 8).triu(-1).bool(),
        "boolean": lambda owner: packed_mask(owner).float(),
        "The shape": lambda owner: packed_mask(owner)[:1],
    }
    assert_told_apart(check_packed_mask, wrong)
