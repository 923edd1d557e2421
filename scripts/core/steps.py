"""One optimizer step, in four kinds; none of them waits for the device, except to record.

`eager` takes batches of any shape from the CPU; `static` cuts batches of a few shapes out of a
corpus on the device; `graphed` is `static`, recorded once for each shape as a CUDA graph. What a
step finds stays on the device until it is asked for (`look`). A step that isn't finite changes
nothing, and neither does any after it.
"""

import gc
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from scripts.ch06_training import Batch, LabelSmoothing
from scripts.ch07_multi30k import Example, make_batch
from scripts.core.checkpoints import rng_states, set_rng_states
from scripts.core.static import ResidentCorpus, longer_side, narrowest

Plan = Sequence[Sequence[Sequence[int]]]  # an epoch: its steps, their batches, the pairs in them


class Figures(NamedTuple):
    """What one step found: two sums over its labels in nats, and the gradient's norm."""

    loss: float
    nll: float
    norm: float

    @property
    def finite(self) -> bool:
        """Whether they are finite. From the first step at which they aren't, no weight moves."""
        return math.isfinite(self.loss + self.norm)


class Step:
    """Optimizer steps on batches of any shape: the eager kind.

    `loss_of` maps (model, batch, criterion) to two sums. `clip` bounds the gradient's norm, unless
    it is 0. On a GPU the optimizer must heed `found_inf`, as PyTorch's fused Adam and our Muon do.
    """

    def __init__(
        self,
        model: nn.Module,
        criterion: LabelSmoothing,
        optimizer: torch.optim.Optimizer,
        loss_of: Callable[..., tuple[Tensor, Tensor]],
        clip: float = math.inf,
    ):
        self.model, self.criterion, self.optimizer = model, criterion, optimizer
        self.loss_of, self.clip = loss_of, clip or math.inf
        self.device = next(model.parameters()).device
        # If processes share a step, `join_gradients` puts here what keeps gradients local.
        self.without_sync: Callable[[], AbstractContextManager] = nullcontext
        self.pending: list[Tensor] = []  # what the steps since the last look found, on the device
        self.bad = torch.zeros((), device=self.device)  # 1 from the first step that isn't finite
        # On a CPU we ask `bad`, and skip. On a GPU asking would mean waiting: there the optimizer
        # (or each of those that act as one) reads it under PyTorch's name for it, if fused.
        unfused = any(group.get("fused") is False for group in optimizer.param_groups)
        self.asks = self.device.type == "cpu" or unfused
        if not self.asks:
            for part in getattr(optimizer, "parts", (optimizer,)):
                part.found_inf = self.bad
        if self.device.type == "cuda":  # cuDNN's attention takes longer to plan than to compute
            torch.backends.cuda.enable_cudnn_sdp(False)

    def load(self, examples: Sequence[Example], plan: Plan, divisors: Sequence[float]) -> None:
        """The epoch that follows: its pairs, the steps' batches, and what each step divides by."""
        self.examples, self.plan, self.divisors = examples, plan, divisors

    def __call__(self, number: int) -> None:
        """Take step `number`, from 0, of the loaded epoch."""
        group = [self.batch(indices) for indices in self.plan[number]]
        self.pending.append(self.run(group, self.divisors[number]))

    def batch(self, indices: Sequence[int]) -> Batch:
        """These pairs, padded, on the device."""
        batch = make_batch([self.examples[i] for i in indices])
        return Batch(self.sent(batch.src), self.sent(batch.full))

    def sent(self, tensor: Tensor) -> Tensor:
        """The tensor on the device. From pinned memory, or the CPU would wait for the copy."""
        if self.device.type != "cuda":
            return tensor.to(self.device)
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def run(self, group: Sequence[Batch], per: float | Tensor) -> Tensor:
        """The step itself: (3,) float64, two sums, and the norm of the gradient of loss / `per`."""
        self.optimizer.zero_grad(set_to_none=True)
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        for i, batch in enumerate(group):
            last = i == len(group) - 1  # processes meet once a step, not once a batch
            with nullcontext() if last else self.without_sync():
                loss, nll = self.loss_of(self.model, batch, self.criterion)  # in its precision
                (loss / per).backward()
            sums += torch.stack((loss.detach(), nll.detach()))
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.bad.copy_(torch.maximum(self.bad, 1 - (sums[0] + norm).isfinite().float()))
        if not (self.asks and self.bad):
            self.optimizer.step()
        return torch.cat((sums, norm.detach().double().reshape(1)))

    def look(self) -> list[Figures]:
        """What the steps since the last look found, in their order. Waits for the device."""
        rows = torch.stack(self.pending).tolist() if self.pending else []
        self.pending.clear()
        return [Figures(*row) for row in rows]


class StaticStep(Step):
    """Steps on batches of few shapes, cut out of a corpus on the device: nothing crosses the bus.

    A batch is as wide as the narrowest of `widths` that holds all its pairs, and has
    `max_tokens // width` rows; fillers complete it.
    """

    def __init__(self, *parts: Any, widths: Sequence[int], max_tokens: int):
        super().__init__(*parts)
        self.widths, self.max_tokens = widths, max_tokens
        self.corpus: ResidentCorpus | None = None

    def load(self, examples: Sequence[Example], plan: Plan, divisors: Sequence[float]) -> None:
        """As in `Step`. The pairs go to the device once for all epochs, the plan once for each."""
        if self.corpus is None:
            self.corpus = ResidentCorpus(examples, self.device, self.widths[-1])
        elif examples is not self.examples:
            raise ValueError("a resident corpus can't change: other pairs need another object")
        super().load(examples, plan, divisors)
        self.shapes = [tuple(map(self.shape, step)) for step in plan]
        flat: list[int] = []
        for step, shapes in zip(plan, self.shapes, strict=True):
            for indices, (_, rows) in zip(step, shapes, strict=True):
                flat += [*indices, *[self.corpus.filler] * (rows - len(indices))]
        sizes = [sum(rows for _, rows in shapes) for shapes in self.shapes]
        self.rows = self.sent(torch.tensor(flat)).split(sizes)  # of each step, batch after batch
        self.per = self.sent(torch.tensor(divisors, dtype=torch.float32))

    def shape(self, indices: Sequence[int]) -> tuple[int, int]:
        """The (width, rows) of a batch of these pairs."""
        width = narrowest(self.widths, max(longer_side(self.examples[i]) for i in indices))
        return width, max(len(indices), self.max_tokens // width)

    def cut(self, rows: Tensor, shapes: Sequence[tuple[int, int]]) -> list[Batch]:
        """A step's batches, cut from the corpus; `rows` are indices of pairs, batch after batch."""
        parts = rows.split([size for _, size in shapes])
        return [self.corpus.batch(part, w) for part, (w, _) in zip(parts, shapes, strict=True)]

    def __call__(self, number: int) -> None:
        """As in `Step`."""
        group = self.cut(self.rows[number], self.shapes[number])
        self.pending.append(self.run(group, self.per[number]))


# A step of one shape as a graph, and the memory for its inputs (rows, per) and answer (figures).
Recording = tuple[Any, Tensor, Tensor, Tensor]


@contextmanager
def other_stream() -> Iterator[None]:
    """Run the block's work on another stream, after what came before and before what follows."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


class GraphedStep(StaticStep):
    """Static steps, recorded once for each shape and replayed, with a capturable optimizer."""

    aside: Callable[[], AbstractContextManager] = staticmethod(other_stream)

    def __init__(self, *parts: Any, **shapes: Any):
        super().__init__(*parts, **shapes)
        self.recorded: dict[tuple, Recording] = {}
        self.pool: Any = None  # one, for all recordings: they never run at the same time

    def recording(self, number: int) -> Recording:
        """The recording for the shapes of that step, made if there is none yet."""
        shapes = self.shapes[number]
        if shapes not in self.recorded:
            self.recorded[shapes] = self.record(self.rows[number], self.per[number], shapes)
        return self.recorded[shapes]

    def __call__(self, number: int) -> None:
        """As in `Step`."""
        graph, rows, per, figures = self.recording(number)
        rows.copy_(self.rows[number])
        per.copy_(self.per[number])
        graph.replay()
        self.pending.append(figures.clone())  # the next replay writes over `figures`

    def record(self, rows: Tensor, per: Tensor, shapes: Sequence[tuple[int, int]]) -> Recording:
        """Record the step for batches of these shapes. Weights and random state stay as before."""
        rows, per, rngs = rows.clone(), per.clone(), rng_states(self.device)
        before = self.bad.clone()
        self.bad.fill_(1)  # while libraries choose their kernels, the optimizer must not step
        with self.aside():  # PyTorch wants warm-ups off the current stream
            for _ in range(3):
                self.run(self.cut(rows, shapes), per)
        self.bad.copy_(before)
        graph, figures = self.capture(lambda: self.run(self.cut(rows, shapes), per))
        set_rng_states(rngs, self.device)
        return graph, rows, per, figures

    def capture(self, run: Callable[[], Tensor]) -> tuple[Any, Tensor]:
        """A graph of what `run` launches, and the tensor that it returned."""
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        collects = gc.isenabled()
        gc.disable()  # freeing an old graph now would spoil this one
        try:
            with torch.cuda.graph(graph, pool=self.pool):
                figures = run()
        finally:
            torch.cuda.set_stream(stream)  # if that fails, PyTorch stays on the recording's
            if collects:
                gc.enable()
        self.pool = graph.pool()
        return graph, figures


KINDS = {"textbook": Step, "eager": Step, "static": StaticStep, "graphed": GraphedStep}


def ask_for_determinism() -> None:
    """Have PyTorch use only kernels that always give the same bits, and raise if it has none."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read at the first product, once
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # we don't need that precaution


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set every group's rate to `rate` times its `initial_lr`; in place, as recordings read it."""
    for group in optimizer.param_groups:
        value = rate * group["initial_lr"]
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(value)
        else:
            group["lr"] = value
