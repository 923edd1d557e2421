"""Milestones: the reader's own definitions in a trained translator, beside ours.

Chapters reach `runs_on` through `scripts.book.exercises`.
"""

import importlib
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import zip_longest
from unittest.mock import patch

import torch

from scripts import ch08_decoding
from scripts.book.records import load_record
from scripts.ch01_attention import padding_mask, subsequent_mask
from scripts.ch06_training import BOS, EOS
from scripts.ch07_multi30k import source_ids
from scripts.ch08_decoding import plain_translate
from scripts.ch10_judging import tokens_13a
from scripts.core.models import STUDIED, Trained, load_model
from scripts.core.scores import corpus_bleu

GERMAN = (  # of different lengths, so that there are pads; the last one stumbles over small faults
    "Ein brauner Hund spielt im Garten.",
    "Ein alter Mann repariert vor seinem Haus ein Fahrrad.",
    "Eine Frau, die einen Hut trägt, malt ein Bild von einem Baum.",
)
TYPO = "Ein keiner Hund springt ins Wasser."  # greedy decoding and a beam differ on it
BEAM_PARTS = {"beam_search", "beam_step", "rows_of"}  # with one of them, a beam of 4 translates
HOMES = (  # where the model is put together, from parts that are found by their names
    "ch01_attention",
    "ch02_multi_head_attention",
    "ch03_embeddings_and_positions",
    "ch04_encoder_decoder",
    "ch06_training",
    "ch08_decoding",
    "core.settings",
)


@contextmanager
def standing_in(parts: Mapping[str, Callable]) -> Iterator[None]:
    """Meanwhile, each of `parts` is what the model's modules find under its name.

    Raises ValueError for a name that none of them has.
    """
    homes = [importlib.import_module(f"scripts.{name}") for name in HOMES]
    with ExitStack() as stack:
        for name, part in parts.items():
            found = [home for home in homes if hasattr(home, name)]
            if not found:
                raise ValueError(f"no part of the translator is called {name!r}")
            for home in found:
                stack.enter_context(patch.object(home, name, part))
        yield


def fitted() -> Trained:
    """The trained model, made of what the names mean now. Raises ValueError if it doesn't fit."""
    try:
        return load_model(STUDIED)
    except ValueError as error:
        what = re.search(r"\((.+) differs\)", str(error))
        if not what:
            raise
        fault = f"the trained weights don't fit your parts: {what[1]} differs, in name or shape"
        raise ValueError(fault) from None


@torch.no_grad()
def mean_probability(trained: Trained, texts: list[str]) -> float:
    """What the model gives each next piece of `texts`, translations of `GERMAN`, on average."""
    given = []
    for german, text in zip(GERMAN, texts, strict=True):
        src = torch.tensor([source_ids(german, trained.tokenizer)])  # (1, S)
        tgt = torch.tensor([[BOS, *trained.tokenizer.encode(text), EOS]])  # (1, T+1)
        masks = padding_mask(src), subsequent_mask(tgt.size(1) - 1)
        logits = trained.model.generator(trained.model(src, tgt[:, :-1], *masks))  # (1, T, V)
        given.append(logits.softmax(-1).gather(-1, tgt[:, 1:, None]).flatten())
    return torch.cat(given).mean().item()


def mean_log_prob(trained: Trained) -> float:
    """What the beam search itself says of its four texts for `TYPO`, on average."""
    src = torch.tensor([source_ids(TYPO, trained.tokenizer)])  # (1, S)
    hypotheses = ch08_decoding.beam_search(trained.model, src, None, 30, beam=4)[0]
    return sum(h.log_prob for h in hypotheses) / len(hypotheses)


def verdict(yours: list[str], ours: list[str], probability: float, expected: float) -> str:
    """One sentence: what the reader's parts do to the translations."""
    if math.isnan(probability):
        return "Yours computes what is no number (NaN)."
    if yours == ours:
        same = abs(probability - expected) < 1e-5
        return f"The same words, {'and' if same else 'but not'} the same numbers."
    if len(set(yours)) == 1:
        return "Yours says the same, whatever it reads."
    if any(re.search(r"(\S.{0,20}?)\1\1\1", text) for text in yours):
        return "Yours repeats itself."
    if any(2 * len(text) < len(right) for text, right in zip(yours, ours, strict=True)):
        return "Yours stops too early."
    pairs = zip_longest(*(" ".join(texts).split() for texts in (yours, ours)), fillvalue="nothing")
    word, right = next(pair for pair in pairs if pair[0] != pair[1])
    return f'Yours goes astray: it says "{word}" where ours says "{right}".'


def runs_on(*parts: Callable, **named: Callable) -> None:
    """Translates with your functions or classes in place of those of the same name, or of `named`.

    The model is chapter 9's, with its trained weights; a part of the beam search makes it translate
    with a beam of 4, otherwise it is greedy. Prints your translations beside ours, and
    what yours does wrong, if it does. Raises ValueError if a name is unknown or weights don't fit.
    """
    named = {part.__name__: part for part in parts} | named
    beam, sentences, what = 1, GERMAN, "probability of our translations' tokens"
    if named.keys() & BEAM_PARTS:
        beam, sentences, what = 4, (*GERMAN, TYPO), "log p of the last one's four hypotheses"

    def run() -> tuple[Trained, list[str]]:
        trained = fitted()
        return trained, ch08_decoding.plain_translate(trained, sentences, beam)

    def number(trained: Trained) -> float:
        return mean_log_prob(trained) if beam > 1 else mean_probability(trained, ours)

    trained, ours = run()
    expected = number(trained)
    with standing_in(named):
        trained, yours = run()
        probability = number(trained)
    for german, text, right in zip(sentences, yours, ours, strict=True):
        print(german)
        print("  yours:", text if len(text) < 90 else f"{text[:90]} …")
        print("  ours: ", right)
    print(verdict(yours, ours, probability, expected))
    numbers = f"{probability:.3f} by yours, {expected:.3f} by ours"
    print(f"Mean {what}: {numbers}.")


def scores_with(bleu_parts: Callable) -> None:
    """Judges chapter 9's translator on ten captions, by your `bleu_parts` and by sacreBLEU.

    Prints both scores, and each part that differs.
    """
    samples = load_record("multi30k-de-en")["samples"]
    outputs = plain_translate(load_model(STUDIED), [row["source"] for row in samples])
    references = [row["reference"] for row in samples]
    theirs = corpus_bleu(outputs, references)
    yours = bleu_parts(*([tokens_13a(text) for text in side] for side in (outputs, references)))
    print(f"BLEU of ten captions: {yours.score:.2f} by yours, {theirs.score:.2f} by sacreBLEU.")
    right = [theirs.counts, theirs.totals, theirs.sys_len, theirs.ref_len]
    names = ["matches", "totals", "output_length", "reference_length"]
    wrong = [pair for pair in zip(names, right, strict=True) if getattr(yours, pair[0]) != pair[1]]
    for name, value in wrong:
        print(f"Your {name}: {getattr(yours, name)}, and not {value}.")
    if not wrong:
        same = math.isclose(yours.score, theirs.score, rel_tol=1e-9)
        print(f"The same parts, {'and the same' if same else 'but not the same'} score.")
