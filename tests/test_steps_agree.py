"""All kinds of a step take the same steps, resume to the bit, and wait for nothing.

Pairs are as long as a batch is wide, and batches are full. So each kind computes on the very same
numbers, draws the very same dropout, and may differ only by its kernels. If there is a GPU, all of
it runs there, at full size: `python -m scripts.gpu` has pytest run this file in its own process, on
a machine that has PyTorch, NumPy and what was carried there. On a CPU `Recorded` stands in for a
GPU's recording.
"""

import itertools
import os
import random
import tempfile
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from scripts.ch06_training import BOS, EOS, LabelSmoothing
from scripts.ch07_multi30k import Example
from scripts.core import steps
from scripts.core.checkpoints import (
    load_tensors,
    restore_training,
    rng_states,
    save_training,
    set_rng_states,
)
from scripts.core.optimizers import make_optimizer
from scripts.core.settings import TrainConfig, build_model
from scripts.core.steps import GraphedStep, Step, ask_for_determinism, set_rate
from scripts.fast.losses import OLD_KERNELS, loss_function_of

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read once, at the first product


class Recorded(GraphedStep):
    """Recording as on a GPU, on a CPU: a replay runs the recorded function again, in its memory."""

    aside = staticmethod(nullcontext)

    def capture(self, run):
        figures = torch.zeros(3, dtype=torch.float64)
        return SimpleNamespace(replay=lambda: figures.copy_(run())), figures


ON_A_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_A_GPU else "cpu")
KINDS = steps.KINDS if ON_A_GPU else steps.KINDS | {"graphed": Recorded}
WIDTHS, ROWS = (12, 16), 256  # of batches, and their tokens a side
VOCAB, COUNT = 1000, 8 if ON_A_GPU else 4
SIZES = {} if ON_A_GPU else {"layers": 1, "d_model": 32, "d_ff": 64, "heads": 2}
# The static kind's switches for all; and a bound low enough to clip the gradient.
BASE = TrainConfig(**SIZES, vocab=VOCAB, max_tokens=ROWS, clip=0.1, step="static")
# How far a kind may be from the eager one: its losses, its gradient, where its weights have gone.
TOLERANCE = {"float32": 1e-4, "bf16": 2e-2}


def full_batches():
    """Pairs, and a plan of `COUNT` steps of one batch, of each width in turn, without filler."""
    rng, pairs, plan = random.Random(0), [], []
    for number in range(COUNT):
        width = WIDTHS[number % len(WIDTHS)]
        rows = ROWS // width
        plan.append([list(range(len(pairs), len(pairs) + rows))])
        for _ in range(rows):
            words = [[rng.randrange(EOS + 1, VOCAB) for _ in range(width - 1)] for _ in range(2)]
            pairs.append(Example([*words[0], EOS], [BOS, *words[1], EOS]))
    return pairs, plan


class Trial:
    """A model in training on the device, by one kind of step."""

    def __init__(self, kind, config):
        torch.manual_seed(config.seed)
        self.pairs, plan = full_batches()
        self.model = build_model(config, VOCAB).to(DEVICE).train()
        self.optimizer = make_optimizer(config, self.model)
        loss_of = loss_function_of(config, DEVICE, training=True)
        parts = (self.model, LabelSmoothing(0.1), self.optimizer, loss_of, config.clip)
        shapes = {} if kind is Step else {"widths": WIDTHS, "max_tokens": ROWS}
        self.take = kind(*parts, **shapes)
        labels = [sum(len(self.pairs[i].tgt) - 1 for i in batch) for (batch,) in plan]
        self.take.load(self.pairs, plan, labels)
        self.gradient = torch.empty(0)

    def run(self, numbers):
        """Take the steps of these numbers, without waiting."""
        for number in numbers:
            set_rate(self.optimizer, 1e-3 / (number + 1))
            self.take(number)
            if number == 0:
                gradients = [p.grad.flatten() for p in self.model.parameters()]
                self.gradient = torch.cat(gradients).clone()

    def weights(self):
        """All weights as one vector, except the keys' biases.

        A softmax doesn't see them. Their gradient is rounding, which Adam turns into whole steps.
        """
        named = self.model.named_parameters()
        parts = [p.detach().flatten() for name, p in named if "project_key.bias" not in name]
        return torch.cat(parts).cpu().clone()


@cache
def outcome(kind, dropout, precision, optimizer):
    """What steps of that kind come to, from the same weights and the same random state.

    Their losses in nats; as vectors the first gradient, and the weights at the start and the end.
    """
    case = {"dropout": dropout, "precision": precision, "optimizer": optimizer}
    trial = Trial(kind, replace(BASE, **case))
    start = trial.weights()
    torch.manual_seed(7)
    trial.run(range(COUNT))
    losses = [figures.loss for figures in trial.take.look()]
    gradient = trial.gradient.cpu()
    return SimpleNamespace(losses=losses, gradient=gradient, start=start, end=trial.weights())


def apart(other, reference):
    """How far an outcome is from the reference, as a share.

    The largest of three: for the worst loss, for the gradient, and for the change of the weights.
    """
    losses = max(abs(a / b - 1) for a, b in zip(other.losses, reference.losses, strict=True))
    gradient = (other.gradient - reference.gradient).norm() / reference.gradient.norm()
    end = (other.end - reference.end).norm() / (reference.end - reference.start).norm()
    return max(losses, gradient.item(), end.item())


CASES = list(itertools.product((0.0, 0.2), TOLERANCE, ("adam", "muon")))
if not ON_A_GPU:  # two that have everything between them
    CASES = [(0.2, "float32", "adam"), (0.2, "bf16", "muon")]


@pytest.mark.parametrize("kind", ["static", "graphed"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_all_kinds_take_the_same_steps(kind, case):
    """On a CPU to the bit."""
    other, eager = outcome(KINDS[kind], *case), outcome(Step, *case)
    assert apart(other, eager) <= TOLERANCE[case[1]]
    if not ON_A_GPU:
        assert other.losses == eager.losses and other.end.equal(eager.end)


@pytest.fixture
def determinism():
    """PyTorch's deterministic kernels; afterwards it is as before."""
    before = torch.are_deterministic_algorithms_enabled()
    ask_for_determinism()
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize("kind", ["eager", "static", "graphed"])
def test_a_resumed_training_ends_with_the_same_bits(kind, determinism):
    if ON_A_GPU and kind == "graphed" and OLD_KERNELS:
        pytest.skip("before 2.10 PyTorch can't record deterministic kernels")
    config = replace(BASE, precision="bf16")
    straight = Trial(KINDS[kind], config)
    torch.manual_seed(7)
    straight.run(range(COUNT // 2))
    with tempfile.TemporaryDirectory() as folder:
        state = (straight.model, straight.optimizer, [rng_states(DEVICE)], {})
        path = save_training(Path(folder), COUNT // 2, *state)
        straight.run(range(COUNT // 2, COUNT))
        again = Trial(KINDS[kind], replace(config, seed=config.seed + 1))
        rngs = restore_training(load_tensors(path)[0], path, again.model, again.optimizer)
    set_rng_states(rngs[0], DEVICE)
    again.run(range(COUNT // 2, COUNT))
    assert again.weights().equal(straight.weights())


@pytest.mark.skipif(not ON_A_GPU, reason="nothing waits for a CPU")
@pytest.mark.parametrize("kind", ["eager", "static", "graphed"])
def test_no_step_waits_for_the_gpu(kind):
    """Once it is warm. PyTorch raises an error if one does."""
    trial = Trial(KINDS[kind], BASE)
    trial.run(range(len(WIDTHS)))
    torch.cuda.set_sync_debug_mode("error")
    try:
        trial.run(range(len(WIDTHS), COUNT))
    finally:
        torch.cuda.set_sync_debug_mode("default")
