"""The study of chapters 22 to 24: its rows are what they say, and what is said of them is true."""

from dataclasses import replace

import pytest
import torch

from scripts.book.instruments import scramble
from scripts.ch06_training import BOS, EOS, Batch, LabelSmoothing, batch_loss
from scripts.ch24_experts import MixtureOfExperts, balance_penalty
from scripts.studies import block

CONFIG = replace(block.BASE, d_model=32, d_ff=96)
SRC = torch.tensor([[5, 6, 7, 8, 9, EOS], [5, 6, 7, EOS, 0, 0]])
TGT = torch.tensor([[BOS, 11, 12, 13, 14], [BOS, 21, 22, EOS, 0]])
CRITERION = LabelSmoothing(0.1)

TODAY = ("today", "today, Muon")
KINDS = {name: {"TodaysAttention", "SwiGLU", "RMSNorm"} for name in (*TODAY, "today, not zeroed")}
KINDS |= {name: set() for name in ("2017", "zeroed outputs", "Muon")}
KINDS |= {"RMSNorm": {"RMSNorm"}, "SwiGLU": {"SwiGLU"}, "ReLU²": {"SquaredReLU"}}
KINDS |= {"rotary": {"RotaryAttention"}, "QK-norm": {"NormedAttention", "RMSNorm"}}
KINDS |= {"window of 4": {"WindowedAttention"}, "linear attention": {"LinearAttention"}}
for _name in ("grouped-query", "multi-query", "multi-query, across too"):
    KINDS[_name] = {"GroupedAttention"}
for _name in ("latent", "latent, across too"):
    KINDS[_name] = {"LatentAttention", "RMSNorm"}
KINDS["latent, decoder alone"] = {"RotaryAttention", "LatentAttention", "RMSNorm"}
KINDS["experts"] = {"MixtureOfExperts", "SwiGLU"}


@pytest.mark.parametrize("name", block.ROWS)
def test_a_part_is_in_the_place_it_is_named_after(name):
    row = block.ROWS[name]
    assert (row.config(CONFIG, lr=0.01).optimizer == "muon") == ("Muon" in name)
    model = row.build(CONFIG, 50)
    kinds = {type(part).__name__ for part in model.modules()}
    old = {"MultiHeadedAttention", "OpenAttention", "PositionwiseFeedForward", "LayerNorm"}
    new = {kind for kind in kinds - old if kind.endswith(("Attention", "ReLU", "GLU", "Norm"))}
    assert new | {"MixtureOfExperts"} & kinds == KINDS[name]
    attends = any(kind.endswith("Attention") for kind in KINDS[name])
    assert ("MultiHeadedAttention" in kinds) == (not attends)
    across = type(model.decoder.layers[0].src_attn).__name__
    assert (across in KINDS[name]) == name.endswith("across too")
    turned = KINDS[name] & {"RotaryAttention", "TodaysAttention", "LatentAttention"}
    for embed in (model.src_embed, model.tgt_embed):
        assert bool(embed[1].pe.any()) == (not turned)
    zeroed = not model.decoder.layers[0].self_attn.project_output.weight.any()
    assert zeroed == (name in ("zeroed outputs", *TODAY))
    assert model.generator.proj.weight is model.src_embed[0].lut.weight


def test_what_a_token_costs_is_counted_from_real_tensors():
    numbers = {"rotary": 64, "today": 32, "grouped-query": 32, "multi-query": 16, "latent": 16}
    token = torch.randn(1, 1, 32)
    for name, count in numbers.items():
        layer = block.ROWS[name].build(CONFIG, 50).decoder.layers[0].self_attn
        assert sum(part.numel() for part in layer.remember(token, token)) == count


def active_parameters(model):
    """Parameters that one token meets: all but the experts that it isn't sent to."""
    total = sum(p.numel() for p in model.parameters())
    for part in model.modules():
        if isinstance(part, MixtureOfExperts):
            expert = sum(p.numel() for p in part.experts[0].parameters())
            total -= (len(part.experts) - part.top) * expert
    return total


def test_rows_are_alike_in_what_a_token_meets():
    with torch.device("meta"):
        models = {name: row.build(block.BASE, 2000) for name, row in block.ROWS.items()}
    active = {name: active_parameters(model) for name, model in models.items()}
    other = {name for name in active if name.startswith(("latent", "today", "multi", "grouped"))}
    for name in active.keys() - other:
        assert abs(active[name] / active["2017"] - 1) < 0.01, name
    sizes = [sum(p.numel() for p in models[name].parameters()) for name in ("experts", "SwiGLU")]
    assert [round(size, -3) for size in sizes] == [620_000, 363_000]  # chapter 24 says so
    assert round(active["experts"], -3) == 362_000  # and so


def test_the_loss_adds_the_penalty_in_training_alone_and_padding_visits_no_expert(monkeypatch):
    row = block.ROWS["experts"]
    model, batch = row.build(CONFIG, 50), Batch(SRC, TGT)
    scramble(model, size=0.2)
    loss_of = row.loss_of(CONFIG)
    torch.testing.assert_close(
        loss_of(model.eval(), batch, CRITERION), batch_loss(model, batch, CRITERION)
    )
    assert {layer.feed_forward.visits.sum().item() for layer in model.encoder.layers} == {2 * 10}
    monkeypatch.setattr(block, "BALANCE", 0.5)
    loss, nll = loss_of(model.train(), batch, CRITERION)
    plain, same = batch_loss(model, batch, CRITERION)
    mixtures = [part for part in model.modules() if isinstance(part, MixtureOfExperts)]
    penalty = sum(balance_penalty(part.probs, part.visits) for part in mixtures)
    torch.testing.assert_close((loss - plain, nll), (0.5 * batch.ntokens * penalty, same))
