"""What chapter 7 says about Multi30k, from its files: `python -m scripts.studies.corpus`."""

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
    """Unknown words in test_2016_flickr by language and `min_freq`, and what they cost at least."""
    rows = []
    for side, language in enumerate(("de", "en")):
        cut = ch07.word_tokenizer(language)
        words = {name: [cut(pair[side]) for pair in part] for name, part in pairs.items()}
        test = words["test_2016_flickr"]
        for min_freq in (1, 2, 5):
            vocab = ch07.build_vocab(words["train"], min_freq)
            rate = ch07.unknown_rate(test, vocab)
            row = {"language": language, "min_freq": min_freq, "entries": len(vocab)}
            row |= {"unknown": round(rate, 5), "ceiling": round(ch07.ceiling(test, vocab), 2)}
            rows.append(row | {"formula": round(100 * (1 - rate) ** 2.5, 2)})
    return rows


def million_operations(v: str, lengths: Sequence[float]) -> float:
    """Of one forward pass of chapter 9's model over a pair of average lengths, with V = `v`."""
    model = make_model(int(v), int(v), N=3, d_model=256, d_ff=1024, h=8)
    src, tgt = (torch.ones(1, round(n) + 1, dtype=torch.long) for n in lengths)
    return round(count_flops(lambda: model.generator(model(src, tgt))) / 1e6, 1)


def multi30k_facts() -> dict[str, Any]:
    """What chapter 7 says about Multi30k, computed from its files in about half a minute."""
    pairs = multi30k()
    sides = zip(*pairs["test_2016_flickr"], strict=True)
    test = dict(zip(("German", "English"), sides, strict=True))
    both = [text for pair in pairs["train"] for text in pair]
    bpe = {str(size): ch07.BPETokenizer.train(both, size) for size in SIZES}
    largest = bpe[str(SIZES[-1])]
    tokens = {
        name: {v: round(mean(len(t.encode(text)) for text in texts), 3) for v, t in bpe.items()}
        for name, texts in test.items()
    }
    return {
        "pairs": {split: len(part) for split, part in pairs.items()},
        "captions": quoted_captions(pairs["train"]),
        "unknown": unknown_words(pairs),
        "tokens": tokens,
        "operations": {v: million_operations(v, [t[v] for t in tokens.values()]) for v in bpe},
        "padding": ch07.padding_table(ch07.encode_pairs(pairs["train"], largest), 2048),
    }


main = record_command("scripts.studies.corpus", "multi30k-corpus", lambda _: multi30k_facts())

if __name__ == "__main__":
    raise SystemExit(main())
