"""Milestones, for `scripts.book.exercises`: the reader's parts in a translator, beside ours."""

import inspect
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import count, islice, zip_longest
from types import FrameType
from unittest.mock import patch

import torch
from torch import nn

from scripts import ch06_training as ch06
from scripts import ch08_decoding as ch08
from scripts.ch01_attention import padding_mask
from scripts.ch07_multi30k import encode_pairs, make_batch, source_ids
from scripts.core.data import TrainingData, epoch_plan, prepare
from scripts.core.models import STUDIED, Trained, load_model
from scripts.core.settings import PRESETS, build_model

GERMAN = (  # of different lengths, so that there are pads; the last one stumbles over small faults
    "Ein brauner Hund spielt im Garten.",
    "Ein alter Mann repariert vor seinem Haus ein Fahrrad.",
    "Eine Frau, die einen Hut trägt, malt ein Bild von einem Baum.",
)
TYPO = "Ein keiner Hund springt ins Wasser."  # greedy decoding and a beam differ on it
BEAM_PARTS = {"beam_search", "beam_step", "rows_of"}  # with one of them, a beam of 4 translates
HOMES = re.compile(r"scripts\.(ch0[1-8]_|core\.settings)")  # their parts are found by name
Parts = Mapping[str, Callable]  # functions or classes by name
SMALL = replace(PRESETS["sample"], lr=4e-3, warmup=40, max_tokens=512)
PIECES = ("Batch", "LabelSmoothing", "cosine_rate", "train_step", "greedy_decode")  # of chapter 6


@contextmanager
def standing_in(parts: Parts) -> Iterator[None]:
    """Meanwhile, the model's modules find `parts` by name. Raises ValueError for an unknown one."""
    homes = [module for path, module in [*sys.modules.items()] if HOMES.match(path)]
    with ExitStack() as stack:
        for name, part in parts.items():
            users = [home for home in homes if hasattr(home, name)]
            if not users:
                raise ValueError(f"no part of the translator is called {name!r}")
            for home in users:
                stack.enter_context(patch.object(home, name, part))
        yield


@contextmanager
def watched(parts: Parts) -> Iterator[list[str]]:
    """Afterwards the list names those of `parts` that were never called, and dropout if it was on.

    It looks at each call in Python: parts of one notebook call each other without `standing_in`.
    """
    codes, called, remarks = {nn.functional.dropout.__code__: "dropout"}, set(), []
    for name, part in parts.items():  # a layer isn't called before its `forward` is
        inner = [part.forward] if hasattr(part, "forward") else [part, *vars(part).values()]
        functions = filter(inspect.isfunction, map(inspect.unwrap, inner))
        codes |= {function.__code__: name for function in functions}

    def note(frame: FrameType, event: str, _: object) -> None:
        name = codes.get(frame.f_code) if event == "call" else None
        if name != "dropout" or frame.f_locals["training"]:
            called.add(name)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield remarks
    finally:
        sys.setprofile(before)
    for name in sorted({*codes.values()} - called - {"dropout"}):
        remarks.append(f"Your {name} was never called.")
    if "dropout" in called:
        remarks.append("Yours leaves dropout on: chance has a say in each word.")


def fitted() -> Trained:
    """The trained model, made of what the names mean now. Raises ValueError if it doesn't fit."""
    try:
        return load_model(STUDIED)
    except ValueError as error:
        error.add_note("The trained weights don't fit your parts: a name or a shape differs.")
        raise


@torch.no_grad()
def mean_probability(texts: Sequence[str], trained: Trained) -> float:
    """What the model gives each next piece of `texts`, translations of `GERMAN`, on average."""
    probabilities = []
    for pair in encode_pairs([*zip(GERMAN, texts, strict=True)], trained.tokenizer):
        batch = make_batch([pair])
        x = trained.model(batch.src, batch.tgt, batch.src_mask, batch.tgt_mask)  # (1, T, D)
        shares = trained.model.generator(x).softmax(-1)  # (1, T, V)
        probabilities.append(shares.gather(-1, batch.tgt_y.unsqueeze(-1)).flatten())
    return torch.cat(probabilities).mean().item()


def mean_log_prob(trained: Trained) -> float:
    """What the beam search itself says of its four texts for `TYPO`, on average."""
    src = torch.tensor([source_ids(TYPO, trained.tokenizer)])  # (1, S)
    hypotheses = ch08.beam_search(trained.model, src, None, 30, beam=4)[0]
    return sum(h.log_prob for h in hypotheses) / len(hypotheses)


def verdict(yours: list[str], ours: list[str], number: float, expected: float) -> str:
    """One sentence: what the reader's parts do to the translations."""
    if math.isnan(number):
        return "Yours computes what is no number (NaN)."
    if yours == ours:
        same = abs(number - expected) < 1e-5
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

    The model is chapter 9's. A part of the beam search makes a beam of 4 translate, in place of or
    beside greedy decoding. Prints your translations and ours, and what is wrong with yours. Raises
    ValueError if a name is unknown or weights don't fit.
    """
    named = {part.__name__: part for part in parts} | named
    beams, sentences, what = [1], GERMAN, "probability of our translations' tokens"
    if named.keys() & BEAM_PARTS:
        beams = [1, 4] if "greedy_decode" in named else [4]
        sentences, what = (*GERMAN, TYPO), "log p of the last one's four hypotheses"

    def run() -> tuple[Trained, list[str]]:
        trained = fitted()
        trained.model.train()  # as in training: it is the search that has to turn dropout off
        texts = [text for beam in beams for text in ch08.plain_translate(trained, sentences, beam)]
        return Trained(trained.model.eval(), trained.tokenizer, trained.config), texts

    trained, ours = run()
    number = partial(mean_probability, ours) if beams == [1] else mean_log_prob
    expected = number(trained)
    with standing_in(named):
        with watched(named) as remarks:
            trained, yours = run()
        measured = number(trained)
    shown = [*zip(sentences * len(beams), yours, ours, strict=True)]
    for place, (german, text, right) in enumerate(shown, start=len(sentences) - len(shown)):
        if place >= 0 or text != right:  # of two searches, the first is shown where it differs
            text = text if len(text) < 90 else f"{text[:90]} …"
            print(german, f"  yours: {text}", f"  ours:  {right}", sep="\n")
    print(verdict(yours, ours, measured, expected), *remarks)
    print(f"Mean {what}: {measured:.3f} by yours, {expected:.3f} by ours.")


def losses_of(parts: Parts, model: nn.Module, data: TrainingData, steps: int) -> Iterator[float]:
    """Train `model` by `parts`, chapter 6's functions by name; yields each step's loss."""
    criterion = parts["LabelSmoothing"](SMALL.smoothing)
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.9, 0.98), eps=1e-9)
    plan = (step for epoch in count(1) for step in epoch_plan(SMALL, data, epoch))
    for number, (indices,) in enumerate(islice(plan, steps), start=1):
        optimizer.param_groups[0]["lr"] = parts["cosine_rate"](
            number, SMALL.lr, SMALL.warmup, steps
        )
        rows = make_batch([data.train[i] for i in indices])
        batch = parts["Batch"](rows.src, rows.full)
        step = parts["train_step"](model, [batch], criterion, optimizer, SMALL.clip)
        yield step.loss_per_token


def parting(yours: Sequence[float], ours: Sequence[float]) -> str:
    """What it means that the losses of the first steps agree, or where they part."""
    reasons = (
        "before any weight moved: the loss, the labels, the masks or what is counted",
        "after one step: the gradient, its length or the rate",
        "after some steps: gradients that weren't cleared, or the rate of later steps",
    )
    for step, pair in enumerate(zip(yours, ours, strict=True)):
        if not math.isclose(*pair, rel_tol=1e-9):
            numbers = "{:.10g} by yours, {:.10g} by ours".format(*pair)
            return f"The losses part at step {step + 1} ({numbers}), {reasons[min(step, 2)]}."
    return f"The same losses in {len(ours)} steps, to nine digits: yours computes what ours does."


def trains_with(*parts: Callable, steps: int = 240, beside: int = 20, **named: Callable) -> float:
    """Trains a small translator by your functions in place of ours of the same name, or of `named`.

    Prints whether the losses of the first steps are ours; then yours train on, and translate three
    captions. Returns the mean loss of the last ten steps. Raises ValueError if a name is unknown.
    """
    ours = {name: getattr(ch06, name) for name in PIECES}
    mine = ours | {part.__name__: part for part in parts} | named
    if unknown := mine.keys() - ours.keys():
        raise ValueError(f"no part of the training is called {unknown.pop()!r}")
    data, runs = prepare(SMALL), []
    for pieces in (ours, mine):
        torch.manual_seed(SMALL.seed)
        model = build_model(SMALL, len(data.tokenizer)).double()
        runs.append(losses_of(pieces, model, data, steps))
    right, losses = ([*islice(run, beside)] for run in runs)
    print(parting(losses, right))
    losses += runs[1]  # yours trains on
    last = sum(losses[-10:]) / 10
    print(f"Loss {losses[0]:.2f} at first, {last:.2f} after {steps} steps by yours.")
    for german, english in data.corpus["val"][:3]:
        src = torch.tensor([source_ids(german, data.tokenizer)])
        search = model.train(), src, padding_mask(src), 40
        with watched({}) as remarks:
            rows = [pieces["greedy_decode"](*search)[0].tolist() for pieces in (mine, ours)]
        yours, right = map(data.tokenizer.decode, rows)
        remarks += [f"  our greedy_decode: {right}"] * (yours != right)
        print(german, f"  yours:    {yours}", *remarks, f"  reference: {english}", sep="\n")
    return last
