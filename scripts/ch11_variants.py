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
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from tqdm import tqdm

from scripts.ch01_attention import attention, subsequent_mask
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
from scripts.ch05_training import PAD, LabelSmoothing, train_step
from scripts.ch06_multi30k import (
    Example,
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
from scripts.ch09_decoding_and_bleu import cached_greedy, write_one_by_one
from scripts.checkpoints import write_whole
from scripts.records import ROOT, provenance, save_record


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
    config = PRESETS["narrow" if corpus == "multi30k" else "sample"]
    config = replace(config, epochs=2, max_tokens=1024, warmup=200, average=0)
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
STUDIES: dict[str, Callable[[VariantOptions], dict[str, Any]]] = {
    "translate": compare_translators,
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
