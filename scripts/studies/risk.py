"""Minimum risk for a model that is already good: it learns from the texts of its own beam.

Shen et al. (2016), chapter 21's formula; candidates from a beam, and cross-entropy beside it, as in
Edunov, Ott, Auli, Grangier and Ranzato, "Classical Structured Prediction Losses for Sequence to
Sequence Learning" (2018). The mark is BLEU of the single sentence.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from scripts.ch06_training import BOS, EOS, PAD, LabelSmoothing
from scripts.ch07_multi30k import pad_rows
from scripts.ch21_learning_from_models import risk_of_candidates
from scripts.core.signals import StopSignal
from scripts.core.training import Training
from scripts.fast.fast import FAST, FastPath, Switches
from scripts.fast.passes import FastLayout
from scripts.fast.translating import DecodeOptions, decode_hypotheses

CANDIDATES = 8  # of the beam's texts are judged
SHARPNESS = 6.0  # what their scores are multiplied by to make Q
AHEAD = 64  # steps whose candidates are written together, by the model as it then is
ALPHA = 1.0  # of the beam that writes, and of the score from which Q is made
Attempt = tuple[list[int], float]  # a text's ids, without bos and eos, and its risk


def bleu_risks(texts: Sequence[str], reference: str) -> list[float]:
    """1 − BLEU/100 of each text against one reference: 0 for the reference itself.

    One is added to the counts of n-grams above the first, so that few matches differ from none
    (Lin and Och 2004).
    """
    from sacrebleu.metrics import BLEU

    metric = BLEU(smooth_method="add-k", smooth_value=1, effective_order=True)
    return [1 - metric.sentence_score(text, [reference]).score / 100 for text in texts]


class Judged(NamedTuple):
    """A batch: B sources, and for each its reference, then its candidates: N texts in all."""

    src: Tensor  # (B, S)
    full: Tensor  # (N, T + 1): bos, a text, eos, padding
    owner: Tensor  # (N,): which source each text belongs to
    is_reference: Tensor  # (N,), boolean
    risks: Tensor  # (N,); 0 for references


def text_rows(model: nn.Module, batch: Judged, switches: Switches) -> tuple[Tensor, Tensor, Tensor]:
    """The decoder's rows (M, D) for all texts, their labels (M,), and each row's text (M,).

    Each source is encoded once, however many texts it has.
    """
    path, packed = FastPath(switches), switches.packed
    tgt, labels = batch.full[:, :-1], batch.full[:, 1:]  # (N, T)
    is_source, is_target = batch.src != PAD, labels != PAD
    once, layout = FastLayout(is_source, packed), FastLayout(is_target, packed)
    copied = FastLayout(is_source[batch.owner], packed)  # a copy of its source for each text
    memory = once.spread(path.encode(model, batch.src, once))  # (B, S, D)
    x = path.decode(model, copied.gather(memory[batch.owner]), copied, tgt, layout)
    text = torch.arange(len(tgt), device=tgt.device).unsqueeze(1).expand_as(tgt)
    labels, text = layout.rows(labels), layout.rows(text)
    real = labels != PAD
    return x[real], labels[real], text[real]


def risk_loss(
    model: nn.Module,
    batch: Judged,
    criterion: LabelSmoothing,
    weight: float,
    switches: Switches = FAST,
) -> tuple[Tensor, Tensor]:
    """The references' two sums in nats; to the first, `weight` times the candidates' risk is added.

    A source's risk counts once for each token of its reference. Q is made from the score by which
    a beam chooses, log P / length^α, times `SHARPNESS`.
    """
    x, labels, text = text_rows(model, batch, switches)
    people = batch.is_reference[text]  # (M,)
    rows_loss = FastPath(switches).rows_loss
    loss, nll = rows_loss(model.generator, x[people], labels[people], criterion)
    log_probs = model.generator(x[~people]).log_softmax(dim=-1)
    chosen = log_probs.gather(-1, labels[~people].unsqueeze(-1)).squeeze(-1)
    scores = chosen.new_zeros(len(batch.full)).index_add(0, text[~people], chosen)  # (N,)
    lengths = (batch.full[:, 1:] != PAD).sum(dim=1)  # (N,), eos counted
    scores = (scores / lengths**ALPHA)[~batch.is_reference]
    counts = batch.owner[~batch.is_reference].bincount(minlength=len(batch.src)).tolist()
    risks = risk_of_candidates(scores, batch.risks[~batch.is_reference], counts, SHARPNESS)  # (B,)
    return loss + weight * (risks @ lengths[batch.is_reference].to(risks.dtype)), nll


class RiskTraining(Training):
    """A training that judges the texts of the model's own beam.

    The model writes for `AHEAD` steps at once. A state is only saved before it writes, so that a
    run that was stopped writes the same texts again.
    """

    def __init__(self, *args: Any, **named: Any):
        super().__init__(*args, **named)
        self.take.batch = self.judged  # instead of the pairs alone
        self.attempts: dict[int, list[Attempt]] = {}  # by pair

    def step(self) -> None:
        """As in `Training`, on candidates that the model wrote before one of the last steps."""
        if self.due():
            steps = self.steps[self.done : self.done + AHEAD]
            self.attempts = self.write([i for step in steps for batch in step for i in batch])
        super().step()

    def due(self) -> bool:
        """Whether the model writes before the next step."""
        return self.done % AHEAD == 0

    def heed(self, stop: StopSignal) -> None:
        """As in `Training`, when the model is about to write."""
        if self.due():
            super().heed(stop)

    def write(self, pairs: Sequence[int]) -> dict[int, list[Attempt]]:
        """The texts of the model's beam for the sources of these pairs, each with its risk."""
        sources, decode = [self.examples[i].src for i in pairs], self.trained.tokenizer.decode
        options, attempts = DecodeOptions(beam=CANDIDATES, alpha=ALPHA), {}
        beams = decode_hypotheses(self.trained, sources, options, CANDIDATES)
        for i, best in zip(pairs, beams, strict=True):
            texts = [[token for token in one.ids if token != EOS] for one in best]
            risks = bleu_risks([*map(decode, texts)], decode(self.examples[i].tgt))
            attempts[i] = [*zip(texts, risks, strict=True)]
        return attempts

    def judged(self, indices: Sequence[int]) -> Judged:
        """These pairs with their candidates, as one batch."""
        full, owner, is_reference, risks = [], [], [], []
        for place, i in enumerate(indices):
            attempts = self.attempts[i]
            full += [self.examples[i].tgt, *([BOS, *ids, EOS] for ids, _ in attempts)]
            owner += [place] * (1 + len(attempts))
            is_reference += [True] + [False] * len(attempts)
            risks += [0.0, *(risk for _, risk in attempts)]
        src = pad_rows([self.examples[i].src for i in indices])
        texts = map(torch.tensor, (owner, is_reference, risks))
        return Judged(*(part.to(self.device) for part in (src, pad_rows(full), *texts)))
