"""The corpora behind one call."""

from heapq import nsmallest

from scripts.corpora.multi30k import multi30k
from scripts.corpora.sample import sample_corpus

FEW = 200  # pairs to train on


def load_corpus(name: str) -> dict[str, list[tuple[str, str]]]:
    """A corpus's splits, each of (German, English) pairs.

    "sample" is generated, offline; "few" are the sample's shortest pairs; then there is "multi30k".
    """
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
