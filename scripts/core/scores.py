"""BLEU and chrF by sacreBLEU, each with its signature. Chapter 10 takes them apart."""

from collections.abc import Sequence
from typing import Any

from scripts.book.domains import texts_side_by_side


def corpus_bleu(hypotheses: Sequence[str], references: Sequence[str], **options: Any) -> Any:
    """sacreBLEU, cased and 13a unless `options` say otherwise: `.score` and its `.signature`."""
    from sacrebleu.metrics import BLEU

    return signed(BLEU(**options), hypotheses, references)


def corpus_chrf(outputs: Sequence[str], references: Sequence[str]) -> Any:
    """sacreBLEU's chrF2 with its defaults: `.score` and its `.signature`."""
    from sacrebleu.metrics import CHRF

    return signed(CHRF(), outputs, references)


def signed(metric: Any, outputs: Sequence[str], references: Sequence[str]) -> Any:
    """The corpus's score by one of sacreBLEU's metrics, with the metric's signature."""
    outputs, references = texts_side_by_side(outputs=outputs, references=references)
    result = metric.corpus_score(outputs, [references])
    result.signature = str(metric.get_signature())
    return result


def held_out_splits(corpus: dict[str, list[tuple[str, str]]]) -> list[str]:
    """The names of a corpus's test splits, in order."""
    return [split for split in corpus if split.startswith("test")]
