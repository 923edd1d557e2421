r"""Train a translator, as chapter 9 does: `python -m scripts.train --preset sample`.

A run writes to `runs/NAME`, or to NAME in the folder that SERIES_RUNS names, and never over a model
that is there, unless `--overwrite` says so. Under torchrun it uses
several GPUs, or several machines, which must all see that folder to resume. On two machines with
four GPUs each, the first at the address 10.0.0.1, with NUMBER 0 on it and 1 on the other:

    torchrun --nnodes=2 --node-rank=NUMBER --master-addr=10.0.0.1 --master-port=29500 \
        --nproc-per-node=4 -m scripts.train --preset small
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from scripts import runs_folder
from scripts.book.command import Command
from scripts.book.domains import folder_name
from scripts.core.checkpoints import newest_state, saved_states
from scripts.core.settings import PRESETS, TrainConfig, plain_config
from scripts.core.signals import Stopped
from scripts.fast.run import run


def report(record: dict[str, Any]) -> str:
    """What a run came to: BLEU on each test split and a few translations, for the terminal."""
    tests = record["test"].items()
    lines = [f"{split}: BLEU {test['bleu']:.1f}  ({test['signature']})" for split, test in tests]
    for sample in record["samples"][:5]:
        lines += ["", *(f"  {name:<11}  {text}" for name, text in sample.items())]
    return "\n".join(lines)


@dataclass
class TrainOptions(TrainConfig):
    """The options of the command: those of a run, the preset they start from, and what goes on."""

    preset: Literal[*PRESETS] = "small"
    """What the other options default to."""
    resume: bool = False
    """Go on where runs/NAME stopped, on this machine or another."""
    overwrite: bool = False
    """Replace what runs/NAME, or models/PUBLISH, holds."""
    publish: str | None = None
    """Also save the model as models/PUBLISH and the record as results/PUBLISH.json."""
    from_: str | None = None
    """A finished run's folder: go on from its end to more --epochs, as a run of its own (by default
    NAME-EPOCHS) with that run's settings. From there on the learning rate is the longer run's."""

    def __post_init__(self):
        super().__post_init__()
        if not self.resume:  # an older run may have another name
            folder_name("name", self.name)
        if self.publish is not None:
            folder_name("publish", self.publish)


class TrainCommand(Command):
    """The defaults of the other options are a preset's, or those of the run that is lengthened."""

    def parse(self, argv: Sequence[str]) -> TrainOptions:
        """The command line as options. Raises ValueError for what makes no sense."""
        first = self.values(argv)
        defaults = asdict(PRESETS[first["preset"]])
        if first["from_"] is None:
            corpus = self.values(argv, defaults)["corpus"]
            if corpus == "sample" != defaults["corpus"]:  # it has too few words for the rest
                defaults["vocab"] = PRESETS["sample"].vocab
            return super().parse(argv, defaults)
        defaults["name"] = f"{Path(first['from_']).resolve().name}-{first['epochs']}"
        own = runs_folder() / self.values(argv, defaults)["name"]
        origin = own if first["resume"] and saved_states(own) else Path(first["from_"])
        if not saved_states(origin):
            raise ValueError(f"{origin} holds no run: give --from the folder of a finished one")
        settings = newest_state(origin).meta["asked"]
        asked = {name: value for name, value in settings.items() if name in defaults}
        return super().parse(argv, defaults | asked | {"name": defaults["name"]})


def train(options: TrainOptions) -> int:
    """Train as asked, print BLEU and translations; return 0, or 128 + signal if stopped."""
    # A resumed run equals one that was never interrupted: it has that one's command.
    given = [option for option in sys.argv[1:] if option not in ("--resume", "--overwrite")]
    lengthen = Path(options.from_) if options.from_ else None
    ways = options.resume, given, options.overwrite, lengthen, options.publish
    try:
        record = run(plain_config(options), *ways)
    except Stopped as stopped:
        print(stopped, file=sys.stderr)
        return 128 + stopped.number
    if record is not None:  # only the first of several processes has one
        print(report(record))
    return 0


main = TrainCommand(
    "scripts.train",
    TrainOptions,
    train,
    interrupted="interrupted: the same command with --resume goes on",
    memory="lower --max_tokens and raise --accumulate",
)

if __name__ == "__main__":
    raise SystemExit(main())
