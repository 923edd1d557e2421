"""Chapter 13: each checker distinguishes mistakes; what the prose says about others' code."""

import pytest
import torch
from exercising import assert_told_apart, rejection

from scripts.book.records import load_record
from scripts.ch01_attention import padding_mask
from scripts.ch04_encoder_decoder import make_model
from scripts.ch06_training import BOS, EOS
from scripts.ch07_multi30k import pad_rows
from scripts.ch08_decoding import CopiedCache
from scripts.ch13_decoding_fast import ALMOST, FamilyTree, close_gaps, log_sum_exp
from scripts.exercises.ch13 import (
    check_decoding_cost,
    check_may_be_largest,
    check_trace_back,
    decoding_cost,
    trace_back,
)


def packing_when(packs, pays=lambda packed, left: packed, late=0):
    """`decoding_cost` with another packing rule: packs(left, live, almost, first)."""

    def cost(lengths, almost, packing):
        live, total = len(lengths), 0.0
        for step in range(1, max(lengths) + 1):
            total += live
            left = sum(length > step - late for length in lengths)
            packed = packs(left, live, almost, len(lengths))
            total += packing * pays(packed, left)
            live = left if packed else live
        return total

    return cost


def no_more(left, live, almost, first):
    return 0 < left <= almost * live


COSTS = {
    "you get 18": lambda lengths, *_: sum(lengths),
    "you get 38": packing_when(lambda left, live, almost, _: left <= almost * live and almost > 0),
    "you get 31": packing_when(lambda left, live, almost, _: 0 < left < almost * live),
    "you get 40": packing_when(lambda left, live, almost, _: 0 < left < live and almost > 0),
    "you get 36": packing_when(
        lambda left, live, almost, first: 0 < left <= almost * first and left < live
    ),
    "you get 28": lambda lengths, almost, packing: (
        decoding_cost(lengths, almost, 0) + packing * (almost > 0 and len(lengths) > 2)
    ),
}


def test_what_was_never_packed_was_not_paid_for_and_nobody_leaves_late():
    paying = packing_when(no_more, pays=lambda packed, left: True)
    assert "never packed" in rejection(check_decoding_cost, paying)
    assert "you get 38" in rejection(check_decoding_cost, packing_when(no_more, late=1))


def walker(chained=True):
    def walk(tokens, origins):
        _, B, K = tokens.shape
        at, read = torch.arange(K).expand(B, K), []
        for new, origin in zip(tokens.flip(0), origins.flip(0), strict=True):
            parent = origin.gather(1, at) if chained else origin
            read.append(new.gather(1, at))
            at = parent
        return torch.stack(read[::-1], dim=-1)

    return walk


TRACES = {
    "you get [[[1, 7, 13]": lambda tokens, origins: tokens.permute(1, 2, 0),
    "are backwards": lambda tokens, origins: trace_back(tokens, origins).flip(-1),
    "you get [[[2, 8, 13]": walker(chained=False),
    "the last axis": lambda tokens, origins: trace_back(tokens, origins).permute(2, 0, 1),
    "return a tensor": lambda tokens, origins: trace_back(tokens, origins).tolist(),
}

BOUNDS = {
    "the best-looking token, and it alone": lambda rough, error: (
        rough - error > rough.amax(1, True)
    ),
    "both may be 4.2": lambda rough, error: rough + error >= rough.amax(1, True),
    "a tie counts": lambda rough, error: rough + error > (rough - error).amax(1, True),
    "the second at least 4.3": lambda rough, error: (
        rough + error >= (rough - error).gather(1, rough.argmax(1, True))
    ),
    "You get [[True, False, True]]": lambda rough, error: rough >= rough.amax(1, True) - 2 * error,
    "its own largest": lambda rough, error: rough + error >= (rough - error).amax(),
    "of bool, not tensor([[6., 2.": lambda rough, error: rough + error,
}

WRONG = [(check_decoding_cost, COSTS), (check_trace_back, TRACES), (check_may_be_largest, BOUNDS)]


@pytest.mark.parametrize("check, wrong", WRONG, ids=lambda x: getattr(x, "__name__", ""))
def test_each_mistake_gets_an_answer_of_its_own(check, wrong):
    assert_told_apart(check, wrong)


def test_each_token_has_an_error_of_its_own():
    def largest_error(rough, error):
        return rough + error.amax(1, True) >= (rough - error).amax(1, True)

    assert "at most 3.5" in rejection(check_may_be_largest, largest_error)


def test_a_trace_is_what_a_beam_has_that_copies_its_ids():
    T, B, K = 6, 3, 4
    tokens, origins = torch.randint(9, (T, B, K)), torch.randint(K, (T, B, K))
    texts = tokens.new_empty(B, K, 0)
    for new, origin in zip(tokens, origins, strict=True):
        old = texts.gather(1, origin.unsqueeze(-1).expand(-1, -1, texts.size(-1)))
        texts = torch.cat((old, new.unsqueeze(-1)), dim=-1)  # (B, K, t)
    assert torch.equal(trace_back(tokens, origins), texts)


def test_rows_that_go_on_stay_where_they_can():
    """For all patterns of seven rows: each unfinished row once, and none moves needlessly."""
    for number in range(1, 2**7):
        going = torch.tensor([bool(number >> i & 1) for i in range(7)])
        rows = close_gaps(going)
        assert sorted(rows.tolist()) == going.nonzero().squeeze(1).tolist()
        stays = [i for i in range(len(rows)) if going[i]]
        assert rows[stays].tolist() == stays
    assert 0 < ALMOST < 1


def test_ancestors_are_what_a_cache_that_copies_has_copied():
    """Four prefixes of a sentence descend from each other at random; equal to the bit."""
    torch.manual_seed(0)
    model = make_model(6, 6, N=2, d_model=16, d_ff=32, h=2, dropout=0.0).eval()
    src = pad_rows([[4, 5, 4, EOS], [5, EOS], [4, 4, 5, EOS]])  # (3, 4)
    moved, tree = CopiedCache(model, src, padding_mask(src)), FamilyTree(len(src))
    shared, tokens = [], torch.full((3, 1), BOS)  # (B, k): one prefix each at first
    for _ in range(9):
        k = tokens.size(1)
        with torch.no_grad():
            moved.step(tokens)
        shared.append(moved.past[..., -1, :].unflatten(2, (3, k)))  # (layers, 2, B, k, H, d_k)
        tree.enter(k)
        origin, tokens = torch.randint(k, (3, 4)), torch.randint(4, 6, (3, 4))  # (B, K) each
        moved.follow(origin)  # copies
        tree.follow(origin)  # copies nothing but the tree
        memory = torch.cat(shared, dim=3).transpose(3, 4)  # (layers, 2, B, H, L, d_k)
        own = moved.past.unflatten(2, (3, 4))  # (layers, 2, B, K, H, T, d_k)
        for b, j in torch.cartesian_prod(torch.arange(3), torch.arange(4)):
            mine = tree.ancestors[b, j]  # (L,): True in the past of prefix j of sentence b
            assert torch.equal(memory[:, :, b][..., mine, :], own[:, :, b, j])


def test_a_log_sum_exp_of_large_logits_is_finite():
    logits = torch.tensor([[1000.0, 999.0], [-1000.0, -1001.0]])
    found = log_sum_exp(logits, logits.amax(1, keepdim=True))
    torch.testing.assert_close(found, logits.logsumexp(1, keepdim=True))


def test_what_the_exercise_answers_further():
    """For the chapter's 64 texts, `decoding_cost`'s docstring says which share is cheapest."""
    from scripts import ROOT
    from scripts.ch07_multi30k import source_ids
    from scripts.ch08_decoding import until_end
    from scripts.core.models import load_model
    from scripts.corpora.load import load_corpus
    from scripts.fast.searching import cached_greedy

    trained = load_model(ROOT / "models" / "sample-de-en", "cpu")
    pairs = load_corpus("sample")["test"][:64]
    src = pad_rows([source_ids(german, trained.tokenizer) for german, _ in pairs])
    model = trained.model.double().eval()
    ids = cached_greedy(model, src, padding_mask(src), 2 * src.size(1) + 10)
    lengths = [len(until_end(row)) for row in ids.tolist()]
    assert 0.55 < sum(lengths) / (64 * max(lengths)) < 0.65  # the chart's "Two rows in five"
    cost = {almost: decoding_cost(lengths, almost / 100, 10) for almost in range(101)}
    assert cost[65] == min(cost.values()) == 1210
    assert (cost[90], cost[100], cost[0]) == (1231, 1370, 1856)


def test_the_record_fits_the_chapters_words():
    from scripts.book.figures.racing import speed_frame

    record = load_record("decoding-speed")
    race = speed_frame(record).set_index(["program", "beam"])
    for beam in (1, 4):
        same = race.xs(beam, level="beam")["same_as_ours"]
        assert same["ours, float32"] == same["CTranslate2, float32"] == record["sentences"] == 1000
        assert 930 < same["ours, int8"] < 990  # 4 to 6 texts in a hundred
        spent = record["accounts"]["ours, int8"][str(beam)]
        assert 0.2 < spent["8-bit products"] / sum(spent.values()) < 0.33  # about a quarter
        assert max(spent.values()) < sum(spent.values()) / 2
    usual, patient = (race.loc[(name, 4)] for name in ("ours, float32", "ours, exact stop"))
    assert patient["bleu"] > usual["bleu"]  # the gain
    waits = {(r["program"], r["beam"]): r["p50"] for r in record["one_at_a_time"]}
    for (name, beam), wait in waits.items():
        assert wait < 1.5 * waits[name.replace("ours", "CTranslate2"), beam]


def test_the_batches_of_the_race_are_those_of_the_table():
    """The chapter states them and the rounds; the record doesn't hold them."""
    from scripts.studies import race_decoding as decoding

    assert len(decoding.BATCHES) == 5
    assert "--rounds" not in load_record("decoding-speed")["repeat"]
    assert decoding.SpeedTestOptions.rounds == 5


def test_what_the_chapter_says_of_8_bits():
    timed = load_record("decoding-speed")
    scores = {(one["split"], one["beam"], one["program"]): one["bleu"] for one in timed["scores"]}
    pairs = [(scores[s, k, "ours, int8"], x) for (s, k, p), x in scores.items() if "32" in p]
    changes = [eight - whole for eight, whole in pairs]
    assert min(changes) < 0 < max(changes) and max(map(abs, changes)) < 0.2
