"""The chapters as a package: importing `scripts.chNN_topic` runs its definitions and nothing else.

Definitions are imports, functions, classes and UPPER_CASE constants of three characters or more.
All other top-level statements are the show: they run in the notebook, in
`python scripts/chNN_topic.py` and in `python -m scripts.chNN_topic`. What only draws or fits is
imported when it is used.
"""

import __future__

import ast
import importlib
import os
import re
import sys
import types
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent  # of the series: defined only here
_CONSTANT = re.compile(r"[A-Z][A-Z0-9_]{2,}")
_IMPORTS = (ast.Import, ast.ImportFrom)
_DEFINES = (*_IMPORTS, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_LATE = ("altair", "pandas", "scipy.optimize")  # slow to import, and not needed for training
_UNREAD = __future__.annotations.compiler_flag  # annotations that name them aren't evaluated


class Late(types.ModuleType):
    """Stands in for a package, which is imported only when something of it is used.

    It is never in `sys.modules`, where other packages would take it for the real one.
    """

    def __getattr__(self, part):
        if part.startswith("__"):
            raise AttributeError(part)
        return getattr(importlib.import_module(self.__name__), part)


def runs_folder():
    """Where runs and studies keep what they resume from: $SERIES_RUNS, or the series' `runs/`."""
    return Path(os.environ.get("SERIES_RUNS") or ROOT / "runs").expanduser()


def bound_names(node):
    """The names that an import, a definition or an assignment binds; "" where it isn't a name."""
    match node:
        case ast.Import() | ast.ImportFrom():
            return [(alias.asname or alias.name).split(".")[0] for alias in node.names]
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return [node.name]
    targets = getattr(node, "targets", None) or [node.target]
    leaves = [leaf for t in targets for leaf in (t.elts if isinstance(t, ast.Tuple) else [t])]
    return [getattr(leaf, "id", "") for leaf in leaves]


def is_definition(node):
    """Whether a top-level statement is a definition, which an import runs, and not show."""
    is_assignment = isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None
    return isinstance(node, _DEFINES) or (
        is_assignment and all(map(_CONSTANT.fullmatch, bound_names(node)))
    )


def definitions(tree):
    """A module's own functions, classes and constants, in order: each name and its statement."""
    own = (node for node in tree.body if is_definition(node) and not isinstance(node, _IMPORTS))
    return [(name, node) for node in own for name in bound_names(node)]


class _ChapterLoader(SourceFileLoader):
    """Runs a chapter's definitions, which keep their line numbers; `_LATE` comes at first use.

    `python -m` asks for the code instead, and gets all of it.
    """

    def exec_module(self, module):
        tree = ast.parse(self.get_data(self.path), self.path)
        body = tree.body[:1] if ast.get_docstring(tree) is not None else []
        for node in filter(is_definition, tree.body):
            match node:
                case ast.Import(names=[ast.alias(name=name, asname=str(short))]) if name in _LATE:
                    setattr(module, short, Late(name))
                case _:
                    body.append(node)
        tree.body = body
        exec(compile(tree, self.path, "exec", _UNREAD, dont_inherit=True), vars(module))


class _ChapterFinder:
    """First on `sys.meta_path`, for `scripts.chNN_topic` only."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if not re.fullmatch(rf"{__name__}\.ch\d\d_\w+", name):
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec and spec.origin:
            spec.loader, spec.cached = _ChapterLoader(name, spec.origin), None
        return spec


sys.meta_path.insert(0, _ChapterFinder)
