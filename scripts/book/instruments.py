"""Instruments that several chapters use: what depends on what, what is where, what it costs."""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode


def influence(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """How strongly each position of `function(x)` reacts to each position of `x`: (T, S).

    `function` maps x (S, d) to (T, d'), or (1, S, d) to (1, T, d'). An entry is the norm of the
    derivatives of output t with respect to input s, by autograd: exactly 0 if t can't depend on s.
    """
    batched = x.dim() == 3
    jacobian = torch.autograd.functional.jacobian(function, x.detach())
    if batched:
        jacobian = jacobian[0, :, :, 0]  # (1, T, d', 1, S, d) -> (T, d', S, d)
    return jacobian.norm(dim=(1, 3))


def count_flops(function: Callable[..., object], *inputs: Tensor) -> int:
    """Additions and multiplications in the products and convolutions of `function(*inputs)`."""
    with FlopCounterMode(display=False) as counter:
        function(*inputs)
    return counter.get_total_flops()


@contextmanager
def dropout_off(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside the block; afterwards every part is as it was, even after an error."""
    was_training = [part for part in model.modules() if part.training]
    for part in was_training:
        part.training = False
    try:
        yield
    finally:
        for part in was_training:
            part.training = True


def moved_bytes(function: Callable[..., object], *inputs: Tensor) -> int:
    """Bytes that PyTorch's operations read and write in `function(*inputs)`, views left out.

    Each is thought to read all of its inputs once: what one does inside, this can't see.
    """
    moved = 0

    class Watcher(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None):
            nonlocal moved
            result = func(*args, **(kwargs or {}))
            if not (func.is_view or re.search("empty|unsafe_view", func.name())):  # move nothing
                inputs = [] if "bernoulli_" in func.name() else (args, kwargs)  # it only writes
                read = {id(x): x for x in tree_leaves(inputs)}  # each once, if it comes twice
                tensors = [*read.values(), *tree_leaves(result)]
                moved += sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor))
            return result

    with Watcher():
        function(*inputs)
    return moved


def slowest_inside(function: Callable[[], object], calls: int = 20) -> tuple[str, float]:
    """PyTorch's operation with the most self time in `function()`, and its share of all of it."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler prints
    function()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(calls):
            function()
    times = {event.key: event.self_cpu_time_total for event in profiler.key_averages()}
    times = {name: time for name, time in times.items() if name.startswith("aten::")}
    slowest = max(times, key=times.get)
    return slowest, times[slowest] / sum(times.values())


def two_passes(call: partial) -> Callable[[], object]:
    """`call` with its backward pass, to the tensors that it reads and its module's weights.

    Of several results, the first is derived. The gradient that comes in is made beforehand.
    """
    inputs = [
        x.detach().requires_grad_(x.is_floating_point()) if isinstance(x, Tensor) else x
        for x in call.args
    ]
    sources = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
    sources += getattr(call.func, "parameters", list)()

    def forward() -> Tensor:
        return tree_leaves(call.func(*inputs, **call.keywords))[0]

    gradient = torch.ones_like(forward())
    return lambda: torch.autograd.grad(forward(), sources, gradient)


def new_pages(function: Callable[[], object]) -> int:
    """Pages of memory that the system hands out during `function()` (on Linux and macOS)."""
    import resource  # Windows has none

    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    function()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def count_calls(module: nn.Module, action: Callable[[], Tensor]) -> tuple[int, Tensor]:
    """How often `module` was called while `action` ran, and what that returned."""
    calls = []
    handle = module.register_forward_hook(lambda *_: calls.append(1))
    try:
        result = action()
    finally:
        handle.remove()
    return len(calls), result


def saved_bytes(function: Callable[..., object], *inputs: Tensor) -> int:
    """Bytes that autograd keeps for the backward pass of `function(*inputs)`.

    Each storage counts once.
    """
    storages = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        # Holding it keeps its address unique; with its graph it would keep itself alive for ever.
        storages[storage._cdata] = (storage.nbytes(), tensor.detach())
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        function(*inputs)
    return sum(size for size, _ in storages.values())


def held_bytes(function: Callable[..., object], *inputs: Tensor) -> int:
    """Bytes that autograd still keeps when `function(*inputs)` has run and its output is gone."""
    boxes: WeakSet[Box] = WeakSet()

    def note(tensor: Tensor) -> Box:
        box = Box(tensor.detach())
        boxes.add(box)
        return box

    with torch.autograd.graph.saved_tensors_hooks(note, lambda box: box.tensor):
        function(*inputs)
    storages = {box.tensor.untyped_storage()._cdata: box.tensor for box in boxes}
    return sum(tensor.untyped_storage().nbytes() for tensor in storages.values())


class Box:
    """A tensor that autograd saved: as long as the graph lives, the box does."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor


def alive_bytes(function: Callable[..., object], *inputs: Any) -> list[int]:
    """Bytes of the tensors made in `function(*inputs)` that are alive, after each operation."""
    sizes: dict[StorageWeakRef, int] = {}
    history = []

    class Watcher(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None):
            result = func(*args, **(kwargs or {}))
            for tensor in tree_leaves(result):
                if isinstance(tensor, Tensor):
                    storage = tensor.untyped_storage()
                    sizes[StorageWeakRef(storage)] = storage.nbytes()
            for ref in [ref for ref in sizes if ref.expired()]:
                del sizes[ref]
            history.append(sum(sizes.values()))
            return result

    with Watcher():
        function(*inputs)
    return history


def most_alive(function: Callable[..., object], *inputs: Any) -> int:
    """Bytes of the tensors made in `function(*inputs)` that are alive at once, at most."""
    return max(alive_bytes(function, *inputs), default=0)


@contextmanager
def traced(model: nn.Module, steps: str) -> Iterator[list[tuple[str, str, str]]]:
    """Rows of what runs inside the `with`: a step's name, the shapes it reads, the shape it gives.

    `steps` is a regular expression: the modules of `model` whose whole name it matches. Masks
    (boolean tensors) are left out. A step inside another ends first, and comes first.
    """
    rows: list[tuple[str, str, str]] = []

    def note(name: str, module: nn.Module, read: tuple, output: Tensor) -> None:
        shapes = [x.shape for x in read if isinstance(x, Tensor) and x.dtype != torch.bool]
        rows.append((name, " ".join(str(tuple(s)) for s in shapes), str(tuple(output.shape))))

    named = [(name, part) for name, part in model.named_modules() if re.fullmatch(steps, name)]
    hooks = [part.register_forward_hook(partial(note, name)) for name, part in named]
    try:
        yield rows
    finally:
        for hook in hooks:
            hook.remove()


def scramble(model: nn.Module, seed: int = 0, size: float = 0.1) -> None:
    """Add normal noise, `size` times standard, to every parameter.

    Then no bias is 0 and no LayerNorm trivial, and a comparison of two models sees each of them.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p += size * torch.randn(p.shape, generator=generator, dtype=p.dtype)
