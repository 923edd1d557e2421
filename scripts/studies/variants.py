"""The studies of chapters 17 and 18: `python -m scripts.studies.variants`, then what is studied.

A run that is done is kept below the folder of runs and only read when the command is given again,
so that it goes on where it was interrupted.
"""

if __name__ == "__main__":  # first, so that Ctrl-C while libraries load is answered, too
    from scripts.book.command import launch

    raise SystemExit(launch("scripts.studies.variants"))

import itertools
import random
import re
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
from scripts.book.files import writable
from scripts.book.records import provenance, save_record
from scripts.ch06_training import BOS, EOS, UNK, LabelSmoothing, train_step
from scripts.ch07_multi30k import (
    BPETokenizer,
    Example,
    make_batch,
    pad_rows,
    source_ids,
    token_batches,
)
from scripts.ch08_decoding import decode_rows, dropout_off
from scripts.ch12_going_fast import keep_memory
from scripts.ch17_small_gpt import (
    Characters,
    KneserNey,
    OneStack,
    asked_next,
    bits_per_character,
    gram_counts,
    row_nats,
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
from scripts.engine.fast import fast_loss
from scripts.engine.losses import LossOf
from scripts.engine.models import Trained
from scripts.engine.optimizers import make_optimizer
from scripts.engine.scores import corpus_bleu, held_out_splits
from scripts.engine.searching import cached_greedy
from scripts.engine.settings import PRESETS, TrainConfig, build_model, learning_rate, pick_device
from scripts.engine.steps import set_rate
from scripts.studies.gpt import samples_of
from scripts.studies.learning import kept_at
from scripts.studies.runner import Run
from scripts.studies.stacks import fast_stack_loss, one_stack

Rows = dict[str, list[list[int]]]  # a split's texts in characters

ORDERS = range(1, 11)  # of the n-gram models
PENALTIES = (0.01, 0.1, 1.0, 10.0)  # of the bags of words
LABELS = (100, 1000)  # how many labelled captions a classifier gets; then all

# What a record tells of a config.
SHOWN = ("layers", "d_model", "d_ff", "heads", "vocab", "dropout", "epochs", "max_tokens")
SHOWN += ("optimizer", "lr")


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

    @property
    def folder(self) -> Path:
        """What holds the folders of runs."""
        return runs_folder() / f"variants-{self.corpus}"

    def of(self, config: TrainConfig) -> TrainConfig:
        """`config` as these options want it."""
        return replace(config, device=self.device, epochs=self.epochs or config.epochs)


def once(folder: Path, settings: Run, work: Callable[[], Run]) -> Run:
    """What `work` gives, kept as folder/score.json and, for the same settings, read from there."""
    found = kept_at(folder / "score.json", {"settings": settings}, lambda: {"score": work()})
    return found["score"]


def runs_of(
    options: VariantOptions,
    kinds: dict[str, tuple[TrainConfig, Callable[..., Run]]],
    each: Sequence[Run] = ({},),
) -> dict[str, list[Run]]:
    """The runs of each kind: with every seed, and with all that `each` gives its work besides."""
    runs: dict[str, list[Run]] = {kind: [] for kind in kinds}
    wanted = itertools.product(range(1, options.seeds + 1), each, kinds.items())
    for seed, more, (kind, (config, work)) in wanted:
        config = replace(config, seed=seed)
        slug = "-".join(map(str, (re.sub(r"\W+", "-", kind), config.epochs, *more.values(), seed)))
        score = once(options.folder / slug, asdict(config) | more, partial(work, config, **more))
        runs[kind].append(more | {"seed": seed} | score)
        tqdm.write(f"{slug}: {score['val']} on validation")
    return runs


def shown(config: TrainConfig, but: str = "") -> dict[str, Any]:
    """What a record tells of a config."""
    return {name: getattr(config, name) for name in SHOWN if name != but}


def train_variant(
    model: nn.Module,
    config: TrainConfig,
    plan: Callable[[int], list[list[int]]],
    batch_of: Callable[[list[int]], Any],
    loss_of: LossOf,
    validate: Callable[[nn.Module], dict[str, float]],
) -> list[dict[str, float]]:
    """Train by `config`'s optimizer, schedule, smoothing and epochs; a row for each epoch.

    `validate`, with dropout off, adds to the row.
    """
    device = next(model.parameters()).device
    optimizer = make_optimizer(config, model)
    rate_at = learning_rate(config, config.epochs * len(plan(1)))
    criterion, history, step = LabelSmoothing(config.smoothing), [], 0
    for epoch in range(1, config.epochs + 1):
        model.train()
        nll = tokens = 0.0
        for indices in tqdm(plan(epoch), f"epoch {epoch}", leave=False, disable=None):
            step += 1
            set_rate(optimizer, rate_at(step))
            batch = batch_of(indices).to(device)
            report = train_step(model, [batch], criterion, optimizer, config.clip, loss_of)
            nll, tokens = nll + report.nll, tokens + report.tokens
        row = {"epoch": epoch, "train_nats": round(nll / tokens, 4)}
        with dropout_off(model), torch.no_grad():
            history.append(row | validate(model))
    return history


def trained_model(
    config: TrainConfig,
    model_of: Callable[[], nn.Module],
    examples: Sequence[Example],
    batch_of: Callable[[list[int]], Any],
    loss_of: LossOf,
    validate: Callable[[nn.Module], dict[str, float]],
) -> tuple[nn.Module, Run]:
    """`model_of()`, trained on batches of `examples`; with it, its size and its history."""
    torch.manual_seed(config.seed)
    model = model_of().to(pick_device(config.device))

    def plan(epoch: int) -> list[list[int]]:
        rng = random.Random(f"{config.seed}:{epoch}")
        return token_batches(examples, config.max_tokens, rng)

    history = train_variant(model, config, plan, batch_of, loss_of, validate)
    return model, {"parameters": sum(p.numel() for p in model.parameters()), "history": history}


def val_nats(model: nn.Module, batches: Sequence[Any], loss_of: LossOf) -> dict[str, float]:
    """Mean negative log-likelihood of what is asked in `batches`."""
    device = next(model.parameters()).device
    sums = [loss_of(model, batch.to(device), LabelSmoothing(0.0))[1] for batch in batches]
    return {"val_nats": round(float(sum(sums)) / sum(batch.ntokens for batch in batches), 4)}


# Language models.

GPT_CONFIGS = {
    "sample": TrainConfig(
        corpus="sample", layers=2, d_model=64, d_ff=256, heads=4, dropout=0.0, smoothing=0.0,
        epochs=1, max_tokens=2048, lr=4e-3, warmup=50,
    ),
    "multi30k": TrainConfig(
        corpus="multi30k", layers=4, d_model=128, d_ff=512, heads=4, dropout=0.0, smoothing=0.0,
        epochs=8, max_tokens=2048, optimizer="muon", lr=3e-3, muon_lr=3e-3, warmup=200,
    ),
}  # fmt: skip


def ngram_bits(rows: Rows, vocab: int) -> list[dict[str, float]]:
    """Bits per character of each order's model, counted on rows["train"], on all other rows."""
    counts, found = gram_counts(rows["train"], max(ORDERS)), []
    for order in ORDERS:
        model = KneserNey(counts[:order], vocab)
        found.append({"order": order, "entries": sum(map(len, model.tables))})
        for name in rows:
            if name != "train":
                nats = [model.nats(row) for row in rows[name]]
                found[-1][name] = round(bits_per_character(nats, rows[name]), 4)
    return found


def gpt_run(config: TrainConfig, characters: Characters, rows: Rows, test: str) -> Run:
    """Train, score and sample one mini-GPT."""

    def bits(model: OneStack, name: str) -> float:
        return round(bits_per_character(row_nats(model, rows[name]), rows[name]), 4)

    start = time.perf_counter()
    model, found = trained_model(
        config,
        partial(one_stack, config, len(characters), positions="learned", max_len=256),
        [Example([], row) for row in rows["train"]],
        lambda indices: asked_next([rows["train"][i] for i in indices]),
        fast_stack_loss,
        lambda model: {"val_bits": bits(model, "val")},
    )
    return found | {
        "val": found["history"][-1]["val_bits"],
        test: bits(model, test),
        "samples": samples_of(model, characters, rows["train"]),
        "seconds": round(time.perf_counter() - start),
    }


def study_gpt(options: VariantOptions) -> dict[str, Any]:
    """Mini-GPTs and n-gram models on the English captions; what the record says of them."""
    corpus = load_corpus(options.corpus)
    characters = Characters([english for _, english in corpus["train"]])
    size, test = len(characters), held_out_splits(corpus)[0]
    rows = {
        name: [characters.encode(english[:250]) for _, english in corpus[name]]
        for name in ("train", "val", test)
    }
    home, config = options.folder / "ngrams", options.of(GPT_CONFIGS[options.corpus])
    ngrams = once(home, {"characters": size}, lambda: {"rows": ngram_bits(rows, size)})
    work = partial(gpt_run, characters=characters, rows=rows, test=test)
    return {
        "test": test,
        "alphabet": "".join(characters.alphabet),
        "predicted": {name: sum(len(row) - 1 for row in part) for name, part in rows.items()},
        "unknown": {name: sum(row.count(UNK) for row in part) for name, part in rows.items()},
        "ngrams": ngrams["rows"],
        "config": shown(config, but="vocab"),
        "runs": runs_of(options, {"gpt": (config, work)})["gpt"],
    }


# Classifiers.

ENCODER_CONFIGS = {
    "sample": TrainConfig(
        corpus="sample", layers=2, d_model=64, d_ff=128, heads=4, dropout=0.0, smoothing=0.0,
        vocab=1000, epochs=2, max_tokens=1024, lr=3e-3, warmup=50,
    ),
    "multi30k": TrainConfig(
        corpus="multi30k", layers=2, d_model=128, d_ff=256, heads=4, dropout=0.1, smoothing=0.0,
        vocab=4096, epochs=12, max_tokens=1024, optimizer="muon", lr=2e-3, muon_lr=2e-3, warmup=100,
    ),
}  # fmt: skip


def pretrain(
    config: TrainConfig, texts: dict[str, list[str]], tokenizer: BPETokenizer, path: Path
) -> Run:
    """Train a masked language model on texts["train"], watched on texts["val"]; kept at `path`."""
    train, val = (
        [[BOS, *tokenizer.encode(text)[:250], EOS] for text in texts[name]]
        for name in ("train", "val")
    )
    draw = torch.Generator().manual_seed(config.seed)
    fixed = torch.Generator().manual_seed(0)  # the same questions after every epoch
    vocab, parts = len(tokenizer), token_batches([Example([], row) for row in val], 1024)
    asked = [asked_hidden([val[i] for i in part], vocab, fixed) for part in parts]
    model, found = trained_model(
        config,
        partial(one_stack, config, vocab + 1),  # the pieces and the gap
        [Example([], row) for row in train],
        lambda indices: asked_hidden([train[i] for i in indices], vocab, draw),
        fast_stack_loss,
        lambda model: val_nats(model, asked, fast_stack_loss),
    )
    save_tensors(writable(path.parent) / path.name, weights(model), {})
    return found


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
    parts = (rows[start : start + 64] for start in range(0, len(rows), 64))
    with dropout_off(model):
        return torch.cat([model(pad_rows(part).to(device)).cpu() for part in parts])


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
    parameters = [p for name, p in model.named_parameters() if "generator" not in name]
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


def judged(
    logits_of: Callable[[Sequence[GapItem]], Tensor], gaps: dict[str, list[GapItem]]
) -> dict[str, float]:
    """The share of captions that are told right: of validation, of test, of test's misleading."""
    hard = [item for item in gaps["test"] if misled(item)]
    parts = {"val": gaps["val"], "test": gaps["test"], "misled": hard}
    return {name: round(share_right(logits_of(part), part), 4) for name, part in parts.items()}


def bag_run(config: TrainConfig, labels: int, gaps: dict[str, list[GapItem]]) -> Run:
    """Bags of words on `labels` captions; of them the one whose penalty does best on validation."""
    items = random.Random(config.seed).sample(gaps["train"], labels)
    bags = {penalty: fit_bag_of_words(items, penalty) for penalty in PENALTIES}
    best = max(bags, key=lambda penalty: share_right(bags[penalty](gaps["val"]), gaps["val"]))
    return {"penalty": best} | judged(bags[best], gaps)


def classify_run(
    config: TrainConfig,
    labels: int,
    gaps: dict[str, list[GapItem]],
    tokenizer: BPETokenizer,
    pretrained: Path | None = None,
) -> Run:
    """An encoder on the same captions, from the weights at `pretrained` or from scratch."""
    items = random.Random(config.seed).sample(gaps["train"], labels)
    torch.manual_seed(config.seed)
    encoder = one_stack(config, len(tokenizer) + 1)
    if pretrained is not None:
        load_weights(encoder, load_tensors(pretrained)[0], pretrained)
    model = NumberClassifier(encoder, len(tokenizer)).to(pick_device(config.device))
    steps = min(500, max(150, 3 * labels // 32))
    fit_classifier(model, items, tokenizer, replace(config, lr=1e-3, warmup=steps // 10), steps)
    return {"steps": steps} | judged(lambda part: number_logits(model, part, tokenizer), gaps)


def study_classify(options: VariantOptions) -> dict[str, Any]:
    """Bag of words, encoder from scratch, encoder pretrained; by number of labels, with seeds."""
    corpus, config = load_corpus(options.corpus), options.of(ENCODER_CONFIGS[options.corpus])
    texts = {name: [german for german, _ in pairs] for name, pairs in corpus.items()}
    tokenizer = BPETokenizer.train(texts["train"], config.vocab)
    gaps = german_gaps(corpus)
    path = options.folder / f"masked-{config.epochs}.safetensors"
    pretraining = partial(pretrain, config, texts, tokenizer, path)
    masked = once(path.with_suffix(""), asdict(config), pretraining)
    encoder = partial(classify_run, gaps=gaps, tokenizer=tokenizer)
    kinds = {
        "bag of words": (config, partial(bag_run, gaps=gaps)),
        "from scratch": (config, encoder),
        "pretrained": (config, partial(encoder, pretrained=path)),
    }
    every = len(gaps["train"])
    sizes = [{"labels": n} for n in sorted({*LABELS, every}) if n <= every]
    return {
        "captions": {name: len(items) for name, items in gaps.items()},
        "misled": sum(map(misled, gaps["test"])),
        "plural": {
            name: round(sum(item.plural for item in items) / len(items), 4)
            for name, items in gaps.items()
        },
        "config": shown(config),
        "pretraining": masked,
        "runs": runs_of(options, kinds, sizes),
    }


# Translators.

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


def translator_run(config: TrainConfig, kind: str, data: TrainingData) -> Run:
    """Train and score one translator: greedy BLEU on validation and on the first test split."""
    start, sees = time.perf_counter(), TRANSLATORS[kind]
    build, ask, loss_of, search = build_model, make_batch, fast_loss, cached_greedy
    examples = data.train
    if sees:
        build, loss_of = one_stack, fast_stack_loss
        ask, search = partial(asked_pairs, sees=sees), partial(stack_greedy, sees=sees)
        examples = [Example([], e.src + e.tgt) for e in data.train]  # as long as its row
    val = [ask([data.val[i] for i in part]) for part in token_batches(data.val, 2048)]
    model, found = trained_model(
        config,
        partial(build, config, len(data.tokenizer)),
        examples,
        lambda indices: ask([data.train[i] for i in indices]),
        loss_of,
        lambda model: val_nats(model, val, loss_of),
    )
    found["seconds"] = round(time.perf_counter() - start)
    trained = Trained(model, data.tokenizer, config)
    for name in ("val", held_out_splits(data.corpus)[0]):
        sources, references = zip(*data.corpus[name], strict=True)
        rows = [source_ids(source, data.tokenizer) for source in sources]
        found[name] = round(corpus_bleu(decode_rows(trained, rows, search), references).score, 2)
    return found


def compare_translators(options: VariantOptions) -> dict[str, Any]:
    """Every kind of `TRANSLATORS`, trained with every seed; what the record says of them."""
    configs = {kind: options.of(translator_config(options.corpus, kind)) for kind in TRANSLATORS}
    data = prepare(configs["encoder-decoder"])
    works = {
        kind: (config, partial(translator_run, kind=kind, data=data))
        for kind, config in configs.items()
    }
    runs = runs_of(options, works)
    return {
        "test": held_out_splits(data.corpus)[0],
        "kinds": {
            kind: {"config": shown(config), "runs": runs[kind]} for kind, config in configs.items()
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
