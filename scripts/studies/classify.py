"""Encoders and bags of words classify number (chapter 18): `python -m scripts.studies.classify`.

A masked model learns from the German captions. Then encoders from scratch, encoders that begin with
its weights, and bags of words learn from few labels and from many. Each encoder has its own rate
for each number of labels, and stops when validation no longer improves; each bag has its best
penalty.

Three masked models are also asked without any label: do they expect plural verbs at the gap, or
singular ones? That they know the number would be refuted if they were right no more often than
"always singular", or than counts of the words beside such verbs in the same captions.
"""

import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from scripts.ch06_training import BOS, EOS, LabelSmoothing
from scripts.ch07_multi30k import BPETokenizer, Example, pad_rows, token_batches
from scripts.ch08_decoding import dropout_off
from scripts.ch17_small_gpt import Asked, OneStack
from scripts.ch18_one_stack import (
    NumberClassifier,
    asked_hidden,
    expected_number,
    fit_bag_of_words,
    share_right,
)
from scripts.ch19_ablations import STUDY
from scripts.core.settings import TrainConfig
from scripts.corpora.gaps import NUMBER, PLURAL, GapItem, german_gaps, spaced
from scripts.corpora.load import load_corpus
from scripts.studies.rows import fit_best, nats, outcome, trained_once
from scripts.studies.runner import SEEDS, Plan, Run, study_command
from scripts.studies.stacks import fast_stack_loss, one_stack

BASE = replace(
    STUDY, d_model=128, d_ff=256, vocab=4096, smoothing=0.0, dropout=0.1, lr=1e-3, name="classify"
)
MASKED = replace(BASE, epochs=24, max_tokens=1024, lr=2e-3)  # the model that fills gaps
BAG, SCRATCH, PRETRAINED = "bag of words", "from scratch", "pretrained"
ASKED, COUNTS = "masked model, asked", "counts of words"  # without labels
PENALTIES = (0.001, 0.01, 0.1, 1.0, 10.0)
LABELS = (100, 1000, 0)  # how many; 0: all
DRAWS = tuple(range(1, 9))  # seeds: which captions have a label, and the first weights
TOGETHER, ROUND, ROUNDS = 32, 2000, 12  # captions in a step, in a round; rounds at most
JUDGED = ("val", "test")


@dataclass(frozen=True)
class Gaps:
    """Captions, those with a gap, by split, and the tokenizer of all."""

    texts: Mapping[str, Sequence[str]]
    items: Mapping[str, Sequence[GapItem]]
    tokenizer: BPETokenizer


@cache
def gaps_of(corpus: str, vocab: int) -> Gaps:
    """The German captions of a corpus; each worker prepares them once."""
    pairs = load_corpus(corpus)
    texts = {name: [spaced(german) for german, _ in part] for name, part in pairs.items()}
    return Gaps(texts, german_gaps(pairs), BPETokenizer.train(texts["train"], vocab))


def shares(logits_of: Callable[[Sequence[GapItem]], Tensor], gaps: Gaps) -> Run:
    """The share classified correctly in each part that is judged."""
    parts = {name: gaps.items[name] for name in JUDGED}
    return {name: round(share_right(logits_of(part), part), 4) for name, part in parts.items()}


def masked_model(config: TrainConfig, gaps: Gaps) -> OneStack:
    """A stack that has learned to fill gaps; trained once, and kept."""
    vocab, encode = len(gaps.tokenizer), gaps.tokenizer.encode
    train, val = (
        [Example([], [BOS, *encode(text)[:250], EOS]) for text in gaps.texts[name]]
        for name in ("train", "val")
    )
    draw, fixed = torch.Generator().manual_seed(config.seed), torch.Generator().manual_seed(0)
    torch.manual_seed(config.seed)
    model = one_stack(config, vocab + 1)  # the pieces and the gap

    def ask(examples: Sequence[Example], generator: torch.Generator, part: Sequence[int]) -> Asked:
        return asked_hidden([examples[i].tgt for i in part], vocab, generator)

    def fill_gaps() -> OneStack:
        questions = [ask(val, fixed, part) for part in token_batches(val, 1024)]
        orders = [random.Random(f"{config.seed}:{epoch}") for epoch in range(config.epochs)]
        epochs = [token_batches(train, config.max_tokens, order) for order in orders]
        batch_of = partial(ask, train, draw)
        validate = partial(nats, model, questions, fast_stack_loss)
        fit_best(model, config, epochs, batch_of, validate, fast_stack_loss)
        return model

    return trained_once(f"masked-{config.corpus}-{config.seed}", model, config, fill_gaps)


# Without labels.


@torch.no_grad()
def asked_run(model: OneStack, gaps: Gaps) -> Run:
    """The masked model asked which verbs it expects at the gap: no head, no label."""
    forms = ([*map(gaps.tokenizer.encode, words)] for words in (NUMBER, PLURAL))
    verbs = [torch.tensor([ids[0] for ids in some if len(ids) == 1]) for some in forms]

    def logits(items: Sequence[GapItem]) -> Tensor:
        batches = parts(items, gaps.tokenizer)
        with dropout_off(model):
            return torch.cat([expected_number(model, batch.ids, *verbs) for batch in batches])

    return shares(logits, gaps)


def counts_run(gaps: Gaps) -> Run:
    """What stands in a caption with a plural verb, and with a singular one: naive Bayes by words.

    The number of each training caption is the rule's. Words alone, with half a count added: on
    validation pairs of neighbours did harm, and the gap's two neighbours hardly any good.
    """
    counts, seen = (Counter(), Counter()), [0, 0]  # singular, plural
    for item in gaps.items["train"]:
        seen[item.plural] += 1
        counts[item.plural].update({*item.before, *item.behind})

    def log_odds(count: Sequence[int]) -> float:
        shares = [(n + 0.5) / (of + 1) for n, of in zip(count, seen, strict=True)]
        return math.log(shares[1] / shares[0])

    def logits(items: Sequence[GapItem]) -> Tensor:
        prior = math.log(seen[1] / seen[0])
        words = ({*item.before, *item.behind} for item in items)
        return torch.tensor(
            [prior + sum(log_odds([n[w] for n in counts]) for w in some) for some in words]
        )

    return shares(logits, gaps)


# Classifiers.


class Labelled(NamedTuple):
    """Captions with a gap, and whether each is plural."""

    ids: Tensor  # (B, T)
    plural: Tensor  # (B,), 0 or 1
    ntokens: int  # B: what the loss is divided by


def labelled(items: Sequence[GapItem], tokenizer: BPETokenizer) -> Labelled:
    """A row each: `<s>`, the pieces before the gap, the gap (id V), those after it, `</s>`."""
    rows = []
    for item in items:
        before, behind = (tokenizer.encode(" ".join(part)) for part in (item.before, item.behind))
        rows.append([BOS, *before, len(tokenizer), *behind, EOS])
    plural = torch.tensor([float(item.plural) for item in items])
    return Labelled(pad_rows(rows), plural, len(items))


def number_loss(
    model: NumberClassifier, batch: Labelled, criterion: LabelSmoothing
) -> tuple[Tensor, Tensor]:
    """The sum of −ln p of the right answers, twice: nothing is smoothed."""
    logits = model(batch.ids)
    loss = F.binary_cross_entropy_with_logits(logits, batch.plural.to(logits), reduction="sum")
    return loss, loss


def parts(items: Sequence[GapItem], tokenizer: BPETokenizer) -> Iterable[Labelled]:
    """All items, 64 at a time."""
    return (labelled(items[i : i + 64], tokenizer) for i in range(0, len(items), 64))


def drawn(count: int, rng: random.Random) -> list[list[int]]:
    """A round: batches of all `count` items in random order, again and again if they are few."""
    times = max(1, ROUND // count)
    order = [i for _ in range(times) for i in rng.sample(range(count), count)]
    return [order[i : i + TOGETHER] for i in range(0, len(order), TOGETHER)]


def encoder_run(config: TrainConfig, gaps: Gaps, items: Sequence[GapItem], pretrained: bool) -> Run:
    """An encoder trained on labelled `items`, from the masked model's weights or from scratch."""
    gap, val = len(gaps.tokenizer), [*parts(gaps.items["val"], gaps.tokenizer)]
    torch.manual_seed(config.seed)
    masked = replace(MASKED, corpus=config.corpus)
    encoder = masked_model(masked, gaps) if pretrained else one_stack(config, gap + 1)
    torch.manual_seed(config.seed)
    model = NumberClassifier(encoder, gap)
    rounds = [drawn(len(items), random.Random(f"{config.seed}:{i}")) for i in range(ROUNDS)]
    config = replace(config, warmup=len(rounds[0]) * ROUNDS // 10)

    def batch_of(part: Sequence[int]) -> Labelled:
        return labelled([items[i] for i in part], gaps.tokenizer)

    def train() -> tuple[NumberClassifier, list[float], list[float]]:
        validate = partial(nats, model, val, number_loss)
        return model, *fit_best(model, config, rounds, batch_of, validate, number_loss)

    @torch.no_grad()
    def logits(some: Sequence[GapItem]) -> Tensor:
        with dropout_off(model):
            return torch.cat([model(part.ids) for part in parts(some, gaps.tokenizer)])

    return outcome(train, lambda model: shares(logits, gaps))


def bag_run(gaps: Gaps, items: Sequence[GapItem]) -> Run:
    """The bag of words on labelled `items` that does best on validation; and counts."""
    val = gaps.items["val"]
    bags = {penalty: fit_bag_of_words(items, penalty) for penalty in PENALTIES}
    best = max(bags, key=lambda penalty: share_right(bags[penalty](val), val))
    return shares(bags[best], gaps) | {
        "captions": {name: len(gaps.items[name]) for name in JUDGED},
        "labelled": len(items),
        "singular": sum(not item.plural for item in gaps.items["test"]),
    }


def plan_runs(plan: Plan) -> None:
    """Without labels; the bags; each encoder's sweeps, then the draws that count."""
    plan += [{"row": COUNTS, "seed": SEEDS[0]}]
    plan.seeds({"row": ASKED})
    plan += [{"row": BAG, "labels": n, "seed": seed} for n, seed in product(LABELS, DRAWS)]
    for row, labels in product((PRETRAINED, SCRATCH), LABELS):
        plan.seeds(plan.sweep({"row": row, "labels": labels}, BASE.lr), DRAWS)


def work(setting: Mapping[str, Any], task: Run) -> Run:
    """One run of the study."""
    gaps = gaps_of(setting["corpus"], setting["vocab"])
    if task["row"] == COUNTS:
        return counts_run(gaps)
    if task["row"] == ASKED:
        masked = replace(MASKED, corpus=setting["corpus"], seed=task["seed"])
        return asked_run(masked_model(masked, gaps), gaps)
    train = gaps.items["train"]
    items = random.Random(task["seed"]).sample(train, task["labels"] or len(train))
    if task["row"] == BAG:
        return bag_run(gaps, items)
    config = replace(TrainConfig(**setting), lr=task["lr"], seed=task["seed"])
    return encoder_run(config, gaps, items, task["row"] == PRETRAINED)


main = study_command("scripts.studies.classify", asdict(BASE), plan_runs, work)

if __name__ == "__main__":
    raise SystemExit(main())
