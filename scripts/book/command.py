"""What all commands share: options from a dataclass, one line for a mistake, a clean way out.

A command's module ends with

    main = Command("scripts.shout", ShoutOptions, shout)

    if __name__ == "__main__":
        raise SystemExit(main())

where `shout` takes the options and does what they say. jsonargparse makes the command line.
"""

import contextlib
import os
import re
import shlex
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any, get_type_hints

from scripts.book.domains import check_settings

GOES_ON = "interrupted: the same command goes on where it left off"  # said by one that resumes


@dataclass(frozen=True)
class Command:
    """A command: the module's name, a dataclass of its options, and the function that takes one.

    Each field is an option, told by its docstring: a bool is a flag (`--save`, `--no_save`), and
    `from_` is --from, as Python keeps that word. `places` are given without a name, each with its
    help. `interrupted` and `memory` are said after Ctrl-C, and when the GPU's memory is full
    (there: what to do).
    """

    prog: str
    options: type
    run: Callable[[Any], Any]
    places: Mapping[str, str] = field(default_factory=dict)
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
        from jsonargparse import ActionYesNo, ArgumentError, ArgumentParser

        asks_help = not {"-h", "--help"}.isdisjoint(argv)  # slow to collect
        help_of = attribute_docstrings(self.options) | dict(self.places) if asks_help else {}
        about = (self.run.__doc__ or "").partition("\n")[0]
        parser = ArgumentParser(
            f"python -m {self.prog}", description=about, exit_on_error=False, allow_abbrev=False
        )
        types = get_type_hints(self.options)
        for option in (option for option in fields(self.options) if option.init):
            name, kind, text = option.name, types[option.name], help_of.get(option.name)
            if name in self.places:
                # Texts come as they are: a list's own parser would read YAML in them.
                several = {"type": str, "nargs": "*", "default": []}
                parser.add_argument(
                    name, help=text, **(several if kind == list[str] else {"type": kind})
                )
                continue
            default = option.default if option.default is not MISSING else option.default_factory()
            special = {"action": ActionYesNo} if kind is bool else {"type": kind}
            if name.endswith("_"):
                special["metavar"] = name[:-1].upper()
            parser.add_argument(
                f"--{name.rstrip('_')}", dest=name, default=default, help=text, **special
            )
        parser.set_defaults(dict(defaults or {}))
        try:
            return parser.parse_args(list(argv)).as_dict()
        except ArgumentError as error:
            text = " ".join(str(error).split())
            if key := re.match(r'Parser key "(\w+)":.*(?:Got|Given) value:\s*(.*)$', text):
                option = key[1] if key[1] in self.places else f"--{key[1].rstrip('_')}"
                text = f"{option} can't be {key[2]!r}: --help says what it may be"
            raise ValueError(text) from error

    def __call__(self, argv: Sequence[str] | None = None) -> int:
        """Do what the command line asks for. Returns the exit code.

        That is 2 for a mistake or a lack of the machine, which get one line; 130 after Ctrl-C, 141
        for a closed pipe; else what `run` returns, if that is a number, or 0.
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
        except (ValueError, OSError, MemoryError, RuntimeError) as error:
            reason = self.remedy(error)
            if reason is None:  # a fault of ours keeps its traceback
                raise
            print("error:", reason, file=sys.stderr)
            return 2
        finally:
            release_output()
        return code if isinstance(code, int) else 0

    def remedy(self, error: Exception) -> str | None:
        """What was wrong, in one line, with what to do; None for a fault of ours."""
        text = " ".join(str(error).split())
        if type(error).__name__ == "OutOfMemoryError":  # torch's, which isn't imported here
            return f"the GPU's memory is full: {self.memory}"
        if isinstance(error, MemoryError) or "DefaultCPUAllocator" in text:
            return "the memory is full: end other programs, or ask for less (sizes, batches, beam)"
        return text if isinstance(error, ValueError | OSError) else None


def attribute_docstrings(options: type) -> dict[str, str]:
    """The docstring below each field of a dataclass and of those it inherits from."""
    from docstring_parser import parse_from_object

    return {
        part.arg_name: part.description
        for kind in reversed(options.__mro__[:-1])
        for part in parse_from_object(kind).params
    }


def as_typed(prog: str, options: Any, places: Collection[str] = ()) -> str:
    """The command that repeats and records what `options` did, as one line.

    It names what isn't the default; the fields in `places` come without a name. Where it ran is
    left out.
    """
    default = type(options)()
    words = ["python", "-m", prog, *(getattr(options, place) for place in places)]
    for name, value in asdict(options).items():
        if name in ("device", "save", *places):
            continue
        if value != getattr(default, name):
            flag = f"--{name}" if value is not False else f"--no_{name}"
            words += [flag] if isinstance(value, bool) else [flag, str(value)]
    return shlex.join([*words, "--save"])


def release_output() -> None:
    """Flush what is printed. If that fails, drop it, or Python fails again when it exits."""
    for stream in (sys.stdout, sys.stderr):
        try:
            print(end="", file=stream, flush=True)
        except OSError:
            with contextlib.suppress(OSError):  # a stream without a file has nothing to let go
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
