"""BLEU and chrF by sacreBLEU, each with its signature. Chapter 10 takes them apart."""

import re
from collections.abc import Sequence
from typing import Any

from scripts.book.domains import texts_side_by_side

# Thai, Lao, Burmese, Khmer, Japanese, Chinese: scripts without spaces between words.
UNSPACED = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff]")


def unspaced(texts: Sequence[str]) -> bool:
    """Whether most letters of `texts` are of scripts without spaces between words."""
    text = "".join(texts)
    return len(UNSPACED.findall(text)) > sum(map(str.isalpha, text)) / 2


def corpus_bleu(hypotheses: Sequence[str], references: Sequence[str], **options: Any) -> Any:
    """sacreBLEU, cased, unless `options` say otherwise: `.score` and its `.signature`.

    Words are 13a's; a text without spaces would be one word, so its letters are counted.
    """
    from sacrebleu.metrics import BLEU

    options = {"tokenize": "char" if unspaced(references) else "13a"} | options
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
