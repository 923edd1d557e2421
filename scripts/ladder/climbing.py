"""The ladder: recipes for the best small translator, each trained to its end.

`scripts.ladder.rungs` says what the rungs are. The queue (`scripts.ladder.queue`) climbs on a
processor, `scripts.gpu` on a GPU. Validation BLEU decides everything; the test sets are read only
for a run that may ship.
"""

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from scripts import ROOT, runs_folder
from scripts.book.files import writable
from scripts.book.records import load_record, sha256
from scripts.ch06_training import EpochReport
from scripts.ch09_training_run import average_checkpoints
from scripts.ch21_learning_from_models import turned_around
from scripts.core.checkpoints import load_weights, saved_states
from scripts.core.data import TrainingData
from scripts.core.models import load_model, save_model
from scripts.core.settings import PRESETS, TrainConfig, plain_config
from scripts.core.signals import StopSignal
from scripts.fast.run import average_if_better, course, evaluate, finish, fit, validated_by
from scripts.fast.translating import DecodeOptions, translate
from scripts.ladder.agenda import Item, Settings
from scripts.ladder.diversify import diversified, pairs_sha256
from scripts.ladder.lessons import LessonConfig, lesson_loss
from scripts.ladder.risk import RiskTraining, StartedTraining
from scripts.ladder.rungs import RUNS, Rung, rung_of, val_bleu
from scripts.studies.rows import data_of
from scripts.studies.runner import Run, kept_at, on_record

MARGIN = 4.0  # BLEU that a rung may be behind the best one at half time
WRITING = DecodeOptions(beam=5, alpha=0.6)  # how models translate the training pairs
ALPHAS = (0.6, 1.0, 1.4, 1.8)  # length penalties that a run which may ship chooses from
AT_ONCE = 2000  # texts that are kept together: the most that is lost if the writing is cut off


def ladder_items(hours: bool) -> list[Item]:
    """An item for each run, in order, with its time on one thread, or on a GPU."""
    each = 1.6 if hours else 0.05  # minutes for as many pairs as the corpus has, roughly
    rungs = {name: rung_of(name) for name in RUNS}
    rungs = {name: rung for name, rung in rungs.items() if not (hours and rung.gpu)}
    return [
        Item(name, each * rung.passes, rung.about, partial(climbed, name), True, rung.needs)
        for name, rung in rungs.items()
    ]


# What is learned from.


def model_of(name: str, settings: Settings) -> Path:
    """The folder of a run's model, or of one that ships."""
    return settings.folder(name) if name in RUNS else ROOT / "models" / name


def weights_sha256(name: str, settings: Settings) -> str:
    """The SHA-256 of a model's weights."""
    return sha256(model_of(name, settings) / "model.safetensors")


def written(name: str, sentences: Sequence[str], settings: Settings) -> list[str]:
    """What model `name` makes of `sentences`; kept in parts in the folder of runs."""
    folder, model = settings.folder(name), model_of(name, settings)
    key = {"weights_sha256": weights_sha256(name, settings), "search": asdict(WRITING)}

    def write(start: int) -> Run:
        part = sentences[start : start + AT_ONCE]
        return {"texts": translate(load_model(model, settings.device), part, WRITING)}

    texts: list[str] = []
    for start in range(0, len(sentences), AT_ONCE):
        path = folder / f"texts-{start:06d}.json"
        texts += kept_at(path, {"key": key}, partial(write, start))["texts"]
    return texts


def standing(names: Sequence[str], settings: Settings) -> list[str]:
    """The runs of `names` that weren't ended at half time. Raises ValueError if none is left."""
    left = [
        name
        for name in names
        if name not in RUNS or "ended" not in load_record("record", settings.folder(name))
    ]
    if names and not left:
        raise ValueError(f"{', '.join(names)}: all were ended at half time")
    return left


def pairs_of(rung: Rung, settings: Settings, vocab: int) -> TrainingData:
    """What a rung learns from: the corpus, turned around, or with what models wrote."""
    data = data_of(settings.corpus, vocab, rung.share)
    if rung.turned:
        return turned_around(data)
    if not (rung.forward or rung.reverse):
        return data
    sources, targets = zip(*data.corpus["train"], strict=True)
    forward = [written(name, sources, settings) for name in standing(rung.forward, settings)]
    reverse = [written(name, targets, settings) for name in standing(rung.reverse, settings)]
    return diversified(data, forward, reverse)


def config_of(name: str, settings: Settings) -> LessonConfig:
    """The settings of run `name`, except what its pairs and teachers turn out to be."""
    rung = rung_of(name)
    base = LessonConfig(**asdict(PRESETS["small"]) | rung.changes)
    base.seed = int(name.rpartition("-")[2])
    if base.layer_drop and settings.device.type == "cuda":
        base.step = "static"  # a recording would always miss the same layers
    return settings.config(base, name)


# Half time.


class HalfTime(Exception):
    """A rung lies too far behind to go on. Its arguments: why, and the history so far."""


def too_far_behind(bleus: Sequence[float], epochs: int, best: Sequence[float]) -> str:
    """Why a run of `epochs` epochs is ended now; "" if it goes on.

    This is decided after half of its epochs. Then the highest of its validation `bleus` may lie
    `MARGIN` below the highest that the `best` run had after the same share of its own epochs.
    """
    if len(bleus) != epochs // 2 or not bleus or not best:
        return ""
    same = max(1, round(len(best) * len(bleus) / epochs))
    behind = max(best[:same]) - max(bleus)
    if behind <= MARGIN:
        return ""
    return f"after {len(bleus)} of {epochs} epochs {behind:.2f} BLEU behind the best rung's half"


class RungTraining(StartedTraining):
    """A run of the ladder in progress: it ends at half time if it is hopeless."""

    def __init__(self, *given: Any, best: Sequence[float] = (), **named: Any):
        super().__init__(*given, **named)
        self.best = best

    def train_epoch(self, stop: StopSignal | None = None) -> EpochReport:
        """As in `Training`. Raises HalfTime, and trains no further, if the run is hopeless."""
        bleus = [row["val_bleu"] for row in self.history]
        why = too_far_behind(bleus, self.config.epochs, self.best)
        if why and self.done == 0:
            raise HalfTime(why, self.history)
        return super().train_epoch(stop)


def best_history(but: str, settings: Settings) -> list[float]:
    """Validation BLEU after each epoch of the best run so far that began from nothing.

    Run `but` is left out, and those that translate back.
    """
    rungs = {name: rung_of(name) for name in RUNS if name != but}
    names = [name for name, rung in rungs.items() if not (rung.turned or rung.start)]
    runs = [load_record(p.stem, p.parent) for p in map(settings.record, names) if p.is_file()]
    runs = [run for run in runs if "ended" not in run]
    return [row["val_bleu"] for row in max(runs, key=val_bleu)["history"]] if runs else []


# A run.


def learned(config: TrainConfig, data: TrainingData, **others: Any) -> list[Run]:
    """Train as `config` says, or go on; the history. `others` go to `fit`."""
    folder = writable(runs_folder() / config.name)
    states = saved_states(folder)
    if states:
        print(f"{config.name} goes on from {states[-1].name}", flush=True)
    return fit(config, data, folder, resume=bool(states), **others)


def averaged(
    names: Sequence[str], config: LessonConfig, data: TrainingData, settings: Settings
) -> tuple[list[Run], dict[str, float]]:
    """Save the mean of these runs' weights: their histories, and validation BLEU, greedy."""
    folder = writable(runs_folder() / config.name)
    folders = [settings.folder(name) for name in names]
    trained = load_model(folders[0], settings.device)
    means = average_checkpoints([one / "model.safetensors" for one in folders])
    load_weights(trained.model, means, folder)
    save_model(folder, replace(trained, config=plain_config(config)))
    histories = [load_record("record", one)["history"] for one in folders]
    bleu = validated_by(load_model(folder, settings.device), data)["val_bleu"]
    return [*chain.from_iterable(histories)], {f"mean of {len(names)} runs": round(bleu, 5)}


def trained_by(
    name: str, config: LessonConfig, data: TrainingData, settings: Settings, teachers: Sequence[str]
) -> tuple[list[Run], str]:
    """Train run `name`, or go on: its history, and why it ended at half time, "" if it didn't."""
    rung = rung_of(name)
    slow = not (rung.turned or settings.device.type == "cuda")  # there, half a run is a minute
    kind = RiskTraining if config.risk else RungTraining
    if kind is RungTraining and slow:
        kind = partial(kind, best=best_history(name, settings))
    if rung.start and not settings.tiny:  # a tiny model can't take the weights of a whole one
        kind = partial(kind, start=model_of(rung.start, settings) / "model.safetensors")
    models = [load_model(settings.folder(one), settings.device).model for one in teachers]
    loss_for = partial(lesson_loss, teachers=models)
    try:
        return learned(config, data, kind=kind, loss_for=loss_for), ""
    except HalfTime as end:
        why, history = end.args
        return history, why


def lesson_of(config: TrainConfig) -> Run:
    """What `config` has beyond a TrainConfig and that isn't off."""
    plain = asdict(plain_config(config))
    return {name: value for name, value in asdict(config).items() if value and name not in plain}


def climbed(name: str, settings: Settings) -> Run:
    """The record of run `name`; trains, or goes on, if there is none."""
    rung, config, folder = rung_of(name), config_of(name, settings), settings.folder(name)
    data = pairs_of(rung, settings, config.vocab)
    if rung.forward or rung.reverse:
        config.pairs = pairs_sha256(data)
    kinds = ("forward", "reverse", "teachers", "mean_of")
    learned_from = {kind: standing(getattr(rung, kind), settings) for kind in kinds}
    learned_from |= {"start": [rung.start]} if rung.start else {}
    for kind in ("teachers", "mean_of", "start"):
        digests = [weights_sha256(one, settings) for one in learned_from.get(kind, [])]
        setattr(config, kind, ",".join(digests))
    if found := on_record(folder / "record.json", config, lesson_of(config)):
        return found
    ended = ""
    if rung.mean_of:
        history, chosen = averaged(learned_from["mean_of"], config, data, settings)
    else:
        teachers = learned_from["teachers"]
        history, ended = trained_by(name, config, data, settings, teachers)
        chosen = average_if_better(plain_config(config), data, folder, history)
    if rung.candidate and not ended:
        record = finish(plain_config(config), data, folder, history, chosen, ALPHAS)
    else:  # nothing in it has seen a test set
        record = course(plain_config(config), folder, history, chosen)
    trained = load_model(folder, config.device)
    beam = evaluate(trained, data.corpus["val"], config.beam, config.alpha)
    clock = "seconds" if settings.device.type == "cuda" else "cpu_seconds"
    models = {one for names in learned_from.values() for one in names}
    made = {
        "rung": RUNS[name],
        "lesson": lesson_of(config),
        "learned_from": learned_from,
        "their_sha256": {one: weights_sha256(one, settings) for one in sorted(models)},
        "parameters": sum(p.numel() for p in trained.model.parameters()),
        "train_pairs": len(data.train),
        "hours": round(sum(row[clock] for row in history) / 3600, 3),
        "val_bleu_beam": beam["bleu"],
    }
    return record | made | ({"ended": ended} if ended else {})
