"""A whole run: from settings to a model in a folder, with its scores and its record.

`python -m scripts.train` is `run` with a command line. It builds what `core.training`
needs, chooses the weights by validation, scores what it stored, and writes record and card.
"""

import os
import shlex
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from scripts import ROOT, runs_folder
from scripts.book.domains import folder_name
from scripts.book.files import writable
from scripts.book.records import load_record, provenance, save_record, sha256
from scripts.ch06_training import LabelSmoothing
from scripts.ch09_training_run import average_checkpoints, validate
from scripts.ch12_going_fast import keep_memory
from scripts.core.cards import publish, refuse_to_publish, write_card
from scripts.core.checkpoints import load_tensors, load_weights, newest_state, saved_states
from scripts.core.data import TrainingData, prepare
from scripts.core.models import Trained, load_model, save_model
from scripts.core.optimizers import make_optimizer
from scripts.core.ranks import ALONE, Ranks, join_ranks
from scripts.core.scores import corpus_bleu, held_out_splits
from scripts.core.settings import TrainConfig, build_model, multiplies_bf16, pick_device
from scripts.core.signals import StopSignal
from scripts.core.static import static_lengths
from scripts.core.steps import KINDS, Step, ask_for_determinism
from scripts.core.training import (
    OF_MACHINE,
    Training,
    asked_of,
    best_weights,
    refuse_to_replace,
    start_anew,
)
from scripts.core.watching import gpu_row, in_words, tracker_of
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
    take.loss_of, take.without_sync = lambda model, *given: shared(*given), shared.no_sync


def training_of(
    config: TrainConfig,
    data: TrainingData,
    folder: Path,
    resume: bool = False,
    ranks: Ranks = ALONE,
    kind: Callable[..., Training] = Training,
    loss_for: Callable[..., LossOf] = loss_function_of,
    lengthen: Path | None = None,
) -> Training:
    """The training that `config` asks for; `loss_for` makes the loss from settings and device.

    It is new, or goes on from the newest state: in `folder`, or in that of a run to `lengthen`.
    """
    torch.manual_seed(config.seed)
    device, asked = pick_device(config.device), config
    state = newest_state(lengthen or folder) if lengthen or resume else None
    if device.index is not None and device.type == "cuda":
        torch.cuda.set_device(device)  # a recording is made on the current one
    step = state.meta["run"].get("step", "eager") if state else None
    config = resolved(config, device, ranks.world, step)
    if config.deterministic and device.type == "cuda":
        ask_for_determinism()
    model = build_model(config, len(data.tokenizer)).to(device)
    optimizer = make_optimizer(config, model)
    criterion, loss_of = LabelSmoothing(config.smoothing), loss_for(config, device, training=True)
    shapes = {}
    if config.step != "eager":
        shapes = {"widths": static_lengths(data.train), "max_tokens": config.max_tokens}
    take = KINDS[config.step](model, criterion, optimizer, loss_of, config.clip, **shapes)
    if ranks.world > 1:
        torch.manual_seed(config.seed + ranks.rank)  # equal weights, but different dropout
        join_gradients(take)
    return kind(config, data, folder, model, optimizer, take, ranks, state or False, asked)


def fit(
    config: TrainConfig,
    data: TrainingData,
    folder: Path,
    resume: bool = False,
    ranks: Ranks = ALONE,
    **others: Any,
) -> list[dict[str, float]]:
    """Train as `config` says; return the history, a row an epoch. `others` go to `trained_to_end`.

    `folder` gets the best model (by validation BLEU), two states, and weights to be averaged. With
    `resume` the run goes on as if it had never stopped. Raises Stopped, Diverged, and ValueError if
    `folder` holds a run already.
    """
    return trained_to_end(config, data, folder, resume, ranks, **others).history


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
    """What `fit` does; return the training. `overwrite` clears away a run that is in `folder`.

    `lengthen` is the folder of a finished run that this one begins with. `others` go to
    `training_of`.
    """
    resume = resume and not (lengthen and not saved_states(folder))  # else it hasn't begun
    whole = resume and (folder / "model.safetensors").is_file()
    takes_over = None if whole else lengthen
    lengthen = None if resume else lengthen
    if takes_over:
        load_model(takes_over)  # if it is unfit, that is said before anything is deleted
    training = training_of(config, data, folder, resume, ranks, lengthen=lengthen, **others)
    watched = config if ranks.first else replace(config, tracker="none")
    with StopSignal() as stop, tracker_of(watched, folder) as track:
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
                track(row)
            training.end_epoch(row)
            training.heed(stop)
        training.poll.answer()  # before the processes part
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
    found = {"search": DecodeOptions(beam=beam, alpha=alpha).in_words()}
    for kind, lowercase in (("", False), ("_lowercased", True)):
        bleu = corpus_bleu(hypotheses, references, lowercase=lowercase)
        found |= {f"bleu{kind}": round(bleu.score, 2), f"signature{kind}": bleu.signature}
    return found | {"translations": hypotheses}


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
        "best_epoch": max(history, key=lambda row: row["val_bleu"])["epoch"],
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


def ended_before(
    config: TrainConfig, folder: Path, ranks: Ranks, lengthen: Path | None
) -> dict[str, Any] | None:
    """The record in `folder`, if this very run has ended there; None if nothing is there.

    Raises ValueError if anything else is.
    """
    with suppress(FileNotFoundError, KeyError, ValueError):
        meta, record = newest_state(folder).meta, load_record("record", folder)
        stored = sha256(folder / "model.safetensors")
        asked, origin = asked_of(meta), (meta.get("origin") or {}).get("run")
        free = ("device", "name", "publish", "tracker", "save_every", *OF_MACHINE)
        same = all(asked.get(n) == value for n, value in asdict(config).items() if n not in free)
        same &= origin == (lengthen.name if lengthen else None)
        same &= stored == record["weights_sha256"]
        if same and meta["run"]["processes"] == ranks.world and meta["epoch"] > config.epochs:
            return record
    refuse_to_replace(folder)
    return None


def run(
    config: TrainConfig,
    resume: bool = False,
    options: Sequence[str] = (),
    overwrite: bool = False,
    lengthen: Path | None = None,
) -> dict[str, Any] | None:
    """Train, test and record one configuration; the record is in runs/NAME and is returned.

    `options` are those of `scripts.train` that repeat it. A finished run is left as it is: if it is
    this very run, its record is returned, else ValueError is raised, unless `overwrite` replaces
    it. `lengthen` is as in `trained_to_end`. Under torchrun every process calls this; only the
    first writes, prints and returns a record.
    """
    device, folder = pick_device(config.device), runs_folder() / config.name
    made = provenance(command_of(options), device)  # first: names the code that runs
    if not resume:  # an older run may have another name
        for part in config.name.split("/"):  # an agenda's runs lie in a folder of their own
            folder_name("name", part)
    if config.publish is not None:
        folder_name("publish", config.publish)
    if lengthen and lengthen.resolve() == folder.resolve():
        raise ValueError(f"{folder} can't be lengthened in its own place: give another --name")
    with join_ranks(device) as ranks:
        ended = refusal = None
        try:
            if config.publish and ranks.first and not overwrite:
                refuse_to_publish(folder, config.publish)
            if ranks.first and not (resume or overwrite):
                ended = ended_before(config, folder, ranks, lengthen)
        except ValueError as error:  # the others wait: they hear it, too
            refusal = error
        ((ended, refusal), *_) = ranks.gather((ended, refusal))
        if refusal:
            raise refusal
        if ended:
            if ranks.first:
                print(f"{folder} holds this very run, of {ended['date'][:10]}: nothing to train")
            if ranks.first and config.publish:
                publish(folder, config.publish, ended)
            return ended if ranks.first else None
        if config.path == "fast" and device.type == "cpu":
            keep_memory()
        if not ranks.first:
            dist.barrier()  # the first process downloads, the others find it done
        data = prepare(config)
        if ranks.first:
            writable(folder)
            if config.publish:
                writable(ROOT / "models" / config.publish)  # now, not hours later
            if ranks.world > 1:
                dist.barrier()
            size = f"{len(data.train):,} training pairs, {len(data.tokenizer):,} BPE pieces"
            print(f"{config.corpus}: {size}, on {device}")
            if config.precision == "bf16" and not multiplies_bf16(device):
                print(f"note: {device} emulates bf16, many times slower than --precision float32")
        training = trained_to_end(config, data, folder, resume, ranks, overwrite, lengthen)
    if not ranks.first:
        return None
    config, history = training.config, training.history
    before = {"from": training.origin, "resumed_on": training.resumed_on}
    del training  # scoring needs the memory
    chosen = average_if_better(config, data, folder, history)
    record = made | finish(config, data, folder, history, chosen, processes=ranks.world)
    record |= {name: said for name, said in before.items() if said}
    save_record("record", record, folder)
    write_card(folder, record)
    if config.publish:
        if not overwrite:
            refuse_to_publish(folder, config.publish)  # something may have come there meanwhile
        publish(folder, config.publish, record)
    return record
