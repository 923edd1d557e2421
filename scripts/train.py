r"""Train a translator, as chapter 9 does: `python -m scripts.train --preset sample`.

Or one of your own: `python -m scripts.train --pairs FILE --languages sw-en`, by a recipe that suits
the number of pairs; chapter 26 tells of it.

A run writes to `runs/NAME`, or to NAME in the folder that SERIES_RUNS names, and never over a model
that is there, unless `--overwrite` says so. Under torchrun it uses
several GPUs, or several machines, which must all see that folder to resume. On two machines with
four GPUs each, the first at the address 10.0.0.1, with NUMBER 0 on it and 1 on the other:

    torchrun --nnodes=2 --node-rank=NUMBER --master-addr=10.0.0.1 --master-port=29500 \
        --nproc-per-node=4 -m scripts.train --preset small
"""

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from scripts import runs_folder
from scripts.book.command import Command
from scripts.book.domains import folder_name
from scripts.core.checkpoints import newest_state, saved_states
from scripts.core.models import load_model
from scripts.core.recipes import reason_for, recipe_for, tuning_recipe
from scripts.core.settings import PRESETS, TrainConfig, plain_config
from scripts.core.signals import Stopped
from scripts.corpora.load import BUILT_IN
from scripts.corpora.report import Pair
from scripts.corpora.splits import (
    BESIDE,
    OwnPairs,
    PairOptions,
    is_corpus,
    load_pairs,
    own_pairs,
    saved_pairs,
)
from scripts.fast.run import run

# What fine-tuning takes over from its model.
KEPT = ("layers", "d_model", "d_ff", "heads", "vocab", "norm_first", "tie", "embedding_init")
KEPT += ("dropout", "smoothing", "languages", "beam", "alpha")


def report(record: dict[str, Any]) -> str:
    """What a run came to: BLEU on each test split and a few translations, for the terminal."""
    tests = record["test"].items()
    lines = [f"{split}: BLEU {test['bleu']:.1f}  ({test['signature']})" for split, test in tests]
    if "tuned" in record:
        lines += [
            "",
            f"{'before':>8}{'after':>8}  BLEU of the model that it began with, and its own",
        ]
        score = "{before:8.1f}{after:8.1f}  {corpus}, {split}"
        lines += [score.format(**row) for row in record["tuned"]]
    for sample in record["samples"][:5]:
        lines += ["", *(f"  {name:<11}  {text}" for name, text in sample.items())]
    return "\n".join(lines)


@dataclass
class TrainOptions(PairOptions, TrainConfig):
    """The options of the command: those of a run, the preset they start from, and what goes on."""

    preset: Literal["auto", *PRESETS] = "auto"
    """What the other options default to; auto: small, and for your own pairs by their number."""
    resume: bool = False
    """Go on where runs/NAME stopped, on this machine or another."""
    overwrite: bool = False
    """Replace what runs/NAME, or models/PUBLISH, holds."""
    publish: str | None = None
    """Also save the model as models/PUBLISH and the record as results/PUBLISH.json."""
    from_: str | None = None
    """With your own pairs: a model's folder, whose weights, pieces and sizes to begin with (fine-
    tuning). Else a finished run's: go on from its end to more --epochs, as a run of its own (by
    default NAME-EPOCHS) with its settings; from there on the learning rate is the longer run's."""
    own: OwnPairs | None = field(default=None, init=False, repr=False)
    tune: Path | None = field(default=None, init=False)  # the model to begin with
    fewer: bool = field(default=False, init=False)  # pieces than the recipe asks for will do
    why: str = field(default="", init=False)  # these defaults

    def __post_init__(self):
        super().__post_init__()
        if not self.resume:  # an older run may have another name
            folder_name("name", self.name)
        if self.publish is not None:
            folder_name("publish", self.publish)


class TrainCommand(Command):
    """The defaults of the other options are a preset's, or those of the run that is lengthened."""

    def parse(self, argv: Sequence[str]) -> TrainOptions:
        """The command line as options, your own pairs read. Raises ValueError for a mistake."""
        first = self.values(argv, dict.fromkeys(("corpus", "vocab", "name")))  # None: isn't asked
        own, name, known = self.own_pairs(first)
        if own is None and first["from_"]:
            origin, defaults = self.lengthened(first)
            options = super().parse(argv, defaults)
            if options.corpus == BESIDE:
                options.own = saved_pairs(origin / BESIDE)
            return options
        pairs = own.splits["train"] if own else []
        defaults = fitting(first, pairs, mixed=not {*pairs}.isdisjoint(known))
        options = super().parse(argv, defaults | ({"name": name} if own else {}))
        options.own, options.fewer = own, first["vocab"] is None
        options.tune = Path(first["from_"]) if first["from_"] else None
        if own:
            options.corpus = BESIDE
        if options.tune:
            options.why = f"fine-tuning {first['from_']}"
        elif own and first["preset"] == "auto":
            options.why = reason_for(len(pairs))
        return options

    def own_pairs(self, first: Mapping[str, Any]) -> tuple[OwnPairs | None, str, Collection[Pair]]:
        """Your own pairs, if the options name some; the run's name; what --from learned from."""
        files = PairOptions(**{part.name: first[part.name] for part in fields(PairOptions)}).files
        if not files:
            folder = Path(first["corpus"] or "nothing")
            own = saved_pairs(folder) if str(folder) not in BUILT_IN and is_corpus(folder) else None
            return own, first["name"] or folder.resolve().name, ()
        if first["corpus"]:
            raise ValueError("either your own pairs or --corpus, not both")
        beside = Path(first["from_"] or "", BESIDE)
        before = load_pairs(beside) if first["from_"] and is_corpus(beside) else None
        name = first["name"] or Path(files["pairs"][0]).name.partition(".")[0]
        return own_pairs(files, before=before), name, before["train"] if before else ()

    def lengthened(self, first: Mapping[str, Any]) -> tuple[Path, dict[str, Any]]:
        """The run that --from names, or what it became, and its settings. Raises ValueError."""
        defaults = asdict(PRESETS["small"])
        defaults["name"] = f"{Path(first['from_']).resolve().name}-{first['epochs']}"
        own = runs_folder() / (first["name"] or defaults["name"])
        origin = own if first["resume"] and saved_states(own) else Path(first["from_"])
        if not saved_states(origin):
            remedy = "give --from the folder of a finished one, or --pairs to fine-tune a model"
            raise ValueError(f"{origin} holds no run: {remedy}")
        settings = newest_state(origin).meta["asked"]
        asked = {name: value for name, value in settings.items() if name in defaults}
        return origin, defaults | asked | {"name": defaults["name"]}


def fitting(
    first: Mapping[str, Any], pairs: Sequence[Pair] = (), mixed: bool = False
) -> dict[str, Any]:
    """The defaults that the options call for, and their own training `pairs`, if they have any.

    `mixed` says whether a model to fine-tune knows some of them.
    """
    if pairs and first["from_"]:
        config = asdict(load_model(Path(first["from_"])).config)
        kept = {name: config[name] for name in KEPT}
        return asdict(PRESETS["small"]) | kept | tuning_recipe(len(pairs), mixed)
    if pairs and first["preset"] == "auto":
        letters = len({letter for pair in pairs for side in pair for letter in side})
        return asdict(PRESETS["small"]) | recipe_for(len(pairs), letters)
    defaults = asdict(PRESETS["small" if first["preset"] == "auto" else first["preset"]])
    if first["corpus"] == "sample" != defaults["corpus"]:  # it has too few words for the rest
        defaults["vocab"] = PRESETS["sample"].vocab
    return defaults


def train(options: TrainOptions) -> int:
    """Train as asked, print BLEU and translations; return 0, or 128 + signal if stopped."""
    # A resumed run equals one that was never interrupted: it has that one's command.
    given = [option for option in sys.argv[1:] if option not in ("--resume", "--overwrite")]
    lengthen = Path(options.from_) if options.from_ and not options.tune else None
    ways = options.resume, given, options.overwrite, lengthen, options.publish
    about = options.own, options.tune, options.fewer, options.why
    try:
        record = run(plain_config(options), *ways, *about)
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
