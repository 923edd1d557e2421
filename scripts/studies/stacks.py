"""Translating with two stacks, and with one (chapter 18): `python -m scripts.studies.stacks`.

Each has its own rate; all learn from the same batches, and decode greedily. With d_ff = 2·D an
encoder layer has 8·D² weights and a decoder layer 12·D²: 2 + 2 layers weigh as much as 5 of one
stack.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from scripts.ch06_training import BOS, PAD, Batch, LabelSmoothing
from scripts.ch07_multi30k import Example, source_ids
from scripts.ch17_small_gpt import Asked, OneStack, make_stack
from scripts.ch18_one_stack import AfterSource, asked_pairs, stack_greedy
from scripts.ch19_ablations import STUDY, StudyRow
from scripts.core.data import TrainingData
from scripts.core.models import Trained
from scripts.core.scores import corpus_bleu
from scripts.core.settings import TrainConfig
from scripts.fast.fast import FastPath, switches_for
from scripts.fast.passes import FastLayout
from scripts.fast.searching import cached_greedy
from scripts.fast.translating import search_rows
from scripts.studies.rows import one_run
from scripts.studies.runner import Plan, Run, study_command

BASE = replace(STUDY, d_ff=2 * STUDY.d_model, dropout=0.0, name="stacks")
LAYERS = 5  # of one stack


def one_stack(config: TrainConfig, vocab: int, **more: Any) -> OneStack:
    """The stack of `config`'s sizes over `vocab` tokens, from the global seed."""
    sizes = (config.layers, config.d_model, config.d_ff, config.heads, config.dropout)
    return make_stack(vocab, *sizes, norm_first=config.norm_first, **more)


def fast_stack_loss(
    model: OneStack, batch: Asked, criterion: LabelSmoothing, places: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`stack_loss` by the fast path: the same two sums, the same gradients.

    `places` (B, T) are the tokens' positions, if they aren't 0, 1, 2, … in each row.
    """
    path = FastPath(switches_for(batch.ids.device))
    layout = FastLayout(batch.ids != PAD, path.switches.packed)
    if places is not None:
        layout.positions = layout.rows(places)
    x = path.embed(model.embed, batch.ids, layout)  # (N, D): a row for each real token
    bias = torch.zeros(batch.mask.shape, dtype=x.dtype, device=x.device)
    bias = bias.masked_fill_(~batch.mask, -math.inf).unsqueeze(1)  # (B|1, 1, T|1, T)
    for layer in model.stack.layers:
        look = partial(path.self_attention, layer.self_attn, layout, bias=bias)
        x = path.residual(layer.sublayer[0], x, look)
        x = path.residual(layer.sublayer[1], x, partial(path.feed_forward, layer.feed_forward))
    x, labels = path.norm(model.stack.norm, x), layout.rows(batch.labels)
    asked = labels != PAD
    return path.rows_loss(model.generator, x[asked], labels[asked], criterion)


def pairs_of(batch: Batch) -> list[Example]:
    """The pairs of a padded batch, as lists of ids."""
    sides = ([row[row != PAD].tolist() for row in side] for side in (batch.src, batch.full))
    return [Example(src, tgt) for src, tgt in zip(*sides, strict=True)]


def restarted(ids: Tensor) -> Tensor:
    """The place of each of ids (B, T) in its own sentence: the target's begin at 0 again."""
    places = torch.arange(ids.size(1), device=ids.device).expand_as(ids)  # (B, T)
    start = (ids == BOS).int().argmax(1, keepdim=True)  # (B, 1): bos begins targets alone
    return torch.where(places < start, places, places - start)


class Restarted(AfterSource):
    """Targets whose positions begin at 0, not after their sources."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.lengths = torch.zeros_like(self.lengths)


@dataclass(frozen=True)
class StackRow(StudyRow):
    """One stack: what its source sees, and whether the target's positions begin again."""

    sees: Literal["causal", "prefix"] = "causal"
    anew: bool = False

    def build(self, config: TrainConfig, vocab: int) -> OneStack:
        """The row's model over `vocab` pieces, tables tied, from the global seed."""
        return one_stack(replace(config, layers=LAYERS), vocab)

    def loss_of(self, config: TrainConfig) -> Callable[..., tuple[Tensor, Tensor]]:
        """Chapter 18's question about chapter 6's batch, by the fast path."""

        def loss(model: OneStack, batch: Batch, criterion: LabelSmoothing) -> tuple[Tensor, Tensor]:
            asked = asked_pairs(pairs_of(batch), self.sees)
            places = restarted(asked.ids) if self.anew else None
            return fast_stack_loss(model, asked, criterion, places)

        return loss

    @property
    def search(self) -> Callable[..., Tensor]:
        """Its greedy decoding: (model, src, src_mask, max_len) to ids."""
        reading = Restarted if self.anew else AfterSource
        return partial(stack_greedy, sees=self.sees, reading=reading)


TWO = "encoder-decoder"
ROWS = {
    TWO: StudyRow("stacks"),
    "causal": StackRow("stacks"),
    "prefix": StackRow("stacks", sees="prefix"),
    "causal, positions anew": StackRow("stacks", anew=True),
    "prefix, positions anew": StackRow("stacks", sees="prefix", anew=True),
}


def greedy_bleu(row: StudyRow, trained: Trained, data: TrainingData) -> Run:
    """BLEU and length of greedy translations of the validation split, by the row's search."""
    sources, references = zip(*data.corpus["val"], strict=True)
    rows = [source_ids(source, trained.tokenizer) for source in sources]
    search = getattr(row, "search", cached_greedy)
    texts = [trained.tokenizer.decode(ids) for ids in search_rows(trained.model, rows, search)]
    scored = corpus_bleu(texts, references)
    return {"bleu": round(scored.score, 2), "length": round(scored.sys_len / scored.ref_len, 3)}


def plan_runs(plan: Plan) -> None:
    """Each row's sweep, then its seeds."""
    for row in ROWS:
        plan.seeds(plan.sweep({"row": row}, BASE.lr))


def work(setting: Mapping[str, Any], task: Run) -> Run:
    """One run of the study."""
    return one_run(ROWS[task["row"]], setting, task, greedy_bleu)


main = study_command("scripts.studies.stacks", asdict(BASE), plan_runs, work)

if __name__ == "__main__":
    raise SystemExit(main())
