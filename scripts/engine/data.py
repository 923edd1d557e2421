"""A corpus, encoded, and each epoch's batches, with BPE-dropout if asked.

An epoch's plan follows from the settings and its number alone, so that a resumed run meets the
batches of one that was never interrupted.
"""

import bisect
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from scripts.ch03_embeddings_and_positions import MAX_LEN
from scripts.ch06_training import BOS, EOS, UNK, Batch, grouped
from scripts.ch07_multi30k import BPETokenizer, Example, encode_pairs, make_batch, token_batches
from scripts.corpora.load import load_corpus
from scripts.engine.settings import TrainConfig
from scripts.engine.static import static_batches, static_lengths


@dataclass
class TrainingData:
    """A corpus, encoded: what a training reads."""

    corpus: dict[str, list[tuple[str, str]]]
    tokenizer: BPETokenizer
    train: list[Example]
    val: list[Example]


def prepare(config: TrainConfig) -> TrainingData:
    """Read the corpus, learn the BPE on its training split, and encode train and validation."""
    corpus = load_corpus(config.corpus)
    lines = (line for pair in corpus["train"] for line in pair)
    tokenizer = BPETokenizer.train(lines, config.vocab)
    train, val = (encode_pairs(corpus[split], tokenizer) for split in ("train", "val"))
    return TrainingData(corpus, tokenizer, train, val)


def epoch_plan(
    config: TrainConfig, data: TrainingData, epoch: int, world: int = 1
) -> list[list[list[int]]]:
    """An epoch's optimizer steps, each of `accumulate` × `world` batches, similar in their work."""
    rng = random.Random(f"{config.seed}:{epoch}")
    if config.step in ("static", "graphed"):
        batches = static_batches(data.train, static_lengths(data.train), config.max_tokens, rng)
    else:
        batches = token_batches(data.train, config.max_tokens, rng)
    together = config.accumulate * world
    if together == 1:
        return [[batch] for batch in batches]

    def work(batch: list[int]) -> int:
        return sum(len(data.train[i].src) + len(data.train[i].tgt) for i in batch)

    batches.sort(key=work)
    while len(batches) % together:  # the largest is halved until no step lacks a batch
        largest = batches.pop()
        half = len(largest) // 2
        for part in (largest[:half], largest[half:]):
            bisect.insort(batches, part, key=work)
    steps = list(grouped(batches, together))
    rng.shuffle(steps)
    return steps


def batches_of(
    examples: Sequence[Example], plan: list[list[int]], device: torch.device
) -> Iterator[Batch]:
    """The planned batches, padded and moved to `device` one by one."""
    return (make_batch([examples[i] for i in indices]).to(device) for indices in plan)


class MergeDropout:
    """BPE that skips merges at random (Provilkov et al. 2020, algorithm 1)."""

    def __init__(self, tokenizer: BPETokenizer):
        get = tokenizer.processor
        self.ids = {get.id_to_piece(i): i for i in range(len(tokenizer))}
        # SentencePiece scores a merged piece by the order in which it was learned, 0, −1, −2, …
        self.scores = {piece: get.get_score(i) for piece, i in self.ids.items()}

    def word(self, word: str, p: float, rng: random.Random) -> list[str]:
        """One word, its "▁" included, as pieces."""
        pieces = list(word)
        while True:
            best, at = -math.inf, -1
            for i in range(len(pieces) - 1):
                score = self.scores.get(pieces[i] + pieces[i + 1], -math.inf)
                if score > best and (p == 0 or rng.random() >= p):
                    best, at = score, i
            if at < 0:
                return pieces
            pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]

    def encode(self, pieces: Iterable[str], p: float, rng: random.Random) -> list[int]:
        """A sentence, given in any pieces, to ids without bos and eos."""
        words = "".join(pieces).replace("▁", " ▁").split(" ")[1:]
        return [self.ids.get(piece, UNK) for w in words for piece in self.word(w, p, rng)]


def epoch_examples(config: TrainConfig, data: TrainingData, epoch: int) -> list[Example]:
    """The training split as this epoch sees it: with BPE-dropout in other pieces than the last."""
    if config.bpe_dropout == 0:
        return data.train
    rng = random.Random(f"pieces:{config.seed}:{epoch}")
    dropout, cut = MergeDropout(data.tokenizer), data.tokenizer.pieces
    examples = []
    for pair in data.corpus["train"]:
        src, tgt = (dropout.encode(cut(text), config.bpe_dropout, rng) for text in pair)
        # A caption that falls into too many pieces keeps its end.
        examples.append(Example([*src[: MAX_LEN - 1], EOS], [BOS, *tgt[: MAX_LEN - 1], EOS]))
    return examples
