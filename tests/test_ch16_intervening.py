"""Chapter 16: silence undone, likelihoods, patched runs, the lens, what weights don't tell."""

import math

import pytest
import torch
import torch.nn.functional as F
from scipy.stats import t as student
from tiny import SRC, TGT

from scripts.book.verdict import pass_together
from scripts.ch01_attention import subsequent_mask
from scripts.ch02_multi_head_attention import MultiHeadedAttention
from scripts.ch06_training import Batch
from scripts.ch07_multi30k import encode_pairs, make_batch
from scripts.ch15_looking_inside import attention_layers
from scripts.ch16_intervening import (
    decoder_stages,
    encoder_stages,
    erasure_effects,
    every_head,
    heads_silenced,
    logit_lens,
    memory_from,
    preference,
    reference_losses,
    said_by_heads,
)
from scripts.corpora.captions import aligned_pairs
from scripts.studies import heads as study

PAIRS = aligned_pairs()


@pytest.fixture
def padded():
    """A padded batch of ids that `tiny` knows."""
    new_ids = {old: 4 + old % 20 for old in range(4, 50)}
    return Batch(*(ids.clone().apply_(lambda i: new_ids.get(i, i)) for ids in (SRC, TGT)))


# Silence


@pytest.mark.parametrize("constants", [[], [torch.randn(4), torch.randn(4)]], ids=["0", "constant"])
def test_silence_is_the_heads_part_and_is_undone_to_the_bit(constants):
    layer = MultiHeadedAttention(h=4, d_model=16, dropout=0.0)
    x, mixtures = torch.randn(2, 5, 16, requires_grad=True), []
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    hook = layer.project_output.register_forward_pre_hook(lambda _, x: mixtures.append(x[0]))
    layer(x, x, x)
    hook.remove()
    replaced = mixtures[0].clone()  # head 1 has features 4 to 7, head 3 has 12 to 15
    replaced[..., 4:8], replaced[..., 12:16] = constants or (0, 0)
    with heads_silenced([(layer, 1), (layer, 3)], constants):
        silenced = layer(x, x, x)
        torch.testing.assert_close(silenced, layer.project_output(mixtures[0]))
        assert torch.autograd.grad(silenced.sum(), x)[0].any()
    torch.testing.assert_close(silenced, layer.project_output(replaced))
    with pytest.raises(ZeroDivisionError), heads_silenced([(layer, 0), (layer, 0)], constants):
        raise ZeroDivisionError
    with pytest.raises(IndexError, match="index 4"), heads_silenced([(layer, 2), (layer, 4)]):
        pass
    assert all(torch.equal(t, before[name]) for name, t in layer.state_dict().items())


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


def test_what_heads_say_is_what_the_output_map_is_given(tiny, padded):
    outputs = said_by_heads(tiny, padded)
    sources, targets = int((padded.src != 0).sum()), int((padded.tgt != 0).sum())
    assert {kind: tuple(x.shape) for kind, x in outputs.items()} == {
        "encoder": (2, sources, 4, 4),
        "decoder": (2, targets, 4, 4),
        "cross": (2, targets, 4, 4),
    }
    alone = Batch(padded.src[1:, :4], torch.cat((padded.tgt[1:, :2], padded.tgt_y[1:, 1:2]), 1))
    again = said_by_heads(tiny, alone)  # without its padding, the shorter sentence says the same
    torch.testing.assert_close(outputs["encoder"][:, -4:], again["encoder"])
    torch.testing.assert_close(outputs["cross"][:, 4:6], again["cross"])
    assert not any(m._forward_pre_hooks for m in tiny.modules())


@pytest.fixture(scope="module")
def judge(trained):
    return study.Judge(trained, [pair.texts for pair in PAIRS[:3]])


def test_means_are_over_all_positions_of_all_batches(judge, monkeypatch):
    monkeypatch.setattr(judge, "batches", [*judge.batches, Batch(SRC, TGT)])
    parts = [said_by_heads(judge.model, batch) for batch in judge.batches]
    for kind, mean in judge.means().items():
        torch.testing.assert_close(mean, torch.cat([p[kind] for p in parts], 1).mean(1))


def test_a_cost_is_a_change_of_likelihood_with_students_p(judge, trained):
    layers = attention_layers(trained.model)
    pairs = sorted((pair.texts for pair in PAIRS[:3]), key=lambda two: len(two[1]))
    batch = make_batch(encode_pairs(pairs, trained.tokenizer))
    whole, tokens = reference_losses(trained.model, batch), int((batch.tgt_y != 0).sum())
    for kind, n, h in (("encoder", 1, 0), ("cross", 2, 7)):
        mean = said_by_heads(trained.model, batch)[kind][n, :, h].mean(0)
        for instead in ([], [mean]):
            with heads_silenced([(layers[kind][n], h)], instead):
                change = reference_losses(trained.model, batch) - whole
            t = change.mean() / (change.std() / math.sqrt(3))
            cost, p = judge.cost([(kind, n, h)], instead)
            assert math.isclose(cost, change.sum() / tokens, abs_tol=1e-5)
            assert math.isclose(p, 2 * student.sf(abs(t), 2), rel_tol=1e-2)
    assert judge.cost([]) == (0.0, 1.0)


def test_the_study_measures_each_head_each_layer_and_each_order(judge, monkeypatch):
    assert len(set(every_head(judge.model))) == 72
    some = every_head(judge.model)[-9:]  # a head of one layer, and all of the next
    monkeypatch.setattr(study, "every_head", lambda model: some)
    monkeypatch.setattr(study, "PRUNING_STEP", 4)
    rows, layers = study.worth_of_each(judge), study.worth_of_layers(judge)
    assert [(r["kind"], r["layer"] - 1, r["head"] - 1) for r in rows] == some
    mean = judge.means()["cross"][some[5][1], some[5][2]]
    assert (rows[5]["silent"], rows[5]["silent p"]) == judge.cost([some[5]])
    assert (rows[5]["mean"], rows[5]["mean p"]) == judge.cost([some[5]], [mean])
    assert layers[0] == {"kind": "cross", "layer": 2, "silent": rows[0]["silent"]}
    assert layers[1]["silent"] == judge.cost(some[1:])[0]
    points = study.pruning_curve(judge, {"forwards": some, "backwards": some[::-1]})
    assert [p["silent"] for p in points] == [0, 4, 8] * 2 and points[0]["nats"] == 0
    assert points[5]["nats"] == layers[1]["silent"] != points[2]["nats"]


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
    assert log_p.shape == (3, 5, 30)
    torch.testing.assert_close(log_p[-1], tiny.generator(x).log_softmax(-1)[0])
    assert torch.equal(decoder_stages(tiny, src, tgt)[0], tiny.tgt_embed(tgt)[0])


def test_erasure_is_the_loss_of_log_p(trained, park):
    effects = erasure_effects(trained.model, park)
    assert effects.shape == (park.tgt.size(1), park.src.size(1))
    hidden, model = 8, trained.model  # Bank
    mask = torch.ones(2, 1, park.src.size(1), dtype=torch.bool)
    mask[1, :, hidden] = False
    both = (ids.expand(2, -1) for ids in (park.src, park.tgt))
    x = model(*both, mask, subsequent_mask(park.tgt.size(1)))
    log_p = model.generator(x).log_softmax(-1)[:, range(park.tgt.size(1)), park.wanted[0]]
    torch.testing.assert_close(effects[:, hidden], log_p[0] - log_p[1])
