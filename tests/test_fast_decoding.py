"""The fast decoder: computing each token once gives what the formula gives."""

import itertools
import random
import threading
import time
import weakref
from functools import partial

import pytest
import torch
from bruteforce import forced_log_probs
from histories import PrefixDecoding, history_gap

from scripts.book.instruments import scramble
from scripts.ch01_attention import padding_mask
from scripts.ch03_embeddings_and_positions import MAX_LEN
from scripts.ch04_encoder_decoder import make_model
from scripts.ch06_training import EOS, PAD, greedy_decode
from scripts.ch07_multi30k import pad_rows
from scripts.ch08_decoding import beam_search, dropout_off, until_end
from scripts.ch13_decoding_fast import Screen, product_in_8_bits
from scripts.fast import translating as fast_translating
from scripts.fast.decoding import CachedDecoding, Packed8, PreparedModel
from scripts.fast.searching import Search, cached_beam_search, cached_greedy, cached_sample
from scripts.fast.translating import (
    CELLS_READ,
    CELLS_SEEN,
    PREFIXES,
    STEP_COST,
    length_batches,
    on_threads,
    search_rows,
)

RNG = random.Random(0)  # two dozen: of ten or fewer, one that ends leaves at once (PACK_AT)
SOURCES = pad_rows([[*RNG.choices(range(4, 9), k=RNG.randint(1, 5)), EOS] for _ in range(24)])
MASK = padding_mask(SOURCES)


def random_model(seed: int = 0, vocab: int = 9, **changes):
    """A small model in double precision whose predictions are far from uniform."""
    torch.manual_seed(seed)
    shape = {"N": 2, "d_model": 16, "d_ff": 32, "h": 2, "dropout": 0.3} | changes
    model = make_model(vocab, vocab, **shape).double()
    scramble(model, seed, 0.3)
    with torch.no_grad():
        model.generator.proj.weight.mul_(3)
    return model


MODELS = {
    "post-norm": {},
    "pre-norm": {"norm_first": True},
    "tied": {"norm_first": True, "tie": "all"},
    "decoder tied": {"tie": "decoder"},
}


@pytest.mark.parametrize("kind", MODELS)
def test_with_and_without_a_cache_every_step_is_the_same(kind):
    model = random_model(0, 6, **MODELS[kind]).eval()
    assert history_gap(model, CachedDecoding, steps=9) < 1e-11


@pytest.mark.parametrize("kind", MODELS)
def test_cached_greedy_is_greedy_and_a_beam_of_one_too(kind):
    model = random_model(1, **MODELS[kind])
    expected = greedy_decode(model, SOURCES, MASK, 12)
    assert torch.equal(cached_greedy(model, SOURCES, MASK, 12), expected)
    best = [beams[0] for beams in cached_beam_search(model, SOURCES, MASK, 12, beam=1)]
    texts = map(until_end, expected.tolist())
    assert [list(h.ids) for h in best] == [[i for i in row if i != EOS] for row in texts]
    assert model.training  # dropout was off meanwhile, and is on again


@pytest.mark.parametrize(("seed", "beam"), [(0, 2), (1, 3), (2, 8), (3, 4)])
def test_the_beam_is_chapter_8s_to_the_last_hypothesis(seed, beam):
    model, alpha = random_model(seed, norm_first=seed % 2 == 0), (0.0, 0.6, 1.0)[seed % 3]
    searches = (cached_beam_search, beam_search)
    beams = (search(model, SOURCES, MASK, 10, beam, alpha) for search in searches)
    for cached, plain in zip(*beams, strict=True):
        assert [(h.ids, h.length) for h in cached] == [(h.ids, h.length) for h in plain]
        log_probs = [h.log_prob for h in plain]
        assert [h.log_prob for h in cached] == pytest.approx(log_probs, rel=1e-10)


def all_endings(model, max_len: int, beam: int, alpha: float):
    """The same beam, but it goes on to the length limit, whatever has ended."""
    with dropout_off(model), torch.no_grad():
        search = Search(CachedDecoding(model, SOURCES, MASK), SOURCES, max_len, beam)
        for step in range(1, max_len + 1):
            search.advance(final=step == max_len)
    return [sorted(ended, key=lambda h: -h.score(alpha))[:beam] for ended in search.finished]


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
def test_exact_is_never_stopping_and_better_than_hasty(alpha):
    gains = 0
    for seed in range(8):
        model = random_model(seed)
        search = partial(cached_beam_search, model, SOURCES, MASK, 8, 2, alpha)
        runs = search(exact=False), search(exact=True), all_endings(model, 8, 2, alpha)
        for hasty, patient, endless in zip(*runs, strict=True):
            assert [h.ids for h in patient] == [h.ids for h in endless]
            pairs = zip(hasty, patient, strict=False)
            gaps = [late.score(alpha) - early.score(alpha) for early, late in pairs]
            assert min(gaps) > -1e-9
            gains += max(gaps) > 1e-9
    assert gains > 0


# The parts


def test_a_cache_grows_beyond_its_first_room_and_ends_where_positions_end():
    model = random_model(1).eval()
    src, states = SOURCES[:2], []
    with torch.no_grad():
        for way in (PrefixDecoding, CachedDecoding):
            decoding = way(model, src, padding_mask(src))
            steps = (decoding.step(torch.full((2, 1), 4)) for _ in range(70))
            states.append([decoding.logits(x).log_softmax(-1) for x in steps])
        for cached, plain in zip(*reversed(states), strict=True):
            torch.testing.assert_close(cached, plain, rtol=1e-10, atol=1e-10)
        decoding.length = MAX_LEN
        with pytest.raises(ValueError, match=str(MAX_LEN)):
            decoding.step(torch.full((2, 1), 4))


def test_a_sample_comes_with_its_own_log_probability():
    """Whatever sharpened the draw, the score is the model's: that of teacher forcing."""
    model = random_model(norm_first=True).eval()
    generator = torch.Generator().manual_seed(0)
    ids, log_probs = cached_sample(model, SOURCES, MASK, 9, 0.7, 5, 0.9, generator)
    for src, row, log_prob in zip(SOURCES, ids.tolist(), log_probs.tolist(), strict=True):
        text = torch.tensor([until_end(row)])
        forced = forced_log_probs(model, src[src != PAD].unsqueeze(0), text)
        assert forced.item() == pytest.approx(log_prob, rel=1e-10)


# Whole corpora


@pytest.mark.parametrize("width", [1, 100, 600])
def test_batches_hold_every_row_once_and_stay_within_bounds(width):
    lengths = [2 + (7 * i) % 250 for i in range(700)]
    batches = length_batches([[4] * n for n in lengths], width)
    assert sorted(itertools.chain(*batches)) == list(range(700))
    tops = [max(lengths[i] for i in batch) for batch in batches]
    assert tops == sorted(tops, reverse=True)
    for count, longest in ((len(b), top) for b, top in zip(batches, tops, strict=True) if b[1:]):
        assert count * longest <= CELLS_READ and count * width <= PREFIXES
        assert count * width * longest <= CELLS_SEEN


def test_cores_get_batches_of_equal_cost():
    lengths = [5 + i % 30 for i in range(1000)]
    for cores in (1, 3, 8):
        batches = length_batches([[4] * n for n in lengths], 1, cores)
        assert len(batches) % cores == 0
        work = [sum(lengths[i] for i in batch) + STEP_COST * lengths[batch[0]] for batch in batches]
        assert max(work) < 1.05 * min(work)
    assert length_batches([], 4, 2) == length_batches([[EOS]], 4, 2) == []


@pytest.fixture
def two_threads():
    torch.set_num_threads(2)


def test_jobs_run_side_by_side_and_come_back_in_order(two_threads):
    meeting = threading.Barrier(2, timeout=20)

    def work(job: int) -> tuple[int, int]:
        if job < 2:
            meeting.wait()  # returns only if another thread is here at the same time
        time.sleep(0.01 * (5 - job))
        return job, torch.get_num_threads()

    assert on_threads(work, range(5)) == [(job, 1) for job in range(5)]
    with pytest.raises(ZeroDivisionError):
        on_threads(lambda job: 1 // job, [1, 0, 1])
    assert torch.get_num_threads() == 2 and on_threads(work, []) == []


def test_threads_dont_switch_each_others_dropout_on(two_threads, monkeypatch):
    model = random_model(4).train()
    rows = [[4 + i % 4, 5, EOS] for i in range(12)]
    monkeypatch.setattr(fast_translating, "PREFIXES", 2)
    for _ in range(5):
        texts = [until_end(row.tolist()) for row in search_rows(model, rows, cached_greedy)]
        assert texts[:8:4] == texts[4::4]
    assert all(part.training for part in model.modules())


# The screen: 8 bits propose, a bound decides


def rough_table(outlier: float) -> torch.nn.Linear:
    """A table whose largest entry sets the unit in which all others are rounded."""
    torch.manual_seed(0)
    table = torch.nn.Linear(48, 4096, dtype=torch.float32).requires_grad_(False)
    table.weight.mul_(2)
    table.weight[5, 3] = outlier
    return table


@pytest.mark.parametrize("outlier", [0.5, 100.0])
def test_the_screen_finds_what_the_whole_product_finds(outlier):
    """However coarse the rounding; if little is excluded, it computes the whole product."""
    table = rough_table(outlier)
    for coarse in (Packed8(table), partial(product_in_8_bits, table)):
        for x in (torch.randn(64, 48, dtype=torch.float32), torch.zeros(3, 48)):
            whole = table(x.float())
            assert torch.equal(Screen(table, coarse).largest(x.float()), whole.argmax(dim=1))
            gap = (coarse(x.float()) - whole).abs()
            assert (gap <= Screen(table, coarse).error(x.float()) + 1e-5).all()


def test_a_model_made_ready_is_freed_with_its_last_reference():
    """Its packed weights are large: they mustn't wait for the garbage collector."""
    ready = PreparedModel(random_model())
    gone = weakref.ref(ready)
    del ready
    assert gone() is None
