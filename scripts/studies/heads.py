"""The numbers and the worth of every head, chapters 15 and 16: `python -m scripts.studies.heads`.

The numbers of each head over the validation split, BLEU without each head and without each layer's
heads, the pruning curve on the test split, and IBM Model 1's links for our captions.
"""

if __name__ == "__main__":  # first, so that Ctrl-C while libraries load is answered, too
    from scripts.book.command import launch

    raise SystemExit(launch("scripts.studies.heads"))

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from scripts.book.command import Command
from scripts.ch08_decoding import until_end
from scripts.ch10_judging import paired_difference
from scripts.ch15_looking_inside import (
    HEAD_NUMBERS,
    KINDS_OF_ATTENTION,
    attention_layers,
    best_links,
    even_look,
    head_numbers,
    look_through,
)
from scripts.ch16_intervening import every_head, heads_silenced
from scripts.corpora.captions import AlignedPair, aligned_pairs
from scripts.engine.models import Trained
from scripts.engine.scores import corpus_bleu, held_out_splits
from scripts.engine.searching import cached_greedy
from scripts.engine.translating import DecodeOptions, decode_texts, search_rows
from scripts.studies.subject import Corpus, Pairs, Rows, StudyOptions, Texts, encoded, recorded

Head = tuple[str, int, int]  # its kind, its layer and its number, from 0

PRUNING_STEP = 9  # heads silenced more at each point of the curve
MANY_DRAWS = 10_000  # and as many swaps: with 72 tests, p has to be measured finely


def word_translation(
    pairs: Iterable[tuple[Texts, Texts]], rounds: int = 5
) -> dict[tuple[str, str], float]:
    """IBM Model 1 (Brown et al. 1993): p(English word | German word), learned from pairs alone.

    Every English word comes from one German word of its sentence, or from none (""), each position
    being as likely as the next. `rounds` of expectation maximisation, from the even distribution.
    """
    ids: dict[tuple[str, str], int] = {}
    cells, groups = [], []  # of each word pair of each sentence: its id, and whom it explains
    targets = ((german, target) for german, english in pairs for target in english)
    for group, (german, target) in enumerate(targets):
        cells += [ids.setdefault((source, target), len(ids)) for source in ("", *german)]
        groups += [group] * (len(german) + 1)
    last = {source: at for at, (source, _) in enumerate(ids)}  # a number for each German word
    cell, owner, source_of = map(np.array, (cells, groups, [last[source] for source, _ in ids]))
    p = np.ones(len(ids))
    for _ in range(rounds):
        shares = p[cell]  # expectation: who explains each English word
        shares /= np.bincount(owner, shares)[owner]
        counts = np.bincount(cell, shares, len(ids))  # maximisation
        p = counts / np.bincount(source_of, counts)[source_of]
    return dict(zip(ids, p.tolist(), strict=True))


def split_words(text: str) -> list[str]:
    """Words and punctuation marks, lower-cased."""
    return re.findall(r"\w+|[^\w\s]", text.lower())


def model_1_links(pairs: Pairs, ours: Sequence[AlignedPair]) -> list[str]:
    """For each of our captions "0-0 1-1 …": each English word's link to what explains it best.

    IBM Model 1 learns from `pairs` and our captions' texts; it never sees their links.
    """
    texts = [*pairs, *(pair.texts for pair in ours)]
    p = word_translation((split_words(german), split_words(english)) for german, english in texts)
    lines = []
    for pair in ours:
        german, english = ([word.lower() for word in side] for side in (pair.german, pair.english))
        weights = [[p.get((source, target), 0.0) for source in german] for target in english]
        links = best_links(torch.tensor(weights, dtype=torch.float64))
        lines.append(" ".join(f"{i}-{j}" for i, j in sorted(links, key=itemgetter(1))))
    return lines


def without_heads(trained: Trained, rows: Rows, heads: Iterable[Head]) -> list[str]:
    """Greedy translations of encoded sources while the named heads are silent."""
    layers = attention_layers(trained.model)
    with heads_silenced((layers[kind][number], head) for kind, number, head in heads):
        return decode_texts(trained, rows, DecodeOptions(beam=1))


def bleu(outputs: Texts, references: Texts) -> float:
    """Corpus BLEU for the record."""
    return round(corpus_bleu(outputs, references).score, 2)


def silence_each(trained: Trained, rows: Rows, references: Texts, whole: Texts) -> list[dict]:
    """BLEU without each head, compared with the `whole` model's outputs."""
    found = []
    for kind, number, head in tqdm(every_head(trained.model), desc="silenced"):
        outputs = without_heads(trained, rows, [(kind, number, head)])
        test = paired_difference(whole, outputs, references, MANY_DRAWS, MANY_DRAWS)
        row = {"kind": kind, "layer": number + 1, "head": head + 1}
        row["bleu"] = bleu(outputs, references)
        row |= {key: round(getattr(test, key), 4) for key in ("difference", "low", "high", "p")}
        found.append(row)
    return found


def silence_layers(trained: Trained, rows: Rows, references: Texts) -> list[dict]:
    """BLEU without all heads of each layer."""
    found = []
    for (kind, number), heads in groupby(every_head(trained.model), itemgetter(0, 1)):
        score = bleu(without_heads(trained, rows, heads), references)
        found.append({"kind": kind, "layer": number + 1, "bleu": score})
    return found


def numbers_on_record(trained: Trained, rows: Rows) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Each kind's numbers (N, H, 7) over greedy translations of `rows`, and even attention's."""
    found = search_rows(trained.model, rows, cached_greedy)
    looks = []
    for row, ids in zip(tqdm(rows, desc="maps"), found, strict=True):
        src = torch.tensor([row], device=trained.device)  # (1, S)
        wanted = src.new_tensor([until_end(ids.tolist())])  # (1, T)
        looks.append(look_through(trained, src, wanted))
    return tuple(
        {
            k: torch.stack([head_numbers(look, k) for look in some]).mean(0)
            for k in KINDS_OF_ATTENTION
        }
        for some in (looks, [even_look(look) for look in looks])
    )


def pruning_curve(
    trained: Trained, rows: Rows, references: Texts, orders: Mapping[str, Sequence[Head]]
) -> list[dict[str, Any]]:
    """BLEU with the first 0, 9, 18, … heads of each order silent."""
    points = []
    for name, order in orders.items():
        for count in range(0, len(order) + 1, PRUNING_STEP):
            score = bleu(without_heads(trained, rows, order[:count]), references)
            points.append({"order": name, "silent": count, "bleu": score})
    return points


def named(numbers: Tensor) -> dict[str, float]:
    """A head's numbers (7,) by their names, for the record."""
    return {k: round(v, 4) for k, v in zip(HEAD_NUMBERS, numbers.tolist(), strict=True)}


def inspect_model(trained: Trained, corpus: Corpus, options: StudyOptions) -> dict[str, Any]:
    """All that the record says about the heads, but where it came from."""
    splits = ("val", held_out_splits(corpus)[0])
    chosen = {name: corpus[name][: options.sentences] for name in splits}
    val, test = (encoded(trained, pairs) for pairs in chosen.values())
    numbers, even = numbers_on_record(trained, val[0])
    texts = without_heads(trained, val[0], ())
    whole = corpus_bleu(texts, val[1])
    every, heads = every_head(trained.model), silence_each(trained, *val, texts)
    by_worth = sorted(zip(every, heads, strict=True), key=lambda both: -both[1]["difference"])
    orders = {"least worth first": [head for head, _ in by_worth]}
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(len(every))
        orders[f"random {seed + 1}"] = [every[i] for i in order]
    for (kind, number, head), row in zip(every, heads, strict=True):
        row |= named(numbers[kind][number, head])
    pairs = aligned_pairs()
    return {
        "splits": {name: len(some) for name, some in chosen.items()},
        "search": "greedy",
        "bleu": round(whole.score, 2),
        "signature": whole.signature,
        "draws": MANY_DRAWS,
        "heads": heads,
        "even": {kind: named(numbers[0, 0]) for kind, numbers in even.items()},
        "layers": silence_layers(trained, *val),
        "pruning": pruning_curve(trained, *test, orders),
        "ibm_model_1": {
            "trained_on": len(corpus["train"]) + len(pairs),
            "links": model_1_links(corpus["train"], pairs),
        },
    }


def run_inspect(options: StudyOptions) -> None:
    """Make the record, save it if the options say so, and print which head is dearest."""
    record = recorded(__name__, "heads", options, inspect_model)
    worst = min(record["heads"], key=itemgetter("difference"))
    print(f"BLEU {record['bleu']:.2f} with all heads ({record['signature']})")
    place = f"{worst['kind']} {worst['layer']}.{worst['head']}"
    print(f"dearest head: {place}, {worst['difference']:+.2f} BLEU without it")


main = Command(__name__, StudyOptions, run_inspect, "Look into every head of a model (minutes).")
