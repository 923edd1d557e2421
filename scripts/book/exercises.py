"""Exercises in a chapter: `check(your_function)` judges it, `solution("its_name")` shows ours.

Both look into `scripts.exercises`, and only when they are called. There, the function
with the exercise's name is our solution, and `check_NAME` raises an AssertionError that says what
is wrong.
"""

import dis
import functools
import importlib
import inspect
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from scripts import ROOT

FOLDER = ROOT / "scripts/exercises"


def check(function: Callable[..., Any], name: str = "") -> None:
    """Says nothing if `function` solves the exercise of the same name, or the exercise `name`.

    For a stub, whose body is `...`, it prints "not tried yet". Raises an AssertionError that says
    what is wrong, or a ValueError if there is no such exercise. Meanwhile the default dtype is
    float64: what a function makes then fits what it is given.
    """
    name = name or function.__name__
    home = home_of(name)
    if is_stub(function):
        print(f"{name}: not tried yet")
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        getattr(home, f"check_{name}")(guarded(function, inspect.signature(getattr(home, name))))
    finally:
        torch.set_default_dtype(before)


def guarded(function: Callable[..., Any], ours: inspect.Signature) -> Callable[..., Any]:
    """`function`, but it raises AssertionError where it doesn't keep to our signature.

    That is, if the result is of another kind, or if it changed data that it was given.
    """
    kind = ours.return_annotation

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(ours.parameters, args, strict=False)) | kwargs
        before = {name: pickle.dumps(x) for name, x in given.items() if is_data(x)}
        result = function(*args, **kwargs)
        for name, bits in before.items():
            kept = pickle.dumps(given[name]) == bits
            assert kept, f"`{name}` itself was changed: make a new one, or work on a copy"
        name = type(result).__name__
        two = (
            isinstance(result, tuple | list)
            and [isinstance(x, Tensor) for x in result] == [True] * 2
        )
        number = hasattr(result, "__float__") and np.ndim(result) == 0
        assert kind is None or result is not None, (
            "your function gives None: is `return` missing, or was nothing found?"
        )
        assert kind is not Tensor or isinstance(result, Tensor), f"return a tensor, not a {name}"
        assert kind != tuple[Tensor, Tensor] or two, f"return two tensors, not a {name}"
        assert kind not in (int, float) or number, f"return one number, not a {name}"
        return result

    return called


def is_data(x: Any) -> bool:
    """Whether x is a tensor, an array, a number or a text, or a list of such."""
    if isinstance(x, list | tuple):
        return all(map(is_data, x))
    return isinstance(x, Tensor | np.ndarray | float | int | str)


def solution(name: str) -> None:
    """Print our solution of the exercise, after what else it uses from its module.

    Raises ValueError if there is no such exercise.
    """
    home = home_of(name)
    ours = inspect.unwrap(getattr(home, name))
    named = [getattr(home, part, None) for part in ours.__code__.co_names]
    taken = [part for part in named if getattr(part, "__module__", "") == home.__name__]
    print("\n\n\n".join(inspect.getsource(part).rstrip() for part in (*taken, ours)))


def home_of(name: str) -> ModuleType:
    """The module of the exercise `name`. Raises ValueError if there is none."""
    for path in sorted(FOLDER.glob("ch*.py")):
        if name in names_in(path):
            return importlib.import_module(f"scripts.exercises.{path.stem}")
    known = ", ".join(one for path in sorted(FOLDER.glob("ch*.py")) for one in names_in(path))
    raise ValueError(f"no exercise is called {name!r}; the exercises are {known}")


def names_in(path: Path) -> list[str]:
    """The names of a module's exercises, read from its text: importing all would take seconds."""
    return re.findall(r"^def check_(\w+)\(", path.read_text("utf-8"), re.MULTILINE)


def is_stub(function: Callable[..., Any]) -> bool:
    """Whether the body does nothing: a docstring, `...` or `pass`."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    steps = dis.get_instructions(code) if code else []
    does = [(step.opname, step.argval) for step in steps if step.opname not in ("RESUME", "NOP")]
    return does in ([("LOAD_CONST", None), ("RETURN_VALUE", None)], [("RETURN_CONST", None)])


def same_numbers(got: Any, wanted: Any, rtol: float = 1e-6, atol: float = 1e-9) -> bool:
    """Have two tensors, arrays, lists or numbers the same shape and, up to rounding, numbers?"""
    got, wanted = (torch.as_tensor(one, dtype=torch.float64) for one in (got, wanted))
    return got.shape == wanted.shape and torch.allclose(got, wanted, rtol=rtol, atol=atol)


def compare(
    got: Any, right: Any, mistakes: dict[str, Any], otherwise: str, **tolerance: float
) -> None:
    """Raises AssertionError unless `got` is `right`.

    It says the message in `mistakes` whose numbers `got` has, or else `otherwise`.
    """
    if not same_numbers(got, right, **tolerance):
        found = (said for said, wrong in mistakes.items() if same_numbers(got, wrong, **tolerance))
        raise AssertionError(next(found, otherwise))
