"""What chapter 7 says about Multi30k, from its files: `python -m scripts.studies.corpus`."""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from scripts import ch07_multi30k as ch07
from scripts.corpora.multi30k import multi30k
from scripts.studies.subject import record_command

SIZES = (1024, 2048, 4096, 8192)  # of the tables of pieces
WORDS = ["Hund", "Feuerwehrmann", "Skateboardfahrer", "Regenbogenforelle"]
EVERY = 2900  # a caption from each tenth of the training split
PICKED = (1691, 5070, 5120, 12678, 15574, 16498, 16663, 25222)  # something is wrong with them


def quoted_captions(train: list[tuple[str, str]]) -> list[list[int | str]]:
    """Twenty pairs, each after its line (from 0): every 2,900th, shortest, longest, `PICKED`."""
    by_length = sorted(range(len(train)), key=lambda i: (len(train[i][1]), i))
    lines = (*range(0, len(train), EVERY), by_length[0], by_length[-1], *PICKED)
    return [[i, *train[i]] for i in lines]


def unknown_words(pairs: dict[str, list[tuple[str, str]]]) -> list[dict[str, Any]]:
    """Unknown German words in test_2016_flickr, for honest and for leaky vocabularies.

    "sentences" is the share of sentences that have one, by the honest vocabulary.
    """
    split = ch07.word_tokenizer("de")
    words = {name: [split(german) for german, _ in part] for name, part in pairs.items()}
    test, everything = words["test_2016_flickr"], sum(words.values(), [])
    rows = []
    for min_freq in (1, 2):
        honest, leaky = (ch07.build_vocab(x, min_freq) for x in (words["train"], everything))
        holes = sum(ch07.unknown_rate([sentence], honest) > 0 for sentence in test)
        rates = {"train only": honest, "all splits (wrong)": leaky}
        rates = {name: round(ch07.unknown_rate(test, vocab), 5) for name, vocab in rates.items()}
        rows.append({"min_freq": min_freq, "sentences": holes / len(test)} | rates)
    return rows


def word_counts(texts: Sequence[str]) -> dict[str, int]:
    """How many different words `texts` hold, and how many of them occur once."""
    counts = Counter(word for text in texts for word in re.findall(r"\w+", text.lower()))
    return {"different": len(counts), "once": sum(times == 1 for times in counts.values())}


def length_shares(texts: Sequence[str]) -> dict[str, float]:
    """The share of texts with 1, 2, … words, split at spaces."""
    counts = Counter(len(text.split()) for text in texts)
    return {str(n): round(counts[n] / len(texts), 5) for n in range(1, max(counts) + 1)}


def multi30k_facts() -> dict[str, Any]:
    """What chapter 7 says about Multi30k, computed from its files in about half a minute."""
    pairs = multi30k()
    train, test = (
        dict(zip(("German", "English"), zip(*pairs[split], strict=True), strict=True))
        for split in ("train", "test_2016_flickr")
    )
    both = [text for pair in pairs["train"] for text in pair]
    bpe = {str(size): ch07.BPETokenizer.train(both, size) for size in SIZES}
    largest = bpe[str(SIZES[-1])]
    return {
        "pairs": {split: len(part) for split, part in pairs.items()},
        "captions": quoted_captions(pairs["train"]),
        "counts": {name: word_counts(texts) for name, texts in train.items()},
        "lengths": {name: length_shares(texts) for name, texts in train.items()},
        "unknown": unknown_words(pairs),
        "words": WORDS,
        "pieces": {v: [" ".join(t.pieces(word)) for word in WORDS] for v, t in bpe.items()},
        "tokens": {
            name: {v: round(ch07.tokens_per_sentence(texts, t), 3) for v, t in bpe.items()}
            for name, texts in test.items()
        },
        "changed": sum(largest.decode(largest.encode(text)) != text for text in both),
        "padding": ch07.padding_table(ch07.encode_pairs(pairs["train"], largest), 2048),
    }


main = record_command("scripts.studies.corpus", "multi30k-corpus", lambda _: multi30k_facts())

if __name__ == "__main__":
    raise SystemExit(main())
