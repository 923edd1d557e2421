"""Why the prefix mask is worse (chapter 18): `python -m scripts.studies.prefix_causes`.

Each suspect is one change, made under both masks, beside the unchanged stacks of the study `stacks`
(the same setting, batches and seeds); two are also made together. Where a change adds weights, the
stack begins as the unchanged one, so that its first loss is the same. A suspect without a change is
the length: each run has its outputs' length beside that of the references.
"""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from scripts.ch02_multi_head_attention import MultiHeadedAttention, merge_heads, split_heads
from scripts.ch06_training import BOS, PAD, UNK, Batch, LabelSmoothing
from scripts.ch08_decoding import keys_values_of
from scripts.ch17_small_gpt import OneStack
from scripts.ch18_one_stack import AfterSource, asked_pairs, hide_some, stack_greedy
from scripts.core.settings import TrainConfig
from scripts.fast.fast import FastPath, switches_for
from scripts.fast.passes import FastLayout
from scripts.studies import stacks
from scripts.studies.rows import one_run
from scripts.studies.runner import SEEDS, Plan, Run, study_command

BASE = replace(stacks.BASE, lr=0.0168, name="prefix-causes")  # the rate that suited all stacks
REACH = 16  # tokens further apart share a number
FIRST = 128  # the place of every target's <s>: no source is as long

Suspect = Literal["none", "own", "relative", "both", "fixed", "asked"]
SUSPECTS: dict[Suspect, str] = {
    "none": "unchanged",
    "own": "own weights for the source",
    "relative": "relative places",
    "both": "own weights and relative places",
    "fixed": f"targets from place {FIRST}",
    "asked": "source asked, too",
}


class ChangedStack(OneStack):
    """`plain` with what a suspect adds: layers that read the source, numbers for offsets."""

    def __init__(self, plain: OneStack, suspect: Suspect):
        super().__init__(plain.embed, plain.stack, plain.generator)
        self.reader = copy.deepcopy(plain.stack) if suspect in ("own", "both") else plain.stack
        N, h = len(plain.stack.layers), plain.stack.layers[0].self_attn.h
        table = nn.Parameter(torch.zeros(N, h, 2 * REACH + 1))  # (N, H, offsets)
        self.offsets = table if suspect in ("relative", "both") else None

    def bias(self, i: int, places: Tensor, others: Tensor) -> Tensor | float:
        """What layer i adds to scores: places (…, T) look at others (…, S), to (H, …, T, S)."""
        if self.offsets is None:
            return 0.0
        offset = places.unsqueeze(-1) - others.unsqueeze(-2)  # (…, T, S)
        return self.offsets[i][:, offset.clamp(-REACH, REACH) + REACH]


def by_side(
    modules: Sequence[nn.Module],
    function: Callable[..., Tensor],
    rows: Sequence[Tensor],
    of_source: Tensor,
) -> Tensor:
    """function(module, *rows) with modules (the target's, the source's), each for its own rows."""
    if modules[0] is modules[1]:
        return function(modules[0], *rows)
    sides = zip(modules, (~of_source, of_source), strict=True)
    parts = [function(module, *(x[mine] for x in rows)) for module, mine in sides]
    back = of_source.int().argsort(stable=True).argsort()  # targets came first
    return torch.cat(parts)[back]


def changed_rows(
    model: ChangedStack, ids: Tensor, mask: Tensor, of_source: Tensor, places: Tensor
) -> tuple[Tensor, FastLayout]:
    """The stack's outputs (N, D), without dropout, and the layout of ids (B, T)."""
    path = FastPath(switches_for(ids.device))
    layout = FastLayout(ids != PAD, path.switches.packed)
    layout.positions = layout.rows(places)
    x = path.embed(model.embed, ids, layout)  # (N, D)
    hidden = torch.zeros(mask.shape, dtype=x.dtype).masked_fill_(~mask, -math.inf).unsqueeze(1)
    row = torch.arange(ids.size(1))  # (T,)
    each = partial(by_side, of_source=layout.rows(of_source))

    def project(layer: nn.Module, x: Tensor) -> Tensor:
        attn = layer.self_attn
        parts = (attn.project_query, attn.project_key, attn.project_value)
        return path.project(path.norm(layer.sublayer[0].norm, x), *parts)  # (N, 3·D)

    def finish(layer: nn.Module, x: Tensor, heads: Tensor) -> Tensor:
        x = x + path.linear(layer.self_attn.project_output, heads)
        return path.residual(layer.sublayer[1], x, partial(path.feed_forward, layer.feed_forward))

    for i, layers in enumerate(zip(model.stack.layers, model.reader.layers, strict=True)):
        rows = each(layers, project, (x,))
        bias = hidden + model.bias(i, row, row)  # (B|1, H|1, T, T)
        heads = path.attend(layers[0].self_attn, rows, None, (layout, layout), bias)
        x = each(layers, finish, (x, heads))
    return each((model.stack.norm, model.reader.norm), path.norm, (x,)), layout


class ChangedReading(AfterSource):
    """Decoding with a changed stack; targets begin at `first`, or behind their sources."""

    def __init__(self, model: ChangedStack, src: Tensor, sees: Any, first: int | None = None):
        self.changed, self.places = model, src[:, :0]  # (B, L): those of what is cached
        super().__init__(OneStack(model.embed, model.reader, model.generator), src, sees)
        self.model = model  # from here on
        if first is not None:
            self.lengths = torch.full_like(self.lengths, first)

    def read(self, ids: Tensor, places: Tensor, mask: Tensor | None = None) -> Tensor:
        """As in `StackDecoding`, with the places kept."""
        self.new = places.expand_as(ids)
        self.places = torch.cat((self.places, self.new), dim=1)
        return super().read(ids, places, mask)

    def look(self, i: int, attn: MultiHeadedAttention, mask: Tensor | None, x: Tensor) -> Tensor:
        """As in `StackDecoding`, with the offsets' numbers in the scores."""
        stored = keys_values_of(attn, x)  # (2, B, H, T, d_k)
        if self.past[i] is not None:
            stored = torch.cat((self.past[i], stored), dim=-2)  # (2, B, H, L, d_k)
        self.past[i] = stored
        query = split_heads(attn.project_query(x), attn.h)  # (B, H, T, d_k)
        bias = self.changed.bias(i, self.new, self.places)  # (H, B, T, L)
        bias = bias.transpose(0, 1) if isinstance(bias, Tensor) else bias
        scores = query @ stored[0].mT / math.sqrt(query.size(-1)) + bias  # (B, H, T, L)
        scores = scores.masked_fill(~mask.unsqueeze(1), -math.inf)
        return attn.project_output(merge_heads(scores.softmax(-1) @ stored[1]))

    def keep(self, rows: Tensor) -> None:
        """Go on with the texts numbered rows (N,) alone."""
        super().keep(rows)
        self.places = self.places[rows]


def source_question(ids: Tensor, of_source: Tensor, sees: str, vocab: int) -> tuple[Tensor, Tensor]:
    """What a source is asked in training: ids (B, T) to read, and labels (B, T), for it alone.

    Under the causal mask, each next token. The prefix mask would show that, so 15% are hidden.
    """
    source = ids.masked_fill(~of_source, PAD)
    if sees == "causal":
        return ids, ids.roll(-1, dims=1).masked_fill(~of_source, PAD)
    hidden, labels = hide_some(source, vocab, torch.default_generator)
    hidden = hidden.masked_fill(hidden == vocab, UNK)  # the gap
    return torch.where(of_source, hidden, ids), labels


@dataclass(frozen=True)
class ChangedRow(stacks.StackRow):
    """One stack with one change."""

    suspect: Suspect = "own"

    def build(self, config: TrainConfig, vocab: int) -> ChangedStack:
        """The row's model over `vocab` pieces, tables tied, from the global seed."""
        return ChangedStack(super().build(config, vocab), self.suspect)

    def loss_of(self, config: TrainConfig) -> Callable[..., tuple[Tensor, Tensor]]:
        """Chapter 18's question, and perhaps the source's; the second sum is the target's."""

        def loss(
            model: ChangedStack, batch: Batch, criterion: LabelSmoothing
        ) -> tuple[Tensor, Tensor]:
            asked = asked_pairs(stacks.pairs_of(batch), self.sees)
            ids, T = asked.ids, asked.ids.size(1)
            start = (ids == BOS).int().argmax(1, keepdim=True)  # (B, 1)
            places = torch.arange(T).expand_as(ids)
            of_source, sums = places < start, []
            if self.suspect == "fixed":
                places = torch.where(of_source, places, places - start + FIRST)
            questions, vocab = [asked.labels], len(model.generator.proj.weight)
            if self.suspect == "asked" and model.training:
                ids, labels = source_question(ids, of_source, self.sees, vocab)
                questions.append(labels)
            x, layout = changed_rows(model, ids, asked.mask, of_source, places)
            for labels in map(layout.rows, questions):
                real, path = labels != PAD, FastPath(switches_for(ids.device))
                sums.append(path.rows_loss(model.generator, x[real], labels[real], criterion))
            return sum(loss for loss, _ in sums), sums[0][1]

        return loss

    @property
    def search(self) -> Callable[..., Tensor]:
        """Its greedy decoding: (model, src, src_mask, max_len) to ids."""
        first = FIRST if self.suspect == "fixed" else None
        reading = partial(ChangedReading, first=first)
        return partial(stack_greedy, sees=self.sees, reading=reading)


ROWS = {
    f"{sees}, {name}": ChangedRow("stacks", sees=sees, suspect=suspect)
    for sees in ("prefix", "causal")
    for suspect, name in SUSPECTS.items()
}


def plan_runs(plan: Plan) -> None:
    """Three seeds of each row, at the rate of all stacks."""
    plan += [{"row": row, "lr": BASE.lr, "seed": seed} for seed in SEEDS for row in ROWS]


def work(setting: Any, task: Run) -> Run:
    """One run of the study."""
    return one_run(ROWS[task["row"]], setting, task, stacks.greedy_bleu)


main = study_command("scripts.studies.prefix_causes", asdict(BASE), plan_runs, work)

if __name__ == "__main__":
    raise SystemExit(main())
