"""A training against the clock: `python -m scripts.studies.speedrun --preset small --save true`."""

if __name__ == "__main__":  # first, so that Ctrl-C while libraries load is answered, too
    from scripts.book.command import launch

    raise SystemExit(launch("scripts.studies.speedrun"))

import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tqdm import tqdm

from scripts.book.command import as_typed, read, serve
from scripts.book.records import provenance, save_record
from scripts.ch08_training_run import PRESETS, Training, evaluate, held_out_splits, prepare
from scripts.train import preset_named


@dataclass
class SpeedOptions:
    """What is timed."""

    corpus: Literal["sample", "multi30k"] = "multi30k"
    """What to learn from."""
    preset: str = "small"
    """The recipe."""
    target: float = 40.0
    """BLEU to reach: cased, greedy, on the first test split."""
    compile: bool = False
    """Let torch.compile rewrite the step."""
    device: str = "auto"
    """Where it runs."""
    save: bool = False
    """Keep the result as results/speedrun-PRESET.json."""

    def __post_init__(self):
        preset_named(self.preset)


def speed_run(options: SpeedOptions) -> dict[str, Any]:
    """Seconds of training until the target, epoch by epoch, and of what comes before: the record.

    Where the preset's epochs don't suffice, "reached" is false.
    """
    changes = {"corpus": options.corpus, "device": options.device, "compile": options.compile}
    config = replace(PRESETS[options.preset], **changes, average=0, save_every=10**9)
    data = prepare(config)
    split = held_out_splits(data.corpus)[0]
    rows: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        throwaway = Training(config, data, Path(folder))
        throwaway.load()
        for _ in range(5):
            throwaway.step()
        throwaway.look()
        warm_up = time.perf_counter() - start
        training = Training(config, data, Path(folder))
        seconds = 0.0
        while training.epoch <= config.epochs and not (rows and rows[-1]["bleu"] >= options.target):
            training.train_epoch()
            seconds += training.seconds
            bleu = evaluate(training.trained, data.corpus[split])["bleu"]
            rows.append({"epoch": training.epoch, "seconds": round(seconds, 2), "bleu": bleu})
            tqdm.write(f"epoch {training.epoch}: {seconds:.1f} s, BLEU {bleu:.1f}")
            training.end_epoch({"epoch": training.epoch, "val_bleu": bleu})
    command = as_typed(__name__, options, always=("corpus", "preset", "target"))
    record = {
        **provenance(command, training.device),
        "config": asdict(config),
        "split": split,
        "target": options.target,
        "reached": rows[-1]["bleu"] >= options.target,
        "warm_up_seconds": round(warm_up, 2),
        "history": rows,
    }
    if options.save:
        save_record(f"speedrun-{options.preset}", record)
    return record


def parse(argv: Sequence[str]) -> SpeedOptions:
    """The command line to its options. Raises ValueError for what makes no sense."""
    return read(__name__, SpeedOptions, argv, "Seconds of training until a BLEU is reached.")


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns the exit code."""
    return serve(parse, speed_run, argv)
