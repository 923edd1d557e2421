"""What studies of one trained model share: their options, their texts, and how a record begins."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from scripts.book.command import as_typed
from scripts.book.records import provenance, refuse_another, save_record, sha256
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
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, …"""
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


def recorded(
    prog: str,
    name: str,
    options: StudyOptions,
    study: Callable[[Trained, Corpus, Any], dict[str, Any]],
) -> dict[str, Any]:
    """The record of study(trained, corpus, options), saved as NAME-CORPUS if the options say so."""
    command, kept_as = as_typed(prog, options), f"{name}-{options.corpus}"
    if options.save:
        refuse_another(kept_as, command)
    folder = Path(options.model or STUDIED)
    trained = open_model(ModelOptions(model=str(folder), device=options.device))
    record = {
        **provenance(command, trained.device),  # first: names the code that runs
        "model": folder.resolve().name,
        "weights_sha256": sha256(folder / "model.safetensors"),
        "corpus": options.corpus,
        **study(trained, load_corpus(options.corpus), options),
    }
    if options.save:
        save_record(kept_as, record)
    return record
