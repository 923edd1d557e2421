"""Trainings in which other models have a part: their settings, what they read, loss and record.

A `Workshop` keeps the runs of `scripts.studies.best`: it trains what isn't on record yet, and goes
on with what was stopped.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path

import torch

from scripts import runs_folder
from scripts.book.records import load_record, provenance, save_record, sha256
from scripts.ch06_training import BOS
from scripts.ch07_multi30k import Example
from scripts.ch09_training_run import average_checkpoints
from scripts.core.checkpoints import load_weights, saved_states
from scripts.core.data import TrainingData, with_pairs
from scripts.core.models import STUDIED, load_model, save_model
from scripts.core.settings import PRESETS, TrainConfig, plain_config
from scripts.core.training import Training
from scripts.fast.losses import LossOf, loss_function_of, resolved, switches_of
from scripts.fast.run import average_if_better, course, evaluate, finish, fit, validated_by
from scripts.fast.translating import DecodeOptions, translate
from scripts.studies.risk import RiskTraining, risk_loss
from scripts.studies.rows import CPU, data_of
from scripts.studies.runner import Run, kept_at

WRITING = DecodeOptions(beam=5, alpha=0.6)  # how models translate the training pairs
ALPHAS = (0.6, 1.0, 1.4, 1.8)  # length penalties that validation chooses from
REPEAT = "python -m scripts.studies.best --only {name} --save"


@dataclass
class LessonConfig(TrainConfig):
    """Everything that decides a training with a lesson: resuming under another is refused."""

    risk: float = 0.0
    """How much the risk of the beam's texts weighs beside the corpus's loss."""
    start: str = ""
    """The SHA-256 of the weights from which the training goes on."""
    mean_of: str = ""
    """The SHA-256 of the weights whose mean is taken, instead of a training."""
    pairs: str = ""
    """The SHA-256 of the training pairs, if they aren't the corpus's own."""


def lesson_loss(config: LessonConfig, device: torch.device, training: bool = True) -> LossOf:
    """How a batch's loss is computed."""
    if not config.risk:
        return loss_function_of(config, device, training)
    return partial(risk_loss, weight=config.risk, switches=switches_of(config, device))


def distilled(
    data: TrainingData, teacher: Callable[[Sequence[str]], Sequence[str]]
) -> TrainingData:
    """The same training sources with `teacher`'s translations (Kim and Rush 2016, §3.2).

    Validation stays as people wrote it: it is there to judge.
    """
    sources = [source for source, _ in data.corpus["train"]]
    return with_pairs(data, list(zip(sources, teacher(sources), strict=True)))


def turned_around(data: TrainingData) -> TrainingData:
    """The same pairs in the other direction: the target becomes the source."""
    corpus = {
        split: [(target, source) for source, target in pairs]
        for split, pairs in data.corpus.items()
    }
    train, val = (  # bos stands before a target only
        [Example(e.tgt[1:], [BOS, *e.src]) for e in examples] for examples in (data.train, data.val)
    )
    return replace(data, corpus=corpus, train=train, val=val)


def diversified(
    data: TrainingData, forward: Sequence[Sequence[str]], reverse: Sequence[Sequence[str]]
) -> TrainingData:
    """`data` with more training pairs: people's first, then what models wrote (Nguyen et al. 2020).

    Each of `forward` holds a model's translation of every source, which becomes a target; each of
    `reverse` one of every target, which becomes a source. A pair is taken once, however many wrote
    it, and what a model wrote only if it is `sound`. Validation and tests stay as they are. Raises
    ValueError if a model wrote too many texts, or too few.
    """
    people = data.corpus["train"]
    sources, targets = zip(*people, strict=True)
    written = [zip(sources, texts, strict=True) for texts in forward]
    written += [zip(texts, targets, strict=True) for texts in reverse]
    once = dict.fromkeys([*people, *filter(sound, chain(*written))])  # in the order of coming
    return with_pairs(data, list(once))


def sound(pair: tuple[str, str]) -> bool:
    """Whether no side is empty or too long: over three times the other's words, plus five."""
    short, long = sorted(len(side.split()) for side in pair)
    return short > 0 and long <= 3 * short + 5


def pairs_sha256(data: TrainingData) -> str:
    """What identifies these training pairs: the SHA-256 of their texts, in hex."""
    text = json.dumps(data.corpus["train"], ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Workshop:
    """Where a recipe's runs are. A run is called NAME-SEED; so is its model."""

    save: bool = False  # records go to results/, too

    def folder(self, name: str) -> Path:
        """The folder of the model: a run's, or chapter 9's, which ships."""
        return STUDIED if name == STUDIED.name else runs_folder() / f"ladder-{name}"

    def digests(self, names: Sequence[str]) -> str:
        """The SHA-256 of these models' weights, with commas between them."""
        return ",".join(sha256(self.folder(name) / "model.safetensors") for name in names)

    @property
    def data(self) -> TrainingData:
        """The corpus, encoded."""
        return data_of("multi30k", PRESETS["small"].vocab)

    def config(self, name: str, **changes: object) -> LessonConfig:
        """The settings of run NAME-SEED: the small preset with `changes`, precision decided."""
        settings = asdict(PRESETS["small"]) | {"corpus": "multi30k", "device": "cpu"} | changes
        settings |= {"name": f"ladder-{name}", "seed": int(name.rpartition("-")[2])}
        return resolved(LessonConfig(**settings), CPU)

    def written(self, name: str, sentences: Sequence[str]) -> list[str]:
        """What model `name` makes of `sentences`; kept beside the runs."""
        key = {"weights_sha256": self.digests([name]), "search": asdict(WRITING)}

        def write() -> Run:
            return {"texts": translate(load_model(self.folder(name)), sentences, WRITING)}

        return kept_at(runs_folder() / f"texts-{name}.json", {"key": key}, write)["texts"]

    def more_pairs(self, forward: Sequence[str], reverse: Sequence[str]) -> TrainingData:
        """The corpus, diversified by models of both directions."""
        sources, targets = zip(*self.data.corpus["train"], strict=True)
        there = [self.written(name, sources) for name in forward]
        back = [self.written(name, targets) for name in reverse]
        return diversified(self.data, there, back)

    def trained(
        self, config: LessonConfig, data: TrainingData, start: str, folder: Path
    ) -> tuple[list[Run], dict[str, float]]:
        """A training's history, and what chose the weights in `folder`."""
        kind = RiskTraining if config.risk else Training
        parts = {"kind": kind, "loss_for": lesson_loss, "tune": self.folder(start)}
        history = fit(config, data, folder, bool(saved_states(folder)), **parts)
        return history, average_if_better(plain_config(config), data, folder, history)

    def averaged(
        self, config: LessonConfig, data: TrainingData, names: Sequence[str], folder: Path
    ) -> tuple[list[Run], dict[str, float]]:
        """The runs' histories, after the mean of their weights has come into `folder`.

        Wortsman et al. (2022), "Model soups".
        """
        folders = [self.folder(one) for one in names]
        model = load_model(folders[0])
        means = average_checkpoints([one / "model.safetensors" for one in folders])
        load_weights(model.model, means, folder)
        save_model(folder, replace(model, config=plain_config(config)))
        bleu = validated_by(load_model(folder), data)["val_bleu"]
        histories = (load_record("record", one)["history"] for one in folders)
        return [*chain(*histories)], {f"mean of {len(names)} runs": round(bleu, 5)}

    def run(
        self,
        name: str,
        models: Mapping[str, Sequence[str]],
        data: TrainingData | None = None,
        tests: bool = True,
        **changes: object,
    ) -> str:
        """The name of a run, which is on record afterwards: it is done now if it wasn't before.

        `models` are those that it learns from, by kind: it goes on from the weights of `start`, or
        is the mean of `mean_of`, which did; `forward` and `reverse` write more pairs. Else it reads
        `data`, or the corpus. Validation chooses a length penalty, and without `tests` nothing
        reads the test sets. Raises ValueError if the folder holds a run of another recipe.
        """
        data = data or self.data
        (start,), mean_of = models["start"], models.get("mean_of", [])
        changes |= {"start": self.digests([start]), "mean_of": self.digests(mean_of)}
        if "forward" in models:
            data = self.more_pairs(models["forward"], models["reverse"])
            changes["pairs"] = pairs_sha256(data)
        config, folder = self.config(name, **changes), self.folder(name)

        def do_it() -> Run:
            record = provenance(REPEAT.format(name=name))  # first: names the code that runs
            if mean_of:
                history, chosen = self.averaged(config, data, mean_of, folder)
            else:
                history, chosen = self.trained(config, data, start, folder)
            plain = plain_config(config)
            if tests:
                record |= finish(plain, data, folder, history, chosen, ALPHAS)
            else:
                record |= course(plain, folder, history, chosen)
            beam = evaluate(load_model(folder), data.corpus["val"], config.beam, config.alpha)
            return record | {
                "hours": round(sum(row["cpu_seconds"] for row in history) / 3600, 3),
                "val_bleu_beam": beam["bleu"],
                "learned_from": dict(models),
                "their_sha256": {one: self.digests([one]) for one in chain(*models.values())},
                "train_pairs": len(data.train),
            }

        record = kept_at(folder / "record.json", {"lesson": asdict(config)}, do_it)
        if self.save:
            save_record(f"ladder-{name}", record)
        return name
