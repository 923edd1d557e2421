"""What all commands share: options from a dataclass, one line for a mistake, a clean way out.

A command is a module that is run, such as `python -m scripts.translate`. It begins with

    if __name__ == "__main__":  # first, so that Ctrl-C while libraries load is answered, too
        from scripts.book.command import launch

        raise SystemExit(launch("scripts.translate"))

and ends with `main`, a `Command`: which options it has, and which function does what they say.
"""

import contextlib
import importlib
import os
import re
import shlex
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from scripts.book.at_home import refuse_another_package
from scripts.book.domains import check_settings

GOES_ON = "interrupted: the same command goes on where it left off"  # said by one that resumes


def launch(module: str) -> int:
    """Import `module` and run its `main`. Returns the exit code, 130 for Ctrl-C while it loads.

    Where another package hides the series, it says so and returns 2.
    """
    try:
        refuse_another_package()
    except ImportError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        main = importlib.import_module(module).main
    except KeyboardInterrupt:
        return 130
    return main()


@dataclass(frozen=True)
class Command:
    """A command: the module's name, a dataclass of its options, and the function that takes one.

    Each field is an option, but `places` are given without a name, and `flags` take no value if
    bool; both come with their help (`from_` is --from: Python keeps that word). `about` is the
    command's. `interrupted` and `memory` are said after Ctrl-C and when the GPU's memory is full
    (there: what to do).
    """

    prog: str
    options: type
    run: Callable[[Any], Any]
    about: str
    places: Mapping[str, str] = field(default_factory=dict)
    flags: Mapping[str, str] = field(default_factory=dict)
    interrupted: str = "interrupted"
    memory: str = "CUDA_VISIBLE_DEVICES= hides it"

    def parse(self, argv: Sequence[str], defaults: Mapping[str, Any] | None = None) -> Any:
        """The command line as options; `defaults` replace those of the fields.

        Raises ValueError, in one line, for what makes no sense.
        """
        options = self.options(**self.values(argv, defaults))
        check_settings(options)
        return options

    def values(
        self, argv: Sequence[str], defaults: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """The same as a dictionary, in which no value has been compared with others yet."""
        from jsonargparse import ArgumentError, ArgumentParser, set_parsing_settings

        helps = not {"-h", "--help"}.isdisjoint(argv)  # fields' docstrings, slow to collect
        set_parsing_settings(docstring_parse_attribute_docstrings=helps)
        about, hints = self.about, get_type_hints(self.options)
        parser = ArgumentParser(f"python -m {self.prog}", description=about, exit_on_error=False)
        for place, text in self.places.items():
            kind = hints[place]
            many = {"type": str, "nargs": "*"} if kind == list[str] else {"type": kind}
            parser.add_argument(place, help=text, **many)
        parser.add_class_arguments(self.options, skip={*self.places, *self.flags})
        for flag, text in self.flags.items():
            takes = {"action": "store_true"} if hints[flag] is bool else {"type": hints[flag]}
            parser.add_argument(f"--{flag.rstrip('_')}", dest=flag, help=text, **takes)
        parser.set_defaults(dict(defaults or {}))
        try:
            return parser.parse_args(list(argv)).as_dict()
        except ArgumentError as error:
            raise ValueError(self.in_words(" ".join(str(error).split()))) from error

    def in_words(self, error: str) -> str:
        """What jsonargparse says of a mistake, with what is allowed, or what to do."""
        hints = get_type_hints(self.options)
        if found := re.match(r'Parser key "(\w+)": .*(?:Got|Given) value:\s*(.*)$', error):
            name, given = found.groups()
            option = name if name in self.places else f"--{name}"
            return f"{option} must be {kind_in_words(hints[name])}, not {given or repr(given)}"
        takes_texts = list[str] in map(hints.get, self.places)
        if takes_texts and " --" not in error and error.startswith(("unrecognized", "argument -h")):
            error += '; if that is a text, put -- before it: -- "-5 Grad"'
        return error

    def __call__(self, argv: Sequence[str] | None = None) -> int:
        """Do what the command line asks for. Returns the exit code.

        That is 2 for a mistake or a fault, which get one line; 130 after Ctrl-C, 141 for a closed
        pipe; else what `run` returns, if that is a number, or 0.
        """
        try:
            if hasattr(sys.stdout, "reconfigure"):
                sys.stdout.reconfigure(encoding="utf-8", newline="\n")  # whatever the locale says
            code = self.run(self.parse(sys.argv[1:] if argv is None else argv))
            print(end="", flush=True)
        except BrokenPipeError:  # as in `| head -1`: as with `cat`, not worth a word
            return 141
        except KeyboardInterrupt:
            print(self.interrupted, file=sys.stderr)
            return 130
        except (ValueError, OSError) as error:
            print("error:", " ".join(str(error).split()), file=sys.stderr)
            return 2
        except (MemoryError, RuntimeError) as error:
            reason = lack(error)
            if type(error).__name__ == "OutOfMemoryError":  # torch's, which isn't imported here
                reason = f"the GPU's memory is full: {self.memory}"
            if reason is None:
                raise
            print("error:", reason, file=sys.stderr)
            return 2
        finally:
            release_output()
        return code if isinstance(code, int) else 0


def lack(error: BaseException) -> str | None:
    """What the machine lacks, and what to do, if that is the error; None for a fault of ours."""
    said = str(error)
    if isinstance(error, MemoryError) or "DefaultCPUAllocator" in said:
        return "the memory is full: end other programs, or ask for less (sizes, batches, a beam)"
    if re.search("No working C.. compiler|Failed to find C compiler|TritonMissing", said):
        return "--compile needs a compiler, such as g++ (on a GPU also Triton): leave it out here"
    return None


def kind_in_words(kind: Any) -> str:
    """What an option of this type may be."""
    kinds = {*get_args(kind)} if get_origin(kind) in (Union, UnionType) else {kind}
    for one in kinds:
        if get_origin(one) is Literal:
            return " or ".join(get_args(one))
    if bool in kinds:
        return "true or false"
    number = "a number, with a decimal point (0.6)" if float in kinds else "a whole number"
    return number if kinds & {int, float} else "a text"


def as_typed(
    prog: str, options: Any, always: Collection[str] = (), places: Collection[str] = ()
) -> str:
    """The command that repeats and records what `options` did, as one line.

    It names what isn't the default, and the fields in `always`; those in `places` come without a
    name. Where it ran is left out.
    """
    default = type(options)()
    words = ["python", "-m", prog, *(getattr(options, place) for place in places)]
    for name, value in asdict(options).items():
        said = name in always or value != getattr(default, name)
        if said and name not in ("device", "save", *places):
            words += [f"--{name}", str(value).lower() if isinstance(value, bool) else str(value)]
    return shlex.join([*words, "--save", "true"])


def release_output() -> None:
    """Flush what is printed. If that fails, drop it, or Python fails again when it exits."""
    for stream in (sys.stdout, sys.stderr):
        try:
            print(end="", file=stream, flush=True)
        except OSError:
            with contextlib.suppress(OSError):  # a stream without a file has nothing to let go
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
