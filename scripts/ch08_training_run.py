# %% [markdown]
# # Chapter 8 · The training run

# %%
import csv
import json
import math
import random
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch.optim.lr_scheduler import LambdaLR
from tqdm.auto import tqdm

from scripts.ch01_attention import padding_mask
from scripts.ch03_embeddings_and_positions import MAX_LEN
from scripts.ch04_encoder_decoder import EncoderDecoder, make_model
from scripts.ch05_training import (
    Batch,
    EpochReport,
    LabelSmoothing,
    TrainState,
    cosine_rate,
    greedy_decode,
    inverse_sqrt_rate,
    run_epoch,
)
from scripts.ch06_multi30k import (
    BPETokenizer,
    Example,
    encode_pairs,
    load_corpus,
    make_batch,
    pad_rows,
    source_ids,
    token_batches,
)
from scripts.checkpoints import (
    load_tensors,
    load_training,
    load_weights,
    save_tensors,
    save_training,
    weights,
)
from scripts.records import ROOT, provenance, save_record, sha256


# %%
@dataclass
class TrainConfig:
    """Everything that decides a training run; each field is an option of the command line."""

    corpus: Literal["sample", "multi30k"] = "multi30k"
    """What to learn from."""
    layers: int = 3
    """Encoder layers, and as many decoder layers."""
    d_model: int = 256
    """Width of the vectors."""
    d_ff: int = 1024
    """Width inside the feed-forward layers."""
    heads: int = 8
    """Attention heads."""
    vocab: int = 8192
    """Pieces of the joint BPE vocabulary."""
    norm_first: bool = True
    """Pre-norm; the paper is post-norm."""
    tie: Literal["none", "decoder", "all"] = "all"
    """Which embedding tables share storage with the generator."""
    dropout: float = 0.15
    """Dropout everywhere, attention weights included."""
    smoothing: float = 0.1
    """Label smoothing's epsilon."""
    epochs: int = 11
    """Passes over the training split."""
    max_tokens: int = 2048
    """Tokens in a batch on either side, padding counted."""
    accumulate: int = 1
    """Batches in an optimizer step."""
    schedule: Literal["cosine", "inverse_sqrt"] = "cosine"
    """How the learning rate falls after its warm-up."""
    lr: float = 1.2e-3
    """Peak learning rate."""
    warmup: int = 400
    """Steps until the peak."""
    clip: float = 1.0
    """Largest norm of the gradient."""
    seed: int = 1
    """Decides the weights' start, dropout and the batches' order."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, …"""
    name: str = "small"
    """The run's folder: runs/NAME."""
    publish: str | None = None
    """Also save the model as models/PUBLISH and the record as results/PUBLISH.json."""
    resume: bool = False
    """Go on from runs/NAME/last.safetensors."""


# %%
PRESETS: dict[str, TrainConfig] = {
    "sample": TrainConfig(
        corpus="sample",
        layers=2,
        d_model=128,
        d_ff=256,
        heads=4,
        vocab=1000,
        dropout=0.0,
        epochs=10,
        max_tokens=1024,
        lr=2e-3,
        warmup=200,
        name="sample",
    ),
    "small": TrainConfig(),
    "base": TrainConfig(
        layers=6,
        d_model=512,
        d_ff=2048,
        norm_first=False,
        dropout=0.1,
        schedule="inverse_sqrt",
        lr=7e-4,
        warmup=4000,
        max_tokens=4096,
        epochs=20,
        name="base",
    ),
}
STORED_DTYPE = torch.float16  # half the size; every score we report is of the weights as stored


# %%
def pick_device(name: str = "auto") -> torch.device:
    """The device called `name`; "auto" takes a GPU where there is one.

    Raises ValueError for a device that this machine lacks.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"unknown device {name!r}: use auto, cpu or cuda") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("this machine has no usable GPU: use --device cpu or auto")
    return device


# %%
def build_model(config: TrainConfig, vocab: int) -> EncoderDecoder:
    """The model of `config` over `vocab` joint pieces, initialised from the global seed."""
    return make_model(
        vocab,
        vocab,
        N=config.layers,
        d_model=config.d_model,
        d_ff=config.d_ff,
        h=config.heads,
        dropout=config.dropout,
        norm_first=config.norm_first,
        tie=config.tie,
    )


# %%
@dataclass
class Trained:
    """A model with what it takes to use it."""

    model: EncoderDecoder
    tokenizer: BPETokenizer
    config: TrainConfig


# %%
def save_model(folder: Path, trained: Trained) -> None:
    """Write model.safetensors, tokenizer.model and config.json into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = {name: t.to(STORED_DTYPE) for name, t in weights(trained.model).items()}
    save_tensors(folder / "model.safetensors", stored, {})
    trained.tokenizer.save(folder / "tokenizer.model")
    config = json.dumps(asdict(trained.config), indent=1)
    (folder / "config.json").write_text(config + "\n", encoding="utf-8")


# %%
def load_model(folder: Path, device: torch.device | str = "cpu") -> Trained:
    """What `save_model` wrote, in float32 and ready to translate.

    Raises FileNotFoundError or ValueError, with the remedy, where a file is missing or unfit.
    """
    folder = Path(folder)
    missing = [n for n in ("config.json", "tokenizer.model") if not (folder / n).is_file()]
    if missing:
        raise FileNotFoundError(f"{folder} holds no {missing[0]}: train a model, or name another")
    try:
        config = TrainConfig(**json.loads((folder / "config.json").read_text(encoding="utf-8")))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{folder / 'config.json'} is not a TrainConfig: {error}") from error
    tokenizer = BPETokenizer.load(folder / "tokenizer.model")
    model = build_model(config, len(tokenizer))
    path = folder / "model.safetensors"
    load_weights(model, load_tensors(path)[0], path)
    return Trained(model.to(device).eval(), tokenizer, config)


# %%
def average_checkpoints(paths: Sequence[Path]) -> dict[str, torch.Tensor]:
    """The mean, weight by weight, of several saved models, in float32 (§6.1)."""
    loaded = [load_tensors(path)[0] for path in paths]
    return {
        name: torch.stack([tensors[name].float() for tensors in loaded]).mean(dim=0)
        for name in loaded[0]
    }


# %%
def greedy_translate(trained: Trained, sentences: Sequence[str], batch_size: int = 64) -> list[str]:
    """Translations of `sentences`, in their order, by greedy decoding of length-sorted batches."""
    device = next(trained.model.parameters()).device
    rows = [source_ids(sentence, trained.tokenizer) for sentence in sentences]
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    out = [""] * len(rows)
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        src = pad_rows([rows[i] for i in chosen]).to(device)  # (B, S)
        limit = min(MAX_LEN, 2 * src.size(1) + 10)
        ids = greedy_decode(trained.model, src, padding_mask(src), limit)  # (B, T)
        for i, row in zip(chosen, ids.tolist(), strict=True):
            out[i] = trained.tokenizer.decode(row)
    return out


# %%
def corpus_bleu(hypotheses: Sequence[str], references: Sequence[str], **options: Any) -> Any:
    """sacreBLEU's cased 13a score of whole texts (`.score`), and the signature that says how it was made."""
    from sacrebleu.metrics import BLEU

    metric = BLEU(**options)
    result = metric.corpus_score(list(hypotheses), [list(references)])
    result.signature = str(metric.get_signature())
    return result


# %%
@dataclass
class TrainingData:
    """A corpus, encoded: what a training reads."""

    corpus: dict[str, list[tuple[str, str]]]
    tokenizer: BPETokenizer
    train: list[Example]
    val: list[Example]


# %%
def prepare(config: TrainConfig) -> TrainingData:
    """Read the corpus, learn the BPE on its training split, and encode train and validation."""
    corpus = load_corpus(config.corpus)
    lines = (line for pair in corpus["train"] for line in pair)
    tokenizer = BPETokenizer.train(lines, config.vocab)
    train, val = (encode_pairs(corpus[split], tokenizer) for split in ("train", "val"))
    return TrainingData(corpus, tokenizer, train, val)


# %%
def epoch_plan(config: TrainConfig, data: TrainingData, epoch: int) -> list[list[int]]:
    """The batches of one epoch: they depend on the seed and the epoch alone, so a resumed run meets the same."""
    return token_batches(data.train, config.max_tokens, random.Random(f"{config.seed}:{epoch}"))


# %%
def batches_of(
    examples: Sequence[Example], plan: list[list[int]], device: torch.device
) -> Iterator[Batch]:
    """The planned batches, padded and moved to `device` one by one."""
    for indices in plan:
        yield make_batch([examples[i] for i in indices]).to(device)


# %%
def learning_rate(config: TrainConfig, total_steps: int) -> Callable[[int], float]:
    """The learning rate at step 1, 2, … as `config` asks for it."""
    if config.schedule == "cosine":
        return lambda step: cosine_rate(step, config.lr, config.warmup, total_steps)
    return lambda step: inverse_sqrt_rate(step, config.lr, config.warmup)


# %%
def validate(trained: Trained, data: TrainingData, device: torch.device) -> dict[str, float]:
    """Perplexity (teacher-forced) and greedy BLEU on the validation split."""
    plan = token_batches(data.val, trained.config.max_tokens)
    criterion = LabelSmoothing(trained.config.smoothing)
    report = run_epoch(batches_of(data.val, plan, device), trained.model, criterion)
    sources, references = zip(*data.corpus["val"], strict=True)
    bleu = corpus_bleu(greedy_translate(trained, sources), references).score
    return {"val_loss": report.loss_per_token, "val_ppl": report.perplexity, "val_bleu": bleu}


# %%
def row_of(epoch: int, report: EpochReport, lr: float, seconds: float) -> dict[str, float]:
    """One line of the log, but for what validation adds."""
    return {
        "epoch": epoch,
        "lr": lr,
        "train_loss": report.loss_per_token,
        "train_ppl": report.perplexity,
        "grad_norm": sum(report.grad_norms) / len(report.grad_norms),
        "tokens": report.tokens,
        "seconds": seconds,
    }


# %%
def write_log(folder: Path, history: list[dict[str, float]]) -> None:
    """The history so far as log.csv, for a spreadsheet or a plot."""
    with open(folder / "log.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=history[0].keys())
        writer.writeheader()
        writer.writerows(history)


# %%
def fit(config: TrainConfig, data: TrainingData, folder: Path) -> list[dict[str, float]]:
    """Train as `config` says; leave the best model and the last state in `folder`; return the history.

    Best is by validation BLEU. After each epoch `last.safetensors` holds all that the next one
    depends on, so that `resume` goes on as if nothing had happened.
    """
    device = pick_device(config.device)
    torch.manual_seed(config.seed)
    model = build_model(config, len(data.tokenizer)).to(device)
    trained = Trained(model, data.tokenizer, config)
    criterion = LabelSmoothing(config.smoothing)
    optimizer = torch.optim.Adam(model.parameters(), lr=1.0, betas=(0.9, 0.98), eps=1e-9)
    plan = [epoch_plan(config, data, epoch) for epoch in range(1, config.epochs + 1)]
    steps = [math.ceil(len(batches) / config.accumulate) for batches in plan]
    lr_at = learning_rate(config, sum(steps))
    scheduler = LambdaLR(optimizer, lambda done: lr_at(done + 1))  # step 1 is the first
    state, history = TrainState(), []
    last = folder / "last.safetensors"
    if config.resume:
        meta = load_training(last, model, optimizer)
        state, history = TrainState(**meta["state"]), meta["history"]
        scheduler.load_state_dict({**scheduler.state_dict(), **meta["scheduler"]})
        optimizer.param_groups[0]["lr"] = lr_at(state.steps + 1)
    for epoch in range(len(history) + 1, config.epochs + 1):
        batches = plan[epoch - 1]
        start = time.perf_counter()
        title = f"epoch {epoch}/{config.epochs}"
        with tqdm(total=len(batches), desc=title, unit="batch", leave=False) as bar:
            report = run_epoch(
                batches_of(data.train, batches, device),
                model,
                criterion,
                optimizer,
                scheduler,
                accumulate=config.accumulate,
                clip=config.clip,
                state=state,
                progress=bar,
            )
        seconds = time.perf_counter() - start
        row = row_of(epoch, report, lr_at(state.steps), seconds) | validate(trained, data, device)
        tqdm.write(
            f"{title}  loss {row['train_loss']:.3f}  val ppl {row['val_ppl']:.2f}  "
            f"val BLEU {row['val_bleu']:.1f}  {seconds:.0f} s"
        )
        if not history or row["val_bleu"] > max(r["val_bleu"] for r in history):
            save_model(folder, trained)
        history.append(row)
        write_log(folder, history)
        kept = {"state": asdict(state), "history": history, "config": asdict(config)}
        kept["scheduler"] = {"last_epoch": scheduler.last_epoch, "_step_count": state.steps + 1}
        save_training(last, model, optimizer, kept)
    return history


# %%
def evaluate(trained: Trained, pairs: list[tuple[str, str]]) -> dict[str, Any]:
    """Greedy BLEU of a model on sentence pairs, cased and lower-cased, with signatures and translations."""
    sources, references = zip(*pairs, strict=True)
    hypotheses = greedy_translate(trained, sources)
    cased = corpus_bleu(hypotheses, references)
    lower = corpus_bleu(hypotheses, references, lowercase=True)
    return {
        "bleu": round(cased.score, 2),
        "signature": cased.signature,
        "bleu_lowercased": round(lower.score, 2),
        "signature_lowercased": lower.signature,
        "translations": hypotheses,
    }


# %%
def held_out_splits(corpus: dict[str, list[tuple[str, str]]]) -> list[str]:
    """The names of a corpus's test splits, in order."""
    return [split for split in corpus if split.startswith("test")]


# %%
def make_record(
    config: TrainConfig, data: TrainingData, folder: Path, history: list[dict[str, float]]
) -> dict[str, Any]:
    """Test the saved model, as anyone who loads it would, and put the run on record."""
    device = pick_device(config.device)
    trained = load_model(folder, device)
    tests, samples = {}, []
    for split in held_out_splits(data.corpus):
        pairs = data.corpus[split]
        tests[split] = evaluate(trained, pairs)
        translations = tests[split].pop("translations")
        if not samples:
            samples = [
                {"source": source, "reference": reference, "translation": translation}
                for (source, reference), translation in list(zip(pairs, translations, strict=True))[
                    :10
                ]
            ]
    command = shlex.join(["python", "scripts/ch08_training_run.py", *sys.argv[1:]])
    return {
        **provenance(command, device),
        "config": asdict(config),
        "parameters": sum(p.numel() for p in trained.model.parameters()),
        "weights_sha256": sha256(folder / "model.safetensors"),
        "seconds": round(sum(row["seconds"] for row in history)),
        "best_epoch": max(history, key=lambda row: row["val_bleu"])["epoch"],
        "history": [{k: round(v, 5) for k, v in row.items()} for row in history],
        "test": tests,
        "samples": samples,
    }


# %%
def model_card(record: dict[str, Any]) -> str:
    """README.md of a saved model: what it is, what made it, how good it is."""
    config, tests = record["config"], record["test"]
    scores = "\n".join(
        f"| {split} | {test['bleu']:.1f} | {test['bleu_lowercased']:.1f} | `{test['signature']}` |"
        for split, test in tests.items()
    )
    return f"""# German to English, trained on {config["corpus"]}

A Transformer of {record["parameters"]:,} parameters ({config["layers"]}+{config["layers"]} layers,
d_model {config["d_model"]}), from chapter 8 of *From Attention to Translation*. Stored in float16.

| test set | BLEU | lower-cased | signature of the first |
|---|---|---|---|
{scores}

Made by `{record["command"]}` on {record["device"]} in {record["seconds"] / 60:.0f} minutes of training
(commit `{record["commit"][:12]}`, {record["date"][:10]}). It translates short image captions; it
knows nothing else, and it repeats the biases of its captions.
"""


# %%
def parse_arguments(argv: Sequence[str] | None = None) -> TrainConfig:
    """The command line to a TrainConfig: `--preset NAME`, then any field as an option.

    Raises ValueError for what it does not understand.
    """
    from jsonargparse import ArgumentError, ArgumentParser

    def parser() -> ArgumentParser:
        made = ArgumentParser(
            prog="ch08_training_run.py",
            description="Train a Transformer from German to English.",
            exit_on_error=False,
        )
        made.add_argument("--preset", default="small", help="sample, small or base")
        made.add_class_arguments(TrainConfig, skip={"resume"})
        made.add_argument(
            "--resume", action="store_true", help="Go on from runs/NAME/last.safetensors."
        )
        return made

    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        preset = parser().parse_args(argv).preset
        if preset not in PRESETS:
            raise ValueError(f"unknown preset {preset!r}: choose from {', '.join(PRESETS)}")
        second = parser()
        second.set_defaults(asdict(PRESETS[preset]))
        chosen = second.parse_args(argv).as_dict()
    except ArgumentError as error:
        raise ValueError(" ".join(str(error).split())) from error
    chosen.pop("preset")
    return TrainConfig(**chosen)


# %%
def writable(folder: Path) -> Path:
    """`folder`, made where it is missing. Raises ValueError where it can't be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".probe"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ValueError(
            f"can't write to {folder} ({error.strerror}): choose another --name"
        ) from error
    return folder


# %%
def run(config: TrainConfig) -> dict[str, Any]:
    """Train, test and record one configuration; the record is in runs/NAME and is returned."""
    device = pick_device(config.device)
    folder = writable(ROOT / "runs" / config.name)
    data = prepare(config)
    print(
        f"{len(data.train):,} training pairs of {config.corpus}, {len(data.tokenizer):,} BPE pieces, on {device}"
    )
    history = fit(config, data, folder)
    record = make_record(config, data, folder, history)
    save_record("record", record, folder)
    (folder / "README.md").write_text(model_card(record), encoding="utf-8")
    if config.publish:
        publish(folder, config.publish, record)
    return record


# %%
def publish(folder: Path, name: str, record: dict[str, Any]) -> None:
    """Copy a run's model to models/NAME and its record to results/NAME.json."""
    shipped = writable(ROOT / "models" / name)
    for part in ("model.safetensors", "tokenizer.model", "config.json", "README.md"):
        (shipped / part).write_bytes((folder / part).read_bytes())
    save_record(name, record)


# %%
def report(record: dict[str, Any]) -> str:
    """What a training came to: BLEU on each test split and a few translations, for the terminal."""
    lines = [
        f"{split}: BLEU {test['bleu']:.1f}  ({test['signature']})"
        for split, test in record["test"].items()
    ]
    for sample in record["samples"][:5]:
        lines += ["", f"  source       {sample['source']}"]
        lines += [
            f"  reference    {sample['reference']}",
            f"  translation  {sample['translation']}",
        ]
    return "\n".join(lines)


# %%
def main(argv: Sequence[str] | None = None) -> int:
    """The command: train as asked and print BLEU and translations. Returns the exit code."""
    try:
        print(report(run(parse_arguments(argv))))
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
