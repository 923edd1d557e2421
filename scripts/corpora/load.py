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
    if name not in BUILT_IN:
        if not Path(name).is_dir():
            known = "choose sample, multi30k or a folder of your own pairs"
            raise ValueError(f"unknown corpus {name!r}: {known}")
        return load_pairs(name)
    if languages not in ("de-en", "en-de"):
        raise ValueError(f"{name} is German and English, de-en or en-de, not {languages!r}")
    corpus = multi30k() if name == "multi30k" else sample_corpus()
    if name == "few":
        size = dict.fromkeys(corpus, 4) | {"train": FEW}
        corpus = {
            split: nsmallest(size[split], pairs, key=lambda pair: len(pair[0]))
            for split, pairs in corpus.items()
        }
    if languages == "en-de":
        return {split: [(b, a) for a, b in pairs] for split, pairs in corpus.items()}
    return dict(corpus)  # a copy, into which a caller may put other splits
