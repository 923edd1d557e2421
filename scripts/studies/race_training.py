"""Races of training steps: `python -m scripts.studies.race_training stairs|peers|steps|…`.

`stairs` climbs from the textbook's step to ours, `steps` times ours without each of its switches,
`base` the paper's base model, `growth` steps of many sizes. `peers` times ours against
`nn.Transformer`, `MarianMTModel` and x-transformers (it needs the packages of
`pip install -e '.[bench]'`), `compiled` against those under torch.compile. A GPU has
`scripts.studies.waterfall`.

Two processes are alive at a time, the reference and one contender, which take turns with passes
over the same batches. On a processor without bfloat16 products (AVX512-BF16), who needs them is
left out, and named.
"""

import importlib
import inspect
import random
import resource
import statistics
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import torch

from scripts import ROOT
from scripts import ch11_where_the_time_goes as ch11
from scripts import ch12_going_fast as ch12
from scripts.book.command import Command
from scripts.book.records import provenance, save_record
from scripts.ch06_training import EOS, PAD, Batch, LabelSmoothing, batch_loss
from scripts.ch07_multi30k import FIXED_WIDTH, Example, make_batch, token_batches
from scripts.ch11_where_the_time_goes import BASE, SMALL, Shape
from scripts.ch12_going_fast import keep_memory
from scripts.core.settings import multiplies_bf16, require_bf16
from scripts.core.static import ResidentCorpus, longer_side
from scripts.core.steps import Step
from scripts.fast.fast import FAST, HALF, PLAIN, LinearProduct, Switches, fast_loss
from scripts.studies.peers import PACKAGES, PEERS, peer_loss
from scripts.studies.rows import data_of
from scripts.studies.turns import against, in_turns, seconds_of

CPU = torch.device("cpu")
RANDOM_WIDTH = 40  # of 51 random pairs the longest has some 30 tokens; one in 700 has more than 40
Batches = list[list[Example]]


@dataclass(frozen=True)
class Contender:
    """What a race times: a model, how it is fed, and how it is run. Records show these fields."""

    model: str = "series"  # or one of PEERS
    batching: Literal["length", "random", "fixed"] = "length"  # fixed: random, padded to 72
    how: Switches | None = None  # ours; None is the textbook's own code
    autocast: bool = False  # the forward pass under PyTorch's autocast in bfloat16
    keep_memory: bool = False
    fused_adam: bool = False
    compiled: bool = False  # the loss and its gradient by torch.compile
    threads: int = 2
    shape: Shape = SMALL

    @property
    def half(self) -> bool:
        """Whether its products have 16-bit factors."""
        return self.autocast or (self.how is not None and self.how.half)


OURS = Contender(how=FAST, fused_adam=True, keep_memory=True)
OURS_HALF = replace(OURS, how=HALF)


def batches_of(batching: str, count: int = 3, max_tokens: int = 2048) -> Batches:
    """The batches of a pass: so many tokens a side, padding counted."""
    rng, examples = random.Random(0), data_of("multi30k", SMALL.vocab).train
    if batching == "length":
        plan = token_batches(examples, max_tokens, rng)
        return [[examples[i] for i in batch] for batch in plan[:count]]
    width = FIXED_WIDTH if batching == "fixed" else RANDOM_WIDTH
    fitting = [example for example in examples if longer_side(example) <= width]
    return [rng.sample(fitting, max_tokens // width) for _ in range(count)]


def lengths_of(examples: Iterable[Example]) -> list[tuple[int, int]]:
    """The tokens of each pair: of its source, and those predicted of its target."""
    return [(len(e.src), len(e.tgt) - 1) for e in examples]


# A contender at work.


class Runner:
    """A contender with its model, its optimizer and its batches."""

    def __init__(self, contender: Contender, batches: Batches):
        if package := PACKAGES.get(contender.model):
            importlib.import_module(package)  # now, so that its own memory isn't counted
        lengths = [lengths_of(batch) for batch in batches]
        self.targets = sum(target for batch in lengths for _, target in batch)
        self.flops = sum(ch11.step_flops(contender.shape, batch) for batch in lengths)
        self.batches = [make_batch(batch) for batch in batches]
        if contender.batching == "fixed":
            wide = [ResidentCorpus(batch, CPU, FIXED_WIDTH) for batch in batches]
            self.batches = [one.batch(torch.arange(one.filler), FIXED_WIDTH) for one in wide]
        self.before = peak_bytes()
        torch.manual_seed(0)
        torch.set_num_threads(contender.threads)
        if contender.keep_memory:
            keep_memory()
        self.contender = contender
        self.model = PEERS.get(contender.model, ch11.series_model)(contender.shape).train()
        adam = {"lr": 1e-4, "betas": (0.9, 0.98), "eps": 1e-9}
        fused = contender.fused_adam or None  # PyTorch chooses
        optimizer = torch.optim.Adam(self.model.parameters(), fused=fused, **adam)
        how = contender.how
        loss_of = partial(fast_loss, switches=how) if how else batch_loss
        loss_of = peer_loss if contender.model in PEERS else loss_of
        loss_of = torch.compile(loss_of, dynamic=True) if contender.compiled else loss_of
        loss_of = torch.autocast("cpu", torch.bfloat16, contender.autocast)(loss_of)
        self.take = Step(self.model, LabelSmoothing(0.1), optimizer, loss_of, 1.0)

    def lap(self) -> None:
        """An optimizer step on each batch."""
        for batch in self.batches:
            self.take.run([batch], batch.ntokens)

    def pace(self) -> float:
        """Seconds of a lap for each real target token."""
        return seconds_of(self.lap) / self.targets

    def report(self, paces: list[float], rates: dict[str, float]) -> dict[str, Any]:
        """What its paces come to, the memory that it took, and its parameters.

        `mfu` is the share that it reached of the machine's rate of products in its precision.
        """
        lap = statistics.median(paces) * self.targets
        rate = rates["matrix_rate_bf16" if self.contender.half else "matrix_rate"]
        return {
            "seconds_per_step": round(lap / len(self.batches), 4),
            "mfu": round(self.flops / lap / rate, 4),
            "peak_bytes": peak_bytes() - self.before,
            "parameters": sum(p.numel() for p in self.model.parameters()),
        }


def peak_bytes() -> int:
    """The most memory that this process ever held."""
    status = Path("/proc/self/status")
    if not status.exists():  # a Mac, which counts bytes
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # On Linux that would count what the parent held when it forked.
    line = next(row for row in status.read_text().splitlines() if row.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


RUNNER: list[Runner] = []  # that of a contender's process


def begin(*parts: Any) -> None:
    """The first thing that a contender's process does."""
    RUNNER.append(Runner(*parts))


def answer(question: str, *parts: Any) -> Any:
    """The result of that method of the process's runner."""
    return getattr(RUNNER[0], question)(*parts)


def ask(process: ProcessPoolExecutor, question: str, *parts: Any) -> Any:
    """What a contender's process answers. Raises RuntimeError if it has died."""
    return process.submit(answer, question, *parts).result()


def race(
    every: dict[str, Contender], rounds: int = 5, count: int = 3, max_tokens: int = 2048
) -> dict[str, Any]:
    """The record of duels: the first that is able, the reference, against each of the others."""
    rates, able = {"matrix_rate": max(ch11.matrix_rates())}, multiplies_bf16(CPU)
    if able:
        rates["matrix_rate_bf16"] = max(ch11.matrix_rates(torch.bfloat16))
    contenders = {name: one for name, one in every.items() if able or not one.half}
    if left_out := "; ".join(name for name in every if name not in contenders):
        print(f"left out, as this processor has no 16-bit products (AVX512-BF16): {left_out}")

    def process(name: str) -> ProcessPoolExecutor:
        one = contenders[name]
        parts = (one, batches_of(one.batching, count, max_tokens))
        return ProcessPoolExecutor(1, get_context("spawn"), begin, parts)

    reference, *others = contenders
    own_paces, reports = [], {}
    with process(reference) as first:
        _, lap = (seconds_of(partial(ask, first, "pace")) for _ in range(2))  # the first is slow
        minutes = len(others) * (10 + 4 * (rounds + 1) * lap) / 60  # others take thrice as long
        print(f"{len(others)} duels of {rounds} rounds: about {minutes:.0f} minutes here")
        for name in others:
            with process(name) as other:
                laps = {reference: partial(ask, first, "pace"), name: partial(ask, other, "pace")}
                paces = in_turns(laps, rounds)
                duel = against(paces[name], paces[reference])
                reports[name] = duel | ask(other, "report", paces[name], rates)
            own_paces += paces[reference]
            print(f"{duel['times']:8.2f}  {name}", flush=True)
        own = ask(first, "report", own_paces, rates)
    reports[reference] = {"times": 1.0, "rounds": []} | own
    return {
        "corpus": "multi30k",
        "shape": asdict(contenders[reference].shape),
        **{"max_tokens": max_tokens, "count": count, "rounds": rounds},
        **{name: round(rate) for name, rate in rates.items()},
        "reference": reference,
        "contenders": {name: asdict(one) for name, one in contenders.items()},
        "reports": reports,
    }


# The races.


def peer_contenders() -> dict[str, Contender]:
    """Ours, the textbook's path and the peers: both precisions, as they come, with memory kept."""
    contenders = {"ours, bf16": OURS_HALF, "ours, float32": OURS}
    for name, half, kept in product(("textbook", *PEERS), (False, True), (False, True)):
        model = "series" if name == "textbook" else name
        words = f"{name}, {'bf16' if half else 'float32'}{', memory kept' * kept}"
        contenders[words] = Contender(model, autocast=half, keep_memory=kept)
    return contenders


def compiled_contenders() -> dict[str, Contender]:
    """Ours in both precisions, and the others under torch.compile, memory kept."""
    return {
        name + ", compiled" * (one.how is None): replace(one, compiled=one.how is None)
        for name, one in peer_contenders().items()
        if one.keep_memory
    }


FAST_FILES = ("fast.py", "passes.py", "compiled.py", "passes.c", "simd.h")
FROM_BITS = [ch12.keep_mask, ch12.keep_scale, ch12.BitDropout]
STAIRS = {  # what a step changes of the contender and of the switches, and the code that it needs
    "padded to 72": ({"batching": "fixed"}, {}, []),
    "padded to the longest": ({"batching": "random"}, {}, ["one line"]),
    "sorted by length": ({"batching": "length"}, {}, [token_batches]),
    "autocast": ({"autocast": True}, {}, ["one line"]),
    "memory kept": ({"keep_memory": True}, {}, [ch12.keep_memory]),
    "fused parts": ({"fused_adam": True}, {"fused_norm": True}, [ch12.become, ch12.FusedNorm]),
    "dropout from 16 bits": ({}, {"random_bits": True}, FROM_BITS),
    "loss in chunks": ({}, {"loss": "ours"}, [ch12.LinearCrossEntropy]),
    "rows": ({}, {"packed": True}, [ch12.Layout]),
    "products by hand": ({"autocast": False}, {"half": True, "onednn": True}, [LinearProduct]),
    "C": ({}, {"compiled": True}, [ROOT / "scripts" / "fast" / name for name in FAST_FILES]),
}


def code_lines(piece: Any) -> int:
    """Lines, blank ones left out, of a file, a line or a definition."""
    text = piece.read_text("utf-8") if isinstance(piece, Path) else piece
    text = text if isinstance(text, str) else inspect.getsource(text)
    return sum(bool(line.strip()) for line in text.splitlines())


def stair_contenders() -> dict[str, Contender]:
    """Chapter 12's staircase from the bottom up, and two controls; on one thread."""
    stair, stairs = Contender(threads=1), {}
    for name, (change, switches, _) in STAIRS.items():
        how = replace(stair.how or PLAIN, **switches) if switches else stair.how
        stair = stairs[name] = replace(stair, **change, how=how)
    alone = replace(stairs["memory kept"], how=PLAIN)  # the textbook's operations, from fast.py
    return stairs | {"the fast path, all off": alone, "the same again": stair}


def padding_of(batches: list[Batch]) -> float:
    """The share of the cells, of both sides, that is padding."""
    real = torch.cat([(side != PAD).flatten() for b in batches for side in (b.src, b.tgt_y)])
    return round(1 - real.double().mean().item(), 4)


def race_stairs(rounds: int = 7, count: int = 8) -> dict[str, Any]:
    """The staircase: processor's seconds of one process, in turns, and each step's lines of code.

    Other programs hardly disturb these, and a race by the clock needs an idle machine.
    """
    stairs = stair_contenders()
    runners = {name: Runner(one, batches_of(one.batching, count)) for name, one in stairs.items()}

    def pace(runner: Runner) -> float:
        keep_memory(ch12.KEPT if runner.contender.keep_memory else ch12.USUAL)
        start = time.process_time()
        runner.lap()
        return (time.process_time() - start) / runner.targets

    paces = in_turns({name: partial(pace, runner) for name, runner in runners.items()}, rounds)
    return {
        "shape": asdict(SMALL),
        **{"count": count, "rounds": rounds},
        "padding": {name: padding_of(runner.batches) for name, runner in runners.items()},
        "contenders": {name: asdict(one) for name, one in stairs.items()},
        "reports": {name: against(own, paces["C"]) for name, own in paces.items()},
        "lines": {name: sum(map(code_lines, pieces)) for name, (*_, pieces) in STAIRS.items()},
    }


WITHOUT = {
    "rows": {"packed": False},
    "LayerNorm in one kernel": {"fused_norm": False},
    "attention by hand": {"attention": "sdpa"},
    "loss in chunks": {"loss": "textbook"},
    "dropout from 16 bits": {"random_bits": False},
    "oneDNN's products": {"onednn": False},
    "small things in C": {"compiled": False},
}


def step_contenders(ours: Contender) -> dict[str, Contender]:
    """The path `ours`, the same again, and without each of its switches and settings."""
    less = {name: {"how": replace(ours.how, **change)} for name, change in WITHOUT.items()}
    less |= {"freed memory kept": {"keep_memory": False}, "the fused Adam": {"fused_adam": False}}
    changed = {f"without {name}": replace(ours, **one) for name, one in less.items()}
    return {"ours": ours, "ours again": ours} | changed


def race_steps() -> dict[str, Any]:
    """What each switch is worth, in both precisions."""
    record = race(step_contenders(OURS))
    if multiplies_bf16(CPU):
        half = race(step_contenders(OURS_HALF))
        record["half"] = {key: half[key] for key in ("contenders", "reports", "matrix_rate_bf16")}
    return record


def race_base() -> dict[str, Any]:
    """The paper's base model: the textbook's path and ours."""
    contenders = {"ours": OURS, "ours, bf16": OURS_HALF, "textbook": Contender()}
    larger = {name: replace(one, shape=BASE) for name, one in contenders.items()}
    return race(larger, rounds=3, count=2, max_tokens=4096)


AXES = {  # of growth: shape, sentences and their length, of which one is set
    "length": {n: (SMALL, 2048 // n, n) for n in (8, 16, 32, 64, 128, 256)},
    "width": {n: (replace(SMALL, d_model=n, d_ff=4 * n), 64, 32) for n in (64, 128, 256, 512, 768)},
}


def growth_point(shape: Shape, sentences: int, length: int) -> dict[str, Any]:
    """Seconds and operations of a textbook's step on random ids, all rows full."""
    sides = torch.randint(EOS + 1, shape.vocab, (2, sentences, length + 1)).tolist()
    pairs = [Example(source[1:], target) for source, target in zip(*sides, strict=True)]
    runner = Runner(Contender(fused_adam=True, shape=shape), [pairs])
    return {
        "seconds": ch11.best_seconds(runner.lap, repeats=4),
        "flops": runner.flops,
    }


def race_growth() -> dict[str, Any]:
    """Seconds of a step along two axes."""
    points = [
        {"axis": axis, "value": value, "path": "textbook"} | growth_point(*setting)
        for axis, settings in AXES.items()
        for value, setting in settings.items()
    ]
    return {"shape": asdict(SMALL), "points": points}


RACES = {
    "stairs": race_stairs,
    "compiled": lambda: race(compiled_contenders()),
    "peers": lambda: race(peer_contenders()),
    "steps": race_steps,
    "base": race_base,
    "growth": race_growth,
}


@dataclass
class RaceOptions:
    """Which race."""

    benchmark: Literal["stairs", "compiled", "peers", "steps", "base", "growth"] = "peers"
    """Which one."""
    save: bool = False
    """Write results/speed-BENCHMARK.json."""


def run_race(options: RaceOptions) -> None:
    """Time training steps against other programs, and against themselves without each part."""
    if options.save and options.benchmark != "growth":
        require_bf16(CPU)  # chapters and README read whole records
    torch.set_num_threads(OURS.threads)  # as the contenders have: for the machine's own rates
    record = RACES[options.benchmark]()
    if options.save:
        command = f"python -m scripts.studies.race_training {options.benchmark} --save"
        save_record(f"speed-{options.benchmark}", provenance(command) | record)


PLACES = {"benchmark": ", ".join(RACES)}
main = Command("scripts.studies.race_training", RaceOptions, run_race, PLACES)

if __name__ == "__main__":
    raise SystemExit(main())
