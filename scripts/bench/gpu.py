"""The steps of chapter 7 on a GPU, one on top of the other: `python -m scripts.bench.gpu`.

No GPU has run this yet. What can run on a CPU is tested there.
"""

if __name__ == "__main__":  # first, so that Ctrl-C while libraries load is answered, too
    from scripts.book.command import launch

    raise SystemExit(launch("scripts.bench.gpu"))

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from scripts.bench.training import BenchOptions, batches_to_time, bench_examples
from scripts.book.command import as_typed, read, serve
from scripts.book.records import provenance, save_record
from scripts.ch04_encoder_decoder import EncoderDecoder
from scripts.ch05_training import Batch, LabelSmoothing, batch_loss
from scripts.ch06_multi30k import Example, make_batch
from scripts.ch07_going_fast import (
    BASE,
    SMALL,
    STATIC,
    ResidentCorpus,
    Shape,
    StaticStep,
    Switches,
    best_seconds,
    fast_loss,
    series_model,
    static_lengths,
    static_plan,
    step_flops,
)


def gpu_stages() -> dict[str, dict[str, Any]]:
    """The waterfall on a GPU: what changes from stage to stage."""
    textbook = {"how": None, "precision": torch.float32, "static": False, "graphs": False}
    fast = asdict(STATIC)
    return {
        "textbook, float32": textbook,
        "textbook, bf16": textbook | {"precision": torch.bfloat16},
        "our switches": textbook | {"how": fast, "precision": torch.bfloat16},
        "resident corpus, 8 static shapes": {
            "how": fast,
            "precision": torch.bfloat16,
            "static": True,
            "graphs": False,
        },
        "CUDA graphs": {"how": fast, "precision": torch.bfloat16, "static": True, "graphs": True},
    }


def gpu_stage(
    stage: dict[str, Any],
    shape: Shape,
    examples: Sequence[Example],
    max_tokens: int,
    count: int,
    device: torch.device,
) -> dict[str, float]:
    """Seconds of one stage's steps on `device`, and the operations that were useful."""
    torch.manual_seed(0)
    model = series_model(shape).to(device).train()
    criterion = LabelSmoothing(0.1)
    adam: dict[str, Any] = {"betas": (0.9, 0.98), "eps": 1e-9}
    if device.type == "cuda":
        adam |= {"fused": True, "capturable": True}
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(1e-4, device=device), **adam)
    if stage["static"]:
        corpus = ResidentCorpus(examples, device)
        widths = static_lengths(examples)
        plan = static_plan(examples, widths, max_tokens, random.Random(0))[:count]
        step = StaticStep(model, criterion, optimizer, 1.0, stage["precision"], stage["graphs"])
        calls = [partial(lambda w, n, ids: step(corpus.batch(ids, w, n)), *entry) for entry in plan]
        chosen = [[examples[i] for i in indices] for _, _, indices in plan]
    else:
        chosen = batches_to_time("buckets", examples, max_tokens, count)
        loss_of = fast_loss if stage["how"] else batch_loss
        if stage["how"]:
            loss_of = partial(fast_loss, how=Switches(**stage["how"]))
        calls = [
            partial(
                plain_step,
                model,
                make_batch(batch),
                loss_of,
                criterion,
                optimizer,
                stage["precision"],
            )
            for batch in chosen
        ]
    for call in calls:
        call()
    synchronize(device)
    start = time.perf_counter()
    for call in calls:
        call()
    synchronize(device)
    seconds = (time.perf_counter() - start) / len(calls)
    lengths = [[(len(e.src), len(e.tgt) - 1) for e in batch] for batch in chosen]
    flops = sum(step_flops(shape, batch) for batch in lengths) / len(lengths)
    targets = sum(t for batch in lengths for _, t in batch) / len(lengths)
    return {
        "seconds_per_step": seconds,
        "tokens_per_second": targets / seconds,
        "flops_per_second": flops / seconds,
        "busy": busy_share(calls, device),
    }


def plain_step(
    model: EncoderDecoder,
    batch: Batch,
    loss_of: Callable,
    criterion: LabelSmoothing,
    optimizer: torch.optim.Optimizer,
    precision: torch.dtype,
) -> None:
    """An optimizer step on a batch that comes from the CPU."""
    device = next(model.parameters()).device
    batch = batch.to(device)
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast(device.type, precision, enabled=precision != torch.float32):
        loss, _ = loss_of(model, batch, criterion)
    (loss / batch.ntokens).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done all it was told; a CPU always has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def busy_share(calls: Sequence[Callable[[], object]], device: torch.device) -> float:
    """The share of the time in which a GPU runs kernels; the rest is gaps between launches."""
    if device.type != "cuda":
        return 1.0
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        start = time.perf_counter()
        for call in calls:
            call()
        synchronize(device)
        wall = time.perf_counter() - start
    return sum(event.self_device_time_total for event in profiler.key_averages()) / 1e6 / wall


def gpu_matrix_rate(device: torch.device, precision: torch.dtype, n: int) -> float:
    """Operations a second of a square product on `device`."""
    a, b = torch.randn(2, n, n, device=device).to(precision)

    def multiply() -> None:
        a @ b
        synchronize(device)

    return 2 * n**3 / best_seconds(multiply)


def waterfall(
    size: Literal["small", "base"], device: torch.device, corpus: str, tiny: bool
) -> dict[str, Any]:
    """The stages of one model on `device`, with the share of the matrix rate and of busy time.

    On a CPU the stages that need a GPU are named in "not_run". `tiny` is for trying it out.
    """
    shape, max_tokens, count, n = (SMALL, 2048, 4, 8192)
    if size == "base":
        shape, max_tokens = BASE, 4096
    if tiny:
        shape = replace(shape, N=1, d_model=32, d_ff=64, h=2, vocab=1000)
        max_tokens, count, n = 256, 1, 64
    corpus, examples = bench_examples(corpus, shape.vocab)
    return stages_of(shape, examples, max_tokens, count, device, n) | {"corpus": corpus}


def stages_of(
    shape: Shape,
    examples: Sequence[Example],
    max_tokens: int,
    count: int,
    device: torch.device,
    n: int = 8192,
) -> dict[str, Any]:
    """Every stage that `device` can run; the matrix rate is that of an n × n product."""
    rate = gpu_matrix_rate(device, torch.bfloat16, n)
    stages, missing = gpu_stages(), []
    if device.type == "cpu":
        missing = [name for name, stage in stages.items() if stage["graphs"]] + ["busy time"]
    reports = {
        name: gpu_stage(stage, shape, examples, max_tokens, count, device)
        for name, stage in stages.items()
        if name not in missing
    }
    for report in reports.values():
        report["mfu"] = round(report["flops_per_second"] / rate, 4)
    return {
        "shape": asdict(shape),
        "matrix_rate": round(rate),
        "reports": reports,
        "not_run": missing,
    }


def bench_gpu(options: BenchOptions) -> dict[str, Any]:
    """The waterfall on a GPU for both models. Raises ValueError where there is no GPU."""
    if not torch.cuda.is_available():
        raise ValueError("this benchmark needs a GPU: the others run on any machine")
    device = torch.device("cuda")
    corpus, examples = bench_examples(options.corpus, SMALL.vocab)
    sizes = {"small": (SMALL, options.max_tokens), "base": (BASE, 2 * options.max_tokens)}
    found = {
        size: stages_of(shape, examples, max_tokens, options.count, device)
        for size, (shape, max_tokens) in sizes.items()
    }
    return {
        "corpus": corpus,
        "gpu": torch.cuda.get_device_name(device),
        "matrix_rate": found["small"]["matrix_rate"],
        "reports": {
            f"{size}, {name}": report
            for size, one in found.items()
            for name, report in one["reports"].items()
        },
    }


def run_bench(options: BenchOptions) -> None:
    """Run the benchmark, print its table, and save the record if the options say so."""
    record = bench_gpu(options)
    if options.save:
        save_record("speed-gpu", provenance(as_typed(__name__, options), "cuda") | record)
    import pandas as pd

    print(pd.DataFrame(record["reports"]).T.round(3).to_string())


def parse(argv: Sequence[str]) -> BenchOptions:
    """The command line to its options. Raises ValueError for what makes no sense."""
    return read(__name__, BenchOptions, argv, "Time training steps on a GPU.")


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns the exit code."""
    return serve(parse, run_bench, argv)
