"""Two processes train as one: the same weights, one writer, one moment to stop, exact resuming.

`torchrun` runs this file in two processes (gloo, CPU). Each does what `work` says and leaves its
answers in a file; the tests compare them with each other, and with what one process does.
"""

import itertools
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from test_training import OWN, outcome, started, until
from tiny import RUN, few_pairs
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from scripts.book.records import load_record
from scripts.core.checkpoints import newest_state, saved_states, weights
from scripts.core.data import epoch_plan
from scripts.core.ranks import ALONE, Ranks, join_ranks
from scripts.core.settings import TrainConfig, build_model, pick_device
from scripts.core.signals import Stopped
from scripts.core.training import Training, over_ranks
from scripts.fast import run as fast_run
from scripts.fast.run import fit, training_of

CPU = torch.device("cpu")
LAUNCH = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone")
STEPS = 6
EXACT = replace(RUN, dropout=0.0, max_tokens=256, clip=0.5)  # masks would differ
WAYS = [("eager", 1), ("textbook", 2)]  # a kind of step, and the batches in one
SIZES = (0, 1, 5)


# What the two do, and one alone.


def some_steps(ranks: Ranks, config: TrainConfig) -> dict[str, Any]:
    """Train in double precision; the weights, the report, and how often gradients travelled."""
    sent = {"times": 0}

    def sharing(*args: Any, **options: Any) -> DistributedDataParallel:
        shared = DistributedDataParallel(*args, **options)
        shared.register_comm_hook(sent, counting)
        return shared

    with (
        mock.patch.object(fast_run, "build_model", lambda *args: build_model(*args).double()),
        mock.patch.object(fast_run, "DistributedDataParallel", sharing),
    ):
        training = training_of(config, few_pairs(), Path("nowhere"), ranks=ranks)
    training.model.train()
    training.load()
    with mock.patch.object(dist, "all_gather_object", side_effect=AssertionError("a gather")):
        for _ in range(STEPS):
            training.step()
    training.look()
    report = over_ranks(training.report, ranks)
    return {
        "weights": {name: p.detach().clone() for name, p in weights(training.model).items()},
        "norms": report.grad_norms,
        "own tokens": training.report.tokens,
        "sent": sent["times"],
        "figures": {
            "loss": report.loss_per_token,
            "ppl": report.perplexity,
            "tokens": report.tokens,
            **fast_run.validated_by(training.trained, training.data, ranks),
        },
    }


def counting(sent: dict[str, int], bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP's own averaging; the last bucket of a step adds one to the count."""
    sent["times"] += bucket.is_last()
    return allreduce_hook(None, bucket)


def trained(
    ranks: Ranks, folder: Path, resume: bool = False, stop_after: int = 0, stopped_rank: int = 0
) -> str:
    """`fit`, with SIGTERM to one process in its step `stop_after`; how it ended."""
    step = Training.step

    def signalled(training: Training) -> None:
        step(training)
        if training.steps_taken == stop_after and ranks.rank == stopped_rank:
            signal.raise_signal(signal.SIGTERM)

    ranks.wait()  # what the first wrote before is there
    torch.manual_seed(987 + ranks.rank)  # what happened before must not matter
    with mock.patch.object(Training, "step", signalled):
        try:
            fit(RUN, few_pairs(), folder, resume, ranks)
            return "done"
        except (Stopped, ValueError) as end:
            return str(end)


def work(ranks: Ranks, home: Path) -> dict[str, Any]:
    """All that the two processes are asked to do: first operations, then steps, then runs."""
    shares = [ranks.share(list(range(size))) for size in SIZES]
    answers: dict[str, Any] = {
        "gather": ranks.gather({"rank": ranks.rank}),
        "totals": ranks.totals(ranks.rank + 1, 1e16 if ranks.rank else 1.0),
        "shares": shares,
        "woven": [ranks.woven(share) for share in shares],
    }
    training = training_of(RUN, few_pairs(), home, ranks=ranks)
    answers["draw"] = torch.rand(8)
    answers["start"] = {name: p.detach().clone() for name, p in weights(training.model).items()}
    for kind, accumulate in WAYS:
        config = replace(EXACT, step=kind, accumulate=accumulate)
        answers[f"steps {kind}"] = some_steps(ranks, config)
    answers["straight"] = trained(ranks, home / "straight")
    answers["stopped"] = trained(ranks, home / "cut", False, 3, stopped_rank=1)
    answers["resumed"] = trained(ranks, home / "cut", True)
    answers["of one"] = trained(ranks, home / "one", True)
    return answers


def main(home: Path) -> None:
    """A process's part."""
    torch.set_num_threads(1)
    with join_ranks(CPU) as ranks:
        torch.save(work(ranks, home), home / f"answers-{ranks.rank}.pt")


@pytest.fixture(scope="module")
def both(tmp_path_factory) -> tuple[Path, list[dict[str, Any]]]:
    """The folder that the two worked in, and the answers of each."""
    home = tmp_path_factory.mktemp("both")
    torch.set_num_threads(1)
    assert "after step 3, and saved" in trained(ALONE, home / "one", False, 3)
    command = [sys.executable, *LAUNCH, __file__, str(home)]
    subprocess.run(command, env=os.environ | OWN, check=True, timeout=500)
    answers = [torch.load(home / f"answers-{rank}.pt", weights_only=False) for rank in range(2)]
    return home, answers


# The same training


def test_what_is_shared_out_is_woven_together_again(both):
    whole = [list(range(size)) for size in SIZES]
    for rank, answers in enumerate(both[1]):
        assert answers["shares"] == [items[rank::2] for items in whole]
        assert answers["woven"] == whole
        assert answers["gather"] == [{"rank": 0}, {"rank": 1}]
        assert answers["totals"] == [3, 1e16 + 1.0]
    assert ALONE.woven([1, 2]) == [1, 2] and ALONE.totals(1, 0.1) == [1, 0.1]


def test_processes_start_with_the_same_weights_and_draw_other_masks(both):
    _, (first, second) = both
    assert all(map(torch.equal, first["start"].values(), second["start"].values()))
    assert not first["draw"].isclose(second["draw"]).any()


@pytest.mark.parametrize(("kind", "accumulate"), WAYS)
def test_two_processes_train_the_model_that_one_trains(both, kind, accumulate):
    """The same global batches in double precision: the same to nine digits.

    Each process has other numbers of tokens, and clipping acts: a mean of the processes' means
    would be far off. Gradients travel once a step.
    """
    torch.set_num_threads(1)
    first, second = (answers[f"steps {kind}"] for answers in both[1])
    whole = replace(EXACT, step=kind, accumulate=2 * accumulate)
    alone = some_steps(ALONE, whole)
    assert first["own tokens"] != second["own tokens"] and max(alone["norms"]) > EXACT.clip
    assert first["own tokens"] + second["own tokens"] == alone["figures"]["tokens"]
    for name, weight in alone["weights"].items():
        assert weight.dtype == torch.float64
        assert first["weights"][name].equal(second["weights"][name]), name
        torch.testing.assert_close(first["weights"][name], weight, rtol=0, atol=1e-9)
    close = pytest.approx(alone["figures"], rel=0, abs=1e-9)
    assert first["figures"] == second["figures"] == close
    assert first["norms"] == second["norms"] == pytest.approx(alone["norms"], rel=1e-9)
    assert first["sent"] == STEPS


# Equal work


@pytest.mark.parametrize("together", [2, 6])
def test_no_process_waits_long_for_another(together):
    """The busiest has hardly more tokens than the mean."""
    data, config = few_pairs(), replace(RUN, max_tokens=128)
    plan = epoch_plan(config, data, 1, together)
    assert sorted(itertools.chain(*itertools.chain(*plan))) == list(range(len(data.train)))
    excess = []
    for step in plan:
        sides = [[(len(data.train[i].src), len(data.train[i].tgt)) for i in b] for b in step]
        assert all(len(batch) * max(map(max, batch)) <= config.max_tokens for batch in sides)
        tokens = [sum(map(sum, batch)) for batch in sides]
        assert len(tokens) == together
        excess.append(max(tokens) / (sum(tokens) / together))
    assert sum(excess) / len(excess) < 1.1
    with pytest.raises(ValueError, match="too few pairs for 4 batches"):
        epoch_plan(config, replace(data, train=data.train[:3]), 1, world=4)


# Stopping and going on


def test_two_processes_go_on_as_if_never_stopped(both):
    """One process is told to stop; both leave after the same step, and resume bit for bit."""
    home, both_answers = both
    for answers in both_answers:
        assert "SIGTERM after step 3, and saved" in answers["stopped"]
        assert answers["resumed"] == answers["straight"] == "done"
        assert "another number of processes (1, now 2)" in answers["of one"]
    straight = outcome(home / "straight")
    assert outcome(home / "cut") == straight
    assert {name for name in straight if name.startswith("rng")} == {"rng.0.cpu", "rng.1.cpu"}
    with pytest.raises(ValueError, match=r"processes \(2, now 1\)"):
        training_of(RUN, few_pairs(), home / "straight", resume=True)


@pytest.mark.audit
def test_the_command_under_torchrun(tmp_path):
    """It is told to stop, and saves first; resumed, one process writes and speaks for both."""
    folder = tmp_path / "run"
    process = started(tmp_path, "--save_every", "2", pause=0.2, launch=LAUNCH)
    until(lambda: saved_states(folder), process)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=240)
    steps = newest_state(folder).meta["steps_taken"]
    assert process.returncode != 0 and "BLEU" not in out
    assert f"stopped by SIGTERM after step {steps}, and saved" in err
    process = started(tmp_path, "--resume", launch=LAUNCH)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    for words in ("training pairs", "test: BLEU", "test_unseen: BLEU", "epoch 2/2  loss"):
        assert (out + err).count(words) == 1, words
    record = load_record("record", folder)
    assert len(record["history"]) == RUN.epochs and record["processes"] == 2
    assert record["repeat"].startswith("torchrun --nproc-per-node=2 -m scripts.train ")
    assert "--resume" not in record["command"]
    assert f"batches of {2 * RUN.max_tokens:,} tokens" in (folder / "README.md").read_text("utf-8")


def test_who_a_process_is(monkeypatch):
    """Without torchrun it is alone; with it, the command names the machines, and each its GPU."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with join_ranks(CPU) as ranks:
        assert ranks == ALONE and ranks.first and not dist.is_initialized()
    assert fast_run.command_of(["--lr", "1"]) == "python -m scripts.train --lr 1"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    for world, machines in ((2, ""), (8, "--nnodes=4 ")):
        monkeypatch.setenv("WORLD_SIZE", str(world))
        command = fast_run.command_of([])
        assert command == f"torchrun {machines}--nproc-per-node=2 -m scripts.train"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert pick_device("auto") == torch.device("cuda", 1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
