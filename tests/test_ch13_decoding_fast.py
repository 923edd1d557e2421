"""Chapter 13: rows close ranks, ties are whole, texts are chapter 8's and are traced back."""

import torch

from scripts import ROOT
from scripts.ch07_multi30k import source_ids
from scripts.ch08_decoding import greedy_choice, texts_by_cache
from scripts.ch13_decoding_fast import PACK_AT, best_logits, close_gaps, written
from scripts.core.models import load_model
from scripts.corpora.load import load_corpus
from scripts.exercises.ch13 import trace_back


def test_rows_that_go_on_stay_where_they_can():
    """For all patterns of seven rows: each unfinished row once, and none moves needlessly."""
    for number in range(1, 2**7):
        going = torch.tensor([bool(number >> i & 1) for i in range(7)])
        rows = close_gaps(going)
        assert sorted(rows.tolist()) == going.nonzero().squeeze(1).tolist()
        stays = [i for i in range(len(rows)) if going[i]]
        assert rows[stays].tolist() == stays


def test_those_who_leave_leave_chapter_8s_texts():
    trained = load_model(ROOT / "models" / "sample-de-en")
    sentences = [german for german, _ in load_corpus("sample")["test"][:24]]
    sources = [source_ids(german, trained.tokenizer) for german in sentences]
    texts, _ = written(trained, sources, 24, PACK_AT)
    plain = texts_by_cache(trained, sentences, greedy_choice)
    assert [trained.tokenizer.decode(text) for text in texts] == plain


def test_equal_logits_have_places_of_their_own():
    logits = torch.randint(9, (50, 1024))
    top, place = best_logits(logits, 8)
    assert top.equal(logits.topk(8).values) and logits.gather(1, place).equal(top)
    assert all(len(set(row)) == 8 for row in place.tolist())


def test_a_trace_is_what_a_beam_has_that_copies_its_ids():
    tokens, origins = torch.randint(9, (6, 3, 4)), torch.randint(4, (6, 3, 4))  # (T, B, K)
    texts = tokens.new_empty(3, 4, 0)
    for new, origin in zip(tokens, origins, strict=True):
        texts = texts.gather(1, origin.unsqueeze(-1).expand(-1, -1, texts.size(-1)))
        texts = torch.cat((texts, new.unsqueeze(-1)), dim=-1)  # (B, K, t)
    assert torch.equal(trace_back(tokens, origins), texts)
