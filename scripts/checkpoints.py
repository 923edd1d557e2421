"""Torn-proof saving and loading of tensors and of a training's state: safetensors, never pickle.

A file is written beside its place and renamed, so that it is there whole or not at all. What is not
a tensor travels as JSON in the file's own metadata.
"""

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn


def save_tensors(path: Path, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
    """Write `tensors` and the JSON-able `meta` to `path`, whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    contiguous = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    save_file(contiguous, partial, metadata={"meta": json.dumps(meta)})
    os.replace(partial, path)


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the meta that `save_tensors` wrote.

    Raises FileNotFoundError where nothing is, ValueError where the file is truncated or foreign.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint at {path}: train one first, or give another path")
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            meta = json.loads((file.metadata() or {})["meta"])
    except (SafetensorError, KeyError, ValueError) as error:
        raise ValueError(f"{path} is truncated or not a checkpoint: train it again") from error
    return tensors, meta


def weights(model: nn.Module) -> dict[str, Tensor]:
    """The model's parameters by name, tied ones once."""
    return dict(model.named_parameters())


def load_weights(model: nn.Module, tensors: dict[str, Tensor], origin: Path) -> None:
    """Copy `tensors` into the model's parameters, in place, so that tied ones stay tied.

    Raises ValueError where names or shapes differ: the file is of another configuration.
    """
    own = weights(model)
    wrong = sorted(own.keys() ^ tensors.keys()) or [
        name for name in own if own[name].shape != tensors[name].shape
    ]
    if wrong:
        raise ValueError(
            f"{origin} is of another configuration ({wrong[0]} differs): "
            "use the config that it was trained with"
        )
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(tensors[name])


def save_training(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, meta: dict[str, Any]
) -> None:
    """Everything that the next epoch depends on: weights, optimizer, random states, and `meta`."""
    tensors = {f"model.{name}": t for name, t in weights(model).items()}
    for index, slots in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{slot}": t for slot, t in slots.items()}
    tensors["rng.cpu"] = torch.get_rng_state()
    if torch.cuda.is_available():
        tensors["rng.cuda"] = torch.cuda.get_rng_state()
    save_tensors(path, tensors, meta)


def load_training(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Put back what `save_training` wrote, and return its `meta`."""
    tensors, meta = load_tensors(path)
    parts: dict[str, dict[str, Tensor]] = {"model": {}, "optimizer": {}, "rng": {}}
    for name, tensor in tensors.items():
        part, rest = name.split(".", 1)
        parts[part][rest] = tensor
    load_weights(model, parts["model"], path)
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in parts["optimizer"].items():
        index, slot = name.split(".")
        state.setdefault(int(index), {})[slot] = tensor
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    torch.set_rng_state(parts["rng"]["cpu"])
    if "cuda" in parts["rng"] and torch.cuda.is_available():
        torch.cuda.set_rng_state(parts["rng"]["cuda"])
    return meta
