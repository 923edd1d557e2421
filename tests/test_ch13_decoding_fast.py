"""Chapter 13: rows close ranks, ties are whole, texts are traced back."""

import torch

from scripts.ch13_decoding_fast import best_logits, close_gaps
from scripts.exercises.ch13 import trace_back


def test_rows_that_go_on_stay_where_they_can():
    """For all patterns of seven rows: each unfinished row once, and none moves needlessly."""
    for number in range(1, 2**7):
        going = torch.tensor([bool(number >> i & 1) for i in range(7)])
        rows = close_gaps(going)
        assert sorted(rows.tolist()) == going.nonzero().squeeze(1).tolist()
        stays = [i for i in range(len(rows)) if going[i]]
        assert rows[stays].tolist() == stays


def test_equal_logits_have_places_of_their_own():
    logits = torch.randint(9, (50, 4096))
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
