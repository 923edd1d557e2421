"""The studies of chapters 17 and 18: `python -m scripts.studies.variants`, then what is studied.

A run that is done is kept below the folder of runs and only read when the command is given again,
so that it goes on where it was interrupted.
"""

if __name__ == "__main__":  # first, so that Ctrl-C while libraries load is answered, too
    from scripts.book.command import launch

    raise SystemExit(launch("scripts.studies.variants"))

import json
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from scripts import runs_folder
from scripts.book.command import GOES_ON, Command, as_typed
from scripts.book.files import write_whole
from scripts.book.records import provenance, save_record
from scripts.ch04_encoder_decoder import EncoderDecoder
from scripts.ch06_training import BOS, EOS, PAD, UNK, LabelSmoothing
from scripts.ch07_multi30k import (
    BPETokenizer,
    Example,
    make_batch,
    pad_rows,
    source_ids,
    token_batches,
)
from scripts.ch08_decoding import decode_rows, dropout_off
from scripts.ch12_going_fast import Layout, keep_memory
from scripts.ch17_small_gpt import (
    Asked,
    Characters,
    KneserNey,
    OneStack,
    asked_next,
    bits_per_character,
    gram_counts,
    make_stack,
    row_nats,
    sample_texts,
    train_variant,
)
from scripts.ch18_one_stack import (
    NumberClassifier,
    asked_hidden,
    asked_pairs,
    fit_bag_of_words,
    share_right,
    stack_greedy,
)
from scripts.corpora.gaps import GapItem, german_gaps
from scripts.corpora.load import load_corpus
from scripts.engine.checkpoints import load_tensors, load_weights, save_tensors, weights
from scripts.engine.data import TrainingData, prepare
from scripts.engine.fast import FastPath, fast_loss, switches_for
from scripts.engine.models import Trained
from scripts.engine.scores import corpus_bleu, held_out_splits
from scripts.engine.searching import cached_greedy
from scripts.engine.settings import PRESETS, TrainConfig, build_model, learning_rate, pick_device

TEMPERATURES = (0.5, 0.8, 1.0, 1.5)


@dataclass
class VariantOptions:
    """What is trained."""

    what: Literal["gpt", "classify", "translate"] = "gpt"
    """The study."""
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


def once(
    folder: Path, settings: dict[str, Any], work: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """What `work` gives, kept as folder/score.json and, for the same settings, read from there."""
    path = folder / "score.json"
    kept = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    if kept.get("settings") != settings:
        kept = {"settings": settings, "score": work()}
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(kept, ensure_ascii=False).encode())
    return kept["score"]


def stack_rows(
    model: OneStack, ids: Tensor, mask: Tensor, path: FastPath, places: Tensor | None = None
) -> tuple[Tensor, Layout]:
    """`model(ids, mask)` by the fast path: a row for each real token, (N, D), and their layout.

    `places` (B, T) are the tokens' positions, if they aren't 0, 1, 2, … in each row.
    """
    layout = Layout(ids != PAD, path.how.packed)
    if places is not None:
        layout.positions = layout.rows(places)
    x = path.embed(model.embed, ids, layout)  # (N, D)
    bias = torch.zeros(mask.shape, dtype=x.dtype, device=x.device)
    bias = bias.masked_fill_(~mask, -math.inf).unsqueeze(1)  # (B|1, 1, T|1, T)
    for layer in model.stack.layers:
        look = partial(path.self_attention, layer.self_attn, layout, bias)
        x = path.residual(layer.sublayer[0], x, look)
        x = path.residual(layer.sublayer[1], x, partial(path.feed_forward, layer.feed_forward))
    return path.norm(model.stack.norm, x), layout


def fast_stack_loss(
    model: OneStack, batch: Asked, criterion: LabelSmoothing, places: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`stack_loss` by the fast path: the same two sums, the same gradients."""
    path = FastPath(switches_for(batch.ids.device))
    x, layout = stack_rows(model, batch.ids, batch.mask, path, places)
    labels = layout.rows(batch.labels)
    asked = labels != PAD
    return path.rows_loss(model.generator, x[asked], labels[asked], criterion)


@torch.no_grad()
def nats_per_token(
    model: nn.Module, batches: Sequence[Any], loss_of: Callable[..., tuple[Tensor, Tensor]]
) -> float:
    """Mean negative log-likelihood of what is asked in `batches`, dropout off."""
    device = next(model.parameters()).device
    with dropout_off(model):
        sums = [loss_of(model, batch.to(device), LabelSmoothing(0.0))[1] for batch in batches]
    return float(sum(sums)) / sum(batch.ntokens for batch in batches)


def caption_rows(corpus: str) -> tuple[Characters, dict[str, list[list[int]]]]:
    """The English side of a corpus in characters: the alphabet of train, and each split's rows."""
    texts = {name: [english for _, english in pairs] for name, pairs in load_corpus(corpus).items()}
    characters = Characters(texts["train"])
    return characters, {
        name: [characters.encode(text[:250]) for text in lines] for name, lines in texts.items()
    }


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


GPT_CONFIGS = {
    "sample": TrainConfig(
        corpus="sample", layers=2, d_model=64, d_ff=256, heads=4, dropout=0.0, smoothing=0.0,
        epochs=1, max_tokens=2048, lr=4e-3, warmup=50,
    ),
    "multi30k": TrainConfig(
        corpus="multi30k", layers=4, d_model=128, d_ff=512, heads=4, dropout=0.0, smoothing=0.0,
        epochs=8, max_tokens=2048, optimizer="muon",
        lr=3e-3, muon_lr=3e-3, warmup=200,
    ),
}  # fmt: skip


def make_gpt(config: TrainConfig, vocab: int) -> OneStack:
    """A small language model: learned positions, tied tables, from the global seed."""
    sizes = (config.layers, config.d_model, config.d_ff, config.heads, config.dropout)
    return make_stack(vocab, *sizes, norm_first=config.norm_first, positions="learned", max_len=256)


def train_gpt(
    config: TrainConfig, rows: dict[str, list[list[int]]], vocab: int
) -> tuple[OneStack, list[dict[str, float]]]:
    """Train a language model on rows["train"], watched on rows["val"]; and its history."""
    torch.manual_seed(config.seed)
    model = make_gpt(config, vocab).to(pick_device(config.device))
    as_examples = [Example([], row) for row in rows["train"]]
    history = train_variant(
        model,
        config,
        lambda epoch: token_batches(
            as_examples, config.max_tokens, random.Random(f"{config.seed}:{epoch}")
        ),
        lambda indices: asked_next([rows["train"][i] for i in indices]),
        fast_stack_loss,
        lambda model: {
            "val_bits": round(bits_per_character(row_nats(model, rows["val"]), rows["val"]), 4)
        },
    )
    return model, history


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
    folder = runs_folder() / f"variants-{options.corpus}"
    ngrams = once(
        folder / "ngrams",
        {"characters": len(characters)},
        lambda: {"rows": ngram_bits(rows["train"], tests, len(characters))},
    )
    runs = []
    for seed in range(1, options.seeds + 1):
        config = replace(GPT_CONFIGS[options.corpus], seed=seed, device=options.device)
        config = replace(config, epochs=options.epochs or config.epochs)
        work = partial(gpt_run, config, characters, rows, test)
        runs.append(once(folder / f"gpt-{config.epochs}-{seed}", asdict(config), work))
    kept = (
        "layers",
        "d_model",
        "d_ff",
        "heads",
        "dropout",
        "epochs",
        "max_tokens",
        "optimizer",
        "lr",
    )
    return {
        "test": test,
        "alphabet": "".join(characters.alphabet),
        "predicted": {name: sum(len(row) - 1 for row in rows[name]) for name in unknown},
        "unknown": unknown,
        "ngrams": ngrams["rows"],
        "config": {key: asdict(config)[key] for key in kept},
        "runs": runs,
    }


PENALTIES = (0.01, 0.1, 1.0, 10.0)


def best_bag_of_words(
    items: Sequence[GapItem], val: Sequence[GapItem]
) -> tuple[Callable[[Sequence[GapItem]], Tensor], float]:
    """The bag of words whose penalty does best on `val`; with it, that penalty."""
    fitted = {penalty: fit_bag_of_words(items, penalty) for penalty in PENALTIES}
    best = max(fitted, key=lambda penalty: share_right(fitted[penalty](val), val))
    return fitted[best], best


ENCODER_CONFIGS = {
    "sample": TrainConfig(
        corpus="sample", layers=2, d_model=64, d_ff=128, heads=4, dropout=0.0, smoothing=0.0,
        vocab=1000, epochs=2, max_tokens=1024, lr=3e-3, warmup=50,
    ),
    "multi30k": TrainConfig(
        corpus="multi30k", layers=2, d_model=128, d_ff=256, heads=4, dropout=0.1, smoothing=0.0,
        vocab=4096, epochs=12, max_tokens=1024, optimizer="muon", lr=2e-3,
        muon_lr=2e-3, warmup=100,
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
    """Train a masked language model on texts["train"], watched on texts["val"]; and history."""
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
        lambda indices: ask([rows["train"][i] for i in indices], draw),
        fast_stack_loss,
        lambda model: {"val_nats": round(nats_per_token(model, val, fast_stack_loss), 4)},
    )
    return model, history


def misled(item: GapItem) -> bool:
    """Whether the noun phrase next to the gap may mislead: a "mit", "von" or "in" before it."""
    return any(word in ("mit", "von", "in", "im", "an", "am", "auf", "vor") for word in item.before)


def gap_row(item: GapItem, tokenizer: BPETokenizer) -> list[int]:
    """`<s>`, the pieces before the gap, the gap (id V), the pieces behind it, `</s>`."""
    before, behind = (tokenizer.encode(" ".join(part)) for part in (item.before, item.behind))
    return [BOS, *before, len(tokenizer), *behind, EOS]


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


def classify_run(
    pretrained: Path | None,
    config: TrainConfig,
    gaps: dict[str, list[GapItem]],
    tokenizer: BPETokenizer,
    labels: int,
) -> dict[str, Any]:
    """Train a classifier on `labels` captions, from the weights at `pretrained` or from scratch."""
    items = random.Random(config.seed).sample(gaps["train"], labels)
    torch.manual_seed(config.seed)
    encoder = make_masked_model(config, len(tokenizer)).to(pick_device(config.device))
    if pretrained is not None:
        load_weights(encoder, load_tensors(pretrained)[0], pretrained)
    model = NumberClassifier(encoder, len(tokenizer)).to(pick_device(config.device))
    steps = min(500, max(150, 3 * labels // 32))
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
    folder = runs_folder() / f"variants-{options.corpus}"
    path = folder / f"masked-{base.epochs}.safetensors"

    def pretraining() -> dict[str, Any]:
        model, history = pretrain(base, texts, tokenizer)
        folder.mkdir(parents=True, exist_ok=True)
        save_tensors(path, weights(model), {})
        return {"history": history, "parameters": sum(p.numel() for p in model.parameters())}

    masked = once(folder / path.stem, asdict(base), pretraining)
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
                    classify_run, path, replace(base, seed=seed), gaps, tokenizer, labels
                ),
            }
            for kind, work in works.items():
                slug = f"{kind.replace(' ', '-')}-{base.epochs}-{labels}-{seed}"
                settings = {**asdict(base), "seed": seed, "labels": labels}
                runs[kind].append(once(folder / slug, settings, work))
                tqdm.write(f"{kind}: {runs[kind][-1]}")
    kept = (
        "layers",
        "d_model",
        "d_ff",
        "heads",
        "vocab",
        "dropout",
        "epochs",
        "max_tokens",
        "optimizer",
        "lr",
    )
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


TRANSLATORS = {  # kind: what its source positions may see; None is the encoder-decoder
    "encoder-decoder": None,
    "decoder-only, causal": "causal",
    "decoder-only, prefix": "prefix",
}


def translator_config(corpus: str, kind: str) -> TrainConfig:
    """Chapter 9's preset for `corpus`, shorter; one stack gets layers enough for equal parameters.

    A decoder layer has half as many weights again as an encoder layer where d_ff = 2·D, so that
    2 + 2 layers weigh as much as 5 of one stack. A joint row holds both sides: twice the tokens.
    """
    config = replace(PRESETS["sample"], corpus=corpus, d_model=64, d_ff=128, epochs=3)
    config = replace(config, optimizer="muon", muon_lr=config.lr, warmup=100)
    if corpus == "multi30k":
        config = replace(config, vocab=2000)
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
        lambda indices: make([data.train[i] for i in indices]),
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


def compare_translators(options: VariantOptions) -> dict[str, Any]:
    """Train every kind of `TRANSLATORS` with every seed; the record."""
    data = prepare(translator_config(options.corpus, "encoder-decoder"))
    runs: dict[str, list[dict[str, Any]]] = {kind: [] for kind in TRANSLATORS}
    configs = {kind: translator_config(options.corpus, kind) for kind in TRANSLATORS}
    configs = {
        kind: replace(config, device=options.device, epochs=options.epochs or config.epochs)
        for kind, config in configs.items()
    }
    for seed in range(1, options.seeds + 1):
        for kind in TRANSLATORS:
            config = replace(configs[kind], seed=seed)
            slug = kind.replace(", ", "-")
            folder = runs_folder() / f"variants-{options.corpus}" / f"{slug}-{config.epochs}-{seed}"
            work = partial(translator_run, kind, config, data)
            runs[kind].append(once(folder, asdict(config), work))
            tqdm.write(f"{kind}, seed {seed}: {runs[kind][-1]}")
    kept = (
        "layers",
        "d_model",
        "d_ff",
        "heads",
        "vocab",
        "dropout",
        "epochs",
        "max_tokens",
        "optimizer",
        "lr",
    )
    return {
        "test": held_out_splits(data.corpus)[0],
        "kinds": {
            kind: {"config": {key: getattr(configs[kind], key) for key in kept}, "runs": runs[kind]}
            for kind in TRANSLATORS
        },
    }


STUDIES: dict[str, Callable[[VariantOptions], dict[str, Any]]] = {
    "translate": compare_translators,
    "gpt": study_gpt,
    "classify": study_classify,
}


def study(options: VariantOptions) -> dict[str, Any]:
    """One of `STUDIES` as a record, saved if the options say so."""
    if pick_device(options.device).type == "cpu":
        keep_memory()
    found = STUDIES[options.what](options)
    command = as_typed(__name__, options, places=("what",))
    record = {**provenance(command, pick_device(options.device)), "corpus": options.corpus, **found}
    if options.save:
        save_record(f"variants-{options.what}-{options.corpus}", record)
    return record


main = Command(
    __name__,
    VariantOptions,
    study,
    "Train a variant of the Transformer and what it has to beat.",
    places={"what": f"The study: {', '.join(STUDIES)}."},
    interrupted=GOES_ON,
)
