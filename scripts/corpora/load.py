"""The corpora behind one call."""

from heapq import nsmallest

from scripts.corpora.multi30k import multi30k
from scripts.corpora.sample import sample_corpus

FEW = 200  # pairs to train on

Pairs = list[tuple[str, str]]


def load_corpus(name: str, languages: str = "de-en") -> dict[str, Pairs]:
    """A corpus's splits, each of (source, target) pairs.

    "sample" is generated, offline; "few" are the sample's shortest pairs; then there is "multi30k".
    These are German and English, and turned round for the languages "en-de". Raises ValueError for
    other languages or another name.
    """
    if languages not in ("de-en", "en-de"):
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
    raise ValueError(f"unknown corpus {name!r}: choose sample or multi30k")
