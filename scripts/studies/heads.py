"""The numbers and the worth of every head, chapters 15 and 16: `python -m scripts.studies.heads`.

The numbers of each head over the validation split; and how much less likely the references become,
under teacher forcing, if a head is silent, has noise beside it, or says its mean; and if a group of
heads is changed together. And IBM Model 1's links for our captions.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import groupby, product
from operator import itemgetter
from typing import Any

import pandas as pd
import torch
from scipy.stats import ttest_1samp
from torch import Tensor, nn
from tqdm import tqdm

from scripts import ch15_looking_inside as ch15
from scripts.ch04_encoder_decoder import EncoderDecoder
from scripts.ch06_training import PAD
from scripts.ch07_multi30k import encode_pairs, make_batch
from scripts.ch08_decoding import dropout_off, until_end
from scripts.ch16_intervening import aligners, changed_losses, every_head, noise_beside, silence
from scripts.core.models import Trained
from scripts.corpora.captions import AlignedPair, aligned_pairs
from scripts.fast.searching import cached_greedy
from scripts.fast.translating import search_rows
from scripts.studies.subject import Corpus, Pairs, Texts, encoded, subject_command

Head = tuple[str, int, int]  # its kind, its layer and its number, from 0
Change = Callable[[Tensor, nn.Linear, list[int]], Tensor]  # as `heads_changed` wants it

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


def heads_by_kind(model: EncoderDecoder) -> dict[str, list[Head]]:
    """All heads, kind by kind."""
    return {kind: list(heads) for kind, heads in groupby(every_head(model), itemgetter(0))}


class Judge:
    """How likely a model finds the references of some pairs, with some of its heads changed."""

    def __init__(self, trained: Trained, pairs: Pairs):
        examples = sorted(encode_pairs(pairs, trained.tokenizer), key=lambda e: len(e.tgt))
        starts = range(0, len(examples), BATCH)
        self.model = trained.model
        self.batches = [make_batch(examples[i : i + BATCH]).to(trained.device) for i in starts]
        self.tokens = sum(batch.ntokens for batch in self.batches)
        with dropout_off(self.model), torch.no_grad():
            self.memories = [self.model.encode(b.src, b.src_mask) for b in self.batches]
        self.whole = self.losses([])
        self.means = self.mean_outputs()
        self.ways = {"silent": silence, "noise": noise_beside, "mean": self.mean_instead}

    def mean_outputs(self) -> dict[nn.Linear, Tensor]:
        """The mean input (D,) of each attention's output projection over all places but padding."""
        sums, places = defaultdict(float), Counter()

        def note(head_outputs: Tensor, output: nn.Linear, _: list[int], real: Tensor) -> Tensor:
            sums[output] = sums[output] + head_outputs[real].sum(0)
            places[output] += int(real.sum())
            return head_outputs

        for (kind, heads), batch in product(heads_by_kind(self.model).items(), self.batches):
            real = (batch.src if kind == "encoder" else batch.tgt_y) != PAD  # (B, T)
            changed_losses(self.model, batch, heads, partial(note, real=real))
        return {output: total / places[output] for output, total in sums.items()}

    def mean_instead(self, head_outputs: Tensor, output: nn.Linear, features: list[int]) -> Tensor:
        """The heads' means over the split, at each of their places (B, T, n · d_k)."""
        return self.means[output][features].expand_as(head_outputs)

    def losses(self, heads: Sequence[Head], change: Change = silence) -> Tensor:
        """Each pair's loss in nats (n,), while some heads are silent or changed otherwise."""
        moved = any(kind == "encoder" for kind, _, _ in heads)  # else the memories stay
        memories = [None] * len(self.batches) if moved else self.memories
        pairs = zip(self.batches, memories, strict=True)
        return torch.cat([changed_losses(self.model, b, heads, change, m) for b, m in pairs])

    def cost(self, heads: Sequence[Head], change: Change = silence) -> tuple[float, float]:
        """What is lost in nats a token, and the p of a t test over the pairs' losses."""
        difference = (self.losses(heads, change) - self.whole).double()
        p = float(ttest_1samp(difference, 0).pvalue) if difference.any() else 1.0
        return round(difference.sum().item() / self.tokens, 5), float(f"{p:.3g}")


def worth_of_each(judge: Judge) -> list[dict[str, Any]]:
    """A row for each head: what silence, noise and its mean cost."""
    rows = []
    for chosen in tqdm(every_head(judge.model), desc="heads"):
        kind, n, h = chosen
        row = {"kind": kind, "layer": n + 1, "head": h + 1}
        for way, change in judge.ways.items():
            row[way], row[f"{way} p"] = judge.cost([chosen], change)
        rows.append(row)
    return rows


def worth_of_groups(
    judge: Judge, groups: Mapping[str, Sequence[Head]], rows: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """What each group's heads cost together, and one by one: the sum of their `rows`."""
    alone = dict(zip(every_head(judge.model), rows, strict=True))
    costs = []
    for name, heads in groups.items():
        row = {"group": name, "heads": len(heads)}
        for way, change in judge.ways.items():
            row[f"{way}, one by one"] = round(sum(alone[head][way] for head in heads), 5)
            row[f"{way}, together"] = judge.cost(heads, change)[0]
        costs.append(row)
    return costs


def caption_aligners(trained: Trained) -> dict[str, list[Head]]:
    """The four heads of each layer of cross-attention that align our captions best, or worst."""
    captions = aligned_pairs()
    looks = [ch15.look_at(trained, *pair.texts) for pair in captions]
    pairs = zip(looks, captions, strict=True)
    words = [ch15.cross_word_weights(look, pair, "writing") for look, pair in pairs]
    return aligners(ch15.error_rates(captions, words))


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


def inspect_model(trained: Trained, corpus: Corpus) -> dict[str, Any]:
    """All that the record says about the heads."""
    val = corpus["val"]
    looks = looks_through(trained, val)
    numbers, even = mean_numbers(looks), mean_numbers([ch15.even_look(look) for look in looks])
    captions = aligned_pairs()
    torch.manual_seed(0)  # noise
    judge = Judge(trained, val)
    heads = worth_of_each(judge)
    groups = heads_by_kind(trained.model) | caption_aligners(trained)
    costs = worth_of_groups(judge, groups, heads)
    for (kind, number, head), row in zip(every_head(trained.model), heads, strict=True):
        row |= by_name(numbers[kind][number, head])
    return {
        "splits": {"val": len(val)},
        "search": "greedy",
        "loss": round(judge.whole.sum().item() / judge.tokens, 5),
        "heads": heads,
        "even": {kind: by_name(numbers[0, 0]) for kind, numbers in even.items()},
        "groups": costs,
        "ibm_model_1": {"links": model_1_links(corpus["train"], captions)},
    }


main = subject_command("scripts.studies.heads", "heads", inspect_model)

if __name__ == "__main__":
    raise SystemExit(main())
