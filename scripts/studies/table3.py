"""Table 3, a rate of its own for each row that may need one: `python -m scripts.studies.table3`.

First the base's dropout and rate are swept, with a seed of their own. Then the rows that change
depth, width, norm or dropout, or that may want other steps, are swept. What counts are the runs of
three fresh seeds. Runs that are on record aren't done again, so the hours may come in pieces.
"""

if __name__ == "__main__":  # first, so that Ctrl-C while libraries load is answered, too
    from scripts.book.command import launch

    raise SystemExit(launch("scripts.studies.table3"))

import functools
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from scripts import runs_folder
from scripts.book.command import GOES_ON, Command, as_typed
from scripts.book.records import RESULTS
from scripts.ch08_decoding import plain_translate
from scripts.ch19_ablations import STUDY, STUDY_ROWS, THE_BASE
from scripts.engine.data import TrainingData, prepare
from scripts.engine.models import Trained
from scripts.engine.scores import corpus_bleu
from scripts.engine.settings import TrainConfig
from scripts.engine.translating import fast_translate
from scripts.studies.ablations import train_row
from scripts.studies.runner import Run, Study, best_rate, complete, step_back, sweep, these

BASE = replace(STUDY, epochs=5, max_tokens=2048, name="table-3")
DROPOUTS = (0.0, 0.05, 0.1, 0.2)
ROWS = [name for name in STUDY_ROWS if "dropout" not in name]  # dropout is asked of the base alone
SWEPT = ("1 layer", "4 layers", "d_model 32", "d_model 128", "d_ff 128", "d_ff 512")
SWEPT += ("no residual", "no √d_k", "no warm-up", "post-norm", "post-norm, no warm-up")
SWEEP, SEEDS = 0, (1, 2, 3)  # what chooses a rate isn't what counts


def wanted_runs(runs: Sequence[Run]) -> list[Run]:
    """All that is wanted by now: the base's sweeps; then those of its rows, and the seeds."""
    wanted: list[Run] = []

    def rate_of(row: str, dropout: float, start: float) -> float | None:
        """The best of a sweep, once it is over; until then its runs are wanted."""
        place = {"row": row, "dropout": dropout, "seed": SWEEP}
        done = these(runs, **place)
        rates = sweep(done, start)
        wanted.extend(place | {"lr": rate} for rate in rates)
        return best_rate(done) if {*rates} <= {run["lr"] for run in done} else None

    def seeds_of(row: str, dropout: float, rate: float) -> None:
        wanted.extend({"row": row, "dropout": dropout, "lr": rate, "seed": s} for s in SEEDS)

    rates = {dropout: rate_of(THE_BASE, dropout, BASE.lr) for dropout in DROPOUTS}
    if None in rates.values():
        return wanted
    base = min(these(runs, row=THE_BASE, seed=SWEEP), key=lambda run: run["loss"] or float("inf"))
    for dropout, rate in rates.items():
        seeds_of(THE_BASE, dropout, rate)
    for row in ROWS:
        rate = rate_of(row, base["dropout"], base["lr"]) if row in SWEPT else base["lr"]
        if rate is not None and row != THE_BASE:
            seeds_of(row, base["dropout"], rate)
    return wanted


@functools.cache
def data_of(corpus: str, vocab: int) -> TrainingData:
    """What all runs read; a worker prepares it once."""
    return prepare(replace(BASE, corpus=corpus, vocab=vocab))


def one_run(setting: Mapping[str, Any], wanted: Run) -> Run:
    """Train a row; the best validation loss in nats, None where it diverged, and BLEU by a beam."""
    start, row = time.perf_counter(), STUDY_ROWS[wanted["row"]]
    given = {key: wanted[key] for key in ("dropout", "lr", "seed")}
    config = row.config(TrainConfig(**setting), **given)
    data = data_of(config.corpus, config.vocab)
    found: Run = {"loss": None}
    try:
        model, losses = train_row(row, config, data)
    except FloatingPointError as error:
        found["diverged"] = str(error)
    else:
        found |= {"loss": round(min(losses), 5), "losses": [round(loss, 5) for loss in losses]}
        if wanted["seed"] != SWEEP:
            sources, references = zip(*data.corpus["val"], strict=True)
            # The engine's cache walks the standard model; what it can't see decodes by the formula.
            decode = fast_translate if row.way == "fast" else plain_translate
            texts = decode(Trained(model, data.tokenizer, config), sources, beam=4)
            found["bleu"] = round(corpus_bleu(texts, references).score, 2)
    return found | {"seconds": round(time.perf_counter() - start)}


@dataclass
class Table3Options:
    """How long, how many at once, and where to."""

    hours: float = 1.2
    """No run begins after so many hours. The same command goes on with what is missing."""
    workers: int = 2
    """Runs at once, each on one thread of the lowest priority."""
    corpus: Literal["sample", "multi30k"] = "multi30k"
    """What to learn from."""
    save: bool = False
    """Keep the record in results/, and not below the folder of runs."""


def run_table(options: Table3Options) -> dict[str, Any]:
    """Do what is missing of the table, as far as the hours go; its record."""
    setting = asdict(replace(BASE, corpus=options.corpus))
    study = Study(f"table3-{options.corpus}", setting, wanted_runs, one_run)
    folder = RESULTS if options.save else runs_folder() / "results"
    command = as_typed(__name__, options, always=("save",))
    step_back()
    return complete(study, command, folder, options.hours, options.workers)


main = Command(__name__, Table3Options, run_table, "Train Table 3's rows.", interrupted=GOES_ON)
