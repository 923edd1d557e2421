"""Chapter 9 over several processes: the same training, one writer, exact resuming (gloo, CPU)."""

import contextlib
import functools
import itertools
import multiprocessing
import multiprocessing.connection
import os
import random
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import mode
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from test_ch09_training_run import TINY as BASE
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from scripts import ROOT, train
from scripts.book.records import load_record
from scripts.ch06_training import PAD
from scripts.ch07_multi30k import BPETokenizer, encode_pairs, token_batches
from scripts.core.checkpoints import newest_state, save_tensors, saved_states, weights
from scripts.core.data import TrainingData, epoch_plan, prepare
from scripts.core.models import Trained
from scripts.core.ranks import ALONE, Poll, Ranks, join_ranks
from scripts.core.settings import PRESETS, TrainConfig, build_model, pick_device
from scripts.core.signals import Stopped
from scripts.core.steps import Step
from scripts.core.training import Training, over_ranks
from scripts.corpora.load import load_corpus
from scripts.fast import run as fast_run
from scripts.fast.run import fit, training_of

CPU = torch.device("cpu")
PATIENCE = 240  # seconds until two processes that wait for each other are given up on
TINY = replace(BASE, vocab=300, max_tokens=512, average=2)


@functools.cache
def few_pairs() -> TrainingData:
    """Some pairs of the sample corpus, and 300 pieces: the same in every process that asks.

    The sources of a held-out split are equally long. How far a decoder that finds no end may run
    depends on the longest source in its batch, and two processes make different batches from one.
    """
    whole = load_corpus("sample")
    train = whole["train"][:500]
    tokenizer = BPETokenizer.train((line for pair in train for line in pair), TINY.vocab)
    corpus = {"train": train}
    for split, size in {"val": 5, "test": 3, "test_unseen": 3}.items():
        lengths = [len(tokenizer.encode(german)) for german, _ in whole[split]]
        chosen = [i for i, length in enumerate(lengths) if length == mode(lengths)][:size]
        corpus[split] = [whole[split][i] for i in chosen]
        assert len(chosen) == size
    examples = [encode_pairs(corpus[split], tokenizer) for split in ("train", "val")]
    return TrainingData(corpus, tokenizer, *examples)


# Two processes, joined as if torchrun had started them, that do what they are told.


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def serve(pipe: Any, rank: int, world: int, port: int) -> None:
    """A process's life: join, then call what comes through the pipe until it is closed."""
    there = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": world}
    here = {"RANK": rank, "LOCAL_RANK": rank, "OMP_NUM_THREADS": 1}
    os.environ.update({name: str(value) for name, value in (there | here).items()})
    torch.set_num_threads(1)
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (progress bars, until it ends)
    with join_ranks(CPU) as ranks, contextlib.suppress(EOFError):
        while True:
            task, given = pipe.recv()
            try:
                pipe.send((task(ranks, *given), None))
            except Exception:
                pipe.send((None, traceback.format_exc()))


class Pair:
    """Two processes started once; `pair(task, …)` is [task(ranks, …) of each]."""

    def __init__(self):
        self.started: list[tuple[Any, Any]] = []

    def start(self) -> None:
        spawn, port = multiprocessing.get_context("spawn"), free_port()
        for rank in range(2):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=serve, args=(theirs, rank, 2, port), daemon=True)
            process.start()
            theirs.close()
            self.started.append((process, ours))

    def __call__(self, task: Callable[..., Any], *given: Any) -> list[Any]:
        if not self.started:
            self.start()
        for _, pipe in self.started:
            pipe.send((task, given))
        answers: dict[int, Any] = {}
        until = time.monotonic() + PATIENCE
        while len(answers) < 2:
            waiting = {p: i for i, (_, p) in enumerate(self.started) if i not in answers}
            ready = multiprocessing.connection.wait(waiting, until - time.monotonic())
            for pipe in ready:
                answer, error = pipe.recv()
                if error:
                    self.end()  # the other may wait for this one forever
                    pytest.fail(f"process {waiting[pipe]}: {error}")
                answers[waiting[pipe]] = answer
            if not ready:
                self.end()
                pytest.fail(f"the processes wait for each other ({sorted(answers)} answered)")
        return [answers[rank] for rank in range(2)]

    def end(self, patience: float = 0) -> None:
        for _, pipe in self.started:
            pipe.close()  # this tells a waiting process to leave
        for process, _ in self.started:
            process.join(patience)
            process.kill()
            process.join()
        self.started = []


@pytest.fixture(scope="module")
def pair():
    pair = Pair()
    yield pair
    pair.end(patience=20)


@pytest.fixture(autouse=True)
def one_thread():
    """As in the processes: sums are the same to the last bit."""
    torch.set_num_threads(1)


# What the two are asked to do. Each task takes its Ranks first: ALONE, if there is one process.


def exact(config: TrainConfig) -> TrainConfig:
    """No dropout, whose masks would differ, and enough steps in an epoch."""
    return replace(config, dropout=0.0, max_tokens=256, clip=0.5)


def some_steps(
    ranks: Ranks, config: TrainConfig, steps: int, mean_of_means: bool = False
) -> dict[str, Any]:
    """Train in double precision; return the weights, the report and the validation."""

    def double(*given: Any) -> torch.nn.Module:
        return built(*given).double()

    def by_own(step: Step, group: Any, per: float) -> Any:
        own = sum(int((batch.tgt_y != PAD).sum()) for batch in group)
        return run(step, group, own if mean_of_means else per)

    built, run = build_model, Step.run
    with (
        mock.patch.object(fast_run, "build_model", double),
        mock.patch.object(Step, "run", by_own),
    ):
        training = training_of(config, few_pairs(), Path("nowhere"), ranks=ranks)
        training.model.train()
        training.load()
        for _ in range(steps):
            training.step()
        training.look()
        own, report = training.report, over_ranks(training.report, ranks)
        return {
            "weights": {name: p.detach().clone() for name, p in weights(training.model).items()},
            "norms": report.grad_norms,
            "own tokens": own.tokens,
            "row": {
                "train_loss": report.loss_per_token,
                "train_ppl": report.perplexity,
                "tokens": report.tokens,
                **fast_run.validated_by(training.trained, training.data, ranks),
            },
            "steps taken": training.steps_taken,
        }


def trained(
    ranks: Ranks,
    config: TrainConfig,
    folder: Path,
    resume: bool = False,
    stop_after: int = 0,
    stopped_rank: int = 0,
) -> dict[str, Any]:
    """`fit`, with SIGTERM to one process in its step `stop_after`; returns what came of it."""
    step = Training.step

    def signalled(training: Training, *given: Any) -> None:
        step(training, *given)
        if training.steps_taken == stop_after and ranks.rank == stopped_rank:
            signal.raise_signal(signal.SIGTERM)

    torch.manual_seed(987 + ranks.rank)  # what happened before must not matter
    if ranks.first:
        folder.mkdir(exist_ok=True)
    with mock.patch.object(Training, "step", signalled):
        try:
            return {"history": fit(config, few_pairs(), folder, resume, ranks)}
        except Stopped as stopped:
            return {"stopped": str(stopped)}
        except ValueError as error:
            return {"refused": str(error)}


def polled(ranks: Ranks) -> list[int]:
    """The answers to four polls. The first process says 0, 7, 1 and 0, the other 0, 0, 3 and 0."""
    poll = Poll(ranks)
    mine = [0, 7, 3 if ranks.world == 1 else 1, 0] if ranks.first else [0, 0, 3, 0]
    answers = [poll(number) for number in mine]
    assert poll.answer() == 0 and poll.answer() == 0
    return answers


def dealt_and_gathered(ranks: Ranks, size: int) -> dict[str, Any]:
    items = [f"item {i}" for i in range(size)]
    return {
        "share": ranks.share(items),
        "woven": ranks.woven([item.upper() for item in ranks.share(items)]),
        "totals": ranks.totals(ranks.rank + 1, 0.1 * (ranks.rank + 1), 1e16 if ranks.rank else 1.0),
        "gather": ranks.gather({"rank": ranks.rank}),
        "polled": polled(ranks),
    }


def masks_and_weights(ranks: Ranks) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """What this process draws right after its model is made, and the model's weights."""
    training = training_of(TINY, few_pairs(), Path("nowhere"), ranks=ranks)
    return torch.rand(8), {name: p.detach() for name, p in weights(training.model).items()}


def sent_in_a_step(ranks: Ranks, config: TrainConfig) -> dict[str, Any]:
    """How often gradients travel in two steps, and whether buffers do."""
    calls = {"sent": 0}
    training = training_of(config, few_pairs(), Path("nowhere"), ranks=ranks)
    (shared,) = (
        cell.cell_contents
        for cell in training.take.loss_of.__closure__
        if isinstance(cell.cell_contents, DistributedDataParallel)
    )
    shared.register_comm_hook(calls, counting)
    training.load()
    with mock.patch.object(dist, "all_gather_object", side_effect=AssertionError("a gather")):
        for _ in range(2):
            training.step()
    training.look()
    return {"sent": calls["sent"], "buffers": shared.broadcast_buffers}


def counting(calls: dict[str, int], bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP's own averaging; the last bucket of a step adds one to the count."""
    calls["sent"] += bucket.is_last()
    return allreduce_hook(None, bucket)


# The operations between processes


@pytest.mark.parametrize("size", [0, 1, 2, 5, 8])
def test_what_is_shared_out_is_woven_together_again(pair, size):
    items = [f"item {i}" for i in range(size)]
    alone = dealt_and_gathered(ALONE, size)
    assert alone["share"] == items
    assert alone["woven"] == [item.upper() for item in items]
    assert alone["totals"] == [1, 0.1, 1.0] and alone["gather"] == [{"rank": 0}]
    assert alone["polled"] == [0, 7, 3, 0]  # at once
    both = pair(dealt_and_gathered, size)
    assert [one["share"] for one in both] == [items[0::2], items[1::2]]
    for one in both:
        assert one["woven"] == alone["woven"]
        assert one["gather"] == [{"rank": 0}, {"rank": 1}]
        assert one["totals"] == [3, pytest.approx(0.3), 1e16 + 1.0]
        assert one["polled"] == [0, 0, 7, 3]  # one step late, and the same for both


def test_gradients_travel_once_a_step_and_buffers_never(pair):
    """However many batches are accumulated."""
    for accumulate in (1, 3):
        for one in pair(sent_in_a_step, replace(TINY, accumulate=accumulate, max_tokens=128)):
            assert one["sent"] == 2 and not one["buffers"]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_shares_are_even_and_complete(world):
    for size in range(12):
        shares = [Ranks(rank, world).share(range(size)) for rank in range(world)]
        assert sorted(sum(shares, [])) == list(range(size))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_processes_start_with_the_same_weights_and_draw_other_masks(pair):
    (one_draw, one), (other_draw, other) = pair(masks_and_weights)
    assert all(one[name].equal(other[name]) for name in one)
    assert not one_draw.isclose(other_draw).any()


# The same training


def tokens_of_ranks(config: TrainConfig, steps: int) -> list[list[int]]:
    """Target tokens of each of two processes in each step."""
    plan = epoch_plan(config, few_pairs(), 1, world=2)[:steps]
    train = few_pairs().train
    return [
        [sum(len(train[i].tgt) - 1 for b in Ranks(r, 2).share(s) for i in b) for r in range(2)]
        for s in plan
    ]


@pytest.mark.parametrize(
    ("path", "accumulate"), [("fast", 1), ("textbook", 1), ("fast", 2), ("textbook", 3)]
)
def test_two_processes_train_the_model_that_one_trains(pair, path, accumulate):
    """Up to 20 steps in double precision on the same global batches: the same to nine digits."""
    config, steps = replace(exact(TINY), path=path, accumulate=accumulate), 20
    whole = replace(config, accumulate=2 * accumulate)  # as many batches a step in one process
    plan = epoch_plan(whole, few_pairs(), 1)
    assert plan == epoch_plan(config, few_pairs(), 1, world=2)
    steps = min(steps, len(plan))
    assert steps >= 20 // accumulate - 3
    dealt = tokens_of_ranks(config, steps)
    assert sum(a != b for a, b in dealt) > steps // 2  # a mean of means would differ

    alone = some_steps(ALONE, whole, steps)
    first, second = pair(some_steps, config, steps)
    assert [sum(tokens) for tokens in zip(*dealt, strict=True)] == [
        first["own tokens"],
        second["own tokens"],
    ]
    assert max(alone["norms"]) > config.clip  # clipping acts, so the gradient's size matters
    for name, weight in alone["weights"].items():
        assert weight.dtype == torch.float64
        assert first["weights"][name].equal(second["weights"][name]), name
        torch.testing.assert_close(first["weights"][name], weight, rtol=0, atol=1e-9)
    assert first["row"] == second["row"] == pytest.approx(alone["row"], rel=0, abs=1e-9)
    assert first["norms"] == second["norms"] == pytest.approx(alone["norms"], rel=1e-9)
    assert first["steps taken"] == second["steps taken"] == alone["steps taken"]


def test_a_mean_of_the_processes_means_would_be_noticed(pair):
    """The wrong version, each process dividing by its own tokens, is off by far more than 1e-9."""
    config = exact(TINY)
    alone = some_steps(ALONE, replace(config, accumulate=2), 20)
    wrong, _ = pair(some_steps, config, 20, True)
    gaps = [(wrong["weights"][name] - w).abs().max() for name, w in alone["weights"].items()]
    assert max(gaps) > 1e-5
    assert abs(wrong["row"]["train_loss"] - alone["row"]["train_loss"]) > 1e-7


def validated(ranks: Ranks) -> dict[str, float]:
    """A validation whose translations are right: BLEU is 100 if each meets its own reference."""
    torch.manual_seed(0)
    data = few_pairs()
    echo = [(german, german) for german, _ in data.corpus["val"]]
    data = replace(data, corpus={"val": echo})
    model = build_model(TINY, len(data.tokenizer)).double().eval()
    model = Trained(model, data.tokenizer, replace(TINY, max_tokens=80))  # several batches
    with mock.patch.object(fast_run, "fast_translate", lambda _, sentences: sentences):
        return fast_run.validated_by(model, data, ranks)


def test_two_processes_validate_as_one(pair):
    alone = validated(ALONE)
    assert alone["val_bleu"] == pytest.approx(100)
    first, second = pair(validated)
    assert first == second == pytest.approx(alone, rel=1e-12)


# Equal work


def spread_of(steps: list[list[list[int]]], world: int, train: list[Any]) -> float:
    """The busiest process's tokens over the mean, averaged over the steps: 1 is perfect."""

    def work(batches: list[list[int]]) -> int:
        return sum(len(train[i].src) + len(train[i].tgt) for batch in batches for i in batch)

    shares = [[work(Ranks(r, world).share(step)) for r in range(world)] for step in steps]
    return sum(max(share) / (sum(share) / world) for share in shares) / len(shares)


@pytest.fixture(scope="module")
def sample_data():
    return prepare(PRESETS["sample"])


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_no_process_waits_long_for_another(sample_data, world, accumulate):
    config = replace(PRESETS["sample"], accumulate=accumulate)
    together, train = accumulate * world, sample_data.train
    for epoch in (1, 2, 3):
        plan = epoch_plan(config, sample_data, epoch, world)
        assert {len(step) for step in plan} == {together}
        assert sorted(i for step in plan for batch in step for i in batch) == list(range(6000))
        for batch in itertools.chain(*plan):
            longest = max(max(len(train[i].src), len(train[i].tgt)) for i in batch)
            assert longest * len(batch) <= config.max_tokens
        assert plan == epoch_plan(config, sample_data, epoch, world)

        loose = token_batches(train, config.max_tokens, random.Random(f"{config.seed}:{epoch}"))
        whole = len(loose) // together * together
        unsorted = [loose[at : at + together] for at in range(0, whole, together)]
        spread, before = spread_of(plan, world, train), spread_of(unsorted, world, train)
        assert spread < 1.05
        assert spread - 1 < 0.6 * (before - 1)
    assert plan != epoch_plan(config, sample_data, 1, world)


def test_too_few_pairs_for_a_step_are_refused():
    data = replace(few_pairs(), train=few_pairs().train[:3])
    ((*batches,),) = epoch_plan(TINY, data, 1, world=3)
    assert sorted(batches) == [[0], [1], [2]]
    with pytest.raises(ValueError, match="too few pairs for 4 batches"):
        epoch_plan(TINY, data, 1, world=4)


# Stopping and going on


def assert_same_run(one: Path, other: Path) -> None:
    """The newest states of two folders are the same to the last bit, and so is what they report."""
    left, right = newest_state(one), newest_state(other)
    assert left.tensors.keys() == right.tensors.keys()
    assert {name.split(".")[1] for name in left.tensors if name.startswith("rng")} == {"0", "1"}
    assert [n for n, tensor in left.tensors.items() if not tensor.equal(right.tensors[n])] == []
    histories = [
        [{k: v for k, v in row.items() if "seconds" not in k} for row in known.meta["history"]]
        for known in (left, right)
    ]
    assert histories[0] == histories[1]
    assert left.meta["steps_taken"] == right.meta["steps_taken"]


@pytest.fixture(scope="module")
def straight(pair, tmp_path_factory):
    """An undisturbed run of two processes: its folder and its steps per epoch."""
    folder = tmp_path_factory.mktemp("straight") / "tiny"
    first, second = pair(trained, TINY, folder)
    assert len(first["history"]) == len(second["history"]) == TINY.epochs
    return folder, len(epoch_plan(TINY, few_pairs(), 1, world=2))


@pytest.mark.parametrize(
    ("stop", "stopped_rank"),
    [("in the first epoch", 1), ("with the first epoch's last step", 0), ("in the second", 0)],
)
def test_two_processes_go_on_as_if_never_stopped(pair, straight, tmp_path, stop, stopped_rank):
    """One process is told to stop; both leave after the next step, and resume bit for bit.

    At the end of an epoch they leave at once: they meet there anyway.
    """
    whole, steps = straight
    told = {"in the first epoch": 3, "in the second": steps + 2}.get(stop, steps)
    after = told if told == steps else told + 1
    folder = tmp_path / "tiny"
    for stopped in pair(trained, TINY, folder, False, told, stopped_rank):
        assert f"SIGTERM after step {after}" in stopped["stopped"]
    assert newest_state(folder).meta["steps_taken"] == after
    first, second = pair(trained, TINY, folder, True)
    assert len(first["history"]) == len(second["history"]) == TINY.epochs
    assert_same_run(folder, whole)


def test_dropouts_state_is_part_of_what_is_restored(pair, straight, tmp_path):
    """The check above can fail: with the random states of the two swapped, the weights differ."""
    whole, _ = straight
    folder = tmp_path / "tiny"
    pair(trained, TINY, folder, False, 3)
    path, tensors, meta, _ = newest_state(folder)
    tensors["rng.0.cpu"], tensors["rng.1.cpu"] = tensors["rng.1.cpu"], tensors["rng.0.cpu"]
    save_tensors(path, tensors, meta)
    pair(trained, TINY, folder, True)
    with pytest.raises(AssertionError):
        assert_same_run(folder, whole)


def test_another_number_of_processes_cant_go_on(pair, tmp_path):
    two, one = tmp_path / "two", tmp_path / "one"
    pair(trained, TINY, two, False, 3)
    with pytest.raises(ValueError, match="processes") as caught:
        training_of(TINY, few_pairs(), two, resume=True)
    assert "\n" not in str(caught.value)
    assert "stopped" in trained(ALONE, TINY, one, False, 3)
    for refused in pair(trained, TINY, one, True):
        assert "processes" in refused["refused"] and "\n" not in refused["refused"]


# The command, under torchrun

DRIVER = """
import sys, time
from scripts import train
from scripts.fast import run
from scripts.core.training import Training
from test_ch09_processes import few_pairs

pause = float(sys.argv.pop(1))
run.prepare, step = lambda config: few_pairs(), Training.step

def slowly(*given):  # so that a signal comes while it works
    time.sleep(pause)
    step(*given)

Training.step = slowly
raise SystemExit(train.main())
"""
NAMES = ("layers", "d_model", "d_ff", "heads", "vocab", "dropout", "epochs", "warmup", "max_tokens")


def options(**more: Any) -> list[str]:
    """The command line that asks for TINY."""
    asked = {name: getattr(TINY, name) for name in (*NAMES, "average", "device")} | more
    return ["--preset", "sample", *(f"--{name}={value}" for name, value in asked.items())]


def torchrun(tmp_path: Path, pause: float, argv: list[str]) -> subprocess.Popen:
    driver = tmp_path / "driver.py"
    driver.write_text(DRIVER)
    launch = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", driver]
    paths = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(__file__).parent)])}
    return subprocess.Popen(
        [sys.executable, *launch, str(pause), *argv],
        env=os.environ | paths | {"OMP_NUM_THREADS": "1", "SERIES_RUNS": str(tmp_path / "runs")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        start_new_session=True,
    )


def finished(process: subprocess.Popen) -> tuple[int, str, str]:
    """Exit code and outputs; a process that hangs is ended, and its workers with it."""
    try:
        out, err = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun ends its workers
        out, err = process.communicate(timeout=60)
        pytest.fail(f"torchrun did not end: {out}{err}")
    return process.returncode, out, err


@pytest.fixture(scope="module")
def commanded(tmp_path_factory):
    """A run under torchrun, ended by SIGTERM in its first epoch and resumed; both outputs."""
    tmp_path = tmp_path_factory.mktemp("torchrun")
    folder = tmp_path / "runs" / "pair"
    first = torchrun(tmp_path, 0.2, options(name="pair", save_every=2))
    until = time.monotonic() + PATIENCE
    while not saved_states(folder) and first.poll() is None and time.monotonic() < until:
        time.sleep(0.02)
    first.send_signal(signal.SIGTERM)
    stopped = finished(first)
    left = newest_state(folder).meta
    resumed = finished(torchrun(tmp_path, 0, options(name="pair") + ["--resume"]))
    return folder, stopped, left, resumed


def test_torchrun_told_to_stop_saves_first(commanded):
    _, (code, out, err), left, _ = commanded
    assert code != 0 and "BLEU" not in out
    assert f"stopped by SIGTERM after step {left['steps_taken']}, and saved" in err
    assert left["epoch"] == 1 and left["done"] == left["steps_taken"]


def test_a_stopped_torchrun_resumes_bit_for_bit(commanded, straight):
    folder, _, _, (code, _, err) = commanded
    assert code == 0, err
    assert_same_run(folder, straight[0])


def kinds_of(folder: Path) -> list[str]:
    """The names of a run's files, without the numbers."""
    return sorted("".join(c for c in path.name if not c.isdigit()) for path in folder.iterdir())


def test_one_process_writes_and_speaks_for_all(commanded, tmp_path, monkeypatch, capsys):
    folder, _, _, (code, out, err) = commanded
    assert code == 0, err
    monkeypatch.setenv("SERIES_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr(fast_run, "prepare", lambda config: few_pairs())
    assert train.main(options(name="alone", accumulate=2)) == 0
    alone = capsys.readouterr().out
    for said in ("training pairs", "test: BLEU", "test_unseen: BLEU"):
        assert out.count(said) == alone.count(said) == 1, said
    for epoch in (1, 2):
        assert (out + err).count(f"epoch {epoch}/2  loss") == 1
    assert kinds_of(folder) == kinds_of(tmp_path / "runs" / "alone")
    assert [path.name for path in folder.iterdir()].count("record.json") == 1
    record = load_record("record", folder)
    assert len(record["history"]) == TINY.epochs and "--resume" not in record["command"]
    assert record["repeat"].startswith("torchrun --nproc-per-node=2 -m scripts.train ")
    assert record["processes"] == 2
    together = 2 * record["config"]["max_tokens"] * record["config"]["accumulate"]
    assert f"batches of {together:,} tokens" in (folder / "README.md").read_text("utf-8")
    assert (folder / "log.csv").read_text().count("\n") == 1 + TINY.epochs
    assert [p.name for p in folder.parent.iterdir()] == ["pair"]


def test_the_command_on_record_says_how_many_machines(monkeypatch):
    for world, here, start in ((1, 1, "python"), (2, 2, "torchrun --nproc-per-node=2")):
        monkeypatch.setenv("WORLD_SIZE", str(world))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(here))
        assert fast_run.command_of(["--lr", "1"]) == f"{start} -m scripts.train --lr 1"
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert fast_run.command_of([]).startswith("torchrun --nnodes=4 --nproc-per-node=2 -m")


def test_a_process_without_a_gpu_of_its_own_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert pick_device("auto") == torch.device("cuda", 1)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ValueError, match="no 'cuda:2': this machine has 2 GPUs"):
        pick_device("auto")


def test_without_torchrun_a_process_is_alone(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with join_ranks(CPU) as ranks:
        assert ranks == ALONE and ranks.first and not torch.distributed.is_initialized()
    assert not Ranks(1, 2).first
