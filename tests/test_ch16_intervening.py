"""Chapter 16: silence undone, likelihoods, patched runs, the lens, what weights don't tell."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from saying import ran
from scipy.stats import spearmanr
from scipy.stats import t as student
from tiny import SRC, TGT

from scripts.book.verdict import pass_together
from scripts.ch01_attention import subsequent_mask
from scripts.ch02_multi_head_attention import MultiHeadedAttention
from scripts.ch06_training import EOS, Batch
from scripts.ch07_multi30k import encode_pairs, make_batch
from scripts.ch15_looking_inside import attention_layers, attention_maps
from scripts.ch16_intervening import (
    decoder_stages,
    encoder_stages,
    erasure_effects,
    every_head,
    heads_silenced,
    heard_values,
    logit_lens,
    memory_from,
    preference,
    reference_losses,
    said_by_heads,
)
from scripts.corpora.captions import aligned_pairs
from scripts.studies.heads import Judge, pruning_curve, worth_of_each, worth_of_layers

PAIRS = aligned_pairs()


def padded():
    """A padded batch of ids that `tiny` knows."""
    ids = {old: 4 + old % 20 for old in range(4, 50)}
    src, tgt = (
        torch.tensor([[ids.get(i, i) for i in row] for row in side.tolist()]) for side in (SRC, TGT)
    )
    return Batch(src, tgt)


# Silence


def test_silence_is_the_heads_part_and_is_undone_to_the_bit():
    torch.manual_seed(0)
    layer = MultiHeadedAttention(h=4, d_model=16, dropout=0.0)
    x = torch.randn(2, 5, 16)
    kept = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    whole = layer(x, x, x)
    without = layer.project_output.weight.detach().clone()
    without[:, 4:8] = 0
    given = {}
    hook = layer.project_output.register_forward_pre_hook(lambda _, args: given.update(x=args[0]))
    layer(x, x, x)
    hook.remove()
    wanted = F.linear(given["x"], without, layer.project_output.bias)
    with heads_silenced([(layer, 1)]):
        torch.testing.assert_close(layer(x, x, x), wanted)
    assert all(torch.equal(t, kept[name]) for name, t in layer.state_dict().items())
    assert torch.equal(layer(x, x, x), whole)
    with pytest.raises(ZeroDivisionError), heads_silenced([(layer, 0), (layer, 0), (layer, 3)]):
        raise ZeroDivisionError
    with pytest.raises(IndexError, match="index 4"), heads_silenced([(layer, 2), (layer, 4)]):
        pass
    assert all(torch.equal(t, kept[name]) for name, t in layer.state_dict().items())


def test_a_head_replaced_says_its_constant_and_is_undone_to_the_bit():
    torch.manual_seed(0)
    layer = MultiHeadedAttention(h=4, d_model=16, dropout=0.0)
    x, constants = torch.randn(2, 5, 16), [torch.randn(4), torch.randn(4)]
    kept = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    given = {}
    hook = layer.project_output.register_forward_pre_hook(lambda _, args: given.update(x=args[0]))
    layer(x, x, x)
    hook.remove()
    replaced = given["x"].clone()
    replaced[..., 4:8], replaced[..., 12:16] = constants
    wanted = layer.project_output(replaced)
    with heads_silenced([(layer, 1), (layer, 3)], constants):
        torch.testing.assert_close(layer(x, x, x), wanted)
    with pytest.raises(ZeroDivisionError), heads_silenced([(layer, 0), (layer, 0)], constants):
        raise ZeroDivisionError
    assert all(torch.equal(t, kept[name]) for name, t in layer.state_dict().items())


def test_gradients_still_flow_inside_the_silence():
    layer = MultiHeadedAttention(h=2, d_model=8, dropout=0.0)
    x = torch.randn(1, 3, 8, requires_grad=True)
    with heads_silenced([(layer, 0)]):
        layer(x, x, x).sum().backward()
    assert x.grad.abs().sum() > 0


def test_holms_steps():
    assert pass_together([0.01, 0.04, 0.03]) == [True, False, False]
    assert pass_together([0.04, 0.01, 0.02]) == [True, True, True]
    assert pass_together([0.02] * 3) == [False] * 3
    assert pass_together([]) == []
    torch.manual_seed(0)
    for _ in range(20):
        p = torch.rand(10).pow(4).tolist()
        order = sorted(range(10), key=p.__getitem__)
        stop = next((k for k, i in enumerate(order) if p[i] > 0.05 / (10 - k)), 10)
        assert pass_together(p) == [i in order[:stop] for i in range(10)]


# Worth by likelihood


def test_losses_are_those_of_cross_entropy_whatever_the_padding(tiny):
    tiny.eval()
    batch = padded()
    logits = tiny.generator(tiny(batch.src, batch.tgt, batch.src_mask, batch.tgt_mask))
    each = F.cross_entropy(logits.transpose(1, 2), batch.tgt_y, ignore_index=0, reduction="none")
    tiny.train()
    losses = reference_losses(tiny, batch)
    torch.testing.assert_close(losses, each.sum(-1))
    assert tiny.training and torch.equal(losses, reference_losses(tiny, batch))
    tiny.eval()
    memory = tiny.encode(batch.src, batch.src_mask)
    assert torch.equal(reference_losses(tiny, batch, memory), losses)
    assert not torch.equal(reference_losses(tiny, batch, memory * 0), losses)


def test_what_heads_say_is_what_the_output_map_is_given(tiny):
    batch = padded()
    said = said_by_heads(tiny, batch)
    sources, targets = int((batch.src != 0).sum()), int((batch.tgt != 0).sum())
    assert {kind: tuple(x.shape) for kind, x in said.items()} == {
        "encoder": (2, sources, 4, 4),
        "decoder": (2, targets, 4, 4),
        "cross": (2, targets, 4, 4),
    }
    alone = Batch(batch.src[1:, :4], torch.cat((batch.tgt[1:, :2], batch.tgt_y[1:, 1:2]), 1))
    again = said_by_heads(tiny, alone)  # without its padding, the shorter sentence says the same
    torch.testing.assert_close(said["encoder"][:, -4:], again["encoder"])
    assert not any(m._forward_pre_hooks for m in tiny.modules())


@pytest.fixture(scope="module")
def judge(trained):
    return Judge(trained, [pair.texts for pair in PAIRS[:3]])


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


def test_the_study_measures_each_head_each_layer_and_each_order(judge):
    every = every_head(judge.model)
    rows, layers = worth_of_each(judge), worth_of_layers(judge)
    assert [(r["kind"], r["layer"] - 1, r["head"] - 1) for r in rows] == every
    assert len(set(every)) == 72 and len({row["silent"] for row in rows}) > 60
    assert (rows[3]["silent"], rows[3]["silent p"]) == judge.cost([every[3]])
    assert layers[4]["silent"] == judge.cost(every[32:40])[0] and len(layers) == 9
    points = pruning_curve(judge, {"one": every, "other": every[::-1]})
    assert [p["silent"] for p in points] == [*range(0, 73, 9)] * 2
    assert points[0]["nats"] == points[9]["nats"] == 0 and points[8] == points[17] | {
        "order": "one"
    }
    assert points[10]["nats"] == judge.cost(every[:-10:-1])[0] != points[1]["nats"]


# Patching


def test_a_run_patched_whole_is_the_other_run(tiny):
    tiny.eval()
    one, two = torch.randint(4, 30, (2, 1, 6))
    tgt = torch.randint(4, 30, (1, 3))
    x = tiny.decode(tiny.encode(two), None, tgt, subsequent_mask(3))
    log_p = tiny.generator(x)[0, -1].log_softmax(-1)
    for done, stage in enumerate(encoder_stages(tiny, two)):
        memory = memory_from(tiny, stage, done)
        torch.testing.assert_close(memory, tiny.encode(two))
        got = preference(tiny, memory, tgt, 5, 9)
        assert math.isclose(got, (log_p[5] - log_p[9]).item(), abs_tol=1e-9)
    assert not torch.allclose(tiny.encode(one), tiny.encode(two))


# The lens, and what weights do not tell


def test_the_lens_ends_in_the_model_itself(tiny):
    src, tgt = torch.randint(4, 30, (1, 7)), torch.randint(4, 30, (1, 5))
    tiny.eval()
    x = tiny(src, tgt, None, subsequent_mask(5))
    log_p = logit_lens(tiny, src, tgt)
    assert log_p.shape == (3, 5, 30)
    torch.testing.assert_close(log_p[-1], tiny.generator(x).log_softmax(-1)[0])
    assert torch.equal(decoder_stages(tiny, src, tgt)[0], tiny.tgt_embed(tgt)[0])


def test_what_heads_send_adds_up_to_the_layers_output(tiny):
    src, tgt = torch.randint(4, 30, (1, 7)), torch.randint(4, 30, (1, 5))
    tiny.eval()
    maps, seen = attention_maps(tiny, src, tgt), {}
    layer = tiny.decoder.layers[1].src_attn
    hook = layer.register_forward_hook(lambda _, given, y: seen.update(key=given[1], y=y[0]))
    tiny(src, tgt, None, subsequent_mask(5))
    hook.remove()
    heard = heard_values(layer, seen["key"])
    added = torch.einsum("hts,hsd->td", maps["cross"][1], heard)
    torch.testing.assert_close(added + layer.project_output.bias, seen["y"])


def test_erasure_is_the_loss_of_log_p(trained, park):
    effects = erasure_effects(trained.model, park)
    assert effects.shape == (park.tgt.size(1), park.src.size(1))
    hidden, model = 8, trained.model  # Bank
    mask = torch.ones(1, 1, park.src.size(1), dtype=torch.bool)
    causal = subsequent_mask(park.tgt.size(1))
    said = []
    for hide in (False, True):
        mask[..., hidden] = not hide
        log_p = model.generator(model(park.src, park.tgt, mask, causal)).log_softmax(-1)
        said.append(log_p.gather(-1, park.wanted.unsqueeze(-1))[0, :, 0])
    torch.testing.assert_close(effects[:, hidden], said[0] - said[1])


# What the chapter says.


def test_what_the_chapter_says_of_heads():
    said = ran("ch16")
    heads, record = said.heads, said.record
    assert [sum(said.passed[way]) for way in ("silent", "mean")] == [24, 35]
    assert heads["silent"].max() < 0.0095 and round(record["loss"], 2) == 1.60
    assert sum(heads["silent"] > 0) == 71
    assert said.milder.to_dict() == {"encoder": 8, "decoder": 9, "cross": 0}
    judged = said.judged
    assert abs(said.agree.statistic) < 0.3 and said.agree.pvalue > 0.1
    assert judged["name"].tolist() == ["cross 1.5", "cross 2.8", "cross 1.7"]
    assert (judged["silent p"][:2] > 0.3).all() and judged["AER"].iloc[2] > 0.74
    cross = heads[heads["kind"] == "cross"]
    assert cross["name"][cross["silent"].idxmax()] == "cross 1.7"


def test_what_the_chapter_says_of_layers_and_of_pruning():
    said = ran("ch16")
    table = said.by_layer
    assert table["times"].min() >= 1.4 and (table["together"] < 0.125).all()
    assert table["times"][table["kind"] == "cross"].between(5, 7).all()
    lowest, highest = said.chance.min(axis=1), said.chance.max(axis=1)
    assert 3.75 < lowest[9] / said.by_worth[9] < 4 and lowest[18] > said.by_worth[18]
    assert lowest[36] < said.by_worth[36] < highest[36] and said.by_worth[45] > highest[45]
    assert lowest[9] > 0.0165 and highest[9] < 0.034
    assert 0.023 < 9 * said.heads["silent"].mean() < 0.0245
    of_nine = []  # what nine heads at random cost, as a share of their worths' sum
    for seed in range(5):
        first = np.random.default_rng(seed).permutation(72)[:9]
        of_nine.append(said.chance.loc[9, f"random {seed + 1}"] / said.heads["silent"][first].sum())
    assert [round(end, 1) for end in (min(of_nine), max(of_nine))] == [0.6, 1.2]
    assert spearmanr(said.at_45["cross"], said.at_45["nats"]).statistic > 0.9


def test_what_the_chapter_says_of_patches_and_of_the_lens():
    said = ran("ch16")
    assert said.clean > 6 and said.foreign < -5
    assert all(abs(row[3]) < 0.2 and 1.4 < row[1] < 1.7 for row in said.table[:3])
    assert round(said.table[3][3], 1) == -1.3 and 2.3 < said.table[3][1] < 2.5
    assert all(x > 5.8 for row in said.table for s, x in enumerate(row) if s not in (1, 3))
    mixed = memory_from(said.model, said.two_words, 0)
    assert -5.3 < preference(said.model, mixed, said.read, said.her, said.his) < -5
    early, middle = said.agreement[1].item(), said.agreement[2]
    assert said.agreement[0] < 0.05 and round(early, 2) == 0.29
    before = []  # each text's last two positions
    for look in said.looks[::2]:
        choices = logit_lens(said.model, look.src, look.tgt).argmax(-1)[:, :-2]
        before.append((choices == choices[-1]).double().mean(-1))
    before = torch.stack(before).mean(0)
    assert before[1] < 0.2 and 0.78 < before[2] < middle < 0.86
    assert said.right_at_once.sum() == 1 and len(said.right_at_once) == 10
    assert torch.equal(said.log_p[0].argmax(-1)[1:], said.dog.tgt[0, 1:])  # repeats what it read


def test_what_the_chapter_says_of_weights():
    said = ran("ch16")
    assert 0.9 < np.mean(said.same_key) < 0.92
    assert said.share[0] > 0.6 and said.contribution[0] < 0.35
    assert [round(share.item(), 2) for share in said.on_first] == [0.18, 0.14]
    erased = said.erased
    assert erased[said.told].mean().round(2).tolist() == [0.66, 0.52, 0.23]
    by_need = erased.groupby("needs the source")[said.told].mean().round(2)
    assert by_need["most weight"].tolist() == [0.39, 0.77]
    assert by_need["same place"].tolist() == [0.56, 0.5]
    assert 0.65 < erased["needs the source"].mean() < 0.75
    assert [round(end, 2) for end in (said.low, said.high)] == [0.08, 0.19]
    stop = said.trained.tokenizer.encode("A dog runs.")[-1]
    ends = torch.cat([(look.wanted[0] == stop) | (look.wanted[0] == EOS) for look in said.looks])
    others = ~erased["needs the source"].to_numpy()
    assert 0.45 < ends.numpy()[others].mean() < 0.55
    told = [
        erased[others & part][said.told[:2]].mean().round(2).tolist()
        for part in (ends.numpy(), ~ends.numpy())
    ]
    assert told == [[0.35, 0.7], [0.43, 0.43]]
    assert by_need["rank correlation"].max() < 0.25
