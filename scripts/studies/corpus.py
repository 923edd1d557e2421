"""What chapter 7 says about Multi30k, from its files: `python -m scripts.studies.corpus`."""

from collections import Counter
from collections.abc import Sequence
from statistics import mean
from typing import Any

import torch

from scripts import ch07_multi30k as ch07
from scripts.book.instruments import count_flops
from scripts.ch04_encoder_decoder import make_model
from scripts.corpora.multi30k import multi30k
from scripts.studies.subject import record_command

SIZES = (1024, 2048, 4096, 8192)  # of the vocabulary
EVERY = 2900  # a caption from each tenth of the training split
PICKED = (1691, 5070, 5120, 12678, 15574, 16498, 16663, 25222)  # something is wrong with them


def quoted_captions(train: list[tuple[str, str]]) -> list[list[int | str]]:
    """Twenty pairs, each after its line (from 0): every 2,900th, shortest, longest, `PICKED`."""
    by_length = sorted(range(len(train)), key=lambda i: (len(train[i][1]), i))
    lines = (*range(0, len(train), EVERY), by_length[0], by_length[-1], *PICKED)
    return [[i, *train[i]] for i in lines]


def unknown_words(pairs: dict[str, list[tuple[str, str]]]) -> list[dict[str, Any]]:
    """Words of val that training lacks, by language and `min_freq`, and the BLEU that is left.

    A leaky vocabulary has seen training, validation and test, as the Annotated Transformer's.
    """
    rows = []
    for side, language in enumerate(("de", "en")):
        cut = ch07.word_tokenizer(language)
        train, val, test = ([cut(p[side]) for p in pairs[name]] for name in (*pairs,)[:3])
        for min_freq in (1, 2, 5, 20):
            vocab = ch07.build_vocab(train, min_freq)
            leaky = ch07.build_vocab(train + val + test, min_freq)
            rate = ch07.unknown_rate(val, vocab)
            row = {"language": language, "min_freq": min_freq, "unknown %": 100 * rate}
            row |= {"leaky %": 100 * ch07.unknown_rate(val, leaky)}
            row |= {"BLEU marked": ch07.bleu_without(val, vocab, "<unk>")}
            row |= {"left out": ch07.bleu_without(val, vocab, "")}
            row |= {"formula": 100 * (1 - rate) ** 2.5}
            rows.append({k: round(v, 2) if isinstance(v, float) else v for k, v in row.items()})
    return rows


def million_operations(v: int, lengths: Sequence[tuple[int, ...]]) -> float:
    """Of chapter 9's model with V = `v`: the mean of one forward pass over pairs of `lengths`."""
    model = make_model(v, v, N=3, d_model=256, d_ff=1024, h=8)
    total = 0
    for sizes, times in Counter(lengths).items():
        src, tgt = (torch.ones(1, size + 1, dtype=torch.long) for size in sizes)
        total += times * count_flops(lambda: model.generator(model(src, tgt)))  # noqa: B023
    return round(total / len(lengths) / 1e6, 1)


def multi30k_facts() -> dict[str, Any]:
    """What chapter 7 says about Multi30k, computed from its files in two minutes."""
    pairs = multi30k()
    both = [text for pair in pairs["train"] for text in pair]
    bpe = {size: ch07.BPETokenizer.train(both, size) for size in SIZES}
    lengths = {
        v: [tuple(len(t.encode(text)) for text in pair) for pair in pairs["val"]]
        for v, t in bpe.items()
    }
    tokens = {
        name: {str(v): round(mean(row[side] for row in rows), 3) for v, rows in lengths.items()}
        for side, name in enumerate(("German", "English"))
    }
    train = ch07.encode_pairs(pairs["train"], bpe[SIZES[-1]])
    return {
        "pairs": {split: len(part) for split, part in pairs.items()},
        "captions": quoted_captions(pairs["train"]),
        "unknown": unknown_words(pairs),
        "tokens": tokens,
        "operations": {str(v): million_operations(v, rows) for v, rows in lengths.items()},
        "longest": max(len(side) for e in train for side in (e.src, e.tgt)),
        "padding": ch07.padding_table(train, 2048),
    }


main = record_command("scripts.studies.corpus", "multi30k-corpus", lambda _: multi30k_facts())

if __name__ == "__main__":
    raise SystemExit(main())
