"""Races of training steps: `python -m scripts.studies.race_training peers|steps|base|growth`.

`peers` times ours against `nn.Transformer`, `MarianMTModel` and x-transformers (ten minutes; it
needs the packages of `pip install -e '.[bench]'`). `steps` times ours without each of its switches,
`base` the paper's base model, `growth` steps of many sizes. A GPU has `scripts.studies.waterfall`.

Two processes are alive at a time, the reference and one contender. They take turns with passes over
the same batches; what counts is their ratio, round by round, so that a slow moment hits both. On a
processor without bfloat16 products (AVX512-BF16), who needs them is left out, and named.
"""

import importlib
import random
import resource
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from scripts.book.command import Command, as_typed
from scripts.book.instruments import saved_bytes
from scripts.book.records import provenance, save_record
from scripts.ch06_training import EOS, PAD, Batch, LabelSmoothing, batch_loss, train_step
from scripts.ch07_multi30k import (
    FIXED_WIDTH,
    BPETokenizer,
    Example,
    encode_pairs,
    make_batch,
    pad_rows,
    token_batches,
)
from scripts.ch11_where_the_time_goes import (
    ADAM_BYTES,
    BASE,
    SMALL,
    Product,
    Shape,
    best_seconds,
    least_seconds,
    matrix_rate,
    memory_bandwidth,
    parameter_count,
    series_model,
    step_flops,
)
from scripts.ch12_going_fast import keep_mask, keep_memory
from scripts.core.settings import multiplies_bf16
from scripts.corpora.load import load_corpus
from scripts.fast import compiled
from scripts.fast.fast import FAST, HALF, Switches, fast_loss
from scripts.studies.peers import PACKAGES, PEERS, peer_loss


@dataclass(frozen=True)
class Contender:
    """What a race times: a model, how it is fed, and how it is run. Records show these fields."""

    model: str = "series"  # or one of PEERS
    batches: Literal["buckets", "fixed"] = "buckets"  # of similar length, or all padded to 72
    how: Switches | None = None  # ours; None is the textbook's own code
    autocast: bool = False  # the forward pass under PyTorch's autocast in bfloat16
    keep_memory: bool = False
    fused_adam: bool = False
    threads: int = 2
    shape: dict[str, Any] | None = None  # what differs from SMALL

    @property
    def sizes(self) -> Shape:
        """The model's full shape."""
        return replace(SMALL, **(self.shape or {}))

    @property
    def half(self) -> bool:
        """Whether its products have 16-bit factors."""
        return self.autocast or (self.how is not None and self.how.half)

    @property
    def able(self) -> bool:
        """Whether this processor has its products: emulated ones take many times as long."""
        return not self.half or multiplies_bf16(torch.device("cpu"))


OURS = Contender(how=FAST, fused_adam=True, keep_memory=True)
OURS_HALF = replace(OURS, how=HALF)


@dataclass
class RaceOptions:
    """Which race, and on what."""

    benchmark: Literal["peers", "steps", "base", "growth"] = "peers"
    """Which one."""
    corpus: Literal["sample", "multi30k"] = "multi30k"
    """Where batches come from."""
    rounds: int = 7
    """Passes over the batches, in turns; the median of their ratios counts."""
    count: int = 4
    """Batches of a pass."""
    max_tokens: int = 2048
    """Tokens in a batch on either side, padding counted."""
    save: bool = False
    """Write results/speed-BENCHMARK.json; without 16 bits, speed-BENCHMARK-float32.json."""


@cache
def encoded_pairs(corpus: str, vocab: int) -> list[Example]:
    """The corpus's training pairs in `vocab` BPE pieces; a small corpus has fewer."""
    pairs = load_corpus(corpus)["train"]
    lines = (line for pair in pairs for line in pair)
    pieces = vocab if corpus == "multi30k" else min(vocab, 1000)
    return encode_pairs(pairs, BPETokenizer.train(lines, pieces))


def batches_to_time(kind: str, options: RaceOptions) -> list[list[Example]]:
    """The batches of a pass, in buckets or fixed: so many tokens a side, padding counted."""
    rng, examples = random.Random(0), encoded_pairs(options.corpus, SMALL.vocab)
    if kind == "buckets":
        plan = token_batches(examples, options.max_tokens, rng)
        return [[examples[i] for i in batch] for batch in plan[: options.count]]
    fitting = [e for e in examples if max(len(e.src), len(e.tgt) - 1) <= FIXED_WIDTH]
    return [rng.sample(fitting, options.max_tokens // FIXED_WIDTH) for _ in range(options.count)]


def batch_as(kind: str, examples: Sequence[Example]) -> Batch:
    """The examples as one batch: padded to the longest of them, or to `FIXED_WIDTH` if "fixed"."""
    if kind != "fixed":
        return make_batch(examples)
    # The last row only makes it wide. Its target is longer by one, for the input and the labels.
    rows = [*examples, Example([PAD] * FIXED_WIDTH, [PAD] * (FIXED_WIDTH + 1))]
    return Batch(pad_rows([e.src for e in rows])[:-1], pad_rows([e.tgt for e in rows])[:-1])


def lengths_of(examples: Iterable[Example]) -> list[tuple[int, int]]:
    """The tokens of each pair: of its source, and those predicted of its target."""
    return [(len(e.src), len(e.tgt) - 1) for e in examples]


# A contender at work.


class Runner:
    """A contender with its model, its optimizer and its batches."""

    def __init__(self, contender: Contender, batches: list[list[Example]]):
        if package := PACKAGES.get(contender.model):
            importlib.import_module(package)  # now, so that its own memory isn't counted
        self.batches = [batch_as(contender.batches, batch) for batch in batches]
        self.before = peak_bytes()
        torch.manual_seed(0)
        torch.set_num_threads(contender.threads)
        if contender.keep_memory:
            keep_memory()
        self.model = PEERS.get(contender.model, series_model)(contender.sizes).train()
        adam = {"lr": 1e-4, "betas": (0.9, 0.98), "eps": 1e-9}
        fused = contender.fused_adam or None  # PyTorch chooses
        self.optimizer = torch.optim.Adam(self.model.parameters(), fused=fused, **adam)
        self.criterion, self.contender = LabelSmoothing(0.1), contender

    def loss_of(self, *parts: Any) -> tuple[Tensor, Tensor]:
        """The loss of (model, batch, criterion) as the contender computes it."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self.contender.autocast):
            if self.contender.model in PEERS:
                return peer_loss(*parts)
            switches = self.contender.how
            return fast_loss(*parts, switches) if switches else batch_loss(*parts)

    def lap(self) -> float:
        """Seconds of an optimizer step on each batch."""
        start = time.perf_counter()
        for batch in self.batches:
            train_step(self.model, [batch], self.criterion, self.optimizer, 1.0, self.loss_of)
        return time.perf_counter() - start

    def report(self) -> dict[str, int]:
        """The memory that it took, and its parameters."""
        size = sum(p.numel() for p in self.model.parameters())
        return {"peak_bytes": peak_bytes() - self.before, "parameters": size}


RUNNER: list[Runner] = []  # a process's own


def begin(*parts: Any) -> None:
    """The first thing that a contender's process does."""
    RUNNER.append(Runner(*parts))


def ask(question: str) -> Any:
    """What a contender's process answers: the result of that method of its runner."""
    return getattr(RUNNER[0], question)()


def peak_bytes() -> int:
    """The most memory that this process ever held."""
    status = Path("/proc/self/status")
    if not status.exists():  # a Mac, which counts bytes
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # On Linux that would count what the parent held when it forked.
    line = next(row for row in status.read_text().splitlines() if row.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


class Worker:
    """A contender's process, and how many seconds a token each pass over the batches takes.

    Its methods raise BrokenProcessPool, a RuntimeError, if the process has died.
    """

    def __init__(self, contender: Contender, options: RaceOptions):
        batches = batches_to_time(contender.batches, options)
        lengths = [lengths_of(batch) for batch in batches]
        self.targets = sum(target for batch in lengths for _, target in batch)
        self.flops = [step_flops(contender.sizes, batch) for batch in lengths]
        self.paces: list[float] = []  # seconds for a real target token, round by round
        self.pool = ProcessPoolExecutor(1, get_context("spawn"), begin, (contender, batches))
        self.round()  # libraries choose their kernels, memory is fetched
        self.paces.clear()

    def round(self) -> float:
        """One pass over the batches: seconds for a real target token."""
        self.paces.append(self.pool.submit(ask, "lap").result() / self.targets)
        return self.paces[-1]

    def finish(self) -> dict[str, Any]:
        """End the process: medians over the rounds, with their spread, memory and parameters."""
        report = self.pool.submit(ask, "report").result()
        self.pool.shutdown()
        middle = statistics.median(self.paces)
        return {
            "tokens_per_second": round(1 / middle, 1),
            "lowest": round(1 / max(self.paces), 1),
            "highest": round(1 / min(self.paces), 1),
            "seconds_per_step": round(middle * self.targets / len(self.flops), 4),
            "flops_per_second": round(sum(self.flops) / (middle * self.targets)),
            **report,
        }


def race(every: dict[str, Contender], options: RaceOptions) -> dict[str, Any]:
    """The record of duels: the first that is able, the reference, against each of the others.

    In a contender's report `times` is its time for a target token over the reference's, the median
    of the `rounds`, and `mfu` the share that it reached of the machine's rate of products.
    """
    contenders = {name: one for name, one in every.items() if one.able}
    rates, reference = {"matrix_rate": matrix_rate()}, next(iter(contenders))
    if any(one.half for one in contenders.values()):
        rates["matrix_rate_bf16"] = matrix_rate(torch.bfloat16)
    first, reports = Worker(contenders[reference], options), {}
    for name in [name for name in contenders if name != reference]:
        other, ratios = Worker(contenders[name], options), []
        for number in range(options.rounds):
            turns = (other, first) if number % 2 else (first, other)  # each is first in turn
            pace = {worker: worker.round() for worker in turns}
            ratios.append(round(pace[other] / pace[first], 4))
        times = round(statistics.median(ratios), 4)
        reports[name] = {"times": times, "rounds": ratios, **other.finish()}
        print(f"{times:8.2f}  {name}", flush=True)
    reports[reference] = {"times": 1.0, "rounds": [], **first.finish()}
    for name, report in reports.items():
        rate = rates["matrix_rate_bf16" if contenders[name].half else "matrix_rate"]
        report["mfu"] = round(report["flops_per_second"] / rate, 4)
    return {
        "corpus": options.corpus,
        "shape": asdict(contenders[reference].sizes),
        **{name: getattr(options, name) for name in ("max_tokens", "count", "rounds")},
        **{name: round(rate) for name, rate in rates.items()},
        "reference": reference,
        "contenders": {name: asdict(contender) for name, contender in contenders.items()},
        "reports": reports,
        "left_out": [name for name in every if name not in contenders],
    }


# Where the time goes.

KINDS = {  # of operations: patterns of PyTorch's names for them
    "matrix products": "aten::mm aten::addmm mkldnn::_linear_pointwise",
    "attention's products": "aten::bmm",
    "softmax, attention's and the loss's": "aten::*softmax* aten::amax aten::*logsumexp* "
    "aten::exp aten::exp_",
    "PyTorch's random bits": "aten::random_ aten::bernoulli_",
    "copies": "aten::copy_ aten::cat aten::fill_ aten::*index* aten::*scatter* aten::*gather*",
    "LayerNorm": "aten::*layer_norm* aten::*var_mean*",
    "Adam and clipping": "aten::*adam* aten::*addcdiv* aten::*lerp* aten::*norm* aten::*foreach*",
    "our functions in C": "passes::*",
    "sums, relu, dropout's products": "aten::* mkldnn::*",
}


def kind_of(operation: str, kinds: Mapping[str, str]) -> str | None:
    """The kind under which an operation is booked: the first with a pattern that fits, or None."""
    for kind, patterns in kinds.items():
        if any(fnmatchcase(operation, pattern) for pattern in patterns.split()):
            return kind
    return None


def account(
    work: Callable[[], object], kinds: Mapping[str, str], rest: str, count: int = 1
) -> dict[str, float]:
    """Seconds of `work()` by kind, over `count`; under `rest` the wall clock's beyond their sum.

    What PyTorch's profiler doesn't see is Python. Our functions in C appear as FILE::NAME.
    """
    call = compiled.call

    def seen(file: str, name: str, *parts: Any) -> None:
        with record_function(f"{file}::{name}"):
            call(file, name, *parts)

    watched = profile(activities=[ProfilerActivity.CPU])
    with patch.object(compiled, "call", seen), watched as profiler:
        start = time.perf_counter()  # the profiler's own start and end take longer than a step
        work()
        total = time.perf_counter() - start
    seconds = dict.fromkeys(kinds, 0.0)
    for event in profiler.key_averages():
        if kind := kind_of(event.key, kinds):
            seconds[kind] += event.self_cpu_time_total / 1e6
    seconds |= {rest: max(0.0, total - sum(seconds.values()))}
    return {kind: round(time / count, 5) for kind, time in seconds.items()}


def step_account(contender: Contender, batches: list[list[Example]]) -> dict[str, float]:
    """Seconds of a step by kind of operation."""
    runner = Runner(contender, batches)
    runner.lap()
    return account(runner.lap, KINDS, "Python and autograd", len(batches))


def measured_operations() -> list[dict]:
    """Typical operations of a small step, each alone: FLOPs, least bytes and seconds.

    FLOPs of what isn't a product are a convention, and bytes the least that must move.
    """
    n, length, D, W, V, H = 2048, 16, SMALL.d_model, SMALL.d_ff, SMALL.vocab, SMALL.h
    x, wide, logits = (torch.randn(n, width) for width in (D, W, V))
    y = torch.randn_like(x)
    heads, others = torch.randn(2, n // length * H, length, D // H)
    weights = torch.randn(n // length * H, length, length)
    labels = torch.randint(1, V, (n,))
    norm = nn.LayerNorm(D)
    to_qkv, to_wide, to_logits = (torch.randn(width, D) for width in (3 * D, W, V))
    back = torch.randn(D, W)
    weight = torch.randn(parameter_count(SMALL), requires_grad=True)
    weight.grad = torch.randn_like(weight)
    adam = torch.optim.Adam([weight], fused=True)

    def product(*sizes: Any) -> dict:
        p = Product(*sizes)
        return {"operation": p.kind, "flops": p.flops, "bytes": p.bytes}

    def moving(name: str, over: Tensor, flops: int, arrays: float) -> dict:
        size = over.numel()
        return {"operation": name, "flops": flops * size, "bytes": int(4 * arrays * size)}

    cases = [
        (product("Q, K, V", 1, n, D, 3 * D), lambda: F.linear(x, to_qkv)),
        (product("feed-forward, out", 1, n, D, W), lambda: F.linear(x, to_wide)),
        (product("feed-forward, back", 1, n, W, D), lambda: F.linear(wide, back)),
        (product("logits", 1, n, D, V), lambda: F.linear(x, to_logits)),
        (product("scores", len(heads), length, D // H, length), lambda: heads @ others.mT),
        (moving("softmax of scores", weights, 5, 2), lambda: weights.softmax(-1)),
        (moving("LayerNorm", x, 8, 2), lambda: norm(x)),
        (moving("residual sum", x, 1, 3), lambda: x + y),
        (moving("dropout", wide, 2, 2.25), lambda: F.dropout(wide, 0.1)),
        (moving("dropout, 16 bits", wide, 2, 2.5), lambda: wide * keep_mask(wide.shape, 0.1, wide)),
        (moving("cross-entropy", logits, 5, 1), lambda: F.cross_entropy(logits, labels)),
        (moving("Adam", weight, 12, ADAM_BYTES / 4), adam.step),
    ]
    with torch.no_grad():
        return [row | {"seconds": best_seconds(call)} for row, call in cases]


# The races.


def peer_contenders() -> dict[str, Contender]:
    """Ours, the textbook's path and the peers: both precisions, as they come, with memory kept."""
    contenders = {"ours, bf16": OURS_HALF, "ours, float32": OURS}
    for name, half, kept in product(("textbook", *PEERS), (False, True), (False, True)):
        model = "series" if name == "textbook" else name
        words = f"{name}, {'bf16' if half else 'float32'}{', memory kept' * kept}"
        contenders[words] = Contender(model, autocast=half, keep_memory=kept)
    return contenders


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


def race_steps(options: RaceOptions) -> dict[str, Any]:
    """What each switch is worth in both precisions, where time goes, and the machine's limits."""
    plain = {
        "textbook, padded to 72": Contender(batches="fixed"),
        "textbook": Contender(),
        "textbook, memory kept": Contender(keep_memory=True),
        "one thread": replace(OURS, threads=1),
        "no dropout at all": replace(OURS, shape={"dropout": 0.0}),
    }
    operations, bandwidth = measured_operations(), memory_bandwidth()
    record, halves = race(step_contenders(OURS) | plain, options), step_contenders(OURS_HALF)
    if OURS_HALF.able:
        half, parts = race(halves, options), ("contenders", "reports", "matrix_rate_bf16")
        record["half"] = {name: half[name] for name in parts}
    else:
        record["left_out"] = [f"{name}, bf16" for name in halves]
    batches, limits = batches_to_time("buckets", options), (record["matrix_rate"], bandwidth)
    floors = [least_seconds(SMALL, lengths_of(batch), *limits) for batch in batches]
    accounts = {"textbook": Contender(keep_memory=True), "float32": OURS, "bf16": OURS_HALF}
    return record | {
        "bandwidth": round(bandwidth),
        "operations": operations,
        "floor_seconds": round(statistics.mean(floors), 4),
        "accounts": {n: step_account(one, batches) for n, one in accounts.items() if one.able},
    }


def race_base(options: RaceOptions) -> dict[str, Any]:
    """The paper's base model: the textbook's path and ours, and where the time of ours goes."""
    shape = {name: value for name, value in asdict(BASE).items() if value != asdict(SMALL)[name]}
    ours, half = replace(OURS, shape=shape), replace(OURS_HALF, shape=shape)
    contenders = {"ours": ours, "ours, bf16": half, "textbook": Contender(shape=shape)}
    record = race(contenders, options)
    return record | {"account": step_account(ours, batches_to_time("buckets", options))}


AXES = {
    "length": [8, 16, 32, 64, 128, 256],
    "tokens": [256, 512, 1024, 2048, 4096, 8192],
    "width": [64, 128, 256, 512, 768],
    "depth": [1, 2, 3, 6, 9, 12],
}


def growth_setting(axis: str, value: int) -> tuple[Shape, int, int]:
    """Shape, sentences and length of a step: one axis is set, the others stay in the middle."""
    length = value if axis == "length" else 32
    tokens = value if axis == "tokens" else 2048
    sizes = {"width": {"d_model": value, "d_ff": 4 * value}, "depth": {"N": value}}.get(axis, {})
    return replace(SMALL, **sizes), tokens // length, length


def growth_point(axis: str, value: int, switches: Switches | None) -> dict[str, Any]:
    """Seconds, kept memory and operations of a step at one point of one axis.

    Its ids are random, and all rows full.
    """
    shape, sentences, length = growth_setting(axis, value)
    sides = torch.randint(EOS + 1, shape.vocab, (2, sentences, length + 1)).tolist()
    pairs = [Example(source[1:], target) for source, target in zip(*sides, strict=True)]
    runner = Runner(Contender(how=switches, fused_adam=True, shape=asdict(shape)), [pairs])
    return {
        "axis": axis,
        "value": value,
        "path": "ours" if switches else "textbook",
        "seconds": best_seconds(runner.lap, repeats=4),
        "bytes": saved_bytes(runner.loss_of, runner.model, runner.batches[0], runner.criterion),
        "flops": step_flops(shape, lengths_of(pairs)),
    }


def race_growth(options: RaceOptions) -> dict[str, Any]:
    """Seconds and memory of a step along four axes, by both paths."""
    places = [(axis, value) for axis, values in AXES.items() for value in values]
    points = [growth_point(*place, switches) for place in places for switches in (None, FAST)]
    return {"shape": asdict(SMALL), "points": points}


RACES = {
    "peers": lambda options: race(peer_contenders(), options),
    "steps": race_steps,
    "base": race_base,
    "growth": race_growth,
}


def run_race(options: RaceOptions) -> None:
    """Time training steps against other programs, and against themselves without each part."""
    torch.set_num_threads(OURS.threads)  # as the contenders have: for the machine's own rates
    record = RACES[options.benchmark](options)
    left_out = record.get("left_out")
    if options.save:  # chapters and README read the name of a whole record
        command = as_typed("scripts.studies.race_training", options, places=("benchmark",))
        name = f"speed-{options.benchmark}" + "-float32" * bool(left_out)
        save_record(name, provenance(command) | record)
    if left_out:
        names = "; ".join(left_out)
        print(f"left out, as this processor has no 16-bit products (AVX512-BF16): {names}")


main = Command(
    "scripts.studies.race_training", RaceOptions, run_race, {"benchmark": ", ".join(RACES)}
)

if __name__ == "__main__":
    raise SystemExit(main())
