"""What studies of one trained model share: their options, their texts, and their record."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

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
class StudyOptions:
    """What is translated, and by which model."""

    model: str | None = None
    """A model's folder; by default chapter 9's."""
    corpus: Literal["sample", "multi30k"] = "multi30k"
    """What to translate."""
    sentences: int | None = None
    """Only this many, from a split's start."""
    save: bool = False
    """Keep the result in results/, where the chapter finds it."""


def encoded(trained: Trained, pairs: Pairs) -> tuple[Rows, Texts]:
    """The sources as ids, eos included, and the references."""
    rows = [source_ids(source, trained.tokenizer) for source, _ in pairs]
    return rows, [reference for _, reference in pairs]


def subject_command(
    module: str,
    name: str,
    study: Callable[[Trained, Corpus, Any], dict[str, Any]],
    options_type: type = StudyOptions,
) -> Command:
    """The command whose record, NAME-CORPUS, says what study(trained, corpus, options) finds."""

    def run(options: StudyOptions) -> dict[str, Any]:
        """Measure what a chapter says about a trained model."""
        folder = Path(options.model or STUDIED)

        def measure() -> dict[str, Any]:
            trained = open_model(ModelOptions(model=str(folder), device="cpu"))
            return {
                "model": folder.resolve().name,
                "weights_sha256": sha256(folder / "model.safetensors"),
                "corpus": options.corpus,
                **study(trained, load_corpus(options.corpus), options),
            }

        return recorded(
            f"{name}-{options.corpus}", as_typed(module, options), measure, options.save
        )

    return Command(module, options_type, run)
