"""Several processes that train together, under torchrun: who is who, and what they tell each other.

Alone, a process is number 0 of 1, and each operation does nothing. Gradients are shared elsewhere.
"""

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Ranks:
    """The processes that train together: which one this is, and how many they are."""

    rank: int = 0
    world: int = 1

    @property
    def first(self) -> bool:
        """Whether this is the process that writes and speaks."""
        return self.rank == 0

    def share(self, items: Sequence[Any]) -> list[Any]:
        """This process's part of `items`: every `world`-th of them."""
        return list(items[self.rank :: self.world])

    def gather(self, value: Any) -> list[Any]:
        """Every process's `value`, in order; each process gets them all."""
        values = [value] * self.world
        if self.world > 1:
            dist.all_gather_object(values, value)
        return values

    def totals(self, *values: float) -> list[float]:
        """The sums of each value over all processes."""
        return [math.fsum(column) for column in zip(*self.gather(values), strict=True)]

    def woven(self, shares: list[Any]) -> list[Any]:
        """What `share` dealt out to the processes, gathered in the original order."""
        dealt = self.gather(shares)
        return [dealt[i % self.world][i // self.world] for i in range(sum(map(len, dealt)))]


ALONE = Ranks()


class Poll:
    """Has any process been asked to stop? Each gives a signal's number, or 0; all hear the highest.

    The answer comes one step late, so that nothing waits for it. Alone, a process hears itself.
    """

    def __init__(self, ranks: Ranks):
        self.ranks = ranks
        # Over the CPU, whatever the gradients use: reading an answer mustn't wait for a GPU.
        self.group = dist.new_group(backend="gloo") if ranks.world > 1 else None
        self.asked: tuple[Any, Tensor] | None = None

    def __call__(self, number: int) -> int:
        """Ask, and hear the answer to the question before; 0 if there was none."""
        if self.ranks.world == 1:
            return number
        answer = self.answer()
        mine = torch.tensor(number)
        self.asked = dist.all_reduce(mine, dist.ReduceOp.MAX, self.group, async_op=True), mine
        return answer

    def answer(self) -> int:
        """What the last question came to, which then counts as answered."""
        if self.asked is None:
            return 0
        (work, number), self.asked = self.asked, None
        work.wait()
        return int(number)


@contextmanager
def join_ranks(device: torch.device) -> Iterator[Ranks]:
    """Join the processes that torchrun started, over NCCL on GPUs and gloo on CPUs; or be alone."""
    if "WORLD_SIZE" not in os.environ:
        yield ALONE
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()
