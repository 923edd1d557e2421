"""Exercises in a chapter: `check(your_function)` judges it, `solution("its_name")` shows ours.

`runs_on(your_function)` translates with it, `trains_with` trains. All look into
`scripts.exercises`, and only when they are called. There, an exercise is data: our solution,
what it is tried on, and the likeliest mistakes, each a wrong function with its message.
"""

import dis
import functools
import importlib
import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scripts import ROOT


class Exercise(NamedTuple):
    """What `exercise` was given; `mistakes` are pairs of a message and a wrong function."""

    solution: Callable
    cases: Callable[[], list]
    otherwise: str
    mistakes: list[tuple[str, Callable]]


EXERCISES: dict[str, Exercise] = {}


def exercise(cases: Callable[[], list], otherwise: str, *mistakes: Any) -> Callable:
    """A decorator that makes an exercise of our solution, of the same name.

    `cases()` makes a list anew, of tuples of arguments and of probes: functions that try the
    function which they are given, and return what is compared, or yield it part by part. `mistakes`
    are messages and wrong functions in turn. Whose function first fails where a wrong one does, and
    with the same result, gets its message; all others get `otherwise`.
    """

    def add(solution: Callable) -> Callable:
        pairs = list(zip(mistakes[::2], mistakes[1::2], strict=True))
        EXERCISES[solution.__name__] = Exercise(solution, cases, otherwise, pairs)
        return solution

    return add


def check(function: Callable[..., Any], name: str = "") -> None:
    """Says nothing if `function` solves the exercise of the same name, or the exercise `name`.

    For a stub, whose body is `...`, it prints "not tried yet". Raises an AssertionError that says
    what is wrong, or a ValueError if there is no such exercise. Meanwhile the default dtype is
    float64: what a function makes then fits what it is given.
    """
    name = name or function.__name__
    find(name)
    if is_stub(function):
        print(f"{name}: not tried yet")
        return
    dtype_before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        if failure := first_failure(function, name):
            raise AssertionError(explained(*failure, name))
    finally:
        torch.set_default_dtype(dtype_before)


def first_failure(function: Callable, name: str) -> tuple[tuple[int, int], Any, Any] | None:
    """Where `function` first differs from our solution, its result there, and the right one."""
    for number, right_results in enumerate(solution_results(name)):
        for part, result in enumerate(results(function, name, number)):
            if not same(result, right_results[part]):
                return (number, part), result, right_results[part]
    return None


def results(function: Callable, name: str, number: int) -> Iterator[Any]:
    """What `function` gives in one case, which is made anew: an iterator serves once."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        case = find(name).cases()[number]
        result = case(function) if callable(case) else function(*case)
        yield from result if callable(case) and inspect.isgenerator(result) else [result]


@functools.cache
def solution_results(name: str) -> list[list]:
    """What our solution gives in each case, part by part."""
    numbers = range(len(find(name).cases()))
    return [list(results(find(name).solution, name, number)) for number in numbers]


def explained(place: tuple[int, int], result: Any, right: Any, name: str) -> str:
    """The message of the mistake that fails in the same way, or else what is known."""
    for message, wrong in find(name).mistakes:
        if same([place, result], list(first_failure(wrong, name)[:2])):
            return message
    if result is None:
        return "your function gives None: is `return` missing?"
    if isinstance(right, Tensor) and form(result) != form(right):
        return f"the result must be {form(right)}, not {form(result)}"
    case = find(name).cases()[place[0]]
    numbers = f" ({name}{case!r} should be {right!r}, not {result!r})"
    readable = (
        isinstance(case, tuple) and len(numbers) < 160 and not re.search("\n| at 0x", numbers)
    )
    return find(name).otherwise + numbers * readable


def form(x: Any) -> str:
    """A tensor's shape and kind of numbers, whatever their precision is; else the type alone."""
    if not isinstance(x, Tensor):
        return f"a {type(x).__name__}"
    kind = "floats" if x.is_floating_point() else "bool" if x.dtype == torch.bool else "integers"
    return f"a tensor {tuple(x.shape)} of {kind}"


def same(result: Any, right: Any) -> bool:
    """Have both the same texts, and the same shapes and numbers up to rounding, part by part?"""
    if isinstance(right, list | tuple):
        result = result.tolist() if hasattr(result, "tolist") else result
        parts = isinstance(result, list | tuple) and len(result) == len(right)
        return parts and all(map(same, result, right))
    if isinstance(right, Tensor) and form(result) != form(right):
        return False
    try:
        result, right = (torch.as_tensor(x, dtype=torch.float64) for x in (result, right))
    except (TypeError, ValueError, RuntimeError):  # no numbers
        return type(result) is type(right) and result == right
    return result.shape == right.shape and torch.allclose(result, right, 1e-6, 1e-6, equal_nan=True)


def solution(name: str) -> None:
    """Print our solution of the exercise. Raises ValueError if there is no such exercise."""
    source = inspect.getsource(find(name).solution)
    print(re.sub(r"^@exercise\(.*?\n\)\n", "", source, flags=re.DOTALL).rstrip())


def runs_on(*parts: Callable, **named: Callable) -> None:
    """Translates with your functions or classes in a trained model, beside ours.

    A part stands in for the chapters' of the same name: runs_on(EncoderLayer), or with any other
    name of your own, runs_on(EncoderLayer=MyLayer). Prints what comes out, and what goes wrong.
    """
    importlib.import_module("scripts.exercises.milestones").runs_on(*parts, **named)


def trains_with(*parts: Callable, **named: Any) -> float:
    """Trains a small translator by your functions, beside ours; the mean loss of its last steps.

    A part stands in for chapter 6's of the same name, as in `runs_on`. `steps=2000` trains longer.
    """
    return importlib.import_module("scripts.exercises.milestones").trains_with(*parts, **named)


@functools.cache
def find(name: str) -> Exercise:
    """The exercise `name`. Raises ValueError if there is none."""
    homes = modules_by_name()
    if name not in homes:
        raise ValueError(f"no exercise is called {name!r}; the exercises are {', '.join(homes)}")
    importlib.import_module(f"scripts.exercises.{homes[name]}")
    return EXERCISES[name]


def modules_by_name() -> dict[str, str]:
    """Each exercise's module, read from the text: importing all would take seconds."""
    solution_name = re.compile(r"^@exercise\(.*?^def (\w+)", re.MULTILINE | re.DOTALL)
    paths = sorted((ROOT / "scripts/exercises").glob("ch*.py"))
    texts = {path.stem: path.read_text("utf-8") for path in paths}
    return {name: stem for stem in texts for name in solution_name.findall(texts[stem])}


def is_stub(function: Callable[..., Any]) -> bool:
    """Whether the body does nothing: a docstring, `...` or `pass`."""
    steps = dis.get_instructions(inspect.unwrap(function))
    does = [(step.opname, step.argval) for step in steps if step.opname not in ("RESUME", "NOP")]
    return does in ([("LOAD_CONST", None), ("RETURN_VALUE", None)], [("RETURN_CONST", None)])


def probe(trial: Callable, *args: Any) -> Callable[[Callable], Any]:
    """A case: what trial(function, *args) returns is compared."""
    return lambda function: trial(function, *args)


def with_gradients(function: Callable[..., Tensor], tensors: Iterable[Tensor], *rest: Any) -> Any:
    """The tensor function(*tensors, *rest), and its gradients for `tensors`."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    result = function(*leaves, *rest)
    if not getattr(result, "requires_grad", False):
        return result, "no gradient"
    weights = torch.linspace(2, 3, result.numel()).view_as(result)
    return result, torch.autograd.grad((result * weights).sum(), leaves, materialize_grads=True)


def normal(*shapes: tuple[int, ...]) -> list[Tensor]:
    """Tensors of these shapes, of normal noise."""
    return [torch.randn(shape) for shape in shapes]


def outcome(function: Callable, *args: Any) -> Any:
    """function(*args), or the name of the error that it raises."""
    try:
        return function(*args)
    except Exception as error:
        return type(error).__name__
