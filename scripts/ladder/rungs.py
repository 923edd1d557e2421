"""The rungs of the ladder: each recipe for a small translator, and what its runs came to.

A rung is a change to the small preset, and perhaps a lesson: other kinds of dropout, pairs that
models wrote, teachers. Runs are named after rung and seed. `scripts.ladder.climbing` trains them;
this module only says what they are, and reads their records.
"""

import statistics
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from scripts.book.records import RESULTS, load_record
from scripts.core.settings import PRESETS


@dataclass(frozen=True)
class Rung:
    """A recipe: the step of the ladder that it belongs to, and what it changes in the preset."""

    step: int
    about: str
    changes: dict[str, Any] = field(default_factory=dict)
    seeds: tuple[int, ...] = (1,)
    forward: tuple[str, ...] = ()
    """Runs, or models that ship, whose translations of the sources are learned from."""
    reverse: tuple[str, ...] = ()
    """Runs whose translations of the targets become sources."""
    teachers: tuple[str, ...] = ()
    """Runs that together teach word by word."""
    start: str = ""
    """The run, or model that ships, from whose weights it goes on. {0} stands for its seed."""
    mean_of: tuple[str, ...] = ()
    """Runs whose weights are averaged, instead of a training (Wortsman et al. 2022).

    {0} stands for its seed, {1} for the next.
    """
    share: int = 1
    """It learns from one in so many of the corpus's pairs, and from no texts that models wrote."""
    turned: bool = False
    """It learns to translate back. Its BLEU is of another language, so it can't be compared."""
    candidate: bool = False
    """It may ship, so its test scores are read."""
    gpu: bool = False
    """For a GPU alone: one thread would take hours."""

    @property
    def needs(self) -> tuple[str, ...]:
        """The runs whose models it uses."""
        used = (*self.forward, *self.reverse, *self.teachers, self.start, *self.mean_of)
        names = dict.fromkeys(used)
        return tuple(name for name in names if name in RUNS)

    @property
    def passes(self) -> float:
        """Passes over as many pairs as the corpus has, or what takes as long."""
        if self.mean_of:
            return SCORING
        epochs = self.changes.get("epochs", PRESETS["small"].epochs)
        sides = 1 + len(self.forward) + len(self.reverse)
        return epochs * sides * (JUDGING if "risk" in self.changes else 1) / self.share


SHIPPED = "multi30k-de-en"  # chapter 9's; its weights are at hand
JUDGING = 45  # times as long as on pairs alone: eight texts for each source are written and read
SCORING = 2  # what it takes to read validation and tests
BY_MUON = {"optimizer": "muon"}
ONCE = {"forward": ("small-1",), "reverse": ("reverse-1",)}
BOTH = {"forward": ("small-1", "long-1"), "reverse": ("reverse-1", "reverse-adam-1")}
BEST = {"forward": (SHIPPED,), "reverse": ("reverse-adam-1", "reverse-adam-2")}
ALL = BEST | {"forward": (SHIPPED, "small-1")}
TEACHERS = ("long-1", "diverse-1", "diverse-more-1")
UNIDROP = {"layer_drop": 0.1, "feature_drop": 0.1, "word_drop": 0.2}
BY_RISK = {
    "risk": 150.0,
    "candidates": 8,
    "sharpness": 6.0,
    "lr": 1e-4,
    "warmup": 30,
    "max_tokens": 512,
}
BY_RISK |= {"epochs": 1, "average": 0, "step": "eager", "precision": "float32"}
MORE = {"epochs": 24}  # noise needs a longer run
TWICE = {"dropout": 0.3, "epochs": 16}  # and two passes need one, too
ONWARD = {"dropout": 0.3, "lr": 1e-3, "warmup": 200}  # from trained weights, in smaller steps
WIDENED = ONWARD | {"epochs": 2, "average": 2}
BACK = ("reverse-onward-1", "reverse-onward-2")


def mean_rung(about: str, *runs: str, seeds: tuple[int, ...] = (1,), start: str = SHIPPED) -> Rung:
    """A rung without a training: the mean of `runs`, which all began as model `start`."""
    return Rung(6, about, seeds=seeds, start=start, mean_of=runs, candidate=True)


# What isn't for a GPU alone takes at most 100 minutes of one thread: a lost machine loses no more.
RUNGS: dict[str, Rung] = {
    "small": Rung(0, "today's recipe", seeds=(1, 2, 3), candidate=True),
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
    "bpe-dropout": Rung(3, "BPE-dropout 0.1", {"bpe_dropout": 0.1, "epochs": 28}),
    "reverse": Rung(4, "English to German, Muon", BY_MUON, turned=True),
    "reverse-adam": Rung(4, "English to German, Adam", {}, (1, 2), turned=True),
    "reverse-onward": Rung(
        4,
        "English to German, from chapter 9's model",
        {"epochs": 5, "average": 3},
        (1, 2),
        start=SHIPPED,
        turned=True,
    ),
    "diverse": Rung(4, "diversified, k = 1", {"epochs": 9}, **ONCE),
    "diverse-more": Rung(4, "diversified, k = 2", {"epochs": 6}, **BOTH),
    "taught": Rung(5, "taught by words", {"taught": 0.5, "epochs": 14}, teachers=TEACHERS),
    # It may ship: Adam alone, and pairs that the best models at hand wrote.
    "final": Rung(
        6,
        "diversified by what was at hand",
        {"epochs": 6, "average": 3},
        (1, 2),
        **BEST,
        candidate=True,
    ),
    "final-more": Rung(
        6,
        "two models each way, longer, dropout 0.3",
        {"dropout": 0.3, "epochs": 10, "average": 3},
        (1, 2),
        **ALL,
        candidate=True,
    ),
    "final-long": Rung(
        6,
        "the same, twice as long",
        {"dropout": 0.3, "epochs": 20, "average": 3},
        (1, 2, 3),
        **ALL,
        candidate=True,
        gpu=True,
    ),
    "risk": Rung(
        6,
        "minimum risk, from chapter 9's model",
        BY_RISK,
        (1, 2),
        start=SHIPPED,
        share=2,
        candidate=True,
    ),
    "risk-long": Rung(
        6,
        "the same, on all pairs, in larger steps",
        BY_RISK | {"lr": 2e-4, "max_tokens": 1024},
        (1, 2, 3, 4),
        start=SHIPPED,
        candidate=True,
    ),
    "risk-again": Rung(
        6,
        "and all pairs once more",
        BY_RISK | {"lr": 2e-4, "max_tokens": 1024},
        (1, 3),
        start="risk-long-{0}",
        candidate=True,
    ),
    "risk-mean": mean_rung(
        "mean of two of risk-long, one of risk-again", "risk-long-1", "risk-long-2", "risk-again-1"
    ),
    "onward": Rung(
        6,
        "no risk, six more epochs, dropout 0.3",
        ONWARD | {"epochs": 6, "average": 3},
        (1, 2),
        start=SHIPPED,
        candidate=True,
    ),
    "onward-mean": mean_rung("mean of two of onward", "onward-1", "onward-2"),
    "widened": Rung(
        6,
        "diversified, from chapter 9's model",
        WIDENED,
        (1, 2, 3, 4),
        forward=(SHIPPED,),
        reverse=BACK,
        start=SHIPPED,
        candidate=True,
    ),
    "widened-mean": mean_rung("mean of two of widened", "widened-1", "widened-2"),
    "all-mean": mean_rung(
        "mean of two of risk-long, one of risk-again, two of widened",
        "risk-long-{0}",
        "risk-long-{1}",
        "risk-again-{0}",
        "widened-{0}",
        "widened-{1}",
        seeds=(1, 3),
    ),
    "both-means": mean_rung("mean of two of all-mean, so of ten runs", "all-mean-1", "all-mean-3"),
    "widened-best": Rung(
        6,
        "diversified by the best mean, from its weights",
        WIDENED,
        (1, 2),
        forward=("all-mean-3",),
        reverse=BACK,
        start="all-mean-3",
        candidate=True,
    ),
    "risk-best": Rung(
        6,
        "minimum risk, from the best mean",
        BY_RISK | {"lr": 2e-4, "max_tokens": 1024},
        (1, 2),
        start="all-mean-3",
        candidate=True,
    ),
    "best-mean": mean_rung(
        "mean of two of widened-best, two of risk-best",
        "widened-best-1",
        "widened-best-2",
        "risk-best-1",
        "risk-best-2",
        start="all-mean-3",
    ),
    "agreed": Rung(
        6,
        "texts of three models, R-Drop 5",
        {"dropout": 0.3, "r_drop": 5.0, "epochs": 16, "average": 3},
        forward=(SHIPPED, "small-1", "small-3"),
        candidate=True,
        gpu=True,
    ),
}
RUNS = {f"{name}-{seed}": name for name, rung in RUNGS.items() for seed in rung.seeds}


def rung_of(run: str) -> Rung:
    """The recipe of run NAME-SEED, with the names of the runs that this seed of it uses."""
    rung, seed = RUNGS[RUNS[run]], int(run.rpartition("-")[2])
    mean_of = tuple(name.format(seed, seed + 1) for name in rung.mean_of)
    return replace(rung, start=rung.start.format(seed), mean_of=mean_of)


def val_bleu(record: dict[str, Any]) -> float:
    """Greedy validation BLEU of what a run left."""
    return max(record["chosen_by_val_bleu"].values())


def pairs_seen(record: dict[str, Any], folder: Path = RESULTS) -> int:
    """How many pairs a run has read, with repetition; a mean of runs as many as they all."""
    parts = record.get("learned_from", {}).get("mean_of", [])
    if parts:
        return sum(pairs_seen(load_record(f"ladder-{part}", folder), folder) for part in parts)
    return len(record["history"]) * record["train_pairs"]


def ladder_table(folder: Path = RESULTS) -> list[dict[str, Any]]:
    """A row for each rung of which the queue left a record: none, some or all of them.

    The gain is over the first rung's mean; None if that is missing, or if the rung translates
    back.
    """
    rows, base = [], None
    for name, rung in RUNGS.items():
        paths = [folder / f"ladder-{run}.json" for run, of in RUNS.items() if of == name]
        runs = [load_record(path.stem, folder) for path in paths if path.is_file()]
        if not runs:
            continue
        each, beams = [val_bleu(run) for run in runs], [run["val_bleu_beam"] for run in runs]
        mean = round(statistics.mean(each), 3)
        base = mean if rung.step == 0 else base
        compares = base is not None and not rung.turned
        rows.append(
            {
                "rung": name,
                "about": rung.about,
                "seeds": len(runs),
                "epochs": max(len(run["history"]) for run in runs),
                "seen": round(max(pairs_seen(run, folder) for run in runs) / 1e6, 2),
                "hours": round(sum(run["hours"] for run in runs), 2),
                "val_bleu": mean,
                "gain": round(mean - base, 2) if compares else None,
                "beam": round(statistics.mean(beams), 3),
                "each": each,
                "each_beam": beams,
            }
        )
    return rows
