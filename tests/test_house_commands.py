"""Commands: options from a dataclass, one line for a mistake, a clean exit, how to repeat them."""

import importlib
import json
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from unittest.mock import Mock

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
    sentences: int | None = 2
    """How often."""
    echo: bool = True
    """With an echo."""
    from_: str | None = None
    """From where."""
    device: str = "cpu"
    """Where."""
    save: bool = False
    """Keep it."""

    def __post_init__(self):
        if self.word == ["nothing"]:
            raise ValueError("nothing can't be shouted: say something")


def shouting(run, **says):
    """A command that parses ShoutOptions and calls `run` with them."""
    return Command("scripts.shout", ShoutOptions, run, {"word": "What to shout."}, **says)


@shouting
def shout(options):
    """Shout words.

    Not in the help.
    """
    print(" ".join(options.word).upper() * options.sentences)


def test_fields_are_options(capsys):
    assert shout.parse([]) == ShoutOptions()
    argv = ["--tone", "high", "1.5", "{a: b}", "null", "--sentences", "3", "--no_echo", "--save"]
    words = ["1.5", "{a: b}", "null"]
    assert shout.parse(argv) == ShoutOptions(words, "high", 3, False, save=True)
    assert shout.parse(["--save", "ho", "--from", "1"]).word == ["ho"]  # a flag takes no value
    assert shout.parse(["--from=here"]).from_ == "here"
    defaults = shout.parse(["--tone", "high"], {"sentences": 9})
    assert (defaults.sentences, defaults.tone) == (9, "high")
    assert shout(["ho", "--sentences", "1"]) == 0
    assert capsys.readouterr().out == "HO\n"


def test_help_tells_of_every_field(capsys):
    with pytest.raises(SystemExit):
        shout(["--help"])
    text = capsys.readouterr().out
    for words in ("scripts.shout", "Shout words.", "What to shout.", "How high.", "--from FROM "):
        assert words in text
    assert "Not " not in text and "--no_echo" in text


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--sentences", "many"], "--sentences can't be 'many': --help says"),
        (["--sentences", "0"], "sentences must be at least 1, not 0"),
        (["--trial", "3"], "unrecognized"),  # names are written in full
        (["nothing"], "say something"),
    ],
)
def test_a_mistake_gets_one_line(argv, message, capsys):
    assert shout(argv) == 2
    assert_one_line(capsys, message)


def assert_one_line(capsys, message):
    """Nothing on standard output; on standard error one line, which holds the message."""
    done = capsys.readouterr()
    assert done.out == "" and done.err.startswith("error: ") and message in done.err
    assert done.err.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "argv", "message"),
    [
        ("translate", ["x", "--input", "y"], "either texts or --input"),
        ("translate", ["--input", "no/such/file"], "'no/such/file'"),
        ("translate", ["x", "--top_p", "0.5"], "add --sample"),
        ("translate", ["x", "--precision", "int8"], "AVX2 and a C compiler: use --precision auto"),
        ("evaluate", ["--split", "proof"], "multi30k has no split 'proof': choose from train, "),
        ("export", [], "required: folder"),
        ("export", ["file"], "file/onnx"),
        ("export", ["runs"], "onnx holds a model: choose another folder"),
    ],
)
def test_commands_say_mistakes_of_their_own(name, argv, message, capsys, monkeypatch, tmp_path):
    """Before anything is translated or written."""
    monkeypatch.setattr("scripts.fast.translating.fast_in_8_bits", lambda: False)
    monkeypatch.setattr("scripts.evaluate.load_corpus", lambda *named: {"train": [], "val": []})
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("runs/onnx").mkdir(parents=True)
    Path("runs/onnx/model.safetensors").touch()
    assert importlib.import_module(f"scripts.{name}").main(argv) == 2
    assert_one_line(capsys, message)


@pytest.mark.parametrize(
    ("fault", "code", "message"),
    [
        (KeyboardInterrupt(), 130, "again goes on"),
        (BrokenPipeError(), 141, ""),
        (torch.OutOfMemoryError("CUDA out of memory"), 2, "GPU's memory is full: buy more"),
        (MemoryError(), 2, "the memory is full"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 2, "the memory is full"),
    ],
)
def test_every_end_has_its_code(fault, code, message, capsys):
    fail = Mock(side_effect=fault, __doc__="")
    assert shouting(fail, interrupted="again goes on", memory="buy more")([]) == code
    text = capsys.readouterr().err
    assert message in text and text.count("\n") == bool(message)


def test_a_command_may_give_its_own_code_and_a_fault_of_ours_keeps_its_traceback():
    assert shouting(lambda options: 143)([]) == 143
    with pytest.raises(RuntimeError):
        shouting(Mock(side_effect=RuntimeError("shapes differ"), __doc__=""))([])


def test_a_command_is_said_as_it_would_be_typed():
    options = ShoutOptions(sentences=3, echo=False, device="cuda", save=True)
    typed = as_typed("scripts.shout", options)
    assert typed == "python -m scripts.shout --sentences 3 --no_echo --save"
    assert shout.parse(shlex.split(typed)[3:]) == ShoutOptions(sentences=3, echo=False, save=True)
    low = as_typed("scripts.shout", ShoutOptions(tone="high"), places=["tone"])
    assert low == "python -m scripts.shout high --save"
    assert provenance(typed)["repeat"] == provenance(typed)["command"] == typed


def test_a_command_serves_the_module_it_is_in():
    assert {"scripts.train", "scripts.translate", "scripts.studies.block"} <= {*COMMANDS}
    for name in COMMANDS:
        module = importlib.import_module(name)
        assert isinstance(module.main, Command) and module.main.prog == name
        assert module.main.run.__doc__ and module.__doc__, name
        source = Path(module.__file__).read_text("utf-8")
        assert source.endswith('if __name__ == "__main__":\n    raise SystemExit(main())\n'), name


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_every_record_says_how_to_repeat_it(path):
    """Right after the command that made it; the module exists, and its parser accepts it."""
    record = json.loads(path.read_text("utf-8"))
    assert list(record)[:2] == ["command", "repeat"]
    python, flag, module, *words = shlex.split(record["repeat"])
    assert (python, flag) == ("python", "-m")
    importlib.import_module(module).main.parse(words)
