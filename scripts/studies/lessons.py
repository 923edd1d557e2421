"""Trainings in which other models have a part: their settings, what they read, loss and record.

A `Workshop` keeps the runs of a recipe: it trains what isn't on record yet, and goes on with what
was stopped. `scripts.studies.best` and `scripts.studies.students` are such recipes.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path

import torch
from filelock import FileLock
from torch import Tensor, nn

from scripts import runs_folder
from scripts.book.files import writable
from scripts.book.records import load_record, provenance, save_record, sha256
from scripts.ch09_training_run import average_checkpoints
from scripts.core.cards import write_card
from scripts.core.checkpoints import load_weights, saved_states
from scripts.core.data import TrainingData, with_pairs
from scripts.core.models import STUDIED, load_model, save_model
from scripts.core.settings import PRESETS, TrainConfig, plain_config
from scripts.fast.fast import FastPath
from scripts.fast.losses import loss_function_of, precision_on, resolved, switches_of
from scripts.fast.run import average_if_better, course, evaluate, finish, fit, validated_by
from scripts.fast.translating import DecodeOptions, translate
from scripts.studies.distill import distill_loss
from scripts.studies.risk import RiskTraining, StartedTraining, risk_loss
from scripts.studies.rows import data_of
from scripts.studies.runner import Run, kept_at, on_record

WRITING = DecodeOptions(beam=5, alpha=0.6)  # how models translate the training pairs
AT_ONCE = 2000  # texts that are kept together: the most that is lost if the writing is cut off
ALPHAS = (0.6, 1.0, 1.4, 1.8)  # length penalties that validation chooses from
TINY = {"layers": 1, "d_model": 32, "d_ff": 64, "heads": 2, "vocab": 300, "epochs": 2, "beam": 2}
TINY |= {"max_tokens": 512, "warmup": 4, "save_every": 2, "precision": "float32"}


@dataclass
class LessonConfig(TrainConfig):
    """Everything that decides a training with a lesson: resuming under another is refused."""

    taught: float = 0.0
    """The teachers' part of the loss; the rest is the corpus's."""
    teachers: str = ""
    """The SHA-256 of each teacher's weights."""
    risk: float = 0.0
    """How much the risk of the beam's texts weighs beside the corpus's loss."""
    candidates: int = 0
    """How many of the beam's texts are judged."""
    sharpness: float = 0.0
    """What their scores are multiplied by to make Q."""
    start: str = ""
    """The SHA-256 of the weights from which the training goes on."""
    mean_of: str = ""
    """The SHA-256 of the weights whose mean is taken, instead of a training."""
    pairs: str = ""
    """The SHA-256 of the training pairs, if they aren't the corpus's own."""

    def __post_init__(self):
        super().__post_init__()
        if self.taught and self.r_drop:
            raise ValueError("a taught run can't have r_drop, too")


def lesson_loss(
    config: LessonConfig,
    device: torch.device,
    teachers: Sequence[nn.Module] = (),
    training: bool = True,
) -> Callable[..., tuple[Tensor, Tensor]]:
    """How a batch's loss is computed. Raises ValueError if teachers are missing or idle."""
    if bool(teachers) != bool(config.taught):
        raise ValueError(f"{len(teachers)} teachers, and {config.taught:g} of the loss is theirs")
    switches = switches_of(config, device)
    if config.risk:
        weights = {"weight": config.risk, "sharpness": config.sharpness}
        return partial(risk_loss, **weights, switches=switches)
    if not teachers:
        return loss_function_of(config, device, training)
    rows_of = FastPath(switches).target_rows
    loss_of = partial(distill_loss, teachers=teachers, weight=config.taught, rows_of=rows_of)
    half = precision_on(config, device) == "bf16"
    return torch.autocast(device.type, torch.bfloat16)(loss_of) if half else loss_of


def diversified(
    data: TrainingData,
    forward: Sequence[Sequence[str]] = (),
    reverse: Sequence[Sequence[str]] = (),
) -> TrainingData:
    """`data` with more training pairs: people's first, then what models wrote (Nguyen et al. 2020).

    Each of `forward` holds a model's translation of every source, which becomes a target; each of
    `reverse` one of every target, which becomes a source. A pair is taken once, however many wrote
    it, and what a model wrote only if it is `sound`. Validation and tests stay as they are. Raises
    ValueError if a model wrote too many texts, or too few.
    """
    people = data.corpus["train"]
    sources, targets = zip(*people, strict=True)
    models: list[tuple[str, str]] = []
    for texts in forward:
        models += zip(sources, texts, strict=True)
    for texts in reverse:
        models += zip(texts, targets, strict=True)
    once = dict.fromkeys([*people, *filter(sound, models)])  # in the order in which they came
    return with_pairs(data, list(once))


def sound(pair: tuple[str, str]) -> bool:
    """Whether no side is empty or too long: over three times the other's words, plus five."""
    short, long = sorted(len(side.split()) for side in pair)
    return short > 0 and long <= 3 * short + 5


def pairs_sha256(data: TrainingData) -> str:
    """What identifies these training pairs: the SHA-256 of their texts, in hex."""
    text = json.dumps(data.corpus["train"], ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def lesson_of(config: LessonConfig) -> Run:
    """What `config` has beyond a TrainConfig and that isn't off."""
    plain = asdict(plain_config(config))
    return {name: value for name, value in asdict(config).items() if value and name not in plain}


@dataclass(frozen=True)
class Workshop:
    """Where a recipe's runs are, and how large. A run is called NAME-SEED; so is its model."""

    repeat: str  # the command that makes run {name}
    prefix: str = "ladder"  # of folders and records
    device: str = "cpu"
    tiny: bool = False  # a small model, on a few pairs of the sample corpus
    save: bool = False  # records go to results/, too

    def place(self, name: str) -> Path:
        """The folder of what is written for or by model `name`."""
        return runs_folder() / ("tiny" if self.tiny else "") / f"{self.prefix}-{name}"

    def folder(self, name: str) -> Path:
        """The folder of the model: a run's, or chapter 9's, which ships."""
        return STUDIED if name == STUDIED.name else self.place(name)

    def digest(self, name: str) -> str:
        """The SHA-256 of a model's weights."""
        return sha256(self.folder(name) / "model.safetensors")

    @property
    def data(self) -> TrainingData:
        """The corpus, encoded."""
        config = self.config("any-1")
        return data_of(config.corpus, config.vocab)

    def config(self, name: str, **changes: object) -> LessonConfig:
        """The settings of run NAME-SEED: the small preset with `changes`, precision decided."""
        settings = asdict(PRESETS["small"]) | changes | (TINY if self.tiny else {})
        settings["corpus"] = "few" if self.tiny else "multi30k"
        settings["name"] = self.place(name).relative_to(runs_folder()).as_posix()
        settings |= {"device": self.device, "seed": int(name.rpartition("-")[2])}
        return resolved(LessonConfig(**settings), torch.device(self.device))

    def written(self, name: str, sentences: Sequence[str]) -> list[str]:
        """What model `name` makes of `sentences`; kept in parts in its place."""
        key = {"weights_sha256": self.digest(name), "search": asdict(WRITING)}

        def write(start: int) -> Run:
            model = load_model(self.folder(name), self.device)
            return {"texts": translate(model, sentences[start : start + AT_ONCE], WRITING)}

        texts: list[str] = []
        for start in range(0, len(sentences), AT_ONCE):
            path = self.place(name) / f"texts-{start:06d}.json"
            texts += kept_at(path, {"key": key}, partial(write, start))["texts"]
        return texts

    def more_pairs(self, forward: Sequence[str], reverse: Sequence[str] = ()) -> TrainingData:
        """The corpus, diversified by models of both directions."""
        data = self.data
        sources, targets = zip(*data.corpus["train"], strict=True)
        there = [self.written(name, sources) for name in forward]
        back = [self.written(name, targets) for name in reverse]
        return diversified(data, there, back)

    def train(
        self,
        name: str,
        data: TrainingData,
        start: str = "",
        forward: Sequence[str] = (),
        reverse: Sequence[str] = (),
        teachers: Sequence[str] = (),
        tests: bool = True,
        **changes: object,
    ) -> str:
        """The name of a run, which is trained now unless it is on record.

        It goes on from the weights of model `start`. `forward` and `reverse` name the models that
        wrote some of `data`, `teachers` those that teach word by word. Without `tests` nothing
        reads the test sets. Raises ValueError if the folder holds a run of another recipe.
        """
        models = {"forward": forward, "reverse": reverse, "teachers": teachers}
        models["start"] = [start] if start else []
        if forward or reverse:
            changes["pairs"] = pairs_sha256(data)

        def work(config: LessonConfig, folder: Path) -> tuple[list[Run], dict[str, float]]:
            kind = RiskTraining if config.risk else StartedTraining
            if start:
                kind = partial(kind, start=self.folder(start) / "model.safetensors")
            loaded = [load_model(self.folder(one), self.device).model for one in teachers]
            loss_for = partial(lesson_loss, teachers=loaded)
            resume = bool(saved_states(folder))
            history = fit(config, data, folder, resume=resume, kind=kind, loss_for=loss_for)
            return history, average_if_better(plain_config(config), data, folder, history)

        return self.recorded(name, data, models, work, tests, **changes)

    def mean(self, name: str, names: Sequence[str], start: str) -> str:
        """The name of a model whose weights are the mean of those of runs that began as `start`.

        Wortsman et al. (2022), "Model soups".
        """
        data = self.data

        def work(config: LessonConfig, folder: Path) -> tuple[list[Run], dict[str, float]]:
            folders = [self.folder(one) for one in names]
            trained = load_model(folders[0], self.device)
            means = average_checkpoints([one / "model.safetensors" for one in folders])
            load_weights(trained.model, means, folder)
            save_model(folder, replace(trained, config=plain_config(config)))
            bleu = validated_by(load_model(folder, self.device), data)["val_bleu"]
            histories = (load_record("record", one)["history"] for one in folders)
            return [*chain(*histories)], {f"mean of {len(names)} runs": round(bleu, 5)}

        return self.recorded(name, data, {"mean_of": names, "start": [start]}, work)

    def recorded(
        self,
        name: str,
        data: TrainingData,
        models: Mapping[str, Sequence[str]],
        work: Callable[[LessonConfig, Path], tuple[list[Run], dict[str, float]]],
        tests: bool = True,
        **changes: object,
    ) -> str:
        """The name of a run, which is on record afterwards: `work` does it if it wasn't before.

        `models` are those that it learns from, by kind.
        """
        kinds = ("forward", "reverse", "teachers", "mean_of")
        learned_from = {kind: [] for kind in kinds} | {k: [*v] for k, v in models.items() if v}
        for kind in ("teachers", "mean_of", "start"):
            changes[kind] = ",".join(map(self.digest, learned_from.get(kind, [])))
        config, folder = self.config(name, **changes), writable(self.place(name))
        with FileLock(folder / "run.lock"):  # of two processes that want the same, one waits
            record = on_record(folder / "record.json", config, lesson_of(config))
            if record is None:
                record = provenance(self.repeat.format(name=name), self.device)  # names the code
                record |= self.scored(config, data, folder, *work(config, folder), tests)
                used = sorted(set(chain(*learned_from.values())))
                record |= {"rung": name.rpartition("-")[0], "lesson": lesson_of(config)}
                record |= {"learned_from": learned_from, "train_pairs": len(data.train)}
                record["their_sha256"] = {one: self.digest(one) for one in used}
                save_record("record", record, folder)
        if tests:
            write_card(folder, record)
        if self.save and not self.tiny:
            save_record(f"{self.prefix}-{name}", record)
        return name

    def scored(
        self,
        config: LessonConfig,
        data: TrainingData,
        folder: Path,
        history: list[Run],
        chosen: dict[str, float],
        tests: bool,
    ) -> Run:
        """What the record says of the model in `folder`; validation chooses its length penalty."""
        plain = plain_config(config)
        if tests:
            record = finish(plain, data, folder, history, chosen, ALPHAS)
        else:
            record = course(plain, folder, history, chosen)
        trained = load_model(folder, self.device)
        beam = evaluate(trained, data.corpus["val"], config.beam, config.alpha)
        clock = "cpu_seconds" if self.device == "cpu" else "seconds"
        return record | {
            "parameters": sum(p.numel() for p in trained.model.parameters()),
            "hours": round(sum(row[clock] for row in history) / 3600, 3),
            "val_bleu_beam": beam["bleu"],
        }
