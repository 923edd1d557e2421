"""Milestones: what the reader wrote translates, and a fault is named by what it does."""

import importlib
import inspect

import pytest
import torch
from conftest import CHAPTERS

from scripts.book.exercises import runs_on, scores_with

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


def test_what_does_not_fit_is_refused():
    renamed = part("PositionwiseFeedForward", "self.expand", "self.widen")
    with pytest.raises(
        ValueError, match="don't fit your parts: .*feed_forward.expand.bias differs"
    ):
        runs_on(renamed)
    with pytest.raises(ValueError, match="no part of the translator is called 'attend'"):
        runs_on(attend=renamed)


def test_a_bleu_of_the_readers_own_is_judged_part_by_part(capsys):
    for old, new, symptom in (
        ("", "", "The same parts, and the same score."),
        (
            "(output_counts & reference_counts)",
            "output_counts",
            "Your matches: [147, 137, 127, 117], and not [116, 81, 58, 43].",
        ),
        ("map(len, outputs)", "map(len, references)", "Your output_length: 153, and not 147."),
    ):
        scores_with(part("bleu_parts", old, new))
        assert symptom in capsys.readouterr().out
