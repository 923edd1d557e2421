# ---
# jupyter:
#   jupytext:
#     cell_metadata_filter: tags,-all
#     notebook_metadata_filter: kernelspec,jupytext,-jupytext.text_representation.jupytext_version
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Chapter 11 · Variants
#
# HEADER

# %% tags=["bootstrap"]
# Make this chapter at home: the series is in a folder above, installed, or gets cloned beside it.
import os
import subprocess
import sys
from pathlib import Path

here = Path(globals().get("__file__", "notebook")).resolve()
beside = Path("from-attention-to-translation").resolve()
finders = [finder for finder in sys.meta_path if hasattr(finder, "find_spec")]
specs = [finder.find_spec("scripts", None) for finder in finders]
installed = [Path(spec.origin).resolve().parents[1] for spec in specs if spec and spec.origin]
homes = [*here.parents, *installed, beside]
root = next((home for home in homes if (home / "scripts/ch01_attention.py").exists()), None)
if root is None:
    address = os.environ.get("SERIES_REPOSITORY", "").removeprefix("git+")
    if not address:
        raise SystemExit("Set SERIES_REPOSITORY to the series' address, such as git+https://…")
    subprocess.run(["git", "clone", "--quiet", "--depth", "1", address, beside], check=True)
    root = beside
sys.path.insert(0, str(root))  # first, so that no other package named scripts shadows ours
for name, module in list(sys.modules.items()):
    if name.split(".")[0] == "scripts" and str(root) not in str(getattr(module, "__file__", "")):
        del sys.modules[name]
if root == beside:
    from scripts.first_cell import install_missing

    install_missing()

# In a terminal, with options or under torchrun, this chapter is a command and shows nothing.
if __name__ == "__main__" and "__file__" in globals() and (sys.argv[1:] or "RANK" in os.environ):
    from scripts.ch11_variants import main

    raise SystemExit(main())

# %%
import json
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import altair as alt
import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from scripts.ch01_attention import attention, padding_mask, subsequent_mask
from scripts.ch02_multi_head_attention import MultiHeadedAttention, merge_heads, split_heads
from scripts.ch03_embeddings_and_positions import (
    MAX_LEN,
    Embeddings,
    LearnedPositions,
    PositionalEncoding,
)
from scripts.ch04_encoder_decoder import (
    Encoder,
    EncoderDecoder,
    EncoderLayer,
    Generator,
    PositionwiseFeedForward,
    initialise,
)
from scripts.ch05_training import BOS, EOS, PAD, UNK, LabelSmoothing, train_step
from scripts.ch06_multi30k import (
    BPETokenizer,
    Example,
    load_corpus,
    make_batch,
    pad_rows,
    source_ids,
    token_batches,
)
from scripts.ch07_going_fast import (
    Layout,
    Switches,
    embed,
    fast_loss,
    feed_forward,
    keep_memory,
    normed,
    residual,
    rows_loss,
    self_attention,
    switches_for,
)
from scripts.ch08_training_run import (
    PRESETS,
    TrainConfig,
    Trained,
    TrainingData,
    build_model,
    corpus_bleu,
    decode_rows,
    dropout_off,
    held_out_splits,
    learning_rate,
    make_optimizer,
    pick_device,
    prepare,
)
from scripts.ch09_decoding_and_bleu import cached_greedy, sharpened, write_one_by_one
from scripts.charts import heatmap, lines, titled
from scripts.checkpoints import write_whole
from scripts.records import ROOT, load_record, provenance, save_record


# %%
def prefix_mask(prefix: Tensor, size: int) -> Tensor:
    """Who may look at whom in a prefix language model: True where allowed, (B, size, size).

    `prefix` (B,) holds each row's prefix length. Every position sees the whole prefix; behind the
    prefix, nobody sees what comes later. With prefix 0 it is `subsequent_mask`.
    """
    within = torch.arange(size, device=prefix.device) < prefix[:, None]  # (B, size)
    return subsequent_mask(size, prefix.device) | within[:, None, :]  # (B, size, size)


# %%
class OneStack(nn.Module):
    """Embedding, one stack of encoder layers, generator. The mask of a call says which variant it is.

    ids (B, T) and mask (B|1, T|1, T), True where attention is allowed, give vectors (B, T, D);
    `generator` turns those that are asked for into logits.
    """

    def __init__(self, embed: nn.Sequential, stack: Encoder, generator: Generator):
        super().__init__()
        self.embed = embed
        self.stack = stack
        self.generator = generator

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """ids (B, T), mask (B|1, T|1, T), to (B, T, D)."""
        return self.stack(self.embed(ids), mask)


def make_stack(
    vocab: int,
    N: int = 4,
    d_model: int = 128,
    d_ff: int = 512,
    h: int = 4,
    dropout: float = 0.1,
    *,
    norm_first: bool = True,
    tie: bool = True,
    positions: Literal["sinusoidal", "learned"] = "sinusoidal",
    max_len: int = 2 * MAX_LEN,
) -> OneStack:
    """One stack of N of chapter 4's encoder layers over `vocab` tokens, initialised as `make_model`.

    `tie` shares the embedding table with the generator. Raises ValueError for unknown positions.
    """
    kinds = {"sinusoidal": PositionalEncoding, "learned": LearnedPositions}
    if positions not in kinds:
        raise ValueError(f'positions must be "sinusoidal" or "learned", not {positions!r}')
    layer = EncoderLayer(
        d_model,
        MultiHeadedAttention(h, d_model, dropout),
        PositionwiseFeedForward(d_model, d_ff, dropout),
        dropout,
        norm_first,
    )
    model = OneStack(
        nn.Sequential(Embeddings(d_model, vocab), kinds[positions](d_model, dropout, max_len)),
        Encoder(layer, N, norm_first),
        Generator(d_model, vocab),
    )
    initialise(model)
    if tie:
        model.generator.proj.weight = model.embed[0].lut.weight
    return model


# %%
@dataclass
class Asked:
    """Rows of tokens with a question at some positions.

    ids (B, T); labels (B, T), `PAD` where nothing is asked; mask (B|1, T|1, T).
    """

    ids: Tensor
    labels: Tensor
    mask: Tensor

    @property
    def ntokens(self) -> int:
        """The positions that are asked: what the loss is divided by."""
        return int((self.labels != PAD).sum())

    def to(self, device: torch.device | str) -> "Asked":
        """The same on another device."""
        return Asked(self.ids.to(device), self.labels.to(device), self.mask.to(device))


def stack_loss(model: OneStack, batch: Asked, criterion: LabelSmoothing) -> tuple[Tensor, Tensor]:
    """Smoothed loss and negative log-likelihood, both summed over the positions that are asked."""
    return criterion(model.generator(model(batch.ids, batch.mask)), batch.labels)


# %%
def stack_rows(model: OneStack, ids: Tensor, mask: Tensor, how: Switches) -> tuple[Tensor, Layout]:
    """`model(ids, mask)` by chapter 7's functions: a row for each real token, (N, D), and their layout."""
    layout = Layout(ids != PAD, how.packed)
    x = embed(model.embed, ids, layout, how)  # (N, D)
    bias = torch.zeros(mask.shape, dtype=x.dtype, device=x.device)
    bias = bias.masked_fill_(~mask, -math.inf).unsqueeze(1)  # (B|1, 1, T|1, T)
    for layer in model.stack.layers:
        look = partial(self_attention, layer.self_attn, layout=layout, bias=bias, how=how)
        x = residual(layer.sublayer[0], x, look, how)
        x = residual(layer.sublayer[1], x, partial(feed_forward, layer.feed_forward, how=how), how)
    return normed(model.stack.norm, x, how), layout


def fast_stack_loss(
    model: OneStack, batch: Asked, criterion: LabelSmoothing
) -> tuple[Tensor, Tensor]:
    """`stack_loss` by the fast path: the same two sums, the same gradients."""
    how = switches_for(batch.ids.device)
    x, layout = stack_rows(model, batch.ids, batch.mask, how)
    labels = layout.rows(batch.labels)
    asked = labels != PAD
    return rows_loss(model.generator, x[asked], labels[asked], criterion, how)


# %%
def train_variant(
    model: nn.Module,
    config: TrainConfig,
    plan: Callable[[int], list[list[int]]],
    batch_of: Callable[[list[int], int], Any],
    loss_of: Callable[..., tuple[Tensor, Tensor]],
    validate: Callable[[nn.Module], dict[str, float]] | None = None,
) -> list[dict[str, float]]:
    """Train by `config`'s optimizer, schedule, smoothing and epochs; a row for each epoch.

    `plan(epoch)` gives the epoch's batches of indices, `batch_of(indices, epoch)` makes one, and
    `validate`, with dropout off, adds to the row. All variants of this chapter train here.
    """
    device = next(model.parameters()).device
    optimizer = make_optimizer(config, model)
    rate = learning_rate(config, config.epochs * len(plan(1)))
    criterion, history, step = LabelSmoothing(config.smoothing), [], 0
    for epoch in range(1, config.epochs + 1):
        model.train()
        nll = tokens = 0.0
        for indices in tqdm(plan(epoch), f"epoch {epoch}", leave=False, mininterval=30):
            step += 1
            for group in optimizer.param_groups:
                group["lr"] = rate(step)
            batch = batch_of(indices, epoch).to(device)
            report = train_step(model, [batch], criterion, optimizer, config.clip, loss_of)
            nll, tokens = nll + report.nll, tokens + report.tokens
        row = {"epoch": epoch, "train_nats": round(nll / tokens, 4)}
        with dropout_off(model), torch.no_grad():
            history.append(row | (validate(model) if validate else {}))
        tqdm.write(str(history[-1]))
    return history


@torch.no_grad()
def nats_per_token(
    model: nn.Module, batches: Sequence[Any], loss_of: Callable[..., tuple[Tensor, Tensor]]
) -> float:
    """Mean negative log-likelihood of what is asked in `batches`, dropout off."""
    device = next(model.parameters()).device
    with dropout_off(model):
        sums = [loss_of(model, batch.to(device), LabelSmoothing(0.0))[1] for batch in batches]
    return float(sum(sums)) / sum(batch.ntokens for batch in batches)


# %%
def asked_pairs(examples: Sequence[Example], sees: Literal["causal", "prefix"]) -> Asked:
    """Pairs as one row each: source, its eos, then bos and the target; asked is the target alone.

    The bos that begins a target is the separator. `sees` "prefix" lets every position see the whole
    source; "causal" lets none see what comes later.
    """
    rows = pad_rows([e.src + e.tgt for e in examples])  # (B, T+1)
    prefix = torch.tensor([len(e.src) for e in examples])  # (B,)
    ids, labels = rows[:, :-1], rows[:, 1:]
    size = ids.size(1)
    in_source = torch.arange(size) < prefix[:, None]  # (B, T)
    mask = prefix_mask(prefix, size) if sees == "prefix" else subsequent_mask(size)
    return Asked(ids, labels.masked_fill(in_source, PAD), mask)


# %%
class StackDecoding:
    """A text in progress for each of B sources, every token computed once; for `write_one_by_one`.

    `src` (B, S), padded at its end, may be empty (S = 0). `sees` is the source's mask, as in
    `asked_pairs`. Cached are each layer's keys and values, (B, H, L, d_k).
    """

    def __init__(self, model: OneStack, src: Tensor, sees: Literal["causal", "prefix"] = "causal"):
        self.model = model
        self.real = src.new_zeros(len(src), 0, dtype=torch.bool)  # (B, L): cached, and no padding
        self.past: list[tuple[Tensor, Tensor] | None] = [None] * len(model.stack.layers)
        self.lengths = (src != PAD).sum(1)  # (B,): where the next token stands
        if src.size(1):
            S = src.size(1)
            places = torch.arange(S, device=src.device).expand_as(src)
            real = src != PAD
            mask = (
                real[:, None]
                if sees == "prefix"
                else real[:, None] & subsequent_mask(S, src.device)
            )
            self.extend(src, places, mask.expand(-1, S, -1), real)

    def extend(self, ids: Tensor, places: Tensor, mask: Tensor, real: Tensor) -> Tensor:
        """New tokens ids (B, T) at places (B, T), mask (B, T, L + T): their vectors (B, T, D)."""
        embedding, position = self.model.embed
        x = embedding(ids) + position.pe[places]  # (B, T, D)
        self.real = torch.cat((self.real, real), dim=1)
        for i, layer in enumerate(self.model.stack.layers):
            x = layer.sublayer[0](x, partial(self.look, i, layer.self_attn, mask=mask))
            x = layer.sublayer[1](x, layer.feed_forward)
        return self.model.stack.norm(x)

    def look(self, i: int, attn: MultiHeadedAttention, x: Tensor, mask: Tensor) -> Tensor:
        """Self-attention of layer i from new x (B, T, D) to all that is cached and to itself."""
        q, k, v = (
            split_heads(project(x), attn.h)  # (B, H, T, d_k)
            for project in (attn.project_query, attn.project_key, attn.project_value)
        )
        if self.past[i] is not None:
            k, v = (torch.cat(pair, dim=2) for pair in zip(self.past[i], (k, v), strict=True))
        self.past[i] = k, v  # (B, H, L + T, d_k) each
        return attn.project_output(merge_heads(attention(q, k, v, mask.unsqueeze(1))[0]))

    def step(self, tokens: Tensor) -> Tensor:
        """Continue each text by one of tokens (B, 1): the last positions (B, D)."""
        new = torch.ones_like(tokens, dtype=torch.bool)
        mask = torch.cat((self.real, new), dim=1)[:, None]  # (B, 1, L + 1)
        x = self.extend(tokens, self.lengths[:, None], mask, new)
        self.lengths = self.lengths + 1
        return x[:, -1]

    def logits(self, x: Tensor) -> Tensor:
        """Last positions x (B, D) to what may come next, (B, V)."""
        return self.model.generator(x)

    def keep(self, rows: Tensor) -> None:
        """Go on with the texts numbered rows (N,) alone."""
        self.real, self.lengths = self.real[rows], self.lengths[rows]
        self.past = [(k[rows], v[rows]) for k, v in self.past]


def stack_greedy(
    model: OneStack,
    src: Tensor,
    src_mask: Tensor | None,
    max_len: int,
    sees: Literal["causal", "prefix"] = "causal",
) -> Tensor:
    """The likeliest token, again and again, behind src (B, S): ids (B, ≤ max_len), as `greedy_decode`."""
    with dropout_off(model), torch.no_grad():
        return write_one_by_one(
            StackDecoding(model, src, sees),
            src,
            max_len,
            lambda decoding, x: (decoding.logits(x).argmax(-1), None),
        )[0]


# %%
@dataclass
class VariantOptions:
    """Options of `translate`, `gpt` and `classify`."""

    corpus: Literal["sample", "multi30k"] = "multi30k"
    """What to learn from."""
    seeds: int = 2
    """Runs of each kind: their spread is the noise."""
    epochs: int | None = None
    """Passes over the training split; by default the chapter's."""
    device: str = "cpu"
    """Where they run."""
    save: bool = False
    """Keep the result as results/variants-WHAT-CORPUS.json, which the chapter shows."""


def once(folder: Path, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `work` gives, kept as folder/score.json; done before, it is only read."""
    path = folder / "score.json"
    if path.is_file():
        return json.loads(path.read_text("utf-8"))
    score = work()
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(score, ensure_ascii=False).encode())
    return score


# %%
TRANSLATORS = {  # kind: what its source positions may see; None is the encoder-decoder
    "encoder-decoder": None,
    "decoder-only, causal": "causal",
    "decoder-only, prefix": "prefix",
}


def translator_config(corpus: str, kind: str) -> TrainConfig:
    """Chapter 8's preset for `corpus`, shorter; one stack gets layers enough for equal parameters.

    A decoder layer has half as many weights again as an encoder layer where d_ff = 2·D, so that
    2 + 2 layers weigh as much as 5 of one stack. A joint row holds both sides: twice the tokens.
    """
    config = replace(PRESETS["sample"], corpus=corpus, epochs=2, average=0)
    if corpus == "multi30k":
        config = replace(config, d_model=64, d_ff=128, vocab=2000, lr=4e-3)
    if TRANSLATORS[kind] is None:
        return config
    return replace(config, layers=5, max_tokens=2 * config.max_tokens)


def make_translator(config: TrainConfig, kind: str, vocab: int) -> EncoderDecoder | OneStack:
    """The model of that kind over `vocab` joint pieces, tables tied, from the global seed."""
    if TRANSLATORS[kind] is None:
        return build_model(config, vocab)
    sizes = (config.layers, config.d_model, config.d_ff, config.heads, config.dropout)
    return make_stack(vocab, *sizes, norm_first=config.norm_first)


def train_translator(
    kind: str, config: TrainConfig, data: TrainingData
) -> tuple[nn.Module, list[dict[str, float]]]:
    """Train one translator of that kind on `data`; the model and its history."""
    sees = TRANSLATORS[kind]
    torch.manual_seed(config.seed)
    model = make_translator(config, kind, len(data.tokenizer)).to(pick_device(config.device))
    make, loss_of = make_batch, fast_loss
    joint = list(data.train)
    if sees:
        make, loss_of = partial(asked_pairs, sees=sees), fast_stack_loss
        joint = [Example([], e.src + e.tgt) for e in data.train]  # as long as its row
    val = [make([data.val[i] for i in part]) for part in token_batches(data.val, 2048)]
    history = train_variant(
        model,
        config,
        lambda epoch: token_batches(
            joint, config.max_tokens, random.Random(f"{config.seed}:{epoch}")
        ),
        lambda indices, epoch: make([data.train[i] for i in indices]),
        loss_of,
        lambda model: {"val_nats": round(nats_per_token(model, val, loss_of), 4)},
    )
    return model, history


def translator_search(kind: str) -> Callable[..., Tensor]:
    """Greedy decoding that suits the kind: (model, src, src_mask, max_len) to ids."""
    sees = TRANSLATORS[kind]
    return cached_greedy if sees is None else partial(stack_greedy, sees=sees)


def translator_run(kind: str, config: TrainConfig, data: TrainingData) -> dict[str, Any]:
    """Train and score one translator: greedy BLEU on validation and on the first test split."""
    start = time.perf_counter()
    model, history = train_translator(kind, config, data)
    score = {
        "seed": config.seed,
        "parameters": sum(p.numel() for p in model.parameters()),
        "seconds": round(time.perf_counter() - start),
        "history": history,
    }
    trained = Trained(model, data.tokenizer, config)
    for name in ("val", held_out_splits(data.corpus)[0]):
        sources, references = zip(*data.corpus[name], strict=True)
        rows = [source_ids(source, data.tokenizer) for source in sources]
        texts = decode_rows(trained, rows, translator_search(kind))
        score[name] = round(corpus_bleu(texts, references).score, 2)
    return score


# %%
def compare_translators(options: VariantOptions) -> dict[str, Any]:
    """Train every kind of `TRANSLATORS` with every seed; the record."""
    data = prepare(translator_config(options.corpus, "encoder-decoder"))
    runs: dict[str, list[dict[str, Any]]] = {kind: [] for kind in TRANSLATORS}
    for seed in range(1, options.seeds + 1):
        for kind in TRANSLATORS:
            config = translator_config(options.corpus, kind)
            config = replace(config, seed=seed, device=options.device)
            config = replace(config, epochs=options.epochs or config.epochs)
            slug = kind.replace(", ", "-")
            folder = ROOT / "runs" / f"variants-{options.corpus}" / f"{slug}-{config.epochs}-{seed}"
            runs[kind].append(once(folder, partial(translator_run, kind, config, data)))
            tqdm.write(f"{kind}, seed {seed}: {runs[kind][-1]}")
    kept = ("layers", "d_model", "d_ff", "heads", "vocab", "dropout", "epochs", "max_tokens", "lr")
    configs = {kind: asdict(translator_config(options.corpus, kind)) for kind in TRANSLATORS}
    return {
        "test": held_out_splits(data.corpus)[0],
        "kinds": {
            kind: {"config": {key: configs[kind][key] for key in kept}, "runs": runs[kind]}
            for kind in TRANSLATORS
        },
    }


# %%
class Characters:
    """The alphabet of a character model: ids 0 to 3 are the series' special ones, then one a character.

    Characters that occur less than `least` times in `texts` are left out, and become `<unk>`.
    """

    def __init__(self, texts: Sequence[str], least: int = 10):
        counts = Counter(char for text in texts for char in text)
        self.alphabet = sorted(char for char, count in counts.items() if count >= least)
        self.ids = {char: i for i, char in enumerate(self.alphabet, start=4)}

    def __len__(self) -> int:
        return 4 + len(self.alphabet)

    def encode(self, text: str) -> list[int]:
        """`<s>`, the characters, `</s>`."""
        return [BOS, *(self.ids.get(char, UNK) for char in text), EOS]

    def decode(self, ids: Sequence[int]) -> str:
        """The characters up to the first `</s>`; `<unk>` shows as a box."""
        ids = list(ids)
        ids = ids[: ids.index(EOS)] if EOS in ids else ids
        return "".join(
            "□" if i == UNK else self.alphabet[i - 4] for i in ids if i > BOS or i == UNK
        )


# %%
def bits_per_character(nats: Sequence[float], rows: Sequence[Sequence[int]]) -> float:
    """Mean surprise in bits of all characters of `rows`, each caption's `</s>` counted.

    `nats` holds −ln p of each whole row as a model sees it, `<s>` given. The same function judges
    every model, over the same characters: that is what makes the figures comparable.
    """
    predicted = sum(len(row) - 1 for row in rows)  # all but <s>
    return math.fsum(nats) / math.log(2) / predicted


# %%
def gram_counts(rows: Sequence[Sequence[int]], order: int) -> list[Counter[tuple[int, ...]]]:
    """How often each n-gram occurs in `rows`, for n = 1 to `order`; `<s>` alone is not counted."""
    counts: list[Counter[tuple[int, ...]]] = [Counter() for _ in range(order)]
    for row in map(tuple, rows):
        for n, table in enumerate(counts, start=1):
            table.update(row[i : i + n] for i in range(len(row) - n + 1))
    del counts[0][(BOS,)]
    return counts


def continuation_counts(
    counts: Sequence[Counter[tuple[int, ...]]],
) -> list[Counter[tuple[int, ...]]]:
    """Of each n-gram, how many different tokens stand before it; the longest keep their counts.

    Nothing stands before `<s>`, so that n-grams which begin with it keep theirs as well.
    """
    adjusted = []
    for table, longer in zip(counts, counts[1:], strict=False):
        before = Counter(gram[1:] for gram in longer)
        before.update({gram: count for gram, count in table.items() if gram[0] == BOS})
        adjusted.append(before)
    return [*adjusted, counts[-1]]


def discounts(table: Counter[tuple[int, ...]]) -> tuple[float, float, float]:
    """What is taken off counts of 1, of 2, and of 3 and more (Chen and Goodman 1998, equation 26).

    Where a table is too small to estimate it from, 0.5, 1 and 1.5.
    """
    n = Counter(table.values())
    if not all(n[i] for i in (1, 2, 3, 4)):
        return 0.5, 1.0, 1.5
    y = n[1] / (n[1] + 2 * n[2])
    found = tuple(i - (i + 1) * y * n[i + 1] / n[i] for i in (1, 2, 3))
    return found if all(0 <= d <= i for i, d in enumerate(found, 1)) else (0.5, 1.0, 1.5)


# %%
class KneserNey:
    """An n-gram model with interpolated modified Kneser-Ney smoothing (Chen and Goodman 1998).

    `rows` are encoded captions, `vocab` the number of ids. All but `<pad>` and `<s>` can come next;
    below the single tokens, all of these are equally likely.
    """

    def __init__(self, counts: Sequence[Counter[tuple[int, ...]]], vocab: int):
        self.order = len(counts)
        self.nexts = vocab - 2
        self.tables = continuation_counts(counts)
        self.discounts = [discounts(table) for table in self.tables]
        self.total: Counter[tuple[int, ...]] = Counter()  # c(h·): of each context
        self.saved: Counter[tuple[int, ...]] = Counter()  # what the discounts took off in it
        for table, off in zip(self.tables, self.discounts, strict=True):
            for gram, count in table.items():
                self.total[gram[:-1]] += count
                self.saved[gram[:-1]] += off[min(count, 3) - 1]

    def probability(self, token: int, context: tuple[int, ...]) -> float:
        """p(token | context), at most `order` − 1 tokens of it."""
        context = context[len(context) - min(len(context), self.order - 1) :]
        total = self.total.get(context)
        lower = partial(self.probability, token, context[1:]) if context else lambda: 1 / self.nexts
        if not total:  # a context that was never seen says nothing
            return lower()
        count = self.tables[len(context)].get((*context, token), 0)
        kept = max(count - self.discounts[len(context)][min(count, 3) - 1], 0.0) if count else 0.0
        return (kept + self.saved[context] * lower()) / total

    def nats(self, row: Sequence[int]) -> float:
        """−ln p of a row after its `<s>`."""
        row = tuple(row)
        places = range(1, len(row))
        return -sum(
            math.log(self.probability(row[i], row[max(0, i - self.order + 1) : i])) for i in places
        )


# %%
ORDERS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10)


def ngram_bits(
    train: Sequence[Sequence[int]],
    tests: dict[str, Sequence[Sequence[int]]],
    vocab: int,
    orders: Sequence[int] = ORDERS,
) -> list[dict[str, float]]:
    """Bits per character of each order's model on each of `tests`."""
    counts = gram_counts(train, max(orders))
    rows = []
    for order in orders:
        model = KneserNey(counts[:order], vocab)
        rows.append({"order": order, "entries": sum(map(len, model.tables))})
        for name, test in tests.items():
            rows[-1][name] = round(bits_per_character([model.nats(row) for row in test], test), 4)
    return rows


# %%
def asked_next(rows: Sequence[Sequence[int]]) -> Asked:
    """A language model's question: every token's next one. Rows of ids with `<s>` and `</s>`."""
    ids = pad_rows(rows)  # (B, T+1)
    return Asked(ids[:, :-1], ids[:, 1:], subsequent_mask(ids.size(1) - 1))


def row_nats(model: OneStack, rows: Sequence[Sequence[int]], size: int = 64) -> list[float]:
    """−ln p of each row under a language model, dropout off; for `bits_per_character`."""
    device = next(model.parameters()).device
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    nats = [0.0] * len(rows)
    with dropout_off(model), torch.no_grad():
        for start in range(0, len(order), size):
            part = order[start : start + size]
            batch = asked_next([rows[i] for i in part]).to(device)
            log_p = model.generator(model(batch.ids, batch.mask)).log_softmax(-1)  # (B, T, V)
            each = log_p.gather(-1, batch.labels.unsqueeze(-1)).squeeze(-1)  # (B, T)
            each = each.masked_fill(batch.labels == PAD, 0.0).double().sum(1)  # (B,)
            for i, value in zip(part, each.tolist(), strict=True):
                nats[i] = -value
    return nats


def sample_texts(
    model: OneStack, count: int, temperature: float, seed: int, max_len: int = 120
) -> Tensor:
    """`count` texts drawn from a language model, from `<s>` on: ids (count, ≤ max_len)."""
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    nothing = torch.empty(count, 0, dtype=torch.int64, device=device)  # (B, 0): no source

    def draw(decoding: StackDecoding, x: Tensor) -> tuple[Tensor, None]:
        p = sharpened(decoding.logits(x).log_softmax(-1), temperature)  # (N, V)
        return torch.multinomial(p, 1, generator=generator).squeeze(1), None

    with dropout_off(model), torch.no_grad():
        return write_one_by_one(StackDecoding(model, nothing), nothing, max_len, draw)[0]


# %%
GPT_CONFIGS = {
    "sample": TrainConfig(
        corpus="sample", layers=2, d_model=64, d_ff=256, heads=4, dropout=0.0, smoothing=0.0,
        epochs=1, max_tokens=2048, lr=4e-3, warmup=50,
    ),
    "multi30k": TrainConfig(
        corpus="multi30k", layers=3, d_model=128, d_ff=512, heads=4, dropout=0.0, smoothing=0.0,
        epochs=2, max_tokens=1024, lr=3e-3, warmup=200,
    ),
}  # fmt: skip
TEMPERATURES = (0.5, 0.8, 1.0, 1.5)


def make_gpt(config: TrainConfig, vocab: int) -> OneStack:
    """A small language model: learned positions, table tied to the generator, from the global seed."""
    sizes = (config.layers, config.d_model, config.d_ff, config.heads, config.dropout)
    return make_stack(vocab, *sizes, norm_first=config.norm_first, positions="learned", max_len=256)


def train_gpt(
    config: TrainConfig, rows: dict[str, list[list[int]]], vocab: int
) -> tuple[OneStack, list[dict[str, float]]]:
    """Train a language model on rows["train"], watched on rows["val"]; the model and its history."""
    torch.manual_seed(config.seed)
    model = make_gpt(config, vocab).to(pick_device(config.device))
    as_examples = [Example([], row) for row in rows["train"]]
    history = train_variant(
        model,
        config,
        lambda epoch: token_batches(
            as_examples, config.max_tokens, random.Random(f"{config.seed}:{epoch}")
        ),
        lambda indices, epoch: asked_next([rows["train"][i] for i in indices]),
        fast_stack_loss,
        lambda model: {
            "val_bits": round(bits_per_character(row_nats(model, rows["val"]), rows["val"]), 4)
        },
    )
    return model, history


def caption_rows(corpus: str) -> tuple[Characters, dict[str, list[list[int]]]]:
    """The English side of a corpus in characters: the alphabet of train, and each split's rows."""
    texts = {name: [english for _, english in pairs] for name, pairs in load_corpus(corpus).items()}
    characters = Characters(texts["train"])
    return characters, {
        name: [characters.encode(text[:250]) for text in lines] for name, lines in texts.items()
    }


def gpt_run(
    config: TrainConfig, characters: Characters, rows: dict[str, list[list[int]]], test: str
) -> dict[str, Any]:
    """Train, score and sample one mini-GPT."""
    start = time.perf_counter()
    model, history = train_gpt(config, rows, len(characters))
    known = {characters.decode(row) for row in rows["train"]}
    samples = {}
    for temperature in TEMPERATURES:
        texts = [
            characters.decode(ids) for ids in sample_texts(model, 200, temperature, 1).tolist()
        ]
        words = [word for text in texts for word in text.rstrip(".").lower().split()]
        samples[f"{temperature:g}"] = {"texts": texts[:3], "copied": sum(t in known for t in texts)}
        samples[f"{temperature:g}"]["words"] = len(words)
        samples[f"{temperature:g}"]["different words"] = len(set(words))
    return {
        "seed": config.seed,
        "parameters": sum(p.numel() for p in model.parameters()),
        "history": history,
        "val": history[-1]["val_bits"],
        test: round(bits_per_character(row_nats(model, rows[test]), rows[test]), 4),
        "samples": samples,
        "seconds": round(time.perf_counter() - start),
    }


def study_gpt(options: VariantOptions) -> dict[str, Any]:
    """Mini-GPTs and n-gram models on the English captions; what the record says of them."""
    characters, rows = caption_rows(options.corpus)
    test = next(name for name in rows if name.startswith("test"))
    unknown = {name: sum(row.count(UNK) for row in rows[name]) for name in ("train", "val", test)}
    tests = {name: rows[name] for name in ("val", test)}
    folder = ROOT / "runs" / f"variants-{options.corpus}"
    ngrams = once(
        folder / "ngrams", lambda: {"rows": ngram_bits(rows["train"], tests, len(characters))}
    )
    runs = []
    for seed in range(1, options.seeds + 1):
        config = replace(GPT_CONFIGS[options.corpus], seed=seed, device=options.device)
        config = replace(config, epochs=options.epochs or config.epochs)
        work = partial(gpt_run, config, characters, rows, test)
        runs.append(once(folder / f"gpt-{config.epochs}-{seed}", work))
    kept = ("layers", "d_model", "d_ff", "heads", "dropout", "epochs", "max_tokens", "lr", "warmup")
    return {
        "test": test,
        "alphabet": "".join(characters.alphabet),
        "predicted": {name: sum(len(row) - 1 for row in rows[name]) for name in unknown},
        "unknown": unknown,
        "ngrams": ngrams["rows"],
        "config": {key: asdict(config)[key] for key in kept},
        "runs": runs,
    }


# %%
NUMBER = {  # a finite verb of captions, third person: singular to plural
    "steht": "stehen", "sitzt": "sitzen", "geht": "gehen", "läuft": "laufen", "spielt": "spielen",
    "fährt": "fahren", "hält": "halten", "trägt": "tragen", "springt": "springen", "liegt": "liegen",
    "schaut": "schauen", "blickt": "blicken", "macht": "machen", "rennt": "rennen",
    "arbeitet": "arbeiten", "wartet": "warten", "klettert": "klettern", "tanzt": "tanzen",
    "lächelt": "lächeln", "posiert": "posieren", "benutzt": "benutzen", "versucht": "versuchen",
    "schläft": "schlafen", "isst": "essen", "liest": "lesen", "sieht": "sehen", "zieht": "ziehen",
    "kauft": "kaufen", "trinkt": "trinken", "ist": "sind", "hat": "haben", "wird": "werden",
}  # fmt: skip
GAP = "<mask>"
PUNCTUATION = str.maketrans({mark: f" {mark} " for mark in '.,;:!?"()'})


@dataclass(frozen=True)
class GapItem:
    """A German caption without its verb: the words before and behind the gap, and the verb's number."""

    before: tuple[str, ...]
    behind: tuple[str, ...]
    plural: bool

    @property
    def words(self) -> tuple[str, ...]:
        """The words with the gap in place."""
        return (*self.before, GAP, *self.behind)


def gap_item(text: str) -> GapItem | None:
    """The caption with its finite verb taken out, or None where the rule does not find just one.

    The rule: exactly one word of the caption is in `NUMBER`; a plural form, which German also uses as
    the infinitive, doesn't follow "zu" and is followed by a word.
    """
    words = tuple(text.translate(PUNCTUATION).split())
    plurals = set(NUMBER.values())
    found = [i for i, word in enumerate(words) if word in NUMBER or word in plurals]
    if len(found) != 1:
        return None
    at = found[0]
    before, verb, behind = words[:at], words[at], words[at + 1 :]
    if verb in plurals and (not before or before[-1] == "zu" or not behind or behind[0] in ".,"):
        return None
    return GapItem(before, behind, verb in plurals)


# %%
class WordsAndPairs:
    """Which of the words and pairs of neighbours a caption has: the features of a bag of words."""

    def __init__(self, items: Sequence[GapItem], least: int = 2):
        counts = Counter(feature for item in items for feature in self.features(item))
        kept = [feature for feature, count in counts.items() if count >= least]
        self.ids = {feature: i for i, feature in enumerate(kept)}

    @staticmethod
    def features(item: GapItem) -> list[tuple[str, ...]]:
        """Words, and pairs of neighbours; the gap is a word."""
        words = item.words
        return [*zip(words), *zip(words, words[1:], strict=False)]

    def bags(self, items: Sequence[GapItem]) -> tuple[Tensor, Tensor]:
        """All items' feature numbers in one row, and where each item's begin, for `F.embedding_bag`."""
        rows = [[self.ids[f] for f in self.features(item) if f in self.ids] for item in items]
        starts = torch.tensor([0, *map(len, rows)]).cumsum(0)[:-1]
        return torch.tensor([i for row in rows for i in row], dtype=torch.int64), starts


def fit_bag_of_words(
    items: Sequence[GapItem], penalty: float, steps: int = 60
) -> Callable[[Sequence[GapItem]], Tensor]:
    """Logistic regression on words and pairs, by L-BFGS: a function from items to logits (N,).

    `penalty` is λ of λ/2·Σw², added to the sum of the losses. The problem is convex: no seed.
    """
    table = WordsAndPairs(items)
    weight = torch.zeros(len(table.ids), 1, dtype=torch.float64, requires_grad=True)
    bias = torch.zeros((), dtype=torch.float64, requires_grad=True)

    def logits(items: Sequence[GapItem]) -> Tensor:
        ids, starts = table.bags(items)
        return F.embedding_bag(ids, weight, starts, mode="sum").squeeze(1) + bias  # (N,)

    bags = table.bags(items)
    plural = torch.tensor([float(item.plural) for item in items], dtype=torch.float64)
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=steps, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        found = F.embedding_bag(bags[0], weight, bags[1], mode="sum").squeeze(1) + bias
        value = F.binary_cross_entropy_with_logits(found, plural, reduction="sum")
        value = value + penalty / 2 * weight.square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    return torch.no_grad()(logits)


PENALTIES = (0.01, 0.1, 1.0, 10.0)


def share_right(logits: Tensor, items: Sequence[GapItem]) -> float:
    """The share of items whose number the sign of the logit tells."""
    plural = torch.tensor([item.plural for item in items])
    return float(((logits.cpu() > 0) == plural).double().mean())


def best_bag_of_words(
    items: Sequence[GapItem], val: Sequence[GapItem]
) -> tuple[Callable[[Sequence[GapItem]], Tensor], float]:
    """The bag of words whose penalty does best on `val`; with it, that penalty."""
    fitted = {penalty: fit_bag_of_words(items, penalty) for penalty in PENALTIES}
    best = max(fitted, key=lambda penalty: share_right(fitted[penalty](val), val))
    return fitted[best], best


# %%
def gap_row(item: GapItem, tokenizer: BPETokenizer) -> list[int]:
    """`<s>`, the pieces before the gap, the gap, the pieces behind it, `</s>`. The gap's id is V."""
    before, behind = (tokenizer.encode(" ".join(part)) for part in (item.before, item.behind))
    return [BOS, *before, len(tokenizer), *behind, EOS]


def hide_some(
    ids: Tensor, vocab: int, generator: torch.Generator, share: float = 0.15
) -> tuple[Tensor, Tensor]:
    """Ids (B, T) with some of them hidden, and the labels (B, T): `PAD` where nothing is asked.

    A `share` of the real tokens is chosen. Of those, 80% become the gap (id `vocab`), 10% any token,
    10% stay (Devlin et al. 2019, §3.1). Special tokens are neither chosen nor put in.
    """
    draw = torch.rand(ids.shape, generator=generator)  # (B, T)
    chosen = (ids > EOS) & (draw < share)
    fate = torch.rand(ids.shape, generator=generator)
    others = torch.randint(EOS + 1, vocab, ids.shape, generator=generator)
    hidden = ids.masked_fill(chosen & (fate < 0.8), vocab)
    hidden = torch.where(chosen & (fate >= 0.9), others, hidden)
    return hidden, ids.masked_fill(~chosen, PAD)


def asked_hidden(rows: Sequence[Sequence[int]], vocab: int, generator: torch.Generator) -> Asked:
    """A masked language model's question: which tokens are hidden here? Every token sees all."""
    ids = pad_rows(rows)  # (B, T)
    hidden, labels = hide_some(ids, vocab, generator)
    return Asked(hidden, labels, padding_mask(ids))


# %%
class NumberClassifier(nn.Module):
    """An encoder and one linear layer that reads the vector at the gap."""

    def __init__(self, encoder: OneStack, gap: int):
        super().__init__()
        self.encoder = encoder
        self.gap = gap
        self.head = nn.Linear(encoder.embed[0].d_model, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, ids: Tensor) -> Tensor:
        """ids (B, T), one gap in each row, to the logits (B,) of "plural"."""
        x, layout = stack_rows(self.encoder, ids, padding_mask(ids), switches_for(ids.device))
        return self.head(x[layout.rows(ids) == self.gap]).squeeze(1)  # (B, D) to (B,)


@torch.no_grad()
def number_logits(
    model: NumberClassifier, items: Sequence[GapItem], tokenizer: BPETokenizer
) -> Tensor:
    """The logits (N,) of "plural" for items, dropout off."""
    device = next(model.parameters()).device
    rows = [gap_row(item, tokenizer) for item in items]
    with dropout_off(model):
        return torch.cat(
            [
                model(pad_rows(rows[start : start + 64]).to(device)).cpu()
                for start in range(0, len(rows), 64)
            ]
        )


def fit_classifier(
    model: NumberClassifier,
    items: Sequence[GapItem],
    tokenizer: BPETokenizer,
    config: TrainConfig,
    steps: int,
    size: int = 32,
) -> None:
    """Train all of `model` on `items`: `steps` batches of `size`, drawn anew each pass."""
    device = next(model.parameters()).device
    rng = random.Random(config.seed)
    parameters = [
        p for name, p in model.named_parameters() if "generator" not in name or "lut" in name
    ]
    optimizer = torch.optim.Adam(parameters, lr=config.lr, betas=(0.9, 0.98), eps=1e-9)
    rate = learning_rate(config, steps)
    rows = [gap_row(item, tokenizer) for item in items]
    order: list[int] = []
    model.train()
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        if len(order) < size:
            order = rng.sample(range(len(items)), len(items))
        part, order = order[:size], order[size:]
        logits = model(pad_rows([rows[i] for i in part]).to(device))  # (B,)
        plural = torch.tensor([float(items[i].plural) for i in part], device=device)
        optimizer.zero_grad()
        F.binary_cross_entropy_with_logits(logits, plural.to(logits.dtype)).backward()
        nn.utils.clip_grad_norm_(parameters, config.clip)
        optimizer.step()


# %%
ENCODER_CONFIGS = {
    "sample": TrainConfig(
        corpus="sample", layers=2, d_model=64, d_ff=128, heads=4, dropout=0.0, smoothing=0.0,
        vocab=1000, epochs=2, max_tokens=1024, lr=3e-3, warmup=50,
    ),
    "multi30k": TrainConfig(
        corpus="multi30k", layers=3, d_model=128, d_ff=256, heads=4, dropout=0.1, smoothing=0.0,
        vocab=4096, epochs=4, max_tokens=1024, lr=3e-3, warmup=200,
    ),
}  # fmt: skip
LABELS = (100, 1000)  # how many labelled captions a classifier gets


def make_masked_model(config: TrainConfig, vocab: int) -> OneStack:
    """An encoder with a generator over `vocab` pieces and the gap, from the global seed."""
    sizes = (config.layers, config.d_model, config.d_ff, config.heads, config.dropout)
    return make_stack(vocab + 1, *sizes, norm_first=config.norm_first)


def pretrain(
    config: TrainConfig, texts: dict[str, Sequence[str]], tokenizer: BPETokenizer
) -> tuple[OneStack, list[dict[str, float]]]:
    """Train a masked language model on texts["train"], watched on texts["val"]; model and history."""
    torch.manual_seed(config.seed)
    model = make_masked_model(config, len(tokenizer)).to(pick_device(config.device))
    rows = {
        name: [[BOS, *tokenizer.encode(text)[:250], EOS] for text in lines]
        for name, lines in texts.items()
    }
    as_examples = {name: [Example([], row) for row in part] for name, part in rows.items()}
    draw = torch.Generator().manual_seed(config.seed)

    def ask(part: list[list[int]], generator: torch.Generator) -> Asked:
        return asked_hidden(part, len(tokenizer), generator)

    fixed = torch.Generator().manual_seed(0)  # the same questions after every epoch
    val = [
        ask([rows["val"][i] for i in part], fixed)
        for part in token_batches(as_examples["val"], 1024)
    ]
    history = train_variant(
        model,
        config,
        lambda epoch: token_batches(
            as_examples["train"], config.max_tokens, random.Random(f"{config.seed}:{epoch}")
        ),
        lambda indices, epoch: ask([rows["train"][i] for i in indices], draw),
        fast_stack_loss,
        lambda model: {"val_nats": round(nats_per_token(model, val, fast_stack_loss), 4)},
    )
    return model, history


def german_gaps(corpus: dict[str, list[tuple[str, str]]]) -> dict[str, list[GapItem]]:
    """The captions in which the rule finds one verb: train, val, and all test splits as one."""
    gaps: dict[str, list[GapItem]] = {"train": [], "val": [], "test": []}
    for name, pairs in corpus.items():
        found = (gap_item(german) for german, _ in pairs)
        gaps[name if name in gaps else "test"] += [item for item in found if item]
    return gaps


def misled(item: GapItem) -> bool:
    """Whether the noun phrase next to the gap may point the wrong way: a "mit", "von" or "in" before it."""
    return any(word in ("mit", "von", "in", "im", "an", "am", "auf", "vor") for word in item.before)


# %%
def classify_run(
    state: dict[str, Tensor] | None,
    config: TrainConfig,
    gaps: dict[str, list[GapItem]],
    tokenizer: BPETokenizer,
    labels: int,
) -> dict[str, Any]:
    """Train a classifier on `labels` captions, from pretrained weights `state` or from scratch."""
    items = random.Random(config.seed).sample(gaps["train"], labels)
    torch.manual_seed(config.seed)
    encoder = make_masked_model(config, len(tokenizer)).to(pick_device(config.device))
    if state is not None:
        encoder.load_state_dict(state)
    model = NumberClassifier(encoder, len(tokenizer)).to(pick_device(config.device))
    steps = min(700, max(150, 3 * labels // 32))
    fit_classifier(model, items, tokenizer, replace(config, lr=1e-3, warmup=steps // 10), steps)
    hard = [item for item in gaps["test"] if misled(item)]
    return {
        "labels": labels,
        "seed": config.seed,
        "steps": steps,
        "val": round(share_right(number_logits(model, gaps["val"], tokenizer), gaps["val"]), 4),
        "test": round(share_right(number_logits(model, gaps["test"], tokenizer), gaps["test"]), 4),
        "misled": round(share_right(number_logits(model, hard, tokenizer), hard), 4),
    }


def bag_run(seed: int, gaps: dict[str, list[GapItem]], labels: int) -> dict[str, Any]:
    """The bag of words on the same labelled captions."""
    items = random.Random(seed).sample(gaps["train"], labels)
    bag, penalty = best_bag_of_words(items, gaps["val"])
    hard = [item for item in gaps["test"] if misled(item)]
    return {
        "labels": labels,
        "seed": seed,
        "penalty": penalty,
        "val": round(share_right(bag(gaps["val"]), gaps["val"]), 4),
        "test": round(share_right(bag(gaps["test"]), gaps["test"]), 4),
        "misled": round(share_right(bag(hard), hard), 4),
    }


def study_classify(options: VariantOptions) -> dict[str, Any]:
    """Bag of words, encoder from scratch, encoder pretrained; by number of labels, with seeds."""
    corpus = load_corpus(options.corpus)
    base = replace(ENCODER_CONFIGS[options.corpus], device=options.device)
    base = replace(base, epochs=options.epochs or base.epochs)
    texts = {name: [german for german, _ in pairs] for name, pairs in corpus.items()}
    tokenizer = BPETokenizer.train(texts["train"], base.vocab)
    gaps = german_gaps(corpus)
    folder = ROOT / "runs" / f"variants-{options.corpus}"
    path = folder / f"masked-{base.epochs}.pt"

    def pretrained() -> dict[str, Any]:
        model, history = pretrain(base, texts, tokenizer)
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), path)
        return {"history": history, "parameters": sum(p.numel() for p in model.parameters())}

    masked = once(folder / path.stem, pretrained)
    state = torch.load(path, map_location="cpu", weights_only=True)
    sizes = [n for n in LABELS if n < len(gaps["train"])] + [len(gaps["train"])]
    runs: dict[str, list[dict[str, Any]]] = {
        "bag of words": [],
        "from scratch": [],
        "pretrained": [],
    }
    for seed in range(1, options.seeds + 1):
        for labels in sizes:
            works = {
                "bag of words": partial(bag_run, seed, gaps, labels),
                "from scratch": partial(
                    classify_run, None, replace(base, seed=seed), gaps, tokenizer, labels
                ),
                "pretrained": partial(
                    classify_run, state, replace(base, seed=seed), gaps, tokenizer, labels
                ),
            }
            for kind, work in works.items():
                slug = f"{kind.replace(' ', '-')}-{base.epochs}-{labels}-{seed}"
                runs[kind].append(once(folder / slug, work))
                tqdm.write(f"{kind}: {runs[kind][-1]}")
    kept = ("layers", "d_model", "d_ff", "heads", "vocab", "dropout", "epochs", "max_tokens", "lr")
    return {
        "captions": {name: len(gaps[name]) for name in gaps},
        "misled": sum(map(misled, gaps["test"])),
        "plural": {
            name: round(sum(item.plural for item in gaps[name]) / len(gaps[name]), 4)
            for name in gaps
        },
        "config": {key: asdict(base)[key] for key in kept},
        "pretraining": masked,
        "runs": runs,
    }


# %%
STUDIES: dict[str, Callable[[VariantOptions], dict[str, Any]]] = {
    "translate": compare_translators,
    "gpt": study_gpt,
    "classify": study_classify,
}


def study(what: str, options: VariantOptions) -> dict[str, Any]:
    """One of `STUDIES` as a record, saved if the options say so."""
    if pick_device(options.device).type == "cpu":
        keep_memory()
    defaults = VariantOptions(device=options.device, save=options.save)
    said = [f" --{k} {v}" for k, v in asdict(options).items() if v != getattr(defaults, k)]
    command = f"python scripts/ch11_variants.py {what}{''.join(said)} --save true"
    found = STUDIES[what](options)
    record = {**provenance(command, pick_device(options.device)), "corpus": options.corpus, **found}
    if options.save:
        save_record(f"variants-{what}-{options.corpus}", record)
    return record


def main(argv: Sequence[str] | None = None) -> int:
    """The command: `translate`, `gpt` or `classify`, with the options of `VariantOptions`."""
    from jsonargparse import ArgumentError, ArgumentParser

    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        if argv[:1] not in [[what] for what in STUDIES]:
            raise ValueError(f"say what to train: {', '.join(STUDIES)}")
        parser = ArgumentParser(prog=f"ch11_variants.py {argv[0]}", exit_on_error=False)
        parser.add_class_arguments(VariantOptions)
        study(argv[0], VariantOptions(**parser.parse_args(argv[1:]).as_dict()))
    except (ValueError, OSError, ArgumentError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: the same command goes on where it was", file=sys.stderr)
        return 130
    return 0
