"""What commands share that measure what a chapter shows, most of them about chapter 9's model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from scripts.book.command import Command, as_typed
from scripts.book.records import recorded, sha256
from scripts.ch07_multi30k import source_ids
from scripts.core.models import STUDIED, Trained
from scripts.corpora.load import load_corpus
from scripts.fast.translating import ModelOptions, open_model

Pairs = Sequence[tuple[str, str]]
Rows = Sequence[Sequence[int]]  # encoded sources
Texts = Sequence[str]
Corpus = dict[str, list[tuple[str, str]]]


@dataclass
class SaveOptions:
    """What is done with the record."""

    save: bool = False
    """Keep it in results/, where the chapter finds it, instead of printing it."""


def encoded(trained: Trained, pairs: Pairs) -> tuple[Rows, Texts]:
    """The sources as ids, eos included, and the references."""
    rows = [source_ids(source, trained.tokenizer) for source, _ in pairs]
    return rows, [reference for _, reference in pairs]


def record_command(
    module: str,
    name: str,
    measure: Callable[[Any], dict[str, Any]],
    interrupted: str = "interrupted",
) -> Command:
    """The command of the module whose record, NAME, says what `measure` finds with its options."""

    def run(options: SaveOptions) -> dict[str, Any]:
        """Measure what a chapter shows."""
        return recorded(name, as_typed(module, options), partial(measure, options), options.save)

    return Command(module, SaveOptions, run, interrupted=interrupted)


def subject_command(
    module: str, name: str, study: Callable[[Trained, Corpus], dict[str, Any]]
) -> Command:
    """The command whose record, NAME-multi30k, says what `study` finds about chapter 9's model."""

    def measure(_: SaveOptions) -> dict[str, Any]:
        trained = open_model(ModelOptions(model=str(STUDIED), device="cpu"))
        return {
            "model": STUDIED.name,
            "weights_sha256": sha256(STUDIED / "model.safetensors"),
            "corpus": "multi30k",
            **study(trained, load_corpus("multi30k")),
        }

    return record_command(module, f"{name}-multi30k", measure)
