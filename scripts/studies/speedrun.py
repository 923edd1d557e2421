"""The race to 40 BLEU: `python -m scripts.studies.speedrun`; docs/speedrun.md has its rules.

Three trainings from nothing. Each ends when validation says that it is good enough; then its clock
stops, and only then is the test read, once. With --tune there is one training and no test.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from time import perf_counter, process_time
from typing import Any, Literal

from scripts.book.command import Command, as_typed
from scripts.book.records import load_record, provenance, record_names, save_record
from scripts.ch12_going_fast import keep_memory
from scripts.core.data import prepare
from scripts.core.models import Trained
from scripts.core.scores import held_out_splits
from scripts.core.settings import TrainConfig, pick_device, plain_config
from scripts.corpora.load import Pairs, load_corpus
from scripts.fast.run import evaluate, training_of
from scripts.studies.runner import SEEDS, Run

MODULE = "scripts.studies.speedrun"
GOAL, TEST, MOST_PARAMETERS = 40.0, "test_2016_flickr", 8_000_000
SIGNATURE = "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:"


@dataclass
class RaceOptions(TrainConfig):
    """A recipe, and what is done with it; docs/speedrun.md says where the defaults come from."""

    d_model: int = 192
    d_ff: int = 768
    heads: int = 6
    vocab: int = 4096
    optimizer: Literal["adam", "muon"] = "muon"
    lr: float = 3e-3
    dropout: float = 0.1
    epochs: int = 14
    warmup: int = 200
    beam: int = 8
    alpha: float = 1.6
    average: int = 0
    save_every: int = 0
    name: str = "speedrun"
    enough: float = 41.0
    """Validation BLEU that ends a training: by the test's own search, on all captions."""
    looks: int = 3
    """After how many of the last epochs validation is asked; it takes time, too."""
    by: str = "the series"
    """Whose entry it is."""
    tune: bool = False
    """One training, with --seed, to try a recipe: prints its validation BLEU, reads no test."""
    check: bool = False
    """Trains nothing: says which rules the records of earlier races break."""
    save: bool = False
    """Keep the record as results/speedrun-DEVICE-N.json, if it breaks no rule."""

    def __post_init__(self):
        super().__post_init__()
        if self.average or self.save_every:
            raise ValueError("a race saves and averages nothing: both options have to be 0")


def trained_to(
    config: TrainConfig, corpus: Mapping[str, Pairs], enough: float, looks: int
) -> tuple[Trained, Run]:
    """One training, until validation BLEU is `enough`: the model, and what it took. No test."""
    start, cpu = perf_counter(), process_time()
    training = training_of(config, prepare(config, corpus), Path())  # it is asked to save nothing
    val_bleu: dict[str, float] = {}
    while training.epoch <= config.epochs and all(b < enough for b in val_bleu.values()):
        training.train_epoch()
        if training.epoch > config.epochs - looks:
            scores = evaluate(training.trained, corpus["val"], config.beam, config.alpha)
            val_bleu[str(training.epoch)] = scores["bleu"]
        training.next_epoch()
    return training.trained, {
        "seed": config.seed,
        "seconds": round(perf_counter() - start, 1),
        "cpu_seconds": round(process_time() - cpu, 1),
        "epochs": training.epoch - 1,
        "val_bleu": val_bleu,
        "parameters": sum(p.numel() for p in training.model.parameters()),
        "precision": training.config.precision,
    }


def scored(config: TrainConfig, corpus: Mapping[str, Pairs], enough: float, looks: int) -> Run:
    """What a training took and, once its clock has stopped, its BLEU on the first test split."""
    trained, run = trained_to(config, corpus, enough, looks)
    split = held_out_splits(corpus)[0]
    scores = evaluate(trained, corpus[split], config.beam, config.alpha)
    run |= {"split": split, "test_bleu": scores["bleu"], "signature": scores["signature"]}
    print(run, flush=True)
    return run


def broken_rules(record: Mapping[str, Any]) -> list[str]:
    """The rules of the race that a record breaks, in words; none if it is an entry."""
    recipe, runs, enough = (record[name] for name in ("recipe", "runs", "enough"))
    looks = [[*run["val_bleu"].values()] for run in runs]
    pairs = recipe["corpus"], recipe["languages"]
    rules = {
        "Multi30k's training pairs are all it learns from": pairs == ("multi30k", "de-en"),
        f"at most {MOST_PARAMETERS:,} parameters": all(
            run["parameters"] <= MOST_PARAMETERS for run in runs
        ),
        "seeds 1, 2 and 3, each once": tuple(run["seed"] for run in runs) == SEEDS,
        f"validation ends each training, with {enough} BLEU": all(
            bleu and bleu[-1] >= enough > max(bleu[:-1], default=0) for bleu in looks
        ),
        f"the test is {TEST}, by sacreBLEU {SIGNATURE}…": all(
            run["split"] == TEST and run["signature"].startswith(SIGNATURE) for run in runs
        ),
        f"on average at least {GOAL} BLEU in the test": fmean(r["test_bleu"] for r in runs) >= GOAL,
    }
    return [rule for rule, holds in rules.items() if not holds]


def check_records() -> int:
    """Print which rules the races in results/ break; 1 if there are any, else 0."""
    names = record_names("speedrun-*")
    complaints = [f"{name}: {rule}" for name in names for rule in broken_rules(load_record(name))]
    print(*complaints or [f"{len(names)} entries, and no rule is broken"], sep="\n")
    return int(bool(complaints))


def race(options: RaceOptions) -> int:
    """Train from nothing to 40 BLEU on Multi30k, three times, each stopped by validation."""
    if options.check:
        return check_records()
    device = pick_device(options.device)
    if device.type == "cpu" and options.step != "textbook":
        keep_memory()
    config = plain_config(options)
    corpus = load_corpus(config.corpus, config.languages)  # a download is outside of the clock
    ends = options.enough, options.looks
    if options.tune:
        print(trained_to(config, corpus, *ends)[1])
        return 0
    record = provenance(as_typed(MODULE, options), device) | {"by": options.by}
    record |= {"enough": options.enough, "recipe": asdict(config)}
    record["runs"] = [scored(replace(config, seed=seed), corpus, *ends) for seed in SEEDS]
    if complaints := broken_rules(record):
        print("no entry, as these rules don't hold:", *complaints, sep="\n")
        return 1
    if options.save:
        number = 1 + len(record_names(f"speedrun-{device.type}-*"))
        print(save_record(f"speedrun-{device.type}-{number}", record))
    return 0


main = Command(MODULE, RaceOptions, race)

if __name__ == "__main__":
    raise SystemExit(main())
