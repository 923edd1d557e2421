"""The waterfall of a training step on a GPU: `python -m scripts.studies.waterfall small|base`.

Stage by stage from the textbook's step to the recorded one, each of them some settings of
`scripts.train`, on the same batches, in turns. It trains nothing, and isn't a profile, which would
say why.
"""

import random
import statistics
import time
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch

from scripts.book.command import Command
from scripts.book.records import provenance, save_record
from scripts.ch06_training import LabelSmoothing
from scripts.ch11_where_the_time_goes import BASE, SMALL, Shape, series_model
from scripts.core.optimizers import make_optimizer
from scripts.core.settings import TrainConfig, pick_device, require_bf16
from scripts.core.static import FEW_SHAPES, static_batches, static_lengths
from scripts.core.steps import KINDS, set_rate
from scripts.fast.losses import loss_function_of
from scripts.studies.rows import data_of
from scripts.studies.turns import against, in_turns

SIZES = {"small": (SMALL, 2048), "base": (BASE, 4096)}  # each with the tokens a side of a batch
COUNT, ROUNDS = 24, 5  # batches of a lap; laps of each stage, in turns
RATE = 1e-4

TEXTBOOK = TrainConfig(step="textbook", precision="float32")
OURS = TrainConfig(step="eager", precision="bf16")
STAGES = {  # each has one thing more than the one before; our path comes with the fused Adam
    "textbook, float32": TEXTBOOK,
    "bf16": replace(TEXTBOOK, precision="bf16"),
    "our switches, fused Adam, nothing waits": OURS,
    "few shapes, corpus on the device": replace(OURS, step="static"),
    "recorded": replace(OURS, step="graphed"),  # which takes a GPU
}


class Task:
    """What all stages share: `plan`, steps of one batch each, as indices of `examples`."""

    def __init__(self, shape: Shape, max_tokens: int, corpus: str, device: torch.device):
        self.shape, self.max_tokens, self.device = shape, max_tokens, device
        self.examples = data_of(corpus, shape.vocab).train
        self.widths = static_lengths(self.examples)
        batches = static_batches(self.examples, self.widths, max_tokens, random.Random(0))
        self.plan = [[batch] for batch in batches[:COUNT]]
        self.labels = [sum(len(self.examples[i].tgt) - 1 for i in b) for (b,) in self.plan]


class Racer:
    """A stage at work, with its own model and optimizer; `loss` is its last lap's, in nats."""

    def __init__(self, stage: TrainConfig, task: Task):
        torch.manual_seed(0)  # all racers start from the same weights
        self.task, model = task, series_model(task.shape).to(task.device).train()
        if stage.step != "textbook":
            self.optimizer = make_optimizer(stage, model)
        else:  # PyTorch's own choice on a GPU, which asks each step whether it was finite
            groups = [{"params": list(model.parameters()), "initial_lr": 1.0}]
            adam = {"betas": (0.9, 0.98), "eps": 1e-9, "foreach": True, "fused": False}
            self.optimizer = torch.optim.Adam(groups, **adam)
        loss_of = loss_function_of(stage, task.device, training=True)
        parts = (model, LabelSmoothing(0.1), self.optimizer, loss_of, stage.clip)
        shapes = {"widths": task.widths, "max_tokens": task.max_tokens}
        self.take = KINDS[stage.step](*parts, **(shapes if stage.step in FEW_SHAPES else {}))
        self.take.load(task.examples, task.plan, task.labels)
        self.lap()  # recordings empty PyTorch's cache: all are made before the race refills it

    def lap(self) -> float:
        """Seconds of a step on each batch, until the device is done with them."""
        start = time.perf_counter()
        for number in range(len(self.task.plan)):
            set_rate(self.optimizer, RATE)
            self.take(number)
        figures = self.take.look()  # waits for the device
        seconds = time.perf_counter() - start
        self.loss = sum(step.loss for step in figures) / sum(self.task.labels)
        return seconds


def waterfall(task: Task) -> dict[str, Any]:
    """Each stage's time over the last one's."""
    names = [name for name in STAGES if name != "recorded" or task.device.type == "cuda"]
    racers = {name: Racer(STAGES[name], task) for name in names}
    laps = in_turns({name: racer.lap for name, racer in racers.items()}, ROUNDS)
    reference, stages = names[-1], {}
    for name, seconds in laps.items():
        stages[name] = against(seconds, laps[reference]) | {
            "seconds_per_step": round(statistics.median(seconds) / len(task.plan), 7),
            "loss": round(racers[name].loss, 4),
        }
    return {
        "shape": asdict(task.shape),
        "max_tokens": task.max_tokens,
        "count": len(task.plan),
        "reference": reference,
        "stages": stages,
    }


@dataclass
class WaterfallOptions:
    """Which model."""

    size: Literal["small", "base"] = "small"
    """Which one."""
    save: bool = False
    """Write results/gpu-waterfall-SIZE.json."""


def run_waterfall(options: WaterfallOptions) -> None:
    """Time a training step on a GPU, stage by stage."""
    device, (shape, max_tokens) = pick_device("cuda"), SIZES[options.size]
    require_bf16(device)
    origin = provenance(f"python -m scripts.studies.waterfall {options.size} --save", device)
    record = origin | waterfall(Task(shape, max_tokens, "multi30k", device))
    for name, stage in record["stages"].items():
        print(f"{stage['times']:8.2f}  {name}")
    if options.save:
        save_record(f"gpu-waterfall-{options.size}", record)


PLACES = {"size": "small or base"}
main = Command("scripts.studies.waterfall", WaterfallOptions, run_waterfall, PLACES)

if __name__ == "__main__":
    raise SystemExit(main())
