"""What chapter 7 says of Multi30k, from its files: `python -m scripts.studies.corpus`."""

if __name__ == "__main__":  # first, so that Ctrl-C while libraries load is answered, too
    from scripts.book.command import launch

    raise SystemExit(launch("scripts.studies.corpus"))

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from scripts.book.command import as_typed, read, serve
from scripts.book.records import provenance, save_record
from scripts.ch07_multi30k import (
    CORPUS_RECORD,
    BPETokenizer,
    build_vocab,
    encode_pairs,
    length_shares,
    padding_table,
    tokens_per_sentence,
    unknown_rate,
    word_ranks,
    word_tokenizer,
)
from scripts.corpora.multi30k import multi30k

RECORDED_SIZES = (1024, 4096, 8192)


RECORDED_WORDS = (
    "Hund",
    "Fahrradfahrer",
    "Feuerwehrmann",
    "Sonnenbrille",
    "Skateboardfahrer",
    "Basketballspielerin",
    "Regenbogenforelle",
)


def unknown_words(pairs: dict[str, list[tuple[str, str]]]) -> list[dict[str, Any]]:
    """Unknown German words in test_2016_flickr, for honest and for leaky vocabularies."""
    split = word_tokenizer("de")
    words = {name: [split(german) for german, _ in found] for name, found in pairs.items()}
    everything = [sentence for found in words.values() for sentence in found]
    rows = []
    for min_freq in (1, 2):
        rates = {
            name: round(
                unknown_rate(words["test_2016_flickr"], build_vocab(sentences, min_freq)), 5
            )
            for name, sentences in (
                ("train only", words["train"]),
                ("all splits (wrong)", everything),
            )
        }
        rows.append({"min_freq": min_freq} | rates)
    return rows


def multi30k_facts() -> dict[str, Any]:
    """What chapter 7 says of Multi30k, computed from its files: about half a minute."""
    pairs = multi30k()
    texts = [text for pair in pairs["train"] for text in pair]
    test = pairs["test_2016_flickr"]
    bpe = {size: BPETokenizer.train(texts, size) for size in RECORDED_SIZES}
    train = encode_pairs(pairs["train"], bpe[8192])
    languages = ("German", "English")
    return {
        "pairs": {split: len(found) for split, found in pairs.items()},
        "ranks": word_ranks(german for german, _ in pairs["train"]),
        "unknown": unknown_words(pairs),
        "words": list(RECORDED_WORDS),
        "pieces": {str(v): [" ".join(t.pieces(w)) for w in RECORDED_WORDS] for v, t in bpe.items()},
        "tokens": {
            name: {
                str(v): round(tokens_per_sentence([pair[side] for pair in test], t), 3)
                for v, t in bpe.items()
            }
            for side, name in enumerate(languages)
        },
        "lengths": {
            "German": length_shares(len(e.src) for e in train),
            "English": length_shares(len(e.tgt) - 1 for e in train),
        },
        "padding": padding_table([(len(e.src), len(e.tgt)) for e in train], 4096),
    }


@dataclass
class CorpusOptions:
    """What is done with the facts."""

    save: bool = False
    """Keep them as results/multi30k-corpus.json, which the chapter shows."""


def record_multi30k(options: CorpusOptions) -> None:
    """Compute the facts, print how many pairs they are of, and save them if the options say so."""
    record = provenance(as_typed(__name__, options)) | multi30k_facts()
    if options.save:
        save_record(CORPUS_RECORD, record)
    print(", ".join(f"{split}: {count:,} pairs" for split, count in record["pairs"].items()))


def parse(argv: Sequence[str]) -> CorpusOptions:
    """The command line to its options. Raises ValueError for what makes no sense."""
    return read(__name__, CorpusOptions, argv, "The facts of Multi30k, from its files.")


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns the exit code."""
    return serve(parse, record_multi30k, argv)
