"""Milestones: what the reader wrote translates, and a fault is named by what it does."""

import importlib
import inspect

import pytest
import torch
from conftest import CHAPTERS

from scripts.book.exercises import runs_on, trains_with

# A name, what its text loses or gets in place of what, and what the translator then does.
FAULTS = [
    ("attention", " / math.sqrt(query.size(-1))", "", 'it says "repairing" where ours says "is"'),
    ("attention", "(scores, mask)", "(scores, None if mask is None else ~mask)", "repeats itself"),
    ("MultiHeadedAttention", "merge_heads(x)", "x.flatten(2).view_as(query)", "repeats itself"),
    ("DecoderLayer", "(x, memory, memory, src_mask)", "(x, x, x)", "the same, whatever it reads"),
    ("LayerNorm", "correction=0", "correction=1", "The same words, but not the same numbers."),
    ("greedy_decode", "ended |= token == EOS", "ended |= token == token[0]", "stops too early"),
    (
        "beam_step",
        "scores.unsqueeze(-1) + log_probs",
        "log_probs",
        'it says "tired" where ours says "small"',
    ),
    ("beam_step", "2 * K", "K", "The same words, but not the same numbers."),
    ("LayerNorm", "torch.rsqrt(variance", "torch.sqrt(-variance", "no number (NaN)"),
    ("greedy_decode", "with dropout_off(model)", "if True", "Yours leaves dropout on"),
]


def part(name, old="", new=""):
    """A chapter's definition, as if a reader had written it with `new` in place of `old`."""
    for home in map(importlib.import_module, (f"scripts.{p.stem}" for p in CHAPTERS[1:11])):
        if getattr(getattr(home, name, None), "__module__", "") == home.__name__:
            text = inspect.getsource(getattr(home, name))
            assert old in text
            namespace = dict(vars(home))
            exec("from __future__ import annotations\n" + text.replace(old, new), namespace)
            return namespace[name]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_right_translates_as_ours_does(dtype, capsys):
    torch.set_default_dtype(dtype)
    runs_on(*map(part, ("attention", "MultiHeadedAttention", "LayerNorm", "make_model")))
    runs_on(part("EncoderLayer"), DecoderLayer=part("DecoderLayer"))
    runs_on(*map(part, ("greedy_decode", "beam_step", "beam_search")))
    said = capsys.readouterr().out
    assert said.count("The same words, and the same numbers.") == 3
    assert said.count("A brown dog is playing in the garden.") == 6


@pytest.mark.parametrize(("name", "old", "new", "symptom"), FAULTS)
def test_what_is_wrong_is_named_by_what_it_does(name, old, new, symptom, capsys):
    runs_on(part(name, old, new))
    assert symptom in capsys.readouterr().out


def test_what_was_never_called_is_named(capsys):
    """Whatever it is: also beside a part that was, and a class of which no layer ran."""
    runs_on(part("greedy_decode"), part("beam_step"), keep_nucleus=lambda *_: 1 / 0)
    runs_on(part("make_model"), LayerNorm=type("Unused", (part("LayerNorm"),), {}))
    runs_on(part("greedy_decode", "token == EOS", "token == token"), part("beam_step"))
    said = capsys.readouterr().out
    assert said.count("was never called") == 1 and "Your keep_nucleus was never called." in said
    assert "Yours stops too early" in said  # greedy decoding, though a beam translates, too


def test_what_does_not_fit_is_refused():
    renamed = part("PositionwiseFeedForward", "self.expand", "self.widen")
    with pytest.raises(ValueError, match="feed_forward.expand.bias differs"):
        runs_on(renamed)
    with pytest.raises(ValueError, match="no part of the translator is called 'attend'"):
        runs_on(attend=renamed)


# What a part loses or gets, and the step at which its losses part from ours.
PARTINGS = [
    ("LabelSmoothing", "logits.mean(dim=-1)", "logits.sum(dim=-1) / 998", 1),
    ("cosine_rate", "peak * step / warmup", "peak * (step - 1) / warmup", 2),
    ("train_step", "optimizer.zero_grad(set_to_none=True)", "pass", 3),
    ("train_step", 'in_domain("clip", clip) or math.inf', "math.inf", 2),
]


@pytest.mark.slow
def test_what_is_right_trains_as_ours_does(capsys):
    trains_with(part("train_step"), cosine_rate=part("cosine_rate"), steps=25)
    said = capsys.readouterr().out
    assert "The same losses in 20 steps" in said and said.count("reference: ") == 3
    with pytest.raises(ValueError, match="no part of the training is called 'attend'"):
        trains_with(attend=part("train_step"))


@pytest.mark.slow
def test_a_wrong_search_shows_after_training(capsys):
    trains_with(part("greedy_decode", "with dropout_off(model)", "if True"), steps=3, beside=2)
    trains_with(part("greedy_decode", "argmax", "argmin"), steps=3, beside=2)
    said = capsys.readouterr().out
    assert said.count("leaves dropout on") == said.count("our greedy_decode: ") == 3


@pytest.mark.slow
@pytest.mark.parametrize(("name", "old", "new", "step"), PARTINGS)
def test_where_losses_part_tells_what_differs(name, old, new, step, capsys):
    trains_with(part(name, old, new), steps=6, beside=5)
    assert f"The losses part at step {step} " in capsys.readouterr().out
