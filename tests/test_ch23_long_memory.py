"""Chapter 23: latents, windows, states, recall, tiles: each against a reference."""

import math
from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from tiny import shaken
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from scripts.book.exercises import with_gradients
from scripts.book.instruments import saved_bytes
from scripts.book.records import load_record
from scripts.ch01_attention import attention, padding_mask, subsequent_mask
from scripts.ch03_embeddings_and_positions import equivariance_gap, shift_matrix
from scripts.ch23_long_memory import (
    ONCE,
    TWICE,
    LatentAttention,
    Recaller,
    asked_twice,
    in_chunks,
    learn_to_recall,
    linear_attention,
    masked_linear_attention,
    near_by,
    pair_counts,
    plain,
    recall_scores,
    recall_texts,
    tiled_attention,
    write_and_read,
)
from scripts.studies import recall
from scripts.studies.block import LinearAttention, WindowedAttention
from scripts.studies.runner import SEEDS, SWEEP, Plan, these

close = torch.testing.assert_close
SRC = torch.tensor([[5, 6, 7, 8, 9, 3], [5, 6, 7, 3, 0, 0]])
LAYERS = {
    "latent": lambda: LatentAttention(4, 32, 0.0, latent=12, rotary=4),
    "window": lambda: WindowedAttention(4, 32, 0.0, window=3),
    "linear": lambda: LinearAttention(4, 32, 0.0),
}

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.parametrize("name", LAYERS)
def test_padding_changes_nothing(name):
    layer, x, causal = shaken(LAYERS[name]()), torch.randn(1, 6, 32), subsequent_mask(6)
    mask, real = padding_mask(torch.tensor([[5, 6, 7, 3, 0, 0]])), x[:, :4]
    for sees, seen in ((mask, None), (mask & causal, subsequent_mask(4))):
        close(layer(x, x, x, sees)[:, :4], layer(real, real, real, seen))


# Latents


def latent_reference(layer: LatentAttention, x: Tensor) -> Tensor:
    """Causal latent attention over x (T, D), score by score: the slow reference, (T, D)."""
    T, d_k, d_R = len(x), layer.d_k, layer.rotary
    c = x @ layer.compress.weight.T  # (T, d_c)
    c = c / (c.square().mean(-1, keepdim=True) + layer.norm.eps).sqrt() * layer.norm.weight
    rows, pairs = [], torch.arange(d_R).view(2, -1).T.flatten()  # i beside i + d_R/2
    for t in range(T):
        answer = []
        for i in range(layer.h):
            features = slice(i * d_k, (i + 1) * d_k)
            q = layer.project_query.weight[i * (d_k + d_R) : (i + 1) * (d_k + d_R)] @ x[t]
            scores = []
            for s in range(t + 1):
                key = layer.expand_key.weight[features] @ c[s]
                place = layer.place_key.weight @ x[s]
                turned = (
                    q[d_k:][pairs] @ shift_matrix(t - s, d_R) @ place[pairs]
                )  # only the distance counts
                scores.append((q[:d_k] @ key + turned) / math.sqrt(d_k + d_R))
            weights = torch.stack(scores).softmax(0)  # (t + 1,)
            answer.append(weights @ (c[: t + 1] @ layer.expand_value.weight[features].T))
        rows.append(layer.project_output.weight @ torch.cat(answer))
    return torch.stack(rows)


def test_latent_attention_by_loop():
    layer, x = shaken(LAYERS["latent"]()), torch.randn(2, 6, 32)
    by_loop = torch.stack([latent_reference(layer, row) for row in x])
    close(layer(x, x, x, subsequent_mask(6)), by_loop)


@pytest.mark.parametrize("rotary", [0, 4])
def test_absorbed_equals_expanded_and_only_a_rotary_key_knows_order(rotary):
    layer, x = shaken(LatentAttention(4, 32, 0.0, latent=12, rotary=rotary)), torch.randn(2, 6, 32)
    q, turned = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 5, rotary)
    cache, mask = layer.remember(x), padding_mask(SRC).unsqueeze(1)
    close(layer.absorbed(q, turned, *cache, mask), layer.expanded(q, turned, *cache, mask))
    assert sum(part.numel() for part in cache) == 2 * 6 * (12 + rotary)
    gap = equivariance_gap(lambda x: layer(x, x, x), x[0, :5])
    assert gap > 1e-3 if rotary else gap < 1e-12


def test_both_ways_of_a_latent_layer_have_dropout():
    layer, x = LatentAttention(4, 32, 1.0, latent=12, rotary=4), torch.randn(2, 6, 32)
    for query in (x, x[:, :1]):
        assert not layer.train()(query, x, x).any()  # all weights dropped: nothing is mixed
        assert layer.eval()(query, x, x).any()


# Windows


def test_a_window_sees_its_neighbours():
    neighbours = [[abs(5 + i - j) < 2 for j in range(8)] for i in range(3)]
    assert near_by(3, 8, 2).tolist() == neighbours
    layer, x = shaken(WindowedAttention(4, 32, 0.0, window=2)), torch.randn(1, 8, 32)
    layer(x, x, x)
    assert ((layer.attn[0, 0] > 0) == near_by(8, 8, 2)).all()


# States


def test_linear_attention_by_hand():
    q, k, v = torch.randn(3, 9, 4)
    everything = torch.ones(9, 9, dtype=torch.bool)
    for mask in (everything, everything.tril()):
        by_hand = []
        for a, seen in zip(q, mask, strict=True):
            likeness = torch.stack([(F.elu(a) + 1) @ (F.elu(b) + 1) for b in k[seen]])
            by_hand.append(likeness / likeness.sum() @ v[seen])
        close(masked_linear_attention(q, k, v, mask), torch.stack(by_hand))
    close(linear_attention(q, k, v), torch.stack(by_hand))


def test_linear_attention_with_nothing_to_see_is_silent():
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 1, 1, 3, 4))
    out = masked_linear_attention(q, k, v, torch.zeros(1, 1, 3, 3, dtype=torch.bool))
    assert (out == 0).all()
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), (q, k, v)))


def written_at_once(q, k, v, beta, correct):
    """Either memory without a recurrence; the delta rule by an inverse of all T × T overlaps."""
    system = torch.eye(k.size(-2)) + correct * (beta.unsqueeze(-1) * (k @ k.mT)).tril(-1)
    return (q @ k.mT).tril() @ (system.inverse() @ (beta.unsqueeze(-1) * v))


@pytest.mark.parametrize("correct", [False, True])
@pytest.mark.parametrize("size", [None, 1, 3, 7, 64])
def test_both_memories_and_their_gradients_at_once(correct, size):
    q, v, beta = torch.randn(2, 3, 7, 4), torch.randn(2, 3, 7, 6), torch.rand(2, 3, 7)
    k = F.normalize(torch.randn(2, 3, 7, 4), dim=-1)  # values may be wider than keys
    form, rest = (in_chunks, (correct, size)) if size else (write_and_read, (correct,))
    results = with_gradients(form, (q, k, v, beta), *rest)
    close(results, with_gradients(written_at_once, (q, k, v, beta), correct))


# Recall


def answers_by_search(text, pairs):
    """What each query's key was last followed by."""
    told = {text[i]: text[i + 1] for i in range(0, 2 * pairs, 2)}
    return [told[key] for key in text[2 * pairs :]]


@pytest.mark.parametrize("text", [ONCE, TWICE])
def test_a_text_tells_what_it_asks(text):
    ids, answers = recall_texts(5, 64, 12, text)
    assert ids.shape == (5, 64) and answers.shape == (5, 40)
    for row, right in zip(ids.tolist(), answers.tolist(), strict=True):
        keys = row[:24:2]
        assert max(keys) < 256 <= min(row[1:24:2]) and max(row) < 320
        assert len({*keys}) == (12 if text == ONCE else 6)
        assert [value - 256 for value in answers_by_search(row, 12)] == right


def test_a_recaller_sees_no_later_token_and_a_window_no_distant_one():
    ids = torch.randint(320, (1, 24))
    for kind in ("softmax", "latent", "window", "linear", "adding", "delta rule"):
        torch.manual_seed(0)
        model, changed = Recaller(kind, 4), ids.clone()
        changed[0, 12] = (ids[0, 12] + 1) % 320
        moved = (model(changed) - model(ids)).abs().amax(-1)[0] > 1e-12
        assert not moved[:12].any() and moved[12]
        assert moved[21:].any() == (kind != "window")  # 8 tokens, and each sees the one before it


def test_one_memory_learns_to_recall_and_a_repeat_is_the_same():
    first, again = (
        recall_scores(learn_to_recall("softmax", 0.02, 1, length=64), 64) for _ in range(2)
    )
    assert first == again and first[16][0] > 0.9 and pair_counts(64) == [4, 8, 16]


def test_old_and_new_values_are_told_apart():
    class Knowing(Recaller):
        """Answers with each key's value number `which`, found by search."""

        def forward(self, ids):
            logits = torch.zeros(*ids.shape, 64)
            for b, row in enumerate(ids.tolist()):
                told = {}
                for i in range(0, 64, 2):
                    told.setdefault(row[i], []).append(row[i + 1] - 256)
                for t in range(64, 128):
                    logits[b, t, told[row[t]][self.which]] = 1.0
            return logits

    model = Knowing("delta rule", 4)
    for model.which in (0, 1):
        _, new, old = asked_twice(model)
        assert (old, new)[model.which] == 1.0 and (new, old)[model.which] < 0.05


@pytest.mark.audit
@pytest.mark.parametrize("seed", range(1, 9))
def test_the_rate_decides_whether_an_old_value_answers(seed):
    once, twice = (learn_to_recall("delta rule", 0.02, seed, text) for text in (ONCE, TWICE))
    raised, added = deepcopy(once), learn_to_recall("adding", 0.01, seed)
    by_adding = recall_scores(added)[32][0]
    raised.scale, added.kind, added.scale = 3.5, "delta rule", 0.5
    models = (once, twice, raised, added)
    found = [(*asked_twice(model), recall_scores(model)[32][0]) for model in models]
    beta, new, old, kept = zip(*found, strict=True)
    assert 0.1 < beta[0] < 0.3 and 0.45 < beta[1] < 0.75
    assert old[0] > 0.11 and max(old[1:]) < 0.08
    assert min(new[2:]) > new[1]
    assert kept[0] - kept[2] > 0.05 > by_adding - kept[3]
    assert seed == 1 or kept[0] < by_adding + 0.05


RUNS = load_record("recall-pairs")["runs"]


def test_the_record_of_recall_holds_its_plan():
    plan = Plan(RUNS)
    recall.plan_runs(plan)
    assert all(len(these(RUNS, **task)) == 1 for task in plan)
    assert len({run["commit"] for run in RUNS if run["kind"] != recall.WIDE}) == 1
    counted = [run for run in RUNS if run["seed"] != SWEEP]
    half = [run for run in counted if run["kind"] == recall.WIDE and run["lr"] == 0.02]
    assert len(counted) == len(SEEDS) * (len(recall.PLACES) + len(recall.STATES) + 1)
    for run in [run for run in counted if run not in half]:
        places = {k: v for k, v in run.items() if k in ("kind", "text", "d")}
        losses = {r["lr"]: r["loss"] or math.inf for r in these(RUNS, **places, seed=SWEEP)}
        assert min(losses, key=losses.get) == run["lr"]
        assert losses[run["lr"] / 2] >= losses[run["lr"]] <= losses[2 * run["lr"]]


def test_the_record_says_what_the_chapter_says():
    def shares(kind, pairs, d=32, steps=200, text=ONCE, **rate):
        runs = these(RUNS, kind=kind, text=text, d=d, steps=steps, **rate)
        return {run["seed"]: run["right"][str(pairs)] for run in runs if run["seed"] != SWEEP}

    def mean(*place, **rest):
        return sum(shares(*place, **rest).values()) / len(SEEDS)

    narrow, rates = mean("delta rule", 64, d=16), (0.02, 0.04)
    wide = [mean(recall.WIDE, 64, d=16, lr=rate) for rate in rates]
    assert [round(100 * (own - narrow)) for own in wide] == [7, -5]
    assert round(100 * (mean("delta rule", 64) - narrow)) == 48
    longer = [mean("delta rule", n, steps=600) - mean("delta rule", n) for n in (64, 128)]
    larger = mean("delta rule", 64, d=64) - mean("delta rule", 64)
    assert [round(100 * gain) for gain in (*longer, larger)] == [9, 10, 19]
    assert mean("delta rule", 32, steps=600) > mean("delta rule", 32, d=64) - 0.01
    for n, gaps in ((64, [13, 3, 1]), (128, [11, 4, 4])):
        adding, delta = shares("adding", n), shares("delta rule", n)
        assert [round(100 * (adding[seed] - delta[seed])) for seed in SEEDS] == gaps
    assert [round(100 * mean(kind, 64)) for kind in ("window", *recall.STATES)] == [6, 67, 84, 79]
    for n in (4, 8, 16, 32, 64, 128):
        assert max(mean(kind, n, text=TWICE) for kind in ("softmax", "adding")) < 0.6
        assert mean("latent", n) > 0.99
        seen = near_by(512, 512, window=64).tril()[2 * n :, 1 : 2 * n : 2].double().mean()
        assert abs(mean("window", n) - seen - (1 - seen) / 64) < 0.01  # and else it guesses


# Tiles


@pytest.mark.parametrize("size", [2, 100])
@pytest.mark.parametrize("causal, S", [(False, 9), (True, 5)])
def test_tiles_equal_the_textbook(causal, S, size):
    q, (k, v) = 3 * torch.randn(2, 2, 5, 4), torch.randn(2, 2, 2, S, 4)
    mask = subsequent_mask(5) if causal else None
    tiled = with_gradients(lambda *rows: tiled_attention(*rows, size, causal)[0], (q, k, v))
    close(tiled, with_gradients(lambda *rows: attention(*rows, mask)[0], (q, k, v)))


def test_scores_that_rise_from_tile_to_tile_neither_mislead_nor_overflow():
    k = torch.arange(12.0).unsqueeze(-1)
    for keys in (k, k.flip(0), 400 * k):
        q, v = torch.ones(1, 1), torch.randn(12, 1)
        close(tiled_attention(q, keys, v, 4)[0], attention(q, keys, v)[0])


def test_the_future_is_never_computed():
    q, k, v = torch.randn(3, 8, 4)
    k[6:], v[6:] = math.nan, math.nan
    assert tiled_attention(q, k, v, 3, causal=True)[0][:6].isfinite().all()


class LargestTensor(TorchDispatchMode):
    """Notes the size, in numbers, of the largest tensor of floats made inside the block."""

    size = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        self.size = max([self.size, *(x.numel() for x in tensors if x.is_floating_point())])
        return result


def test_tiles_make_nothing_large():
    heads = torch.randn(3, 2, 256, 16)
    with LargestTensor() as largest:
        tiled_attention(*heads, 32, causal=True)
    assert largest.size == 2 * 256 * 16  # and not 2 · 256 · 256
    with LargestTensor() as largest:
        attention(*heads)
    assert largest.size == 2 * 256 * 256


def test_a_plain_softmax_keeps_one_matrix_and_chapter_1_two():
    heads = [torch.empty(8, 128, 64, device="meta", requires_grad=True) for _ in range(3)]
    square, mask, given = 8 * 8 * 128 * 128, 128 * 128, 3 * 8 * 8 * 128 * 64  # bytes
    assert saved_bytes(plain, *heads) == square + mask + given
    guarded = saved_bytes(lambda *rows: attention(*rows, subsequent_mask(128, "meta"))[0], *heads)
    assert guarded == 2 * square + mask + given
