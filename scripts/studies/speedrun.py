"""A training against the clock: `python -m scripts.studies.speedrun --preset small --save true`."""

if __name__ == "__main__":  # first, so that Ctrl-C while libraries load is answered, too
    from scripts.book.command import launch

    raise SystemExit(launch("scripts.studies.speedrun"))

import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tqdm import tqdm

from scripts.book.command import Command, as_typed
from scripts.book.records import provenance, save_record
from scripts.engine.data import TrainingData, prepare
from scripts.engine.run import evaluate, training_of
from scripts.engine.scores import held_out_splits
from scripts.engine.settings import PRESETS, TrainConfig, pick_device
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
    margin: float = 0.5
    """What greedy validation BLEU must have beyond the target for the training to stop."""
    compile: bool = False
    """Let torch.compile rewrite the step."""
    device: str = "auto"
    """Where it runs."""
    save: bool = False
    """Keep the result as results/speedrun-PRESET.json."""

    def __post_init__(self):
        preset_named(self.preset)


def clocked(
    config: TrainConfig, data: TrainingData, target: float, margin: float
) -> dict[str, Any]:
    """Seconds of training until validation says that the target is reached, and the test's answer.

    The first test split is read once, by the model of the epoch at which training stopped: the
    first whose greedy validation BLEU has `margin` beyond the target, or else the recipe's last.
    """
    config = replace(config, average=0, save_every=10**9)
    split = held_out_splits(data.corpus)[0]
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        throwaway = training_of(config, data, Path(folder))
        throwaway.load()
        for _ in range(5):
            throwaway.step()
        throwaway.look()
        training = training_of(config, data, Path(folder))
        training.load()
        training.take.prepare()
        warm_up = time.perf_counter() - start
        seconds, enough = 0.0, False
        while training.epoch <= config.epochs and not enough:
            training.train_epoch()
            seconds += training.seconds
            bleu = evaluate(training.trained, data.corpus["val"])["bleu"]
            enough = bleu >= target + margin
            tqdm.write(f"epoch {training.epoch}: {seconds:.1f} s, validation BLEU {bleu:.1f}")
            row = {"epoch": training.epoch, "seconds": round(seconds, 2), "val_bleu": bleu}
            training.end_epoch(row)
        test = evaluate(training.trained, data.corpus[split])
    del test["translations"]
    return {
        "config": asdict(training.config),
        "split": split,
        "target": target,
        "margin": margin,
        "stopped_by_validation": enough,
        "reached": test["bleu"] >= target,
        "seconds": row["seconds"],
        "warm_up_seconds": round(warm_up, 2),
        "history": training.history,
        "test": test,
    }


def speed_run(options: SpeedOptions) -> dict[str, Any]:
    """The record of a clocked training, which is saved if the options say so."""
    changes = {"corpus": options.corpus, "device": options.device, "compile": options.compile}
    config = replace(PRESETS[options.preset], **changes)
    report = clocked(config, prepare(config), options.target, options.margin)
    command = as_typed(__name__, options, always=("corpus", "preset", "target"))
    record = provenance(command, pick_device(options.device)) | report
    if options.save:
        save_record(f"speedrun-{options.preset}", record)
    print(f"{report['seconds']:.1f} s of training, test BLEU {report['test']['bleu']:.1f}")
    return record


main = Command(__name__, SpeedOptions, speed_run, "Seconds of training until a BLEU is reached.")
