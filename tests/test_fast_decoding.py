"""The fast decoder: computing each token once gives what the formula gives."""

import itertools
import math
import random
import threading
import time
import weakref
from functools import partial

import pytest
import torch
from bruteforce import every_hypothesis, forced_log_probs
from histories import PrefixDecoding, history_gap

from scripts import ROOT
from scripts.book.instruments import scramble
from scripts.book.phrases import PhraseBook
from scripts.ch01_attention import padding_mask
from scripts.ch03_embeddings_and_positions import MAX_LEN
from scripts.ch04_encoder_decoder import make_model
from scripts.ch06_training import EOS, PAD, greedy_decode
from scripts.ch07_multi30k import pad_rows, source_ids
from scripts.ch08_decoding import CopiedCache, beam_search, dropout_off, until_end
from scripts.ch13_decoding_fast import LATE
from scripts.core.models import load_model
from scripts.corpora.load import load_corpus
from scripts.fast import searching
from scripts.fast import translating as fast_translating
from scripts.fast.decoding import (
    CachedDecoding,
    PreparedModel,
    Screen,
    exact_in_8_bits,
    fast_in_8_bits,
)
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

RNG = random.Random(0)  # two dozen: of ten or fewer, one that ends leaves at once (ALMOST)
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
@pytest.mark.parametrize("seed", range(2))
def test_with_and_without_a_cache_every_step_is_the_same(kind, seed):
    model = random_model(seed, 6, **MODELS[kind]).eval()
    for way in (CopiedCache, CachedDecoding):
        assert history_gap(model, way, steps=9) < 1e-11
        assert history_gap(model, way, forgetful=True, steps=9) > 1e-6


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("seed", range(2))
def test_cached_greedy_is_greedy_and_a_beam_of_one_too(kind, seed):
    model = random_model(seed, **MODELS[kind])
    expected = greedy_decode(model, SOURCES, MASK, 12)
    assert torch.equal(cached_greedy(model, SOURCES, MASK, 12), expected)
    best = [beams[0] for beams in cached_beam_search(model, SOURCES, MASK, 12, beam=1)]
    texts = map(until_end, expected.tolist())
    assert [list(h.ids) for h in best] == [[i for i in row if i != EOS] for row in texts]
    assert model.training  # dropout was off meanwhile, and is on again


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("beam", [1, 2, 3, 8])
def test_the_beam_is_chapter_8s_to_the_last_hypothesis(seed, beam):
    model, alpha = random_model(seed, norm_first=seed % 2 == 0), (0.0, 0.6, 1.0)[seed % 3]
    searches = (beam_search, cached_beam_search)
    expected, found = (way(model, SOURCES, MASK, 10, beam, alpha) for way in searches)
    for mine, theirs in zip(found, expected, strict=True):
        assert [(h.ids, h.length) for h in mine] == [(h.ids, h.length) for h in theirs]
        log_probs = [h.log_prob for h in theirs]
        assert [h.log_prob for h in mine] == pytest.approx(log_probs, rel=1e-10)


@pytest.mark.parametrize("exact", [False, True])
def test_a_wide_beam_is_brute_force(exact):
    model, src = random_model(3, vocab=6).eval(), torch.tensor([[4, 5, 5]])
    everything = every_hypothesis(model, src, vocab=6, max_len=3)
    for alpha in (0.0, 0.6, 1.0):
        ranked = sorted(everything, key=lambda h: -h.score(alpha))
        found = cached_beam_search(model, src, None, 3, 6**3, alpha, exact)[0]
        assert [h.ids for h in found] == [h.ids for h in ranked]


# Stopping


def test_an_exact_search_waits_for_a_better_text(monkeypatch):
    """The usual rule stops after two endings, while the likeliest text is still being written."""
    monkeypatch.setattr(searching, "CachedDecoding", PrefixDecoding)  # a phrase book has no layers
    book, src = PhraseBook(LATE), torch.tensor([[EOS]])
    hasty, patient = (
        cached_beam_search(book, src, None, 9, beam=2, alpha=0.0, exact=exact)[0]
        for exact in (False, True)
    )
    assert hasty[0].ids == () and hasty[0].log_prob == pytest.approx(math.log(0.40))
    assert book.text(patient[0].ids) == "so be it"
    assert patient[0].log_prob == pytest.approx(math.log(0.45))


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
def test_exact_never_ends_with_less_and_sometimes_with_more(alpha):
    """Over random models; and it finds what a search that never stops early finds."""
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


def all_endings(model, max_len: int, beam: int, alpha: float):
    """The same beam, but it goes on to the length limit, whatever has ended."""
    with dropout_off(model), torch.no_grad():
        search = Search(CachedDecoding(model, SOURCES, MASK), SOURCES, max_len, beam)
        for step in range(1, max_len + 1):
            search.advance(final=step == max_len)
    return [sorted(ended, key=lambda h: -h.score(alpha))[:beam] for ended in search.finished]


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
    for cores in (1, 2, 3, 8):
        batches = length_batches([[4] * n for n in lengths], 1, cores)
        assert len(batches) % cores == 0
        costs = [
            sum(lengths[i] for i in batch) + STEP_COST * lengths[batch[0]] for batch in batches
        ]
        assert max(costs) < 1.05 * min(costs)
    assert sorted(len(b) for b in length_batches([[4, EOS]] * 3, 1, 2)) == [1, 2]
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

    assert on_threads(work, []) == []
    assert on_threads(work, range(5)) == [(job, 1) for job in range(5)]
    assert torch.get_num_threads() == 2
    with pytest.raises(ZeroDivisionError):
        on_threads(lambda job: 1 // job, [1, 0, 1])
    assert torch.get_num_threads() == 2


def test_threads_dont_switch_each_others_dropout_on(two_threads, monkeypatch):
    model = random_model(4).train()
    rows = [[4 + i % 4, 5, EOS] for i in range(12)]
    monkeypatch.setattr(fast_translating, "PREFIXES", 2)
    for _ in range(5):
        found = search_rows(model, rows, cached_greedy)
        texts = [until_end(row.tolist()) for row in found]
        assert texts[:8:4] == texts[4::4]
    assert all(part.training for part in model.modules())


# The screen: 8 bits propose, a bound decides


def rough_table(outlier: float) -> torch.nn.Linear:
    """A table whose largest entry sets the unit in which all others are rounded."""
    if not exact_in_8_bits():
        pytest.fail("no exact product of 8-bit integers here: the screen would be off")
    torch.manual_seed(0)
    table = torch.nn.Linear(48, 4096, dtype=torch.float32).requires_grad_(False)
    table.weight.mul_(2)
    table.weight[5, 3] = outlier
    return table


@pytest.mark.parametrize(("outlier", "asks"), [(0.5, False), (2.0, False), (100.0, True)])
def test_the_screen_finds_what_the_whole_product_finds(outlier, asks):
    """However coarse the rounding; if little is excluded, it asks for the whole product."""
    table, asked = rough_table(outlier), []
    x = torch.randn(64, 48, dtype=torch.float32)

    def outputs(rows):
        asked.append(len(rows))
        return table(rows)

    assert torch.equal(Screen(table).largest(x, outputs), table(x).argmax(dim=1))
    assert bool(asked) == asks
    nothing = torch.zeros(2, 48, dtype=torch.float32)
    assert torch.equal(Screen(table).largest(nothing, table), table(nothing).argmax(dim=1))


def test_the_screen_excludes_what_is_two_bounds_below_the_best_and_nothing_else():
    table = rough_table(2.0)
    screen, x = Screen(table), torch.randn(64, 48, dtype=torch.float32)
    rough, unit, error = screen.roughly(x)
    assert ((rough * unit - table(x)).abs() <= error.unsqueeze(1)).all()
    stays = torch.zeros(rough.shape, dtype=torch.bool)
    stays[screen.candidates(rough, error / unit)] = True
    least = rough.amax(dim=1) - (2 * error / unit).ceil().int()
    assert torch.equal(stays, rough >= least.unsqueeze(1))
    assert 1 < stays.sum(dim=1).float().mean() < 64


def test_a_model_made_ready_is_freed_with_its_last_reference():
    """Its packed weights are large: they mustn't wait for the garbage collector."""
    ready = PreparedModel(random_model())
    gone = weakref.ref(ready)
    del ready
    assert gone() is None


def test_greedy_with_the_screen_is_greedy_in_single_precision():
    """The shipped model in float32: the screened search against the whole product at each step."""
    trained = load_model(ROOT / "models" / "multi30k-de-en", "cpu")
    ready = PreparedModel(trained.model.eval())
    assert (ready.screen is not None) == (ready.vocabulary.onednn and fast_in_8_bits())
    ready.screen = Screen(trained.model.generator.proj)  # slow on some machines, never wrong
    rows = [source_ids(german, trained.tokenizer) for german, _ in load_corpus("sample")["test"]]
    src = pad_rows(rows[:40])
    quick = cached_greedy(ready, src, padding_mask(src), 40)
    ready.screen = None
    assert torch.equal(cached_greedy(ready, src, padding_mask(src), 40), quick)
