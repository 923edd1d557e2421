"""Commands: options from a dataclass, one line for a mistake, a clean exit, how to repeat them."""

import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Literal

import pytest
import torch
from conftest import MODULES, ROOT

from scripts.book.command import Command, as_typed
from scripts.book.records import provenance

RECORDS = sorted((ROOT / "results").glob("*.json"))
COMMANDS = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in MODULES
    if re.search(r"^main = \w*command\(", path.read_text("utf-8"), re.IGNORECASE | re.MULTILINE)
]


@dataclass
class ShoutOptions:
    """What is shouted, and how."""

    word: list[str] = field(default_factory=list)
    """Not shown: `places` says it."""
    tone: Literal["high", "low"] = "low"
    """How high."""
    rounds: int = 2
    """How often."""
    echo: bool = False
    """With an echo."""
    device: str = "cpu"
    """Where."""
    save: bool = False
    """Keep it."""

    def __post_init__(self):
        if self.rounds < 1:
            raise ValueError("rounds must be at least 1")


def shouting(run, **says):
    """A command that parses ShoutOptions and calls `run` with them."""
    places, flags = {"word": "What to shout."}, {"echo": "With an echo."}
    return Command("scripts.shout", ShoutOptions, run, "Shout.", places, flags, **says)


@shouting
def shout(options):
    print(" ".join(options.word).upper() * options.rounds)


def test_fields_are_options(capsys):
    assert shout.parse([]) == ShoutOptions()
    asked = shout.parse(["1.5", "{a: b}", "--rounds", "3", "--echo", "--tone", "high"])
    assert asked == ShoutOptions(["1.5", "{a: b}"], "high", 3, True)
    defaults = shout.parse(["--tone", "high"], {"rounds": 9})
    assert (defaults.rounds, defaults.tone) == (9, "high")
    assert shout(["ho", "--rounds", "1"]) == 0
    assert capsys.readouterr().out == "HO\n"


def test_help_tells_of_every_field(capsys):
    with pytest.raises(SystemExit) as done:
        shout(["--help"])
    said = capsys.readouterr().out
    assert done.value.code == 0 and "python -m scripts.shout" in said
    for words in ("Shout.", "What to shout.", "How high.", "How often.", "With an echo."):
        assert words in said


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--rounds", "many"], "--rounds must be a whole number, not many"),
        (["--echo=maybe"], "echo"),
        (["-ho"], "put -- before it"),
        (["--rounds", "0"], "at least 1"),
        (["--tone", "shrill"], "--tone must be high or low, not shrill"),
        (["--volume", "11"], "unrecognized"),
    ],
)
def test_a_mistake_gets_one_line(argv, says, capsys):
    assert shout(argv) == 2
    done = capsys.readouterr()
    assert done.out == "" and done.err.startswith("error: ") and says in done.err
    assert done.err.count("\n") == 1


@pytest.mark.parametrize(
    ("fault", "code", "says"),
    [
        (KeyboardInterrupt(), 130, "again goes on"),
        (BrokenPipeError(), 141, ""),
        (OSError(28, "No space left"), 2, "No space left"),
        (torch.OutOfMemoryError("CUDA out of memory"), 2, "GPU's memory is full: buy more"),
        (MemoryError(), 2, "the memory is full"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 2, "the memory is full"),
        (RuntimeError("InvalidCxxCompiler: No working C++ compiler found"), 2, "such as g++"),
    ],
)
def test_every_end_has_its_code(fault, code, says, capsys):
    def fail(options):
        raise fault

    assert shouting(fail, interrupted="again goes on", memory="buy more")([]) == code
    said = capsys.readouterr().err
    assert says in said and said.count("\n") == bool(says)
    assert shouting(lambda options: 143)([]) == 143  # a command may give its own


def test_a_fault_of_ours_keeps_its_traceback():
    def broken(options):
        raise RuntimeError("shapes differ")

    with pytest.raises(RuntimeError, match="shapes differ"):
        shouting(broken)([])


def test_a_command_is_said_as_it_would_be_typed():
    typed = as_typed("scripts.shout", ShoutOptions(rounds=3, echo=True, device="cuda"), ["tone"])
    assert typed == "python -m scripts.shout --tone low --rounds 3 --echo true --save true"
    low = as_typed("scripts.shout", ShoutOptions(tone="high"), places=["tone"])
    assert low == "python -m scripts.shout high --save true"
    assert provenance(typed)["repeat"] == provenance(typed)["command"] == typed


def test_commands_are_found():
    assert {"scripts.train", "scripts.studies.best", "scripts.studies.block"} <= {*COMMANDS}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_parses_serves_and_answers_while_libraries_load(name):
    """Run as a script, it calls `launch` before it imports anything else."""
    module = importlib.import_module(name)
    assert isinstance(module.main, Command) and module.__doc__
    text = (ROOT / f"{name.replace('.', '/')}.py").read_text("utf-8")
    guard = text.index('if __name__ == "__main__":')
    assert text.index(f'raise SystemExit(launch("{name}"))') > guard
    assert "import" not in text[len(module.__doc__) + 6 : guard]


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_every_record_says_how_to_repeat_it(path):
    """Right after the command that made it; the module exists, and its parser accepts it."""
    record = json.loads(path.read_text("utf-8"))
    assert list(record)[:2] == ["command", "repeat"]
    python, flag, module, *words = shlex.split(record["repeat"])
    assert (python, flag) == ("python", "-m")
    importlib.import_module(module).main.parse(words)


def test_an_interrupt_while_libraries_load_ends_quietly(tmp_path):
    (tmp_path / "slow_library.py").write_text("raise KeyboardInterrupt\n", "utf-8")
    code = "import sys; from scripts.book.command import launch; sys.exit(launch('slow_library'))"
    paths = os.pathsep.join([str(ROOT), str(tmp_path)])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_runs_live_where_the_environment_says(monkeypatch, tmp_path):
    from scripts import runs_folder

    monkeypatch.delenv("SERIES_RUNS", raising=False)
    assert runs_folder() == ROOT / "runs"
    monkeypatch.setenv("SERIES_RUNS", str(tmp_path))
    assert runs_folder() == tmp_path
