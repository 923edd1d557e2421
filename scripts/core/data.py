"""A corpus, encoded, and each epoch's batches, with BPE-dropout if asked.

An epoch's plan follows from the settings and its number alone, so that a resumed run gets the
same batches as one that was never interrupted.
"""

import bisect
import random
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import sentencepiece
import torch

from scripts.book.domains import in_domain, list_of_texts
from scripts.ch03_embeddings_and_positions import MAX_LEN
from scripts.ch06_training import BOS, EOS, Batch, grouped
from scripts.ch07_multi30k import (
    BPETokenizer,
    Example,
    encode_pairs,
    make_batch,
    token_batches,
)
from scripts.core.settings import TrainConfig
from scripts.core.static import FEW_SHAPES, static_batches, static_lengths
from scripts.corpora.load import Pairs, load_corpus
from scripts.corpora.plain import plain_text
from scripts.corpora.splits import BESIDE, is_corpus


@dataclass
class TrainingData:
    """A corpus, encoded: what a run reads."""

    corpus: dict[str, list[tuple[str, str]]]
    tokenizer: BPETokenizer
    train: list[Example]
    val: list[Example]


def learn_pieces(config: TrainConfig, pairs: Pairs, fewer: bool = False) -> BPETokenizer:
    """BPE of `config.vocab` pieces, learnt on these pairs; if they can't give so many and `fewer`
    is true, of as many as they can. Raises ValueError otherwise.
    """
    try:
        return BPETokenizer.train((line for pair in pairs for line in pair), config.vocab)
    except RuntimeError as error:  # SentencePiece's own
        why = str(error).rpartition("] ")[2].partition(" Increase")[0]
        if fewer and (most := re.search(r"<= (\d+)", why)):
            return learn_pieces(replace(config, vocab=int(most[1])), pairs)
        raise ValueError(f"--vocab {config.vocab} on {config.corpus}: {why}") from error


def prepare(
    config: TrainConfig,
    corpus: dict[str, Pairs] | None = None,
    tokenizer: BPETokenizer | None = None,
    fewer: bool = False,
) -> TrainingData:
    """Read the corpus, learn the BPE on its training split, and encode train and validation.

    Corpus and tokenizer are those that are given, if any are. Raises ValueError as `learn_pieces`.
    """
    corpus = corpus or load_corpus(config.corpus, config.languages)
    tokenizer = tokenizer or learn_pieces(config, corpus["train"], fewer)
    train, val = (encode_pairs(corpus[split], tokenizer) for split in ("train", "val"))
    return TrainingData(corpus, tokenizer, train, val)


def corpus_beside(folder: Path, config: TrainConfig) -> str:
    """What the model in `folder` learned from: the pairs beside it, else what its settings name."""
    return str(folder / BESIDE) if is_corpus(folder / BESIDE) else config.corpus


def epoch_plan(
    config: TrainConfig, data: TrainingData, epoch: int, world: int = 1
) -> list[list[list[int]]]:
    """An epoch's optimizer steps, each of `accumulate` × `world` batches of similar work.

    Raises ValueError if there are too few pairs for a step.
    """
    rng = random.Random(f"{config.seed}:{epoch}")
    if config.step in FEW_SHAPES:
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
        if len(largest) == 1:
            raise ValueError(f"too few pairs for {together} batches a step")
        half = len(largest) // 2
        for part in (largest[:half], largest[half:]):
            bisect.insort(batches, part, key=work)
    steps = list(grouped(batches, together))
    rng.shuffle(steps)
    return steps


def with_pairs(data: TrainingData, pairs: Sequence[tuple[str, str]]) -> TrainingData:
    """`data` with other training pairs, in their order, and everything else as it is."""
    pairs = list(pairs)
    train = encode_pairs(pairs, data.tokenizer)
    return replace(data, corpus=data.corpus | {"train": pairs}, train=train)


def batches_of(
    examples: Sequence[Example], plan: list[list[int]], device: torch.device
) -> Iterator[Batch]:
    """The planned batches, padded and moved to `device` one by one."""
    return (make_batch([examples[i] for i in indices]).to(device) for indices in plan)


def split_anew(
    texts: Sequence[str], tokenizer: BPETokenizer, p: float, seed: int
) -> list[list[int]]:
    """Texts to ids by BPE that skips merges at rate p (Provilkov et al. 2020), seeded."""
    texts, p = list_of_texts("texts", texts), in_domain("bpe_dropout", p)
    draw = partial(tokenizer.processor.encode, enable_sampling=True, alpha=p)
    sentencepiece.set_random_generator_seed(seed)  # a thread starts from it, so we take a new one
    with ThreadPoolExecutor(1) as pool:
        return list(pool.map(draw, map(plain_text, texts)))


def epoch_examples(config: TrainConfig, data: TrainingData, epoch: int) -> list[Example]:
    """The training split as this epoch sees it: with BPE-dropout, in different pieces each time."""
    if config.bpe_dropout == 0:
        return data.train
    seed = random.Random(f"pieces:{config.seed}:{epoch}").getrandbits(31)
    sides = list(zip(*data.corpus["train"], strict=True))
    texts = [text for side in sides for text in side]
    rows = split_anew(texts, data.tokenizer, config.bpe_dropout, seed)
    rows = [row[: MAX_LEN - 1] for row in rows]  # too many pieces are cut; eos still follows
    pairs = zip(rows[: len(sides[0])], rows[len(sides[0]) :], strict=True)
    return [Example([*src, EOS], [BOS, *tgt, EOS]) for src, tgt in pairs]
