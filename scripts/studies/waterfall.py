"""The waterfall of a training step on a GPU: `python -m scripts.studies.waterfall small|base`.

Stage by stage from the textbook's step to the recorded one, each of them some settings of
`scripts.train`, on the same batches, in turns; what counts is the ratio of times, round by round.
It trains nothing, and isn't a profile, which would say why.
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
from scripts.ch11_where_the_time_goes import BASE, SMALL, best_seconds, series_model, step_flops
from scripts.core.optimizers import make_optimizer
from scripts.core.settings import TrainConfig, pick_device, require_bf16
from scripts.core.static import FEW_SHAPES, static_batches, static_lengths
from scripts.core.steps import KINDS, set_rate
from scripts.fast.losses import loss_function_of
from scripts.studies.race_training import encoded_pairs, lengths_of

SIZES = {"small": (SMALL, 2048), "base": (BASE, 4096)}  # each with the tokens a side of a batch
TINY = {"N": 1, "d_model": 16, "d_ff": 32, "h": 2, "vocab": 300}
COUNT, ROUNDS = 24, 5  # batches of a lap; laps of each stage, in turns
RATE = 1e-4

TEXTBOOK = TrainConfig(step="textbook", precision="float32")
OURS = TrainConfig(step="eager", precision="bf16")
STAGES = {  # each has one thing more than the one before; our path comes with the fused Adam
    "textbook, float32": TEXTBOOK,
    "bf16": replace(TEXTBOOK, precision="bf16"),
    "our switches, fused Adam, nothing waits": OURS,
    "few shapes, corpus on the device": replace(OURS, step="static"),
    "recorded": replace(OURS, step="graphed"),
}
OF_A_GPU = ("recorded", "peak_bytes")  # what a CPU can't show


@dataclass
class WaterfallOptions:
    """Which model, and where."""

    size: Literal["small", "base"] = "small"
    """Which one."""
    device: Literal["cuda", "cpu"] = "cuda"
    """Where."""
    tiny: bool = False
    """A tiny model, on a few pairs of the sample corpus."""
    save: bool = False
    """Write results/gpu-waterfall-SIZE.json."""


class Task:
    """What all stages share: `plan`, steps of one batch each, as indices of `examples`.

    `labels` are each step's real target tokens, `flops` the operations that all steps need.
    """

    def __init__(self, options: WaterfallOptions):
        self.device, count = pick_device(options.device), 2 if options.tiny else COUNT
        self.shape, self.max_tokens = SIZES[options.size]
        if options.tiny:
            self.shape, self.max_tokens = replace(self.shape, **TINY), 128
        self.corpus = "few" if options.tiny else "multi30k"
        self.examples = encoded_pairs(self.corpus, self.shape.vocab)
        self.widths = static_lengths(self.examples)
        batches = static_batches(self.examples, self.widths, self.max_tokens, random.Random(0))
        self.plan = [[batch] for batch in batches[:count]]
        lengths = [lengths_of(self.examples[i] for i in batch) for (batch,) in self.plan]
        self.labels = [sum(target for _, target in batch) for batch in lengths]
        self.flops = sum(step_flops(self.shape, batch) for batch in lengths)


class Racer:
    """A stage at work, with its own model and optimizer, after its first lap.

    `seconds` are those of its laps, `loss` the last one's in nats a token, `peak_bytes` the most
    GPU memory that it took in the first.
    """

    def __init__(self, stage: TrainConfig, task: Task):
        if task.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()  # by the others
        torch.manual_seed(0)  # all racers start from the same weights
        self.task, self.model = task, series_model(task.shape).to(task.device).train()
        if stage.step != "textbook":
            self.optimizer = make_optimizer(stage, self.model)
        else:  # PyTorch's own choice on a GPU, which asks each step whether it was finite
            groups = [{"params": list(self.model.parameters()), "initial_lr": 1.0}]
            adam = {"betas": (0.9, 0.98), "eps": 1e-9, "foreach": True, "fused": False}
            self.optimizer = torch.optim.Adam(groups, **adam)
        loss_of = loss_function_of(stage, task.device, training=True)
        parts = (self.model, LabelSmoothing(0.1), self.optimizer, loss_of, stage.clip)
        shapes = {"widths": task.widths, "max_tokens": task.max_tokens}
        self.take = KINDS[stage.step](*parts, **(shapes if stage.step in FEW_SHAPES else {}))
        self.take.load(task.examples, task.plan, task.labels)
        self.seconds: list[float] = []
        self.lap()
        self.peak_bytes = torch.cuda.max_memory_allocated() - before

    def lap(self) -> None:
        """A step on each batch, until the device is done with them.

        Raises FloatingPointError if one isn't finite: from there on no weight moved.
        """
        start = time.perf_counter()
        for number in range(len(self.task.plan)):
            set_rate(self.optimizer, RATE)
            self.take(number)
        figures = self.take.look()  # waits for the device
        self.seconds.append(time.perf_counter() - start)
        if not all(step.finite for step in figures):
            raise FloatingPointError(f"a step isn't finite: {figures}")
        self.loss = sum(step.loss for step in figures) / sum(self.task.labels)

    def report(self, reference: "Racer", rate: float) -> dict[str, Any]:
        """Its last laps against the reference's, round by round: `times` is the ratios' median.

        `mfu` is the share of `rate`, that of bfloat16 products, which its operations reach.
        """
        own, others = self.seconds[-ROUNDS:], reference.seconds[-ROUNDS:]
        ratios = [round(a / b, 4) for a, b in zip(own, others, strict=True)]
        lap = statistics.median(own)
        figures = {
            "times": round(statistics.median(ratios), 4),
            "rounds": ratios,
            "seconds_per_step": round(lap / len(self.task.plan), 7),
            "mfu": round(self.task.flops / lap / rate, 4),
            "loss": round(self.loss, 4),
        }
        on_gpu = self.task.device.type == "cuda"
        return figures | ({"peak_bytes": self.peak_bytes} if on_gpu else {})


def product_rate(device: torch.device) -> float:
    """Operations a second of a large square product in bfloat16 on `device`."""
    n = 16384 if device.type == "cuda" else 256  # so large that asking for a number takes no time
    a, b = torch.randn(2, n, n, device=device).bfloat16()
    return 2 * n**3 / best_seconds(lambda: (a @ b)[0, 0].item())


def waterfall(options: WaterfallOptions) -> dict[str, Any]:
    """The record; `not_run` names what takes a GPU.

    Raises ValueError for a device without bfloat16 products, unless the trial is tiny.
    """
    if not options.tiny:
        require_bf16(pick_device(options.device))
    task = Task(options)
    lacks = () if task.device.type == "cuda" else OF_A_GPU
    racers = {name: Racer(stage, task) for name, stage in STAGES.items() if name not in lacks}
    for _ in range(1 + ROUNDS):  # recordings emptied PyTorch's cache: one lap to refill it
        for racer in racers.values():
            racer.lap()
    rate, (*_, reference) = product_rate(task.device), racers
    return {
        "size": options.size,
        "corpus": task.corpus,
        "shape": asdict(task.shape),
        "matrix_rate": round(rate),
        "max_tokens": task.max_tokens,
        "widths": task.widths,
        "count": len(task.plan),
        "labels": round(statistics.mean(task.labels), 1),
        "useful": round(task.flops / len(task.plan)),
        "reference": reference,
        "stages": {name: one.report(racers[reference], rate) for name, one in racers.items()},
        "not_run": [*lacks],
    }


def run_waterfall(options: WaterfallOptions) -> None:
    """Time a training step on a GPU, stage by stage."""
    command = f"python -m scripts.studies.waterfall {options.size} --save"
    record = provenance(command, pick_device(options.device)) | waterfall(options)
    for name, stage in record["stages"].items():
        print(f"{stage['times']:8.2f}  {name}")
    if options.save:
        save_record(f"gpu-waterfall-{options.size}", record)


PLACES = {"size": "small or base"}
main = Command("scripts.studies.waterfall", WaterfallOptions, run_waterfall, PLACES)

if __name__ == "__main__":
    raise SystemExit(main())
