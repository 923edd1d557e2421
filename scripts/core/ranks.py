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

    def wait(self) -> None:
        """Until every process is here."""
        if self.world > 1:
            dist.barrier()

    def totals(self, *values: float) -> list[float]:
        """The sums of each value over all processes."""
        return [math.fsum(column) for column in zip(*self.gather(values), strict=True)]

    def woven(self, shares: list[Any]) -> list[Any]:
        """What `share` dealt out to the processes, gathered in the original order."""
        dealt = self.gather(shares)
        return [dealt[i % self.world][i // self.world] for i in range(sum(map(len, dealt)))]


ALONE = Ranks()


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
