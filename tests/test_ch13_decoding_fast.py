"""Chapter 13: its definitions against plain ones, and what the prose says of the records."""

import math

import pytest
import torch

from scripts.book.figures.speed import speed_frame
from scripts.book.records import load_record
from scripts.ch01_attention import padding_mask
from scripts.ch04_encoder_decoder import make_model
from scripts.ch06_training import BOS, EOS
from scripts.ch07_multi30k import pad_rows
from scripts.ch08_decoding import CopiedCache
from scripts.ch13_decoding_fast import FamilyTree, best_logits, close_gaps, log_sum_exp
from scripts.exercises.ch13 import trace_back


def test_rows_that_go_on_stay_where_they_can():
    """For all patterns of seven rows: each unfinished row once, and none moves needlessly."""
    for number in range(1, 2**7):
        going = torch.tensor([bool(number >> i & 1) for i in range(7)])
        rows = close_gaps(going)
        assert sorted(rows.tolist()) == going.nonzero().squeeze(1).tolist()
        stays = [i for i in range(len(rows)) if going[i]]
        assert rows[stays].tolist() == stays


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
    T, B, K = 6, 3, 4
    tokens, origins = torch.randint(9, (T, B, K)), torch.randint(K, (T, B, K))
    texts = tokens.new_empty(B, K, 0)
    for new, origin in zip(tokens, origins, strict=True):
        old = texts.gather(1, origin.unsqueeze(-1).expand(-1, -1, texts.size(-1)))
        texts = torch.cat((old, new.unsqueeze(-1)), dim=-1)  # (B, K, t)
    assert torch.equal(trace_back(tokens, origins), texts)


def test_the_record_fits_the_chapters_words():
    record = load_record("decoding-speed")
    race = speed_frame(record).set_index(["program", "beam"])
    for beam in (1, 4):
        same = race.xs(beam, level="beam")["same_as_ours"]
        assert same["ours, float32"] == same["CTranslate2, float32"] == record["sentences"] == 1000
        assert 930 < same["ours, int8"] < 990  # 4 to 6 texts in a hundred
        spent = record["accounts"]["ours, int8"][str(beam)]
        assert 0.2 < spent["8-bit products"] / sum(spent.values()) < 0.33  # about a quarter
    scores = {(s["split"], s["beam"], s["program"]): s["bleu"] for s in record["scores"]}
    pairs = [(scores[s, k, "ours, int8"], bleu) for (s, k, p), bleu in scores.items() if "32" in p]
    changes = [eight - whole for eight, whole in pairs]
    assert min(changes) < 0 < max(changes) and max(map(abs, changes)) < 0.2
