"""Chapter 16: silence undone, likelihoods, patched runs, the lens, what weights don't tell."""

import math

import pytest
import torch
import torch.nn.functional as F
from scipy.stats import t as student
from tiny import SRC, TGT

from scripts.book.records import load_record, sha256
from scripts.book.verdict import pass_together
from scripts.ch01_attention import subsequent_mask
from scripts.ch02_multi_head_attention import MultiHeadedAttention
from scripts.ch06_training import Batch
from scripts.ch07_multi30k import encode_pairs, make_batch
from scripts.ch15_looking_inside import attention_layers
from scripts.ch16_intervening import (
    CROSS_CHANGES,
    aligners,
    cost_per_token,
    decoder_stages,
    encoder_stages,
    every_head,
    heads_changed,
    logit_lens,
    memory_from,
    noise_beside,
    preference,
    reference_losses,
    silence,
)
from scripts.core.models import STUDIED
from scripts.corpora.captions import aligned_pairs
from scripts.studies import heads as study

PAIRS = aligned_pairs()


@pytest.fixture
def padded():
    """A padded batch of ids that `tiny` knows."""
    new_ids = {old: 4 + old % 20 for old in range(4, 50)}
    return Batch(*(ids.clone().apply_(lambda i: new_ids.get(i, i)) for ids in (SRC, TGT)))


# Silence


def test_a_changed_head_says_what_the_change_makes_of_its_part_until_the_block_ends():
    layer = MultiHeadedAttention(h=4, d_model=16, dropout=0.0)
    x, mixtures = torch.randn(2, 5, 16, requires_grad=True), []
    hook = layer.project_output.register_forward_pre_hook(lambda _, x: mixtures.append(x[0]))
    whole = layer(x, x, x)
    hook.remove()
    changed = mixtures[0].clone()  # head 1 has features 4 to 7, head 3 has 12 to 15
    changed[..., 4:8] *= -2
    changed[..., 12:16] *= -2
    with heads_changed([(layer, 1), (layer, 3)], lambda said, output, features: -2 * said):
        output = layer(x, x, x)
        assert torch.autograd.grad(output.sum(), x)[0].any()
    torch.testing.assert_close(output, layer.project_output(changed))
    with pytest.raises(ZeroDivisionError), heads_changed([(layer, 0)], silence):
        raise ZeroDivisionError
    assert torch.equal(layer(x, x, x), whole)


def test_noise_is_as_long_in_the_stream_as_what_the_heads_add_together():
    layer, said = MultiHeadedAttention(h=4, d_model=16, dropout=0.0), torch.randn(2, 5, 8)
    features = torch.tensor([0, 1, 2, 3, 8, 9, 10, 11])  # those of heads 0 and 2
    noise = noise_beside(said, layer.project_output, features) - said
    columns = layer.project_output.weight[:, features]
    lengths = [(part @ columns.T).norm(dim=-1) for part in (noise, said)]
    torch.testing.assert_close(*lengths)
    assert not torch.allclose(noise, said)


def test_holms_steps():
    assert pass_together([0.01, 0.04, 0.03]) == [True, False, False]
    assert pass_together([0.04, 0.01, 0.02]) == [True, True, True]
    assert pass_together([0.02] * 3) == [False] * 3
    assert pass_together([]) == []


# Worth by likelihood


def test_losses_are_those_of_cross_entropy_whatever_the_padding(tiny, padded):
    tiny.eval()
    logits = tiny.generator(tiny(padded.src, padded.tgt, padded.src_mask, padded.tgt_mask))
    each = F.cross_entropy(logits.transpose(1, 2), padded.tgt_y, ignore_index=0, reduction="none")
    tiny.train()
    losses = reference_losses(tiny, padded)
    assert tiny.training
    torch.testing.assert_close(losses, each.sum(-1))


@pytest.fixture(scope="module")
def judge(trained):
    return study.Judge(trained, [pair.texts for pair in PAIRS[:3]])


def test_a_cost_is_a_change_of_likelihood_with_students_p(judge, trained):
    layers = attention_layers(trained.model)
    pairs = sorted((pair.texts for pair in PAIRS[:3]), key=lambda two: len(two[1]))
    batch = make_batch(encode_pairs(pairs, trained.tokenizer))
    whole, tokens = reference_losses(trained.model, batch), int((batch.tgt_y != 0).sum())
    for kind, n, h in (("encoder", 1, 0), ("cross", 2, 7)):  # with and without the encoder
        with heads_changed([(layers[kind][n], h)], silence):
            lost = reference_losses(trained.model, batch) - whole
        t = lost.mean() / (lost.std() / math.sqrt(3))
        cost, p = judge.cost([(kind, n, h)])
        assert math.isclose(cost, lost.sum() / tokens, abs_tol=1e-5)
        assert math.isclose(p, 2 * student.sf(abs(t), 2), rel_tol=1e-2)
    assert judge.cost([]) == (0.0, 1.0)


@pytest.mark.parametrize("kind", ["encoder", "cross"])
def test_a_head_says_its_mean_over_all_sentences_without_padding(judge, trained, kind):
    """However the sentences lie in batches: here each is a batch, and so without padding."""
    output = attention_layers(trained.model)[kind][1].project_output
    inputs = []
    hook = output.register_forward_pre_hook(lambda _, x: inputs.append(x[0].flatten(0, 1)))
    for pair in PAIRS[:3]:
        reference_losses(trained.model, make_batch(encode_pairs([pair.texts], trained.tokenizer)))
    hook.remove()
    d_k = output.in_features // 8
    mean = torch.cat(inputs).mean(0)[2 * d_k : 3 * d_k]
    features = torch.arange(2 * d_k, 3 * d_k)
    said = judge.mean_instead(torch.zeros(2, 5, d_k), output, features)
    torch.testing.assert_close(said, mean.expand(2, 5, d_k))


def test_the_study_measures_each_head_and_each_group(judge, monkeypatch):
    assert len(set(every_head(judge.model))) == 72
    some = every_head(judge.model)[-9:]  # a head of one layer, and all of the next
    monkeypatch.setattr(study, "every_head", lambda model: some)
    rows = study.worth_of_each(judge)
    assert [(r["kind"], r["layer"] - 1, r["head"] - 1) for r in rows] == some
    assert (rows[5]["silent"], rows[5]["silent p"]) == judge.cost([some[5]])
    assert rows[5]["mean"] == judge.cost([some[5]], judge.mean_instead)[0]
    assert rows[5]["noise"] not in (rows[5]["silent"], rows[5]["mean"], 0)
    (group,) = study.worth_of_groups(judge, {"layer": some[1:]}, rows)
    assert group["silent, together"] == judge.cost(some[1:])[0]
    total = sum(row["silent"] for row in rows[1:])
    assert math.isclose(group["silent, one by one"], total, abs_tol=1e-5)


def test_groups_of_aligners_and_what_they_cost():
    rates = torch.tensor([[0.8, 0.1, 0.7, 0.2, 0.6, 0.3, 0.5, 0.4]])
    groups = aligners(rates)
    assert [head for _, _, head in groups["best"]] == [1, 3, 5, 7]
    assert [head for _, _, head in groups["worst"]] == [6, 4, 2, 0]
    cost, error = cost_per_token(torch.tensor([2.0, -2.0]), 10)
    assert cost == 0 and math.isclose(error, 0.4, rel_tol=1e-6)  # √8 · √2 / 10


def test_the_record_of_aligners_is_of_the_shipped_model_and_says_what_the_chapter_says():
    record = load_record("aligners-multi30k")
    assert record["weights_sha256"] == sha256(STUDIED / "model.safetensors")
    assert list(record["costs"]) == list(CROSS_CHANGES)
    noise, halved, best, worst, silent = record["costs"].values()
    assert max(noise, halved) < min(best, worst) < max(best, worst) < halved + 0.1 < silent / 10
    difference, error = record["best less worst"]
    assert math.isclose(difference, best - worst, abs_tol=2e-5) and difference < -2 * error


# Patching, the lens, and what weights do not tell


def test_a_run_patched_whole_is_the_other_run(tiny):
    tiny.eval()
    src, tgt = torch.randint(4, 30, (1, 6)), torch.randint(4, 30, (1, 3))
    x = tiny.decode(tiny.encode(src), None, tgt, subsequent_mask(3))
    log_p = tiny.generator(x)[0, -1].log_softmax(-1)
    for done, stage in enumerate(encoder_stages(tiny, src)):
        memory = memory_from(tiny, stage, done)
        torch.testing.assert_close(memory, tiny.encode(src))
        lead = preference(tiny, memory, tgt, 5, 9)
        assert math.isclose(lead, (log_p[5] - log_p[9]).item(), abs_tol=1e-9)


def test_the_lens_ends_in_the_model_itself(tiny):
    src, tgt = torch.randint(4, 30, (1, 7)), torch.randint(4, 30, (1, 5))
    tiny.eval()
    x = tiny(src, tgt, None, subsequent_mask(5))
    log_p = logit_lens(tiny, src, tgt)
    assert log_p.shape == (7, 5, 30)  # the embedding, then two layers of three sublayers
    torch.testing.assert_close(log_p[-1], tiny.generator(x).log_softmax(-1)[0])
    assert torch.equal(decoder_stages(tiny, src, tgt)[0], tiny.tgt_embed(tgt)[0])
