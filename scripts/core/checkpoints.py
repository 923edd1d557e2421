"""Crash-safe saving and loading of tensors and of a run's state: safetensors, never pickle.

A file is there whole or not at all, and a checksum shows later damage by the disk. What is not a
tensor is stored as JSON in the file's own metadata.
"""

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from scripts.book.files import write_whole

STATE = "state-{:08d}.safetensors"  # a run's state after that many steps


def digest(tensors: dict[str, Tensor], meta: str) -> str:
    """SHA-256 over names, types, shapes and bytes of `tensors` and over `meta`, in hex."""
    sha = hashlib.sha256(meta.encode())
    for name, tensor in sorted(tensors.items()):
        sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        sha.update(tensor.reshape(-1).view(torch.uint8).numpy())
    return sha.hexdigest()


def save_tensors(path: Path, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
    """Write `tensors` and the JSON-able `meta` to `path` with a checksum, whole or not at all."""
    stored = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    text = json.dumps(meta)
    # One key: safetensors writes several in any order, and equal checkpoints should be equal files.
    header = json.dumps({"sha256": digest(stored, text), "meta": text})
    write_whole(path, save(stored, metadata={"checkpoint": header}))


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the meta that `save_tensors` wrote.

    Raises FileNotFoundError if there is none, ValueError if it is truncated, damaged or foreign.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint at {path}: train one first, or give another path")
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            header = json.loads((file.metadata() or {})["checkpoint"])
        text, expected = header["meta"], header["sha256"]
    except (SafetensorError, KeyError, ValueError) as error:
        raise ValueError(f"{path} is truncated or not a checkpoint: train it again") from error
    if digest(tensors, text) != expected:
        raise ValueError(f"{path} is damaged (its checksum differs): train it again")
    return tensors, json.loads(text)


def weights(model: nn.Module) -> dict[str, Tensor]:
    """The model's parameters by name, tied ones once."""
    return dict(model.named_parameters())


def load_weights(model: nn.Module, tensors: dict[str, Tensor], origin: Path) -> None:
    """Copy `tensors` into the model's parameters, in place, so that tied ones stay tied.

    Raises ValueError if names or shapes differ: the file belongs to another configuration.
    """
    own = weights(model)
    wrong = sorted(own.keys() ^ tensors.keys())
    wrong = wrong or [name for name, p in own.items() if p.shape != tensors[name].shape]
    if wrong:
        raise ValueError(
            f"{origin} belongs to another configuration ({wrong[0]} differs): "
            "use the config that it was trained with"
        )
    model.load_state_dict(tensors, strict=False)  # a tied one also has other names


def rng_states(device: torch.device) -> dict[str, Tensor]:
    """The states of the random generators that a run on `device` draws from."""
    of_gpu = {"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {}
    return {"cpu": torch.get_rng_state()} | of_gpu


def set_rng_states(states: dict[str, Tensor], device: torch.device, otherwise: int = 0) -> None:
    """Put back what `rng_states` gave, except for a device that isn't in use.

    If `device` had none, as the run was on another kind, it gets the seed `otherwise`.
    """
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
    elif device.type == "cuda":
        torch.cuda.manual_seed(otherwise)


def save_training(
    folder: Path,
    steps: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rngs: list[dict[str, Tensor]],
    meta: dict[str, Any],
) -> Path:
    """Save weights, optimizer and each process's random states. The previous state stays, too."""
    tensors = {f"model.{name}": t for name, t in weights(model).items()}
    for index, slots in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{slot}": t for slot, t in slots.items()}
    for rank, states in enumerate(rngs):
        tensors |= {f"rng.{rank}.{kind}": state for kind, state in states.items()}
    path = folder / STATE.format(steps)
    save_tensors(path, tensors, meta)
    keep_newest(saved_states(folder), 2)
    return path


def saved_states(folder: Path, kind: str = "state") -> list[Path]:
    """The states in `folder`, oldest first; or, for the kind "epoch", the weights to average."""
    paths = folder.glob(f"{kind}-*.safetensors")
    return sorted(paths, key=lambda path: (len(path.name), path.name))  # epoch 1,000 is the last


def keep_newest(paths: list[Path], count: int) -> None:
    """Delete all but the last `count` of `paths`."""
    for path in paths[: max(0, len(paths) - count)]:
        path.unlink(missing_ok=True)


class SavedState(NamedTuple):
    """A run's state, as it was read."""

    path: Path
    tensors: dict[str, Tensor]
    meta: dict[str, Any]
    complaints: list[str]  # what is wrong with newer ones


def newest_state(folder: Path) -> SavedState:
    """The newest good state in `folder`.

    Raises FileNotFoundError if there is none, ValueError if none is good.
    """
    complaints: list[str] = []
    for path in reversed(saved_states(folder)):
        try:
            return SavedState(path, *load_tensors(path), complaints)
        except ValueError as error:
            complaints.append(str(error).rpartition(":")[0])
    if complaints:
        raise ValueError(f"no good checkpoint in {folder} ({'; '.join(complaints)}): start again")
    raise FileNotFoundError(f"no checkpoint in {folder}: run without --resume first")


def restore_training(
    tensors: dict[str, Tensor], origin: Path, model: nn.Module, optimizer: torch.optim.Optimizer
) -> list[dict[str, Tensor]]:
    """Put a saved state back into model and optimizer; returns each process's random states.

    Raises ValueError, with nothing changed, if they belong to another configuration.
    """
    parts: dict[str, dict[Any, Any]] = {"model": {}, "optimizer": {}, "rng": {}}
    for name, tensor in tensors.items():
        part, rest = name.split(".", 1)
        if part == "model":
            parts[part][rest] = tensor
        else:
            number, slot = rest.split(".")
            parts[part].setdefault(int(number), {})[slot] = tensor
    load_weights(model, parts["model"], origin)
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": parts["optimizer"], "param_groups": groups})
    return [parts["rng"][rank] for rank in sorted(parts["rng"])]
