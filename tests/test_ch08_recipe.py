"""Chapter 8's recipe: its ingredients against independent references."""

import copy
import itertools
import random
from dataclasses import replace

import pytest
import torch

from scripts import ch08_training_run as ch08
from scripts.ch01_attention import subsequent_mask
from scripts.ch04_encoder_decoder import make_model
from scripts.ch05_training import BOS, EOS, LabelSmoothing, batch_loss, greedy_decode

SAMPLE = ch08.PRESETS["sample"]


@pytest.fixture(scope="module")
def data():
    return ch08.prepare(SAMPLE)


@pytest.fixture(scope="module")
def tiny():
    """Six tokens, far from uniform, so that there is something to find."""
    torch.manual_seed(0)
    model = make_model(6, 6, N=1, d_model=16, d_ff=32, h=2, dropout=0.0).double().eval()
    with torch.no_grad():
        model.generator.proj.weight.mul_(6)
    return model


@torch.no_grad()
def forced(model, src, ids) -> float:
    """log p(ids | src) by teacher forcing, in one pass."""
    tgt = torch.tensor([[BOS, *ids[:-1]]])
    x = model(src, tgt, None, subsequent_mask(len(ids)))
    log_probs = model.generator(x).log_softmax(dim=-1)[0]
    return sum(log_probs[t, token].item() for t, token in enumerate(ids))


def test_beam_search_equals_brute_force(tiny):
    src = torch.tensor([[4, 5, 4, EOS]])
    texts = [
        ids
        for length in (1, 2, 3)
        for ids in itertools.product(range(6), repeat=length)
        if EOS not in ids[:-1] and (ids[-1] == EOS or length == 3)
    ]
    scores = {ids: forced(tiny, src, ids) / len(ids) ** 0.6 for ids in texts}
    ranked = sorted(scores, key=scores.get, reverse=True)
    found = ch08.beam_search(tiny, src, None, max_len=3, beam=6**3, alpha=0.6)[0]
    without_end = [ids[:-1] if ids[-1] == EOS else ids for ids in ranked]
    assert [h.ids for h in found] == without_end
    for h, ids in zip(found, ranked, strict=True):
        assert h.score(0.6) == pytest.approx(scores[ids], rel=1e-9)


def test_a_beam_of_one_is_greedy(tiny):
    src = torch.tensor([[4, 5, 4, EOS]])
    greedy = greedy_decode(tiny, src, None, 8)[0].tolist()
    ids = list(ch08.beam_search(tiny, src, None, 8, beam=1)[0][0].ids)
    assert ids == (greedy[: greedy.index(EOS)] if EOS in greedy else greedy)


def test_merge_dropout_is_bpe_without_dropout(data):
    merges, rng = ch08.MergeDropout(data.tokenizer), random.Random(0)
    texts = [text for pair in data.corpus["train"][:300] for text in pair]
    lengths = []
    for p in (0.0, 0.3, 1.0):
        rows = [merges.encode(data.tokenizer.pieces(text), p, rng) for text in texts]
        assert [data.tokenizer.decode(row) for row in rows] == texts
        lengths.append(sum(map(len, rows)))
        if p == 0:
            assert rows == [data.tokenizer.encode(text) for text in texts]
    assert lengths == sorted(lengths) and lengths[0] < lengths[1] < lengths[2]


def test_an_epochs_pieces_depend_on_seed_and_epoch_alone(data):
    few = replace(data.corpus and data, corpus=data.corpus | {"train": data.corpus["train"][:40]})
    config = replace(SAMPLE, bpe_dropout=0.2)
    assert ch08.epoch_examples(config, few, 1) == ch08.epoch_examples(config, few, 1)
    assert ch08.epoch_examples(config, few, 1) != ch08.epoch_examples(config, few, 2)
    assert ch08.epoch_examples(SAMPLE, few, 1) is few.train


def test_r_drop_without_dropout_is_the_loss(data):
    torch.manual_seed(0)
    model = ch08.build_model(replace(SAMPLE, dropout=0.0), len(data.tokenizer)).double()
    (batch,) = ch08.batches_of(data.train, [[0, 1, 2, 3]], torch.device("cpu"))
    plain = batch_loss(model, batch, LabelSmoothing())
    found = ch08.r_drop_loss(model, batch, LabelSmoothing(), weight=5.0)
    torch.testing.assert_close(found, plain, rtol=1e-9, atol=1e-9)


def test_muon_and_adam_act_as_one_and_go_on_after_loading(data):
    config = replace(SAMPLE, optimizer="muon", layers=1)
    torch.manual_seed(0)
    model = ch08.build_model(config, len(data.tokenizer))
    one = ch08.make_optimizer(config, model)
    held = [id(p) for group in one.param_groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in model.parameters())
    gradients = [torch.randn_like(p) for p in model.parameters()]

    def step(optimizer, parameters):
        for p, gradient in zip(parameters, gradients, strict=True):
            p.grad = gradient.clone()
        for group in optimizer.param_groups:
            group["lr"] = 1e-3
        optimizer.step()

    step(one, model.parameters())
    twin = ch08.build_model(config, len(data.tokenizer))
    twin.load_state_dict(model.state_dict())
    other = ch08.make_optimizer(config, twin)
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    step(one, model.parameters())
    step(other, twin.parameters())
    assert all(map(torch.equal, model.parameters(), twin.parameters()))


def test_a_full_gpu_is_said_in_one_line(monkeypatch, capsys):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(ch08, "run", full)
    assert ch08.main(["--preset", "sample"]) == 2
    error = capsys.readouterr().err
    assert "--max_tokens" in error and error.count("\n") == 1
