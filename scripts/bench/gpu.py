"""The waterfall of a training step on a GPU: `python -m scripts.gpu --only waterfall-small`.

Stage by stage from the textbook's step to the recorded one, each of them some settings of
`scripts.train`, on the same batches, in turns; what counts is the ratio of times, round by round.
It trains nothing, and isn't a profile, which would say why.
"""

import random
import statistics
import time
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import nn

from scripts.bench.training import bench_examples, lengths_of
from scripts.ch06_training import LabelSmoothing
from scripts.ch11_where_the_time_goes import BASE, SMALL, best_seconds, series_model, step_flops
from scripts.core.optimizers import make_optimizer
from scripts.core.settings import TrainConfig, require_bf16
from scripts.core.static import FEW_SHAPES, static_batches, static_lengths
from scripts.core.steps import KINDS, set_rate
from scripts.fast.losses import loss_function_of
from scripts.ladder.agenda import Settings

SIZES = {"small": (SMALL, 2048), "base": (BASE, 4096)}  # each with the tokens a side of a batch
COUNT, ROUNDS = 24, 5  # batches of a lap; laps of each stage, in turns
RATE = 1e-4

# Without the fused Adam a step asks whether it was finite before the next one begins.
TEXTBOOK = TrainConfig(precision="float32", step="textbook")
OURS = replace(TEXTBOOK, precision="bf16", step="eager")
STAGES = {
    "textbook, float32": TEXTBOOK,
    "bf16": replace(TEXTBOOK, precision="bf16"),
    "our switches, fused Adam, nothing waits": OURS,
    "few shapes, corpus on the device": replace(OURS, step="static"),
    "recorded": replace(OURS, step="graphed"),
}
OF_A_GPU = ("recorded", "peak_bytes")  # what a CPU can't show


class Task:
    """What all stages share on one device: `plan`, steps of one batch, as indices of `examples`.

    `labels` are each step's real target tokens, `flops` the operations that all steps need.
    """

    def __init__(self, size: str, settings: Settings):
        self.device, count = settings.device, 2 if settings.tiny else COUNT
        self.shape, self.max_tokens = SIZES[size]
        if settings.tiny:
            self.shape = replace(self.shape, N=1, d_model=16, d_ff=32, h=2, vocab=300)
            self.max_tokens = 128
        self.corpus, self.examples = bench_examples(settings.corpus, self.shape.vocab)
        self.widths = static_lengths(self.examples)
        batches = static_batches(self.examples, self.widths, self.max_tokens, random.Random(0))
        self.plan = [[batch] for batch in batches[:count]]
        lengths = [lengths_of(self.examples[i] for i in batch) for (batch,) in self.plan]
        self.labels = [sum(target for _, target in batch) for batch in lengths]
        self.flops = sum(step_flops(self.shape, batch) for batch in lengths)


def adam_of(stage: TrainConfig, model: nn.Module) -> torch.optim.Optimizer:
    """The stage's Adam. Unfused it is the one that PyTorch itself chooses on a GPU."""
    if stage.step != "textbook":
        return make_optimizer(stage, model)
    groups = [{"params": list(model.parameters()), "initial_lr": 1.0}]
    return torch.optim.Adam(groups, betas=(0.9, 0.98), eps=1e-9, foreach=True, fused=False)


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
        self.optimizer = adam_of(stage, self.model)
        loss_of = loss_function_of(stage, task.device, training=True)
        given = (self.model, LabelSmoothing(0.1), self.optimizer, loss_of, stage.clip)
        few = {"widths": task.widths, "max_tokens": task.max_tokens}
        self.take = KINDS[stage.step](*given, **(few if stage.step in FEW_SHAPES else {}))
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
        found = self.take.look()
        self.seconds.append(time.perf_counter() - start)
        if not all(figures.finite for figures in found):
            raise FloatingPointError(f"a step found {found}")
        self.loss = sum(figures.loss for figures in found) / sum(self.task.labels)


def product_rate(device: torch.device) -> float:
    """Operations a second of a large square product in bfloat16 on `device`."""
    n = 16384 if device.type == "cuda" else 256  # so large that asking for a number takes no time
    a, b = torch.randn(2, n, n, device=device).bfloat16()
    return 2 * n**3 / best_seconds(lambda: (a @ b)[0, 0].item())


def report(racer: Racer, reference: Racer, rate: float) -> dict[str, Any]:
    """A stage on record: its last laps against those of the reference, round by round.

    `times` is the median of the ratios. `mfu` is the share of `rate`, that of bfloat16 products,
    which its useful operations reach.
    """
    own, others = racer.seconds[-ROUNDS:], reference.seconds[-ROUNDS:]
    ratios = [round(a / b, 4) for a, b in zip(own, others, strict=True)]
    task, lap = racer.task, statistics.median(own)
    found = {
        "times": round(statistics.median(ratios), 4),
        "rounds": ratios,
        "seconds_per_step": round(lap / len(task.plan), 7),
        "mfu": round(task.flops / lap / rate, 4),
        "loss": round(racer.loss, 4),
    }
    return found | ({"peak_bytes": racer.peak_bytes} if task.device.type == "cuda" else {})


def waterfall(size: str, settings: Settings) -> dict[str, Any]:
    """The record of the waterfall for a size of `SIZES`; `not_run` names what takes a GPU.

    Raises ValueError for a device without bfloat16 products, unless the trial is tiny.
    """
    if not settings.tiny:
        require_bf16(settings.device)
    task = Task(size, settings)
    lacks = () if task.device.type == "cuda" else OF_A_GPU
    racers = {name: Racer(stage, task) for name, stage in STAGES.items() if name not in lacks}
    for _ in range(1 + ROUNDS):  # recordings emptied PyTorch's cache: one lap to refill it
        for racer in racers.values():
            racer.lap()
    rate, (*_, reference) = product_rate(task.device), racers
    return {
        "size": size,
        "corpus": task.corpus,
        "shape": asdict(task.shape),
        "matrix_rate": round(rate),
        "max_tokens": task.max_tokens,
        "widths": task.widths,
        "count": len(task.plan),
        "labels": round(statistics.mean(task.labels), 1),
        "useful": round(task.flops / len(task.plan)),
        "reference": reference,
        "stages": {name: report(one, racers[reference], rate) for name, one in racers.items()},
        "not_run": [*lacks],
    }
