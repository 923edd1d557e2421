"""Chapter 16: silence undone, likelihoods, patched runs, the lens, what weights don't tell."""

import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from saying import ran
from scipy.stats import t as student
from tiny import SRC, TGT

from scripts.book.instruments import scramble
from scripts.book.records import load_record, sha256
from scripts.ch01_attention import subsequent_mask
from scripts.ch02_multi_head_attention import MultiHeadedAttention
from scripts.ch04_encoder_decoder import make_model
from scripts.ch06_training import Batch, greedy_decode
from scripts.ch07_multi30k import encode_pairs, make_batch
from scripts.ch15_looking_inside import (
    KINDS_OF_ATTENTION,
    attention_layers,
    attention_maps,
    look_at,
)
from scripts.ch16_intervening import (
    decoder_stages,
    encoder_stages,
    erasure_effects,
    every_head,
    heads_silenced,
    heads_silenced_by_hook,
    heard_values,
    logit_lens,
    memory_from,
    preference,
    rank_correlation,
    reference_losses,
    said_by_heads,
)
from scripts.corpora.captions import aligned_pairs
from scripts.engine.models import default_model, load_model
from scripts.engine.searching import cached_greedy
from scripts.studies.blends import other_weights
from scripts.studies.heads import without_heads
from scripts.studies.verdict import pass_together
from scripts.studies.worth import head_means, main, paired, worth_by_likelihood

PAIRS = aligned_pairs()


@pytest.fixture(scope="module")
def trained():
    loaded = load_model(default_model())
    loaded.model.double()
    return loaded


@pytest.fixture(scope="module")
def park(trained):
    return look_at(trained, PAIRS[2].texts[0])


@pytest.fixture
def tiny():
    torch.manual_seed(0)
    model = make_model(30, 30, N=2, d_model=16, d_ff=32, h=4, dropout=0.1, norm_first=True).double()
    scramble(model)
    return model


def padded():
    """A padded batch of tiny ids."""
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
    with pytest.raises(IndexError, match="head 4"), heads_silenced([(layer, 2), (layer, 4)]):
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


def test_the_fast_path_hears_the_silence_and_not_the_hook(trained, park):
    layers = attention_layers(trained.model)["cross"]
    heads = [(layer, head) for layer in layers for head in range(layer.h)]
    whole = cached_greedy(trained.model, park.src, None, 20)
    with heads_silenced(heads):
        blind = cached_greedy(trained.model, park.src, None, 20)
        assert torch.equal(blind, greedy_decode(trained.model, park.src, None, 20))
    assert not torch.equal(blind, whole)
    with heads_silenced_by_hook(heads):
        assert torch.equal(cached_greedy(trained.model, park.src, None, 20), whole)
        assert torch.equal(greedy_decode(trained.model, park.src, None, 20), blind)
    assert torch.equal(cached_greedy(trained.model, park.src, None, 20), whole)


def test_every_head_is_silenced_by_its_own_name(trained):
    heads = every_head(trained.model)
    assert len(heads) == len(set(heads)) == 72
    rows = [trained.tokenizer.encode(PAIRS[0].texts[0]) + [3]]
    (plain,) = without_heads(trained, rows, ())
    (blind,) = without_heads(trained, rows, [h for h in heads if h[0] == "cross"])
    assert plain == "A small dog runs through the wet grass." and blind != plain
    assert without_heads(trained, rows, ()) == [plain]


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


def test_means_are_over_all_positions_of_all_batches(tiny):
    batch = padded()
    both = head_means(tiny, [batch, Batch(batch.src[:1], TGT[:1] % 20 + 4)])
    parts = [said_by_heads(tiny, b) for b in (batch, Batch(batch.src[:1], TGT[:1] % 20 + 4))]
    for kind, mean in both.items():
        torch.testing.assert_close(mean, torch.cat([p[kind] for p in parts], 1).mean(1))


def test_a_paired_change_is_students():
    whole, changed = torch.tensor([3.0, 5.0, 4.0, 8.0]), torch.tensor([3.5, 5.1, 4.4, 8.2])
    change, p = paired(changed, whole, tokens=10)
    assert math.isclose(change, 0.12, rel_tol=1e-5)
    t = 0.3 / (np.std([0.5, 0.1, 0.4, 0.2], ddof=1) / 2)
    assert math.isclose(p, 2 * student.sf(t, 3), rel_tol=1e-4)
    assert paired(whole, whole, 10) == (0.0, 1.0)


def test_the_study_measures_each_head_and_each_layer(trained):
    model = trained.model
    found = worth_by_likelihood(trained, [pair.texts for pair in PAIRS[:2]])
    batch = make_batch(encode_pairs([pair.texts for pair in PAIRS[:2]], trained.tokenizer))
    whole = reference_losses(model, batch).sum()
    assert math.isclose(found["loss"], whole / found["tokens"], abs_tol=1e-5)
    layers = attention_layers(model)
    for kind, n, h in (("encoder", 1, 0), ("cross", 2, 7)):
        row = next(
            r for r in found["heads"] if (r["kind"], r["layer"], r["head"]) == (kind, n + 1, h + 1)
        )
        mean = said_by_heads(model, batch)[kind][n, :, h].mean(0)
        for name, instead in (("silent", ()), ("mean", [mean])):
            with heads_silenced([(layers[kind][n], h)], instead):
                change = (reference_losses(model, batch).sum() - whole) / found["tokens"]
            assert math.isclose(row[name], change, abs_tol=1e-5)
    assert len(found["layers"]) == 9


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
    assert torch.equal(log_p[-1], tiny.generator(x).log_softmax(-1)[0])
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


def test_other_weights_blend_the_same():
    torch.manual_seed(0)
    for S, d in ((12, 4), (40, 8), (20, 18)):
        values, weights = torch.randn(S, d).double(), torch.randn(S).double().mul(2).softmax(-1)
        others = other_weights(weights, values)
        torch.testing.assert_close(others @ values, weights @ values)
        assert others.min() > -1e-12 and abs(others.sum().item() - 1) < 1e-10
        assert others[weights.argmax()] < weights.max() - 1e-6
    few = torch.randn(5).double().softmax(-1)
    assert torch.equal(other_weights(few, torch.randn(5, 4).double()), few)


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


def test_ranks_correlate():
    assert math.isclose(rank_correlation([1, 2, 3, 4], [1, 4, 9, 16]), 1)
    assert math.isclose(rank_correlation([1, 2, 3], [3, 2, 1]), -1)
    assert math.isclose(rank_correlation([1, 1, 2], [1, 1, 5]), 1)  # ties share their rank


# The record and its command


def test_the_record_of_worth_is_of_the_shipped_model_and_whole():
    record = load_record("worth-multi30k")
    assert record["weights_sha256"] == sha256(default_model() / "model.safetensors")
    heads = [(row["kind"], row["layer"], row["head"]) for row in record["heads"]]
    assert heads == list(itertools.product(KINDS_OF_ATTENTION, range(1, 4), range(1, 9)))
    for row in record["heads"]:
        assert 0 <= row["silent p"] <= 1 and 0 <= row["mean p"] <= 1
    layers = [(row["kind"], row["layer"]) for row in record["layers"]]
    assert layers == list(itertools.product(KINDS_OF_ATTENTION, range(1, 4)))


def test_a_missing_model_is_a_line(capsys, tmp_path):
    assert main(["--model", str(tmp_path)]) == 2
    assert "error: " in capsys.readouterr().err


# What the chapter says.


def test_what_the_chapter_says_of_heads():
    said = ran("ch16")
    heads, finer, worth = said.heads, said.finer, said.worth
    assert said.record["weights_sha256"] == sha256(default_model() / "model.safetensors")
    assert worth["weights_sha256"] == said.record["weights_sha256"] and worth["pairs"] == 300
    assert (finer[["kind", "layer", "head"]] == heads[["kind", "layer", "head"]]).all(axis=None)
    assert sum(pass_together(heads["p"].tolist())) == 0 and sum(heads["p"] < 0.05) == 9
    assert heads["low"].min() > -1 and said.dearest["name"] == "encoder 2.1"
    assert said.passing == {"silent": ["encoder 1.8"], "mean": ["encoder 1.8", "cross 1.7"]}
    assert sum(finer["silent p"] < 0.05) == 21 and finer["silent"].max() < 0.01
    assert sum(finer["mean"] > finer["silent"]) == 50
    assert heads["name"][said.top] == "cross 1.7" and sum(finer["silent"] > 0) == 67
    judged = said.maps_judged
    assert list(heads["name"][judged.index]) == ["cross 1.5", "cross 2.8", "cross 1.7"]
    assert (judged["silent p"][:2] > 0.3).all() and judged["silent"][:2].max() < 0.001


def test_what_the_chapter_says_of_layers_and_of_pruning():
    said = ran("ch16")
    table = said.by_layer
    assert table["BLEU: together"].between(-3, -0.5).all()
    assert table["nats: times"].min() > 1.4 and 11 < table["nats: times"].max() < 12
    assert list(table.index[table["BLEU: times"] < 1]) == [1, 2]  # encoder 2 and 3
    assert (table["BLEU: times"].iloc[[3, 6, 7, 8]] > 1.2).all()  # decoder 1, cross-attention
    assert list(said.ahead.index[said.ahead]) == [18, 54] and 0.1 < said.agree < 0.2


def test_what_the_chapter_says_of_patches_and_of_the_lens():
    said = ran("ch16")
    assert said.clean > 6 and said.foreign < -5
    assert all(abs(row[3]) < 0.2 and 1.4 < row[1] < 1.7 for row in said.table[:3])
    assert 3 < math.exp(-said.table[3][3]) < 4 and 2.3 < said.table[3][1] < 2.5
    assert all(x > 5.8 for row in said.table for s, x in enumerate(row) if s not in (1, 3))
    early, middle = said.agreement[1].item(), said.agreement[2]
    assert said.agreement[0] < 0.05 and round(early, 2) == 0.29 and 0.75 < middle < 0.95
    assert said.first.sum() == 1 and len(said.first) == 10
    assert torch.equal(said.log_p[0].argmax(-1)[1:], said.dog.tgt[0, 1:])  # repeats what it read


def test_what_the_chapter_says_of_weights():
    said = ran("ch16")
    assert 0.9 < np.mean(said.same_key) < 0.92
    assert said.share[0] > 0.6 and said.contribution[0] < 0.35
    assert 0.4 < said.moved.max() < 0.45 and said.moved.median() < 0.05
    same, needed = said.same_top, said.needed
    assert 0 < np.mean(said.correlations) < 0.3 and 0.5 < np.mean(said.by_place) < same.mean() < 0.7
    assert same[~needed].mean() < 0.5 and same[needed].mean() > 0.75
