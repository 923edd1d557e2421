"""The corpora behind one call."""

from heapq import nsmallest
from pathlib import Path

from scripts.corpora.multi30k import multi30k
from scripts.corpora.sample import sample_corpus
from scripts.corpora.splits import load_pairs

FEW = 200  # pairs to train on
BUILT_IN = ("sample", "few", "multi30k")

Pairs = list[tuple[str, str]]


def load_corpus(name: str, languages: str = "de-en") -> dict[str, Pairs]:
    """A corpus's splits, each of (source, target) pairs.

    "sample" is generated, offline; "few" are the sample's shortest pairs; then there is "multi30k".
    These are German and English, and turned round for the languages "en-de". A folder that
    `save_pairs` wrote is a corpus, too, whatever its languages. Raises ValueError for another name,
    and for languages that a corpus doesn't have.
    """
    if name not in BUILT_IN and Path(name).is_dir():
        return load_pairs(name)
    if name in BUILT_IN and languages not in ("de-en", "en-de"):
        raise ValueError(f"{name} is German and English, de-en or en-de, not {languages!r}")
    corpus = german_english(name)
    if languages == "en-de":
        return {split: [(b, a) for a, b in pairs] for split, pairs in corpus.items()}
    return corpus


def german_english(name: str) -> dict[str, Pairs]:
    """The corpora that the series brings, or knows where to find."""
    if name == "sample":
        return dict(sample_corpus())  # a copy, into which a caller may put other splits
    if name == "few":
        size = dict.fromkeys(sample_corpus(), 4) | {"train": FEW}
        return {
            split: nsmallest(size[split], pairs, key=lambda pair: len(pair[0]))
            for split, pairs in sample_corpus().items()
        }
    if name == "multi30k":
        return multi30k()
    known = "choose sample, multi30k or a folder of your own pairs"
    raise ValueError(f"unknown corpus {name!r}: {known}")
