"""The optimizers of a run: Adam as in the paper (§5.3), or Muon inside the layers.

Rates are set from outside before each step (`core.steps.set_rate`). Nothing here waits for a GPU.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from scripts.core.settings import multiplies_bf16


def near_orthogonal(matrices: Tensor) -> Tensor:
    """Matrices (n, a, b), their singular values moved to about 1 (Jordan et al. 2024).

    In 16 bits, which are enough for that, if the device has instructions for them.
    """
    wide = matrices.bfloat16() if multiplies_bf16(matrices.device) else matrices.float()
    wide = wide.mT if wide.size(1) > wide.size(2) else wide  # products of the smaller side
    wide = wide / wide.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)  # no singular value above 1
    for _ in range(5):
        square = wide @ wide.mT  # S = X Xᵀ, and X becomes 3.4445 X + (−4.775 S + 2.0315 S²) X
        more = torch.baddbmm(square, square, square, beta=-4.7750, alpha=2.0315)
        wide = torch.baddbmm(wide, more, wide, beta=3.4445)
    return wide.mT if matrices.size(1) > matrices.size(2) else wide


class Muon(torch.optim.Optimizer):
    """Each step is nearly orthogonal momentum (Jordan et al. 2024): for matrices inside layers.

    PyTorch's own (from 2.9) waits for the device, can't be recorded and rounds to 16 bits anywhere.
    If `found_inf` is set and 1, as PyTorch's GradScaler sets it, a step changes nothing.
    """

    def __init__(self, params: Iterable[Any], lr: float | Tensor, momentum: float = 0.95):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One step on all matrices that have a gradient."""
        bad = getattr(self, "found_inf", None)
        for group in self.param_groups:
            alike: dict[torch.Size, list[nn.Parameter]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    alike.setdefault(p.shape, []).append(p)
                    if not self.state[p]:
                        self.state[p]["momentum_buffer"] = torch.zeros_like(p)
            for (rows, columns), params in alike.items():
                grad = torch.stack([p.grad for p in params])  # (n, a, b)
                keep = group["momentum"]
                if bad is not None:  # if it is 1: gradient 0, keep 1, rate 0, and nothing moves
                    grad, keep = grad.where(bad == 0, 0), 1 - (1 - keep) * (1 - bad)
                buffers = [self.state[p]["momentum_buffer"] for p in params]
                mean = torch.lerp(grad, torch.stack(buffers), keep)
                torch._foreach_copy_(buffers, list(mean.unbind()))
                ahead = torch.lerp(grad, mean, group["momentum"])  # Nesterov's
                rate = group["lr"] * max(1, rows / columns) ** 0.5 * (1 if bad is None else 1 - bad)
                torch._foreach_sub_(params, list((near_orthogonal(ahead).float() * rate).unbind()))


class ActAsOne(torch.optim.Optimizer):
    """Several optimizers, each with its own weights, that act as one."""

    def __init__(self, *parts: torch.optim.Optimizer):
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})
        self.share()

    def share(self) -> None:
        """Groups and state live here; the parts look at the same objects."""
        groups = iter(self.param_groups)
        for part in self.parts:
            part.state = self.state
            part.param_groups = [next(groups) for _ in part.param_groups]

    def step(self, closure: None = None) -> None:
        """Each part steps."""
        for part in self.parts:
            part.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in `Optimizer`; the parts follow."""
        super().load_state_dict(state_dict)
        self.share()


def make_optimizer(config: Any, model: nn.Module) -> torch.optim.Optimizer:
    """Adam with the paper's settings (§5.3), or Muon and Adam. The schedule sets the rates.

    A group's `initial_lr` is what the schedule's rate is multiplied by.
    """
    everything = list(model.parameters())
    device = everything[0].device
    cuda = device.type == "cuda"  # rate and step count are kept there, as a recording needs
    rates = list(torch.ones(2, device=device)) if cuda else [1.0, 1.0]
    adam = {"betas": (0.9, 0.98), "eps": 1e-9, "fused": True, "capturable": cuda}
    if config.optimizer == "adam":
        return torch.optim.Adam([{"params": everything, "initial_lr": 1.0}], lr=rates[0], **adam)
    tables = {id(part.weight) for part in model.modules() if isinstance(part, nn.Embedding)}
    tables.add(id(model.generator.proj.weight))
    inner = [p for p in everything if p.ndim == 2 and id(p) not in tables]
    rest = [p for p in everything if p.ndim != 2 or id(p) in tables]
    ratio = config.muon_lr / config.lr
    return ActAsOne(
        Muon([{"params": inner, "initial_lr": ratio}], lr=rates[0]),
        torch.optim.Adam([{"params": rest, "initial_lr": 1.0}], lr=rates[1], **adam),
    )
