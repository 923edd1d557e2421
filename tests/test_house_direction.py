"""Names are made once, and asked for by behaviour. (`make lint` holds that imports point down.)"""

import ast
import re
from pathlib import Path

from conftest import CHAPTERS, MODULES

from scripts import definitions


def test_public_names_of_chapters_core_and_fast_are_made_once():
    homes: dict[str, Path] = {}
    rooms = [p for p in MODULES if p in CHAPTERS or p.parent.name in ("core", "fast")]
    for path in rooms:
        for name in {name for name, _ in definitions(ast.parse(path.read_text("utf-8")))}:
            if not name.startswith("_"):
                assert name not in homes, f"{name} is defined in {homes[name]} and in {path}"
                homes[name] = path
    assert {"attention", "save_training"} <= homes.keys()


def test_plain_modules_never_ask_for_a_chapters_class():
    """In a notebook that class is `__main__`'s, and the answer would be no."""
    texts = "\n".join(path.read_text("utf-8") for path in CHAPTERS)
    classes = set(re.findall(r"^class (\w+)", texts, re.MULTILINE))
    for path in (path for path in MODULES if path not in CHAPTERS):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            match node:
                case ast.Call(func=ast.Name(id="isinstance" | "issubclass"), args=[_, kinds]):
                    named = {part.id for part in ast.walk(kinds) if isinstance(part, ast.Name)}
                case ast.MatchClass(cls=ast.Name(id=name)):
                    named = {name}
                case _:
                    continue
            assert not named & classes, f"{path}, line {node.lineno}: {named & classes}"
