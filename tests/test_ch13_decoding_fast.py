"""Chapter 13: its definitions against plain ones."""

import math

import pytest
import torch

from scripts.ch13_decoding_fast import best_logits, close_gaps, log_sum_exp
from scripts.exercises.ch13 import trace_back


def test_rows_that_go_on_stay_where_they_can():
    """For all patterns of seven rows: each unfinished row once, and none moves needlessly."""
    for number in range(1, 2**7):
        going = torch.tensor([bool(number >> i & 1) for i in range(7)])
        rows = close_gaps(going)
        assert sorted(rows.tolist()) == going.nonzero().squeeze(1).tolist()
        stays = [i for i in range(len(rows)) if going[i]]
        assert rows[stays].tolist() == stays


@pytest.mark.parametrize("k", [1, 2, 7, 8, 10])
def test_the_best_logits_are_topks(k):
    generator = torch.Generator().manual_seed(k)
    for shape in ((20, 640), (20, 1000), (3, 64 * k), (3, 64 * k - 64 or 5)):
        logits = torch.randn(shape, generator=generator)
        logits[0] = -math.inf
        logits[0, :k] = torch.arange(k).float()  # all in one block
        assert all(map(torch.equal, best_logits(logits, k), logits.topk(min(k, shape[1]))))


def test_a_log_sum_exp_of_large_logits_is_finite():
    logits = torch.tensor([[1000.0, 999.0], [-1000.0, -1001.0]])
    total = log_sum_exp(logits, logits.amax(1, keepdim=True))
    torch.testing.assert_close(total, logits.logsumexp(1, keepdim=True))


def test_a_trace_is_what_a_beam_has_that_copies_its_ids():
    tokens, origins = torch.randint(9, (6, 3, 4)), torch.randint(4, (6, 3, 4))  # (T, B, K)
    texts = tokens.new_empty(3, 4, 0)
    for new, origin in zip(tokens, origins, strict=True):
        texts = texts.gather(1, origin.unsqueeze(-1).expand(-1, -1, texts.size(-1)))
        texts = torch.cat((texts, new.unsqueeze(-1)), dim=-1)  # (B, K, t)
    assert torch.equal(trace_back(tokens, origins), texts)
