"""The numbers and the worth of every head, chapters 15 and 16: `python -m scripts.studies.heads`.

The numbers of each head over the validation split; how much less likely the references become,
under teacher forcing, without a head, with its mean in its place, and without a layer's heads; the
pruning curve on a test split; and IBM Model 1's links for our captions.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy.stats import ttest_1samp
from torch import Tensor
from tqdm import tqdm

from scripts import ch15_looking_inside as ch15
from scripts.ch07_multi30k import encode_pairs, make_batch
from scripts.ch08_decoding import until_end
from scripts.ch16_intervening import every_head, heads_silenced, reference_losses, said_by_heads
from scripts.core.models import Trained
from scripts.core.scores import held_out_splits
from scripts.corpora.captions import AlignedPair, aligned_pairs
from scripts.fast.searching import cached_greedy
from scripts.fast.translating import search_rows
from scripts.studies.subject import Corpus, Pairs, StudyOptions, Texts, encoded, subject_command

Head = tuple[str, int, int]  # its kind, its layer and its number, from 0

PRUNING_STEP = 9  # how many more heads are silenced at each point of the curve
RANDOM_ORDERS = 5
BATCH = 100  # sentences of similar length


def word_translation(
    pairs: Iterable[tuple[Texts, Texts]], rounds: int = 5
) -> dict[tuple[str, str], float]:
    """IBM Model 1 (Brown et al. 1993): p(English word | German word), learned from pairs alone.

    Every English word comes from one German word of its sentence, or from none (""), all positions
    being equally likely. `rounds` of expectation maximisation, from the uniform distribution.
    """
    rows = [(("", *german), english) for german, english in pairs]
    words = pd.DataFrame(rows, columns=["source", "target"]).explode("target", ignore_index=True)
    links = words.explode("source").astype("category").rename_axis("word").reset_index()
    links["p"] = 1.0
    for _ in range(rounds):
        links["share"] = links["p"] / links.groupby("word")["p"].transform("sum")  # expectation
        groups = (links.groupby(by, observed=True) for by in (["source", "target"], "source"))
        of_pair, of_source = (group["share"].transform("sum") for group in groups)
        links["p"] = of_pair / of_source  # maximisation
    return links.groupby(["source", "target"], observed=True)["p"].first().to_dict()


def split_words(text: str) -> list[str]:
    """Words and punctuation marks, lower-cased."""
    return re.findall(r"\w+|[^\w\s]", text.lower())


def model_1_links(pairs: Pairs, aligned: Sequence[AlignedPair]) -> list[str]:
    """For each of our captions a line "0-0 1-1 …": each English word linked to its best source.

    IBM Model 1 learns from `pairs` and our captions' texts; it never sees their links.
    """
    texts = [*pairs, *(pair.texts for pair in aligned)]
    p = word_translation((split_words(german), split_words(english)) for german, english in texts)
    lines = []
    for pair in aligned:
        german, english = ([word.lower() for word in side] for side in (pair.german, pair.english))
        weights = [[p.get((source, target), 0.0) for source in german] for target in english]
        links = ch15.best_links(torch.tensor(weights, dtype=torch.float64))
        lines.append(" ".join(f"{i}-{j}" for i, j in sorted(links, key=itemgetter(1))))
    return lines


class Judge:
    """How likely a model finds the references of some pairs, with any of its heads missing."""

    def __init__(self, trained: Trained, pairs: Pairs):
        examples = sorted(encode_pairs(pairs, trained.tokenizer), key=lambda e: len(e.tgt))
        starts = range(0, len(examples), BATCH)
        self.model = trained.model
        self.batches = [make_batch(examples[i : i + BATCH]).to(trained.device) for i in starts]
        self.layers = ch15.attention_layers(self.model)
        self.tokens = sum(batch.ntokens for batch in self.batches)
        self.whole = self.losses([])

    def means(self) -> dict[str, Tensor]:
        """What each head says on average over all real positions: kind to (N, H, d_k)."""
        outputs = [said_by_heads(self.model, batch) for batch in self.batches]
        return {k: torch.cat([x[k] for x in outputs], dim=1).mean(1) for k in self.layers}

    def losses(self, heads: Sequence[Head], instead: Sequence[Tensor] = ()) -> Tensor:
        """Each pair's loss in nats (n,) without some heads, or with constants in their places."""
        with heads_silenced([(self.layers[kind][n], h) for kind, n, h in heads], instead):
            return torch.cat([reference_losses(self.model, batch) for batch in self.batches])

    def cost(self, heads: Sequence[Head], instead: Sequence[Tensor] = ()) -> tuple[float, float]:
        """What is lost in nats a token, and the p of a t test over the pairs' losses."""
        change = (self.losses(heads, instead) - self.whole).double()
        p = float(ttest_1samp(change, 0).pvalue) if change.any() else 1.0
        return round(change.sum().item() / self.tokens, 5), float(f"{p:.3g}")


def worth_of_each(judge: Judge) -> list[dict[str, Any]]:
    """A row for each head: what is lost when it is silent, and when it says its mean."""
    means, rows = judge.means(), []
    for kind, n, h in tqdm(every_head(judge.model), desc="heads"):
        row = {"kind": kind, "layer": n + 1, "head": h + 1}
        for way, instead in (("silent", []), ("mean", [means[kind][n, h]])):
            row[way], row[f"{way} p"] = judge.cost([(kind, n, h)], instead)
        rows.append(row)
    return rows


def worth_of_layers(judge: Judge) -> list[dict[str, Any]]:
    """What is lost when all heads of a layer are silent."""
    groups = groupby(every_head(judge.model), itemgetter(0, 1))
    return [{"kind": k, "layer": n + 1, "silent": judge.cost([*g])[0]} for (k, n), g in groups]


def pruning_curve(judge: Judge, orders: Mapping[str, Sequence[Head]]) -> list[dict[str, Any]]:
    """What is lost with the first 0, 9, 18, … heads of each order silent."""
    return [
        {
            "order": name,
            "silent": count,
            "cross": sum(kind == "cross" for kind, _, _ in order[:count]),
            "nats": judge.cost(order[:count])[0],
        }
        for name, order in tqdm(orders.items(), desc="orders")
        for count in range(0, len(order) + 1, PRUNING_STEP)
    ]


def mean_numbers(looks: Sequence[ch15.Look]) -> dict[str, Tensor]:
    """Each kind's numbers (N, H, 5), averaged over sentences."""
    kinds = ch15.KINDS_OF_ATTENTION
    return {k: torch.stack([ch15.head_numbers(x, k) for x in looks]).mean(0) for k in kinds}


def looks_through(trained: Trained, pairs: Pairs) -> list[ch15.Look]:
    """What the model looks at while it translates the sources greedily."""
    rows, _ = encoded(trained, pairs)
    looks = []
    for row, ids in zip(rows, search_rows(trained.model, rows, cached_greedy), strict=True):
        src = torch.tensor([row], device=trained.device)  # (1, S)
        looks.append(ch15.look_through(trained, src, src.new_tensor([until_end(ids.tolist())])))
    return looks


def by_name(numbers: Tensor) -> dict[str, float]:
    """A head's numbers (5,) by their names, for the record."""
    return {k: round(v, 4) for k, v in zip(ch15.HEAD_NUMBERS, numbers.tolist(), strict=True)}


def inspect_model(trained: Trained, corpus: Corpus, options: StudyOptions) -> dict[str, Any]:
    """All that the record says about the heads."""
    splits = {n: corpus[n][: options.sentences] for n in ("val", held_out_splits(corpus)[0])}
    val, test = splits.values()
    looks = looks_through(trained, val)
    numbers, even = mean_numbers(looks), mean_numbers([ch15.even_look(look) for look in looks])
    judge, every = Judge(trained, val), every_head(trained.model)
    heads = worth_of_each(judge)
    by_worth = sorted(range(len(every)), key=lambda i: heads[i]["silent"])
    orders = {"least worth first": [every[i] for i in by_worth]}
    for seed in range(RANDOM_ORDERS):
        order = np.random.default_rng(seed).permutation(len(every))
        orders[f"random {seed + 1}"] = [every[i] for i in order]
    for (kind, number, head), row in zip(every, heads, strict=True):
        row |= by_name(numbers[kind][number, head])
    captions = aligned_pairs()
    return {
        "splits": {name: len(pairs) for name, pairs in splits.items()},
        "search": "greedy",
        "loss": round(judge.whole.sum().item() / judge.tokens, 5),
        "heads": heads,
        "even": {kind: by_name(numbers[0, 0]) for kind, numbers in even.items()},
        "layers": worth_of_layers(judge),
        "pruning": pruning_curve(Judge(trained, test), orders),
        "ibm_model_1": {
            "trained_on": len(corpus["train"]) + len(captions),
            "links": model_1_links(corpus["train"], captions),
        },
    }


main = subject_command("scripts.studies.heads", "heads", inspect_model)

if __name__ == "__main__":
    raise SystemExit(main())
