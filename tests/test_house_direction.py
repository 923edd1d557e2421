"""One direction: chapters build on earlier ones; what composes chapters is on top of them."""

import ast
import os
import re
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from conftest import CHAPTERS, MODULES, ROOT

from scripts import definitions

CHAPTER = re.compile(r"ch(\d\d)_\w+")
GROUND = ("book", "corpora")  # what is below the chapters


def dotted(path: Path, folder: Path) -> str:
    """A module's path below `scripts`, as imports write it: "core.checkpoints"."""
    parts = path.relative_to(folder).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def read(folder: Path = ROOT / "scripts") -> dict[str, ast.Module]:
    """The syntax tree of each module except exercises, by its path below `scripts`.

    Exercises are imported when a reader calls `check` or `solution`, and by no other code.
    """
    trees = {dotted(p, folder): ast.parse(p.read_text("utf-8")) for p in folder.rglob("*.py")}
    return {name: tree for name, tree in trees.items() if name.split(".")[0] != "exercises"}


def imported(tree: ast.AST, modules) -> dict[str, tuple[str, str]]:
    """Names that imports bind, also inside functions: each with its module, and its name there.

    That name is "" if it stands for the module itself.
    """
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("scripts."):
                    found[alias.asname or alias.name] = alias.name.removeprefix("scripts."), ""
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "scripts":
            source = node.module.removeprefix("scripts").lstrip(".")
            for alias in node.names:
                inside = f"{source}.{alias.name}".lstrip(".")
                target = (inside, "") if inside in modules else (source, alias.name)
                found[alias.asname or alias.name] = target
    return found


def graph(trees: dict[str, ast.Module]) -> dict[str, set[str]]:
    """Each module, with the modules that it imports."""
    return {
        name: {source for source, _ in imported(tree, trees).values()} & trees.keys() - {""}
        for name, tree in trees.items()
    }


def reached(name: str, edges: dict[str, set[str]]) -> set[str]:
    """What a module leads to, itself included, down to chapters, which are checked separately."""
    found, waiting = set(), [name]
    while waiting:
        one = waiting.pop()
        if one not in found:
            found.add(one)
            waiting += edges[one] if number(one) is None else ()
    return found


def number(module: str) -> int | None:
    """A chapter's number; None for a module that isn't a chapter."""
    match = CHAPTER.fullmatch(module)
    return int(match[1]) if match else None


def misdirected(edges: dict[str, set[str]]) -> list[str]:
    """Imports against the direction, as "module: what it imports"."""
    wrong = []
    for name, targets in edges.items():
        own, ground = number(name), name.split(".")[0] in GROUND
        for target in targets:
            below = [number(one) for one in reached(target, edges) if number(one) is not None]
            if (
                (number(target) == 0)
                or (ground and target.split(".")[0] not in GROUND)
                or (own and any(one >= own for one in below))
                or target == name
            ):
                wrong.append(f"{name}: {target}")
    return sorted(wrong)


def circle(edges: dict[str, set[str]]) -> list[str]:
    """Modules that import one another in a circle, if there are any."""
    try:
        TopologicalSorter({name: to - {name} for name, to in edges.items()}).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def own_names(tree: ast.Module) -> set[str]:
    """The public functions, classes and constants that a module itself defines."""
    return {name for name, _ in definitions(tree) if not name.startswith("_")}


def maker(module: str, name: str, trees: dict[str, ast.Module]) -> str:
    """The module that defines what `module` calls `name`: itself, or one it imports from."""
    further = imported(trees[module], trees).get(name) if module in trees else None
    return maker(*further, trees) if further else module


def asked_of_chapters(tree: ast.AST, trees: dict[str, ast.Module]) -> list[str]:
    """Checks whether something is of a chapter's class: isinstance, issubclass, type, match."""
    names = imported(tree, trees)
    asked = []
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id="isinstance" | "issubclass"), args=[_, kinds]):
                asked.append(kinds)
            case ast.Compare() if re.search(r"\btype\(|\b__class__\b", ast.unparse(node)):
                asked += [node.left, *node.comparators]
            case ast.MatchClass(cls=kind):
                asked.append(kind)
    parts = (part for kinds in asked for part in ast.walk(kinds))
    texts = (ast.unparse(part) for part in parts if isinstance(part, (ast.Name, ast.Attribute)))
    return [one for one in texts if one in names and number(maker(*names[one], trees)) is not None]


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    return read()


def test_imports_go_in_one_direction(trees):
    assert not misdirected(graph(trees))


def test_nothing_is_imported_in_circles(trees):
    assert not circle(graph(trees))


@pytest.mark.parametrize(
    "edges, wrong",
    [
        ({"ch02_b": {"ch01_a", "book.charts"}}, []),
        ({"ch01_a": {"ch02_b"}}, ["ch01_a: ch02_b"]),
        ({"ch02_b": {"ch02_c"}}, ["ch02_b: ch02_c"]),
        ({"ch02_b": {"ch02_b"}}, ["ch02_b: ch02_b"]),
        ({"ch03_c": {"train"}, "train": {"ch02_b"}}, []),
        ({"ch03_c": {"train"}, "train": {"engine.x"}, "engine.x": {"ch03_d"}}, ["ch03_c: train"]),
        ({"ch03_c": {"train"}, "train": {"ch04_d"}}, ["ch03_c: train"]),
        ({"ch01_a": {"ch00_z"}}, ["ch01_a: ch00_z"]),
        ({"bench.x": {"ch00_z"}}, ["bench.x: ch00_z"]),
        ({"ch00_z": {"ch06_e", "train"}, "train": {"ch09_h"}}, []),
        ({"book.charts": {"ch01_a"}}, ["book.charts: ch01_a"]),
        ({"book.charts": {"engine.x"}}, ["book.charts: engine.x"]),
        ({"corpora.sample": {"book.files"}}, []),
        ({"corpora.load": {"ch07_g"}}, ["corpora.load: ch07_g"]),
    ],
)
def test_a_wrong_direction_is_found(edges, wrong):
    every = edges.keys() | set().union(*edges.values())
    assert misdirected({name: edges.get(name, set()) for name in every}) == wrong


def test_a_circle_is_found_though_an_import_hides_in_a_function(tmp_path):
    (tmp_path / "engine").mkdir()
    (tmp_path / "fast/fast.py").write_text("def f():\n    from scripts import slow\n")
    (tmp_path / "slow.py").write_text("import scripts.middle as m\n")
    (tmp_path / "middle.py").write_text("from scripts.fast.fast import f\n")
    assert set(circle(graph(read(tmp_path)))) == {"fast.fast", "slow", "middle"}
    (tmp_path / "middle.py").write_text("from scripts import ROOT\n")
    assert not circle(graph(read(tmp_path)))


def test_public_names_are_unique_over_chapters_and_engine(trees):
    """Except `main`, by which commands are called."""
    home = {}
    for module in sorted(trees):
        if number(module) is not None or module.startswith("engine."):
            for name in own_names(trees[module]) - {"main"}:
                assert name not in home, f"{name} is defined in {home[name]} and in {module}"
                home[name] = module
    assert {"attention", "save_training"} <= home.keys()


PLAIN = [path for path in MODULES if path not in CHAPTERS]


@pytest.mark.parametrize("path", PLAIN, ids=lambda path: dotted(path, ROOT / "scripts") or "root")
def test_a_plain_module_never_asks_for_a_chapters_class(path, trees):
    """In a notebook that class is `__main__`'s, and the answer would be no."""
    assert not asked_of_chapters(ast.parse(path.read_text("utf-8")), trees)


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_a_chapter_with_the_engine_never_asks_for_an_earlier_chapters_class(path, trees):
    """The engine's objects are of the package's classes; in the one notebook ours are not."""
    tree = ast.parse(path.read_text("utf-8"))
    engine = any(source.startswith("engine.") for source, _ in imported(tree, trees).values())
    assert number(path.stem) == 0 or not engine or not asked_of_chapters(tree, trees)


@pytest.mark.parametrize(
    "code, found",
    [
        ("isinstance(x, Thing)", ["Thing"]),
        ("issubclass(x, (int, Thing))", ["Thing"]),
        ("isinstance(x, int | one.Thing)", ["one"]),
        ("isinstance(x, scripts.ch01_one.Thing)", ["scripts.ch01_one"]),
        ("isinstance(x, Passed)", ["Passed"]),
        ("type(x) is Thing", ["Thing"]),
        ("Thing == x.__class__", ["Thing"]),
        ("match x:\n    case Thing(): pass", ["Thing"]),
        ("isinstance(x, Plain), isinstance(x, int), Thing(x), x is Thing", []),
    ],
)
def test_such_a_question_is_found(code, found):
    head = "from scripts.engine.x import Passed, Plain\nfrom scripts import ch01_one as one\n"
    head += "import scripts.ch01_one\ndef f():\n    from scripts.ch01_one import Thing\n"
    passed_on = ast.parse("from scripts.ch01_one import Thing as Passed\nclass Plain: ...")
    trees = {"ch01_one": ast.parse("class Thing: ..."), "engine.x": passed_on}
    assert asked_of_chapters(ast.parse(head + code), trees) == found


IN_MAIN = """
from pathlib import Path
import torch
from torch import nn
from scripts.core.checkpoints import *

class Generator(nn.Linear):
    pass

class EncoderDecoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.generator = nn.Embedding(7, 4), Generator(4, 7, bias=False)
        self.generator.weight = self.embed.weight

model, other = EncoderDecoder(), EncoderDecoder()
assert type(model).__module__ == "__main__" and list(weights(model)) == ["embed.weight"]
path = Path("model.safetensors")
save_tensors(path, weights(model), {"d_model": 4})
tensors, meta = load_tensors(path)
load_weights(other, tensors, path)
assert torch.equal(other.generator.weight, model.embed.weight)
optimizer = torch.optim.Adam(model.parameters())
model.generator(model.embed(torch.tensor([1]))).sum().backward()
optimizer.step()
save_training(Path(), 1, model, optimizer, [rng_states(torch.device("cpu"))], {})
state = newest_state(Path())
restore_training(state[1], state[0], other, torch.optim.Adam(other.parameters()))
assert torch.equal(other.generator.weight, model.embed.weight)
print("kept")
"""


def test_a_model_made_in_main_is_saved_and_loaded(tmp_path):
    """As in the one notebook, whose classes belong to no module."""
    done = subprocess.run(
        [sys.executable, "-c", IN_MAIN],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "kept\n"), done.stderr
