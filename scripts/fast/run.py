"""A whole run: from settings to a model in a folder, with its scores and its record.

`python -m scripts.train` is `run` with a command line. It builds what `core.training`
needs, chooses the weights by validation, scores what it stored, and writes record and card.
"""

import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from scripts import runs_folder
from scripts.book.files import writable
from scripts.book.records import provenance, save_record, sha256
from scripts.ch06_training import UNK, LabelSmoothing
from scripts.ch09_training_run import average_checkpoints, validate
from scripts.ch12_going_fast import keep_memory
from scripts.core.cards import publish, refuse_to_publish, write_card
from scripts.core.checkpoints import load_tensors, load_weights, newest_state, saved_states
from scripts.core.data import TrainingData, corpus_beside, prepare
from scripts.core.models import Trained, load_model, save_model
from scripts.core.optimizers import make_optimizer
from scripts.core.ranks import ALONE, Ranks, join_ranks
from scripts.core.scores import corpus_bleu, held_out_splits
from scripts.core.settings import (
    TrainConfig,
    build_model,
    multiplies_bf16,
    pick_device,
    stored_config,
)
from scripts.core.signals import StopSignal
from scripts.core.static import FEW_SHAPES, static_lengths
from scripts.core.steps import KINDS, Step, ask_for_determinism
from scripts.core.training import (
    Training,
    best_weights,
    refuse_to_replace,
    standing,
    start_anew,
)
from scripts.core.watching import gpu_row, in_words
from scripts.corpora.load import load_corpus
from scripts.corpora.report import report_text
from scripts.corpora.splits import (
    BESIDE,
    OwnPairs,
    is_corpus,
    save_pairs,
    saved_pairs,
)
from scripts.fast.losses import LossOf, loss_function_of, resolved
from scripts.fast.translating import DecodeOptions, fast_translate


def validated_by(trained: Trained, data: TrainingData, ranks: Ranks = ALONE) -> dict[str, float]:
    """Chapter 9's `validate`, with the run's own loss and the fast search, shared among `ranks`."""
    loss_of = loss_function_of(trained.config, trained.device)

    def shared(trained: Trained, sources: Sequence[str]) -> list[str]:
        return ranks.woven(fast_translate(trained, ranks.share(sources)))  # in the old order

    return validate(trained, data, loss_of, shared)


def join_gradients(take: Step) -> None:
    """Have all processes meet in each step, and leave it with the mean of their gradients."""
    on = [take.device.index] if take.device.type == "cuda" else None
    module = nn.Module()  # it has the model's parameters, and computes the loss
    module.model, module.forward = take.model, partial(take.loss_of, take.model)
    # The position table is a buffer, the same in all processes: no need to send it.
    shared = DistributedDataParallel(module, device_ids=on, broadcast_buffers=False)
    take.loss_of = lambda model, batch, criterion: shared(batch, criterion)
    take.without_sync = shared.no_sync


def training_of(
    config: TrainConfig,
    data: TrainingData,
    folder: Path,
    resume: bool = False,
    ranks: Ranks = ALONE,
    kind: Callable[..., Training] = Training,
    loss_for: Callable[..., LossOf] = loss_function_of,
    lengthen: Path | None = None,
    tune: Path | None = None,
) -> Training:
    """The training that `config` asks for; `loss_for` makes the loss from settings and device.

    It is new, or goes on from the newest state: in `folder`, or in that of a run to `lengthen`. A
    new one begins with the weights of the model in `tune`, if that is given.
    """
    torch.manual_seed(config.seed)
    device, asked = pick_device(config.device), config
    if device.index is not None and device.type == "cuda":
        torch.cuda.set_device(device)  # a recording is made on the current one
    state = newest_state(lengthen or folder) if lengthen or resume else None
    before = state.meta["run"]["step"] if state else None
    config = resolved(config, device, ranks.world, before)
    if config.deterministic and device.type == "cuda":
        ask_for_determinism()
    model = build_model(config, len(data.tokenizer)).to(device)
    optimizer, criterion = make_optimizer(config, model), LabelSmoothing(config.smoothing)
    loss_of, shapes = loss_for(config, device, training=True), {}
    if config.step in FEW_SHAPES:
        shapes = {"widths": static_lengths(data.train), "max_tokens": config.max_tokens}
    take = KINDS[config.step](model, criterion, optimizer, loss_of, config.clip, **shapes)
    if ranks.world > 1:
        torch.manual_seed(config.seed + ranks.rank)  # equal weights, but different dropout
        join_gradients(take)
    training = kind(config, data, folder, model, optimizer, take, ranks, state or False, asked)
    if tune and not lengthen:
        begin_with(tune, training, anew=state is None)
    return training


def begin_with(tune: Path, training: Training, anew: bool) -> None:
    """Give a new training the weights of the model in `tune`, and note whose they are.

    Raises ValueError if the training isn't new, and those it began with were others.
    """
    path = tune / "model.safetensors"
    origin = {"model": tune.resolve().name, "weights_sha256": sha256(path)}
    if anew:
        load_weights(training.model, load_tensors(path)[0], path)
        training.origin = origin
    elif training.origin != origin:
        before = training.origin.get("model", "no model")
        remedy = "resume with the same model, or start again under another --name"
        raise ValueError(f"{training.folder} began with other weights, of {before}: {remedy}")


def forgotten(tune: Path, record: dict[str, Any]) -> list[dict[str, Any]]:
    """BLEU before and after fine-tuning the model in `tune`: on its own test splits, then on ours.

    If its corpus isn't at hand, a note says so, and only ours are scored.
    """
    config = stored_config(record["config"])
    device = pick_device(config.device)
    old, new = load_model(tune, device), load_model(runs_folder() / config.name, device)
    both = {tune: old.config, runs_folder() / config.name: config}
    names = {corpus_beside(folder, settings): settings for folder, settings in both.items()}
    rows, scored = [], []
    for name, settings in names.items():
        try:
            corpus = load_corpus(name, settings.languages)
        except (OSError, ValueError) as error:
            print(f"note: what was forgotten isn't known, as its corpus isn't here: {error}")
            continue
        for split in held_out_splits(corpus):
            if corpus[split] in scored:  # the new pairs' test may be the old one
                continue
            scored.append(corpus[split])
            search = corpus[split], config.beam, config.alpha
            before, after = (evaluate(trained, *search)["bleu"] for trained in (old, new))
            label = "/".join(Path(name).parts[-2:])  # no path of this machine
            rows.append({"corpus": label, "split": split, "before": before, "after": after})
    return rows


def same_pairs(own: OwnPairs, folder: Path) -> OwnPairs:
    """The splits that a run began with. Raises ValueError if its files held other pairs."""
    if not is_corpus(folder):
        return own
    began = saved_pairs(folder)
    then, now = began.report.inputs, own.report.inputs
    if other := sorted(n for n in then.keys() | now.keys() if then.get(n) != now.get(n)):
        what = f"{folder.parent} began with other pairs (another {', '.join(other)})"
        raise ValueError(f"{what}: resume with the same files, or choose another --name")
    return began


def fit(*given: Any, **named: Any) -> list[dict[str, float]]:
    """The history, a row an epoch, of `trained_to_end` with the same arguments."""
    return trained_to_end(*given, **named).history


def trained_to_end(
    config: TrainConfig,
    data: TrainingData,
    folder: Path,
    resume: bool = False,
    ranks: Ranks = ALONE,
    overwrite: bool = False,
    lengthen: Path | None = None,
    **others: Any,
) -> Training:
    """Train as `config` says, and validate after each epoch; return the training.

    `folder` gets the best model (by validation BLEU), two states, and weights to be averaged. With
    `resume` the run goes on as if it had never stopped. `overwrite` clears away a run that is in
    `folder`; `lengthen` is the folder of a finished run that this one begins with. `others` go to
    `training_of`. Raises Stopped, Diverged, and ValueError if `folder` holds a run already.
    """
    resume = resume and not (lengthen and not saved_states(folder))  # else it hasn't begun
    taken_over = resume and (folder / "model.safetensors").is_file()  # its last part
    takes_over = None if taken_over else lengthen
    if takes_over:
        load_model(takes_over)  # if it is unfit, that is said before anything is deleted
    origin = None if resume else lengthen
    training = training_of(config, data, folder, resume, ranks, lengthen=origin, **others)
    with StopSignal() as stop:
        if ranks.first and not resume:
            if not overwrite:
                refuse_to_replace(folder)
            folder.mkdir(parents=True, exist_ok=True)
            start_anew(folder)  # only now: no mistake in the options deletes anything
        if takes_over:
            training.take_over(takes_over)
        while training.epoch <= config.epochs:
            report = training.train_epoch(stop)
            row = {
                "epoch": training.epoch,
                "lr": training.lr_at(training.steps_taken),
                "train_loss": report.loss_per_token,
                "train_ppl": report.perplexity,
                "grad_norm": sum(report.grad_norms) / len(report.grad_norms),
                "tokens": report.tokens,
                "seconds": training.seconds,
                "cpu_seconds": training.cpu_seconds,
                **gpu_row(training.device),
                **validated_by(training.trained, data, ranks),
            }
            if ranks.first:
                tqdm.write(in_words(row, config.epochs))
            training.end_epoch(row)
            training.heed(stop)
    return training


def average_if_better(
    config: TrainConfig, data: TrainingData, folder: Path, history: list[dict[str, float]]
) -> dict[str, float]:
    """Validation BLEU of the best epoch and of the last epochs' mean; the better one is kept."""
    trained = load_model(folder, pick_device(config.device))
    scores = {"best epoch": max(row["val_bleu"] for row in history)}
    paths = saved_states(folder, "epoch")[-config.average :]
    if config.average > 1 and len(paths) > 1:
        load_weights(trained.model, average_checkpoints(paths), paths[-1])
        name = f"mean of the last {len(paths)}"
        scores[name] = validated_by(trained, data)["val_bleu"]
        best = best_weights(folder, history)
        if scores[name] > scores["best epoch"]:
            save_model(folder, trained)
        elif best.is_file():  # a mean may be stored that another machine had found better
            load_weights(trained.model, load_tensors(best)[0], best)
            save_model(folder, trained)
    return {name: round(score, 5) for name, score in scores.items()}


def evaluate(
    trained: Trained, pairs: list[tuple[str, str]], beam: int = 1, alpha: float = 0.6
) -> dict[str, Any]:
    """Translate `pairs`: BLEU, cased and lower-cased, signatures, and the translations."""
    sources, references = zip(*pairs, strict=True)
    hypotheses = fast_translate(trained, sources, beam, alpha)
    scores = {"search": DecodeOptions(beam=beam, alpha=alpha).in_words()}
    for kind, lowercase in (("", False), ("_lowercased", True)):
        bleu = corpus_bleu(hypotheses, references, lowercase=lowercase)
        scores |= {f"bleu{kind}": round(bleu.score, 2), f"signature{kind}": bleu.signature}
    return scores | {"translations": hypotheses}


def course(
    config: TrainConfig,
    folder: Path,
    history: list[dict[str, float]],
    chosen: dict[str, float],
) -> dict[str, Any]:
    """What every record says of a training whose model is in `folder`."""
    return {
        "config": asdict(config),
        "weights_sha256": sha256(folder / "model.safetensors"),
        "seconds": round(sum(row["seconds"] for row in history)),
        "chosen_by_val_bleu": chosen,
        "history": [{k: round(v, 5) for k, v in row.items()} for row in history],
    }


def finish(
    config: TrainConfig,
    data: TrainingData,
    folder: Path,
    history: list[dict[str, float]],
    chosen: dict[str, float],
    alphas: Sequence[float] = (),
    processes: int = 1,
) -> dict[str, Any]:
    """Test the weights in `folder` as stored; return the training's record, without provenance.

    They were `chosen` by validation BLEU. If there are `alphas`, it chooses the model's length
    penalty, too.
    """
    trained, tests = load_model(folder, pick_device(config.device)), {}
    by_alpha = {a: evaluate(trained, data.corpus["val"], config.beam, a)["bleu"] for a in alphas}
    config = replace(config, alpha=max(by_alpha, key=by_alpha.get, default=config.alpha))
    if (config.beam, config.alpha) != (trained.config.beam, trained.config.alpha):
        trained.config.beam, trained.config.alpha = config.beam, config.alpha
        save_model(folder, trained)  # a model brings the search that its card is of
    for split in held_out_splits(data.corpus):
        test = tests[split] = evaluate(trained, data.corpus[split], config.beam, config.alpha)
        greedy = evaluate(trained, data.corpus[split]) if config.beam > 1 else test
        test["bleu_greedy"] = greedy["bleu"]
    texts = {split: test.pop("translations") for split, test in tests.items()}
    split = next(iter(texts))
    first = zip(data.corpus[split][:10], texts[split][:10], strict=True)
    record = {
        **course(config, folder, history, chosen),
        "processes": processes,
        "parameters": sum(p.numel() for p in trained.model.parameters()),
        "best_epoch": max(history, key=standing)["epoch"],
        "test": tests,
        "samples": [{"source": s, "reference": r, "translation": t} for (s, r), t in first],
    }
    if alphas:
        record["val_bleu_by_alpha"] = {f"{a:g}": bleu for a, bleu in by_alpha.items()}
    return record


def command_of(options: Sequence[str]) -> str:
    """The command that trains with these options, on as many machines and processes as now."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    here = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    nodes = [f"--nnodes={world // here}"] * (world > here)
    start = ["torchrun", *nodes, f"--nproc-per-node={here}"] if world > 1 else ["python"]
    return shlex.join([*start, "-m", "scripts.train", *options])


def run(
    config: TrainConfig,
    resume: bool = False,
    options: Sequence[str] = (),
    overwrite: bool = False,
    lengthen: Path | None = None,
    published: str | None = None,
    own: OwnPairs | None = None,
    tune: Path | None = None,
    fewer: bool = False,
    why: str = "",
) -> dict[str, Any] | None:
    """Train, test and record one configuration; the record is in runs/NAME and is returned.

    `options` are those of `scripts.train` that repeat it. `overwrite` and `lengthen` are as in
    `trained_to_end`; the model also goes to models/PUBLISHED. Your `own` pairs are the corpus, if
    they are given, and are written to runs/NAME/pairs; `tune` is the folder of a model to begin
    with. `fewer` lets the corpus give fewer pieces than were asked for; `why` says in words where
    the settings come from. Under torchrun every process calls this; only the first writes, prints
    and returns a record. Raises ValueError if a run or a model is in the way.
    """
    device, folder = pick_device(config.device), runs_folder() / config.name
    origin = provenance(command_of(options), device)  # first: names the code that runs
    if lengthen and lengthen.resolve() == folder.resolve():
        raise ValueError(f"{folder} can't be lengthened in its own place: give another --name")
    if published and not overwrite:
        refuse_to_publish(folder, published)
    if not (resume or overwrite):
        refuse_to_replace(folder)
    if own and resume:
        own = same_pairs(own, folder / BESIDE)
    base = load_model(tune) if tune else None
    with join_ranks(device) as ranks:
        if device.type == "cpu" and config.step != "textbook":
            keep_memory()
        if not ranks.first:
            ranks.wait()  # the first process downloads, the others find it done
        if own and ranks.first:
            print(report_text(own.report), end="\n\n", flush=True)
        data = prepare(config, own and own.splits, base and base.tokenizer, fewer)
        pieces, config = config.vocab, replace(config, vocab=len(data.tokenizer))
        if ranks.first:
            writable(folder)
            ranks.wait()
            size = f"{len(data.train):,} training pairs, {len(data.tokenizer):,} BPE pieces"
            print(f"{config.corpus}: {size}, on {device}")
            if why:
                print(f"recipe: {why}")
            if config.vocab < pieces:
                print(f"note: the pairs give no more pieces; the recipe asked for {pieces:,}")
            if tune and (odd := sum(UNK in (*pair.src, *pair.tgt) for pair in data.train)):
                print(f"note: {odd:,} training pairs hold letters that {tune} has never met")
            if own:
                save_pairs(folder / BESIDE, own)
            if config.precision == "bf16" and not multiplies_bf16(device):
                print(f"note: {device} emulates bf16, many times slower than --precision float32")
        ways = resume, ranks, overwrite, lengthen
        training = trained_to_end(config, data, folder, *ways, tune=tune)
    if not ranks.first:
        return None
    config, history = training.config, training.history
    whence = {"from": training.origin, "resumed_on": training.resumed_on}
    del training  # scoring needs the memory
    chosen = average_if_better(config, data, folder, history)
    record = origin | finish(config, data, folder, history, chosen, processes=ranks.world)
    record |= {name: value for name, value in whence.items() if value}
    if own:
        kept = ("read", "left_out", "sizes", "inputs", "seed")
        record["pairs"] = {name: getattr(own.report, name) for name in kept}
    if tune:
        record["tuned"] = forgotten(tune, record)
    save_record("record", record, folder)
    write_card(folder, record)
    if published:  # something else may have come there meanwhile: it stays
        publish(folder, published, record, overwrite)
    return record
