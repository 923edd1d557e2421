"""The ladder: recipes for the best small translator, each to be trained to its end.

A rung is a change of the small preset, and perhaps a lesson: dropout of other kinds, pairs that
models wrote, teachers. Runs are named after rung and seed. The queue (`scripts.studies.queue`)
climbs on a processor, `scripts.gpu` on a GPU. Validation BLEU decides everything; the test sets are
read for a run that may ship, and for no other.
"""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from scripts import runs_folder
from scripts.book.files import writable, write_whole
from scripts.book.records import RESULTS, load_record, sha256
from scripts.ch06_training import EpochReport
from scripts.ch07_multi30k import encode_pairs
from scripts.ch21_learning_from_models import turned_around
from scripts.engine.cards import model_card
from scripts.engine.checkpoints import saved_states
from scripts.engine.data import TrainingData, prepare
from scripts.engine.models import load_model
from scripts.engine.run import average_if_better, finish, fit
from scripts.engine.scores import corpus_bleu
from scripts.engine.settings import PRESETS, TrainConfig, plain_config
from scripts.engine.signals import StopSignal
from scripts.engine.training import Training
from scripts.engine.translating import DecodeOptions, translate
from scripts.studies.agenda import Item, Settings
from scripts.studies.diversify import diversified, pairs_sha256
from scripts.studies.learning import kept_at
from scripts.studies.lessons import LessonConfig, lesson_loss, lesson_of
from scripts.studies.runner import Run

MARGIN = 4.0  # BLEU that a rung may lie behind the best one when it is half way
WRITING = DecodeOptions(beam=5)  # how models translate the training pairs
AT_ONCE = 2000  # texts that are kept together: what is lost when the writing is cut off

# Of one thread with 16-bit products: seconds of an epoch of the small preset, what Muon adds, a
# validation, writing 29,000 texts. Without such products it takes three to four times as long.
EPOCH, MUON, VALIDATION, TEXTS = 85, 45, 6, 240
R_DROP, TEACHER = 2.65, 0.45  # times the work; more work for each teacher
GPU_MINUTES = 4.0  # of the small preset on a GPU


@dataclass(frozen=True)
class Rung:
    """A recipe: the step of the ladder that it belongs to, and what is changed of the preset."""

    step: int
    about: str
    changes: dict[str, Any] = field(default_factory=dict)
    seeds: tuple[int, ...] = (1,)
    forward: tuple[str, ...] = ()
    """Runs whose translations of the sources are learned from, too."""
    reverse: tuple[str, ...] = ()
    """Runs whose translations of the targets become sources."""
    teachers: tuple[str, ...] = ()
    """Runs that together teach word by word."""
    turned: bool = False
    """It learns to translate back. Its BLEU is of another language, and compares with nothing."""
    candidate: bool = False
    """It may ship, so its test scores are read."""

    @property
    def needs(self) -> tuple[str, ...]:
        """The runs whose models it uses."""
        return tuple(dict.fromkeys((*self.forward, *self.reverse, *self.teachers)))

    @property
    def epochs(self) -> int:
        """Passes over its pairs."""
        return self.changes.get("epochs", PRESETS["small"].epochs)

    @property
    def passes(self) -> int:
        """Passes over so many pairs as the corpus has."""
        return self.epochs * (1 + len(self.forward) + len(self.reverse))

    @property
    def work(self) -> float:
        """The work of its losses, in epochs of the small preset."""
        each = R_DROP if self.changes.get("r_drop") else 1.0
        return self.passes * (each + TEACHER * len(self.teachers))

    def minutes(self, gpu: bool) -> float:
        """What it should take on a GPU, or of one thread."""
        if gpu:
            return GPU_MINUTES * self.work / PRESETS["small"].epochs
        seconds = EPOCH * self.work + VALIDATION * (self.epochs + 4)
        seconds += MUON * self.passes if self.changes.get("optimizer") == "muon" else 0
        return (seconds + TEXTS * (len(self.forward) + len(self.reverse))) / 60


BY_MUON = {"optimizer": "muon"}
UPON: dict[str, Any] = {}  # what steps 2 to 6 stand on: by hand, from the table, after step 1
ONCE = {"forward": ("small-1",), "reverse": ("reverse-1",)}
BOTH = {"forward": ("small-1", "muon-slow-1"), "reverse": ("reverse-1", "reverse-2")}
TEACHERS = ("small-1", "muon-slow-1", "long-1")
UNIDROP = {"layer_drop": 0.1, "feature_drop": 0.1, "word_drop": 0.2}
MORE = UPON | {"epochs": 24}  # noise wants a longer run
TWICE = UPON | {"dropout": 0.3, "epochs": 16}  # and two passes a longer time

# None takes more than 100 minutes, alone on its thread: a machine that goes takes no more along.
RUNGS: dict[str, Rung] = {
    "small": Rung(0, "today's recipe"),
    "muon": Rung(1, "Muon", BY_MUON),
    "muon-slow": Rung(1, "Muon, a third of its rate", BY_MUON | {"muon_lr": 0.007}),
    "dropout": Rung(1, "dropout 0.3", {"dropout": 0.3}),
    "long": Rung(1, "longer, dropout 0.3", {"dropout": 0.3, "epochs": 28}),
    "r-drop": Rung(2, "R-Drop 1, dropout 0.3", TWICE | {"r_drop": 1.0}),
    "r-drop-more": Rung(2, "R-Drop 5, dropout 0.3", TWICE | {"r_drop": 5.0}),
    "layer-drop": Rung(3, "layers dropped", MORE | {"layer_drop": 0.1}),
    "feature-drop": Rung(3, "queries, keys, values dropped", MORE | {"feature_drop": 0.1}),
    "word-drop": Rung(3, "source words dropped", MORE | {"word_drop": 0.2}),
    "unidrop": Rung(3, "UniDrop: all three", MORE | UNIDROP),
    "bpe-dropout": Rung(3, "BPE-dropout 0.1", UPON | {"bpe_dropout": 0.1, "epochs": 28}),
    "reverse": Rung(4, "English to German", BY_MUON, seeds=(1, 2), turned=True),
    "diverse": Rung(4, "diversified, k = 1", UPON | {"epochs": 9}, **ONCE),
    "diverse-more": Rung(4, "diversified, k = 2", UPON | {"epochs": 6}, **BOTH),
    "taught": Rung(5, "taught by words", UPON | {"taught": 0.5, "epochs": 14}, teachers=TEACHERS),
    # A first guess: what won goes here, by hand, from the table.
    "final": Rung(
        6, "what won, together", UPON | {"r_drop": 1.0, "epochs": 7}, (1, 2), **ONCE, candidate=True
    ),
}
RUNS = {f"{name}-{seed}": name for name, rung in RUNGS.items() for seed in rung.seeds}


def ladder_items(hours: bool, but: Sequence[str] = ()) -> list[Item]:
    """An item for each run, in order, without those in `but`: its time by thread, or on a GPU."""
    rungs = {name: RUNGS[of] for name, of in RUNS.items() if name not in but}
    return [
        Item(name, rung.minutes(not hours), rung.about, partial(climbed, name), True, rung.needs)
        for name, rung in rungs.items()
    ]


# What is learned from.


@cache
def data_of(corpus: str, vocab: int, tiny: bool) -> TrainingData:
    """A corpus, read and encoded once for all items; its shortest pairs alone, if `tiny`."""
    data = prepare(replace(PRESETS["small"], corpus=corpus, vocab=vocab))
    if not tiny:
        return data
    few = {
        name: sorted(pairs, key=lambda pair: len(pair[0]))[: 120 if name == "train" else 4]
        for name, pairs in data.corpus.items()
    }
    train, val = (encode_pairs(few[split], data.tokenizer) for split in ("train", "val"))
    return TrainingData(few, data.tokenizer, train, val)


def written(name: str, sentences: Sequence[str], settings: Settings) -> list[str]:
    """What the model of run `name` makes of `sentences`; it is kept beside the model, in parts."""
    folder = settings.folder(name)
    key = {"weights_sha256": sha256(folder / "model.safetensors"), "search": asdict(WRITING)}

    def write(start: int) -> Run:
        part = sentences[start : start + AT_ONCE]
        return {"texts": translate(load_model(folder, settings.device), part, WRITING)}

    texts: list[str] = []
    for start in range(0, len(sentences), AT_ONCE):
        path = folder / f"texts-{start:06d}.json"
        texts += kept_at(path, {"key": key}, partial(write, start))["texts"]
    return texts


def standing(names: Sequence[str], settings: Settings) -> list[str]:
    """Those of the runs `names` that weren't ended at half time. Raises ValueError if none is."""
    left = [n for n in names if "ended" not in load_record("record", settings.folder(n))]
    if names and not left:
        raise ValueError(f"{', '.join(names)}: all were ended at half time")
    return left


def pairs_of(rung: Rung, settings: Settings, vocab: int) -> TrainingData:
    """What a rung learns from: the corpus, turned around, or with what models wrote."""
    data = data_of(settings.corpus, vocab, settings.tiny)
    if rung.turned:
        return turned_around(data)
    if not (rung.forward or rung.reverse):
        return data
    sources, targets = zip(*data.corpus["train"], strict=True)
    forward = [written(name, sources, settings) for name in standing(rung.forward, settings)]
    reverse = [written(name, targets, settings) for name in standing(rung.reverse, settings)]
    return diversified(data, forward, reverse)


def config_of(name: str, settings: Settings) -> LessonConfig:
    """The settings of run `name`, but for what its pairs and teachers turn out to be."""
    rung = RUNGS[RUNS[name]]
    base = LessonConfig(**asdict(PRESETS["small"]) | rung.changes)
    base.seed = int(name.rpartition("-")[2])
    if base.layer_drop and settings.device.type == "cuda":
        base.step = "static"  # a recording would always miss the same layers
    return settings.config(base, name)


# Half time.


class HalfTime(Exception):
    """A rung lies too far behind to go on. Its arguments: why, and the history so far."""


def too_far_behind(bleus: Sequence[float], epochs: int, best: Sequence[float]) -> str:
    """Why a run of so many `epochs` is ended now; "" where it goes on.

    It is asked at half of its epochs. Then the highest of its validation `bleus` may lie `MARGIN`
    under the highest that the `best` run had at the same share of its own way.
    """
    if len(bleus) != epochs // 2 or not bleus or not best:
        return ""
    same = max(1, round(len(best) * len(bleus) / epochs))
    behind = max(best[:same]) - max(bleus)
    if behind <= MARGIN:
        return ""
    return f"after {len(bleus)} of {epochs} epochs {behind:.2f} BLEU behind the best rung's half"


class RungTraining(Training):
    """A run of the ladder in progress: it ends at half time where it is hopeless."""

    def __init__(self, *given: Any, best: Sequence[float] = (), **named: Any):
        super().__init__(*given, **named)
        self.best = best

    def train_epoch(self, stop: StopSignal | None = None) -> EpochReport:
        """As in `Training`. Raises HalfTime, and trains no further, where it is hopeless."""
        bleus = [row["val_bleu"] for row in self.history]
        why = too_far_behind(bleus, self.config.epochs, self.best)
        if why and self.done == 0:
            raise HalfTime(why, self.history)
        return super().train_epoch(stop)


def val_bleu(record: dict[str, Any]) -> float:
    """Greedy validation BLEU of what a run left."""
    return max(record["chosen_by_val_bleu"].values())


def best_history(but: str, settings: Settings) -> list[float]:
    """Validation BLEU after each epoch of the best run there is, run `but` left out."""
    names = [n for n, of in RUNS.items() if n != but and not RUNGS[of].turned]
    runs = [load_record(p.stem, p.parent) for p in map(settings.record, names) if p.is_file()]
    runs = [run for run in runs if "ended" not in run]
    return [row["val_bleu"] for row in max(runs, key=val_bleu)["history"]] if runs else []


# A run.


def learned(config: TrainConfig, data: TrainingData, **others: Any) -> list[Run]:
    """Train as `config` says, or go on: the history. `others` are those of `fit`."""
    folder = writable(runs_folder() / config.name)
    states = saved_states(folder)
    if states:
        print(f"{config.name} goes on from {states[-1].name}", flush=True)
    return fit(config, data, folder, resume=bool(states), **others)


def on_record(path: Path, config: TrainConfig) -> Run | None:
    """The record at `path`, if any. Raises ValueError where it is of another run than `config`."""
    if not path.is_file():
        return None
    found = load_record(path.stem, path.parent)
    theirs = found["config"] | found.get("lesson", {})
    if theirs != asdict(plain_config(config)) | lesson_of(config):
        raise ValueError(f"{path.parent} holds another run: move it away")
    return found


def tested(
    name: str, settings: Settings, config: TrainConfig, data: TrainingData, history: list[Run]
) -> Run:
    """The record of a run that may ship, with the tests' scores; its card names the command."""
    folder = settings.folder(name)
    record = finish(plain_config(config), data, folder, history)
    record |= {"command": settings.repeat(name), "repeat": settings.repeat(name)}
    write_whole(folder / "README.md", model_card(record).encode())
    return record


def validated(config: LessonConfig, data: TrainingData, folder: Path, history: list[Run]) -> Run:
    """The record of any other run: nothing in it has seen a test set."""
    chosen = average_if_better(plain_config(config), data, folder)
    return {
        "config": asdict(plain_config(config)),
        "weights_sha256": sha256(folder / "model.safetensors"),
        "seconds": round(sum(row["seconds"] for row in history)),
        "chosen_by_val_bleu": chosen,
        "history": [{k: round(v, 5) for k, v in row.items()} for row in history],
    }


def climbed(name: str, settings: Settings) -> Run:
    """The record of run `name`; trains, or goes on, where there is none."""
    rung, config, folder = RUNGS[RUNS[name]], config_of(name, settings), settings.folder(name)
    data = pairs_of(rung, settings, config.vocab)
    if rung.forward or rung.reverse:
        config.pairs = pairs_sha256(data)
    teachers = [settings.folder(one) for one in standing(rung.teachers, settings)]
    config.teachers = ",".join(sha256(one / "model.safetensors") for one in teachers)
    if found := on_record(folder / "record.json", config):
        return found
    models = [load_model(one, settings.device).model for one in teachers]
    kind = partial(RungTraining, best=[] if rung.turned else best_history(name, settings))
    ended = {}
    try:
        history = learned(config, data, kind=kind, loss_for=partial(lesson_loss, teachers=models))
    except HalfTime as end:
        ended["ended"], history = end.args
    if rung.candidate and not ended:
        record = tested(name, settings, config, data, history)
    else:
        record = validated(config, data, folder, history)
    trained = load_model(folder, config.device)
    sources, references = zip(*data.corpus["val"], strict=True)
    texts = translate(trained, sources, DecodeOptions(beam=config.beam, alpha=config.alpha))
    clock = "seconds" if settings.device.type == "cuda" else "cpu_seconds"
    made = {
        "rung": RUNS[name],
        "lesson": lesson_of(config),
        "learned_from": {
            kind: standing(getattr(rung, kind), settings)
            for kind in ("forward", "reverse", "teachers")
        },
        "parameters": sum(p.numel() for p in trained.model.parameters()),
        "train_pairs": len(data.train),
        "hours": round(sum(row[clock] for row in history) / 3600, 3),
        "val_bleu_beam": round(corpus_bleu(texts, references).score, 3),
    }
    return record | made | ended


# What the runs came to.


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Values with their mean and standard deviation, which one value alone hasn't."""
    deviation = round(statistics.stdev(values), 3) if len(values) > 1 else None
    return {"mean": round(statistics.mean(values), 3), "deviation": deviation, "each": [*values]}


def ladder_table(folder: Path = RESULTS, prefix: str = "ladder") -> list[dict[str, Any]]:
    """A row for each rung of which there is a record: none, some or all of them.

    `prefix` "ladder" stands for the queue's records, "gpu" for a GPU's. The gain is over the first
    rung's mean; None where that is missing, or where the rung translates back.
    """
    rows, base = [], None
    for name, rung in RUNGS.items():
        paths = [folder / f"{prefix}-{run}.json" for run, of in RUNS.items() if of == name]
        runs = [load_record(path.stem, folder) for path in paths if path.is_file()]
        if not runs:
            continue
        bleu = spread([val_bleu(run) for run in runs])
        base = bleu["mean"] if rung.step == 0 else base
        compares = base is not None and not rung.turned
        rows.append(
            {
                "step": rung.step,
                "rung": name,
                "about": rung.about,
                "seeds": len(runs),
                "epochs": max(len(run["history"]) for run in runs),
                "hours": round(sum(run.get("hours", run["seconds"] / 3600) for run in runs), 2),
                "val_bleu": bleu["mean"],
                "deviation": bleu["deviation"],
                "gain": round(bleu["mean"] - base, 2) if compares else None,
                "ended": next((run["ended"] for run in runs if "ended" in run), None),
                "device": runs[0]["device"],
                "command": runs[0]["repeat"],
            }
        )
    return rows
