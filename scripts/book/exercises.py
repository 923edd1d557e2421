"""Exercises in a chapter: `check(your_function)` judges it, `solution("its_name")` shows ours.

Both look into `scripts.exercises`, and only when they are called. There, the function
with the exercise's name is our solution, and `check_NAME` raises an AssertionError that says what
is wrong.
"""

import dis
import functools
import importlib
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import torch
from torch import Tensor

from scripts import ROOT

FOLDER = ROOT / "scripts/exercises"


def check(function: Callable[..., Any], name: str = "") -> None:
    """Says nothing if `function` solves the exercise of the same name, or the exercise `name`.

    For a stub, whose body is `...`, it prints "not tried yet". Raises an AssertionError that says
    what is wrong, or a ValueError if there is no such exercise.
    """
    name = name or function.__name__
    home = home_of(name)
    if is_stub(function):
        print(f"{name}: not tried yet")
    else:
        checker, ours = getattr(home, f"check_{name}"), getattr(home, name)
        gives = inspect.signature(ours).return_annotation is not None
        checker(giving(function) if gives else function)


def giving(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, but if it gives None it raises an AssertionError that says so."""

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        assert result is not None, "your function gives None: is `return` missing?"
        return result

    return called


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
    code = getattr(function, "__code__", None)
    steps = dis.get_instructions(code) if code else []
    does = [(step.opname, step.argval) for step in steps if step.opname not in ("RESUME", "NOP")]
    return does in ([("LOAD_CONST", None), ("RETURN_VALUE", None)], [("RETURN_CONST", None)])


def same_numbers(got: Any, wanted: Tensor) -> bool:
    """Is `got` a tensor of `wanted`'s shape with the same numbers, up to rounding?"""
    if not isinstance(got, Tensor) or got.shape != wanted.shape:
        return False
    return torch.allclose(got.double(), wanted.double(), rtol=1e-6, atol=1e-9)


def blame(got: Any, mistakes: dict[str, Tensor], otherwise: str) -> NoReturn:
    """Raises AssertionError: the message in `mistakes` whose result is `got`, or `otherwise`."""
    assert isinstance(got, Tensor), f"return a tensor, not a {type(got).__name__}"
    found = (message for message, result in mistakes.items() if same_numbers(got, result))
    raise AssertionError(next(found, otherwise))
