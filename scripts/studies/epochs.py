"""Chapter 9's translator after each epoch: `python -m scripts.studies.epochs` (an hour).

The training of `models/multi30k-de-en` is repeated, and the weights of all epochs are kept. Each
translates the validation split. Now and then BLEU falls although both losses fall. Suspects: the
choice of captions (an interval), greedy search (a beam beside it), texts that repeat themselves
(cut where they begin to), and the steps just before. The epoch with the deepest fall is repeated,
with a look every few steps; then in other orders of its steps, each with three draws of dropout.
Last, the mean of the weights after an epoch's last steps translates, there and in other epochs. If
the fall is a jitter of the weights, such a mean hasn't fallen. What a repetition found is kept
beside the run, so that a study that was stopped goes on.
"""

import json
import random
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from scripts import runs_folder
from scripts.book.files import write_whole
from scripts.ch06_training import EOS, PAD
from scripts.ch07_multi30k import make_batch, token_batches
from scripts.ch08_decoding import dropout_off, until_end
from scripts.ch10_judging import paired_difference, sentence_parts
from scripts.ch12_going_fast import keep_memory
from scripts.core.checkpoints import STATE, load_tensors, load_weights, newest_state, saved_states
from scripts.core.data import TrainingData, prepare
from scripts.core.models import Trained, load_model
from scripts.core.scores import corpus_bleu
from scripts.core.settings import PRESETS
from scripts.core.training import Training
from scripts.fast.run import trained_to_end, training_of
from scripts.fast.translating import DecodeOptions, decode_ids
from scripts.studies.subject import encoded, record_command

CONFIG = replace(PRESETS["small"], name="epochs", device="cpu")
CONFIG = replace(CONFIG, average=CONFIG.epochs)  # it keeps the weights of as many
CAPTIONS = 10  # of test_2016_flickr, whose translations after each epoch are kept
SETTLED = 5  # from this epoch on a fall of BLEU counts as one
COPIES, LONGEST = 4, 12  # a loop: so many copies, one after the other, of at most so many pieces
RECENT = 10  # steps: as far back as Adam's mean of gradients remembers
BEFORE, BEYOND, EVERY = 60, 30, 5  # steps around the end of the epoch that is looked at
ORDERS = (1, 2)  # seeds that shuffle the steps which a control doesn't move
LAST, LONG = 20, 5  # of an epoch's last steps, those with long sentences that a control moves
DRAWS = (None, 1, 2)  # of dropout: the training's own, and two others
MEANS = (5, 10, 20, 40)  # of the weights after so many steps, an epoch's last
EXAMPLES = 5

Ids = Sequence[int]


def loop_in(ids: Ids) -> tuple[int, int] | None:
    """Where a text begins to repeat itself, and how many pieces it repeats; None if it doesn't."""
    ids = list(ids)
    for start in range(len(ids)):
        for period in range(1, LONGEST + 1):
            copies = ids[start : start + period] * COPIES
            if ids[start : start + len(copies)] == copies:
                return start, period
    return None


def cut_at_loop(ids: Ids) -> Ids:
    """The ids with one copy of what is repeated, and nothing after it."""
    loop = loop_in(ids)
    return ids if loop is None else ids[: sum(loop)]


def labels_each(data: TrainingData, step: Sequence[Sequence[int]]) -> float:
    """The mean number of labels of a sentence, `</s>` included, in one optimizer step."""
    labels = [len(data.train[i].tgt) - 1 for batch in step for i in batch]
    return sum(labels) / len(labels)


def translated(
    trained: Trained, data: TrainingData, split: str = "val", beam: int = 1
) -> list[Ids]:
    """The ids of a split's translations, up to their end."""
    rows, _ = encoded(trained, data.corpus[split])
    ids = decode_ids(trained, rows, DecodeOptions(beam=beam, alpha=0.6))
    return list(map(until_end, ids))


def texts(data: TrainingData, rows: Sequence[Ids]) -> list[str]:
    """Ids as texts."""
    return [data.tokenizer.decode(ids) for ids in rows]


def judged(data: TrainingData, rows: Sequence[Ids]) -> dict[str, float]:
    """BLEU of translations of the validation split, how long they are, and how many are loops."""
    references = [reference for _, reference in data.corpus["val"]]
    bleu = corpus_bleu(texts(data, rows), references)
    cut = corpus_bleu(texts(data, list(map(cut_at_loop, rows))), references)
    return {
        "bleu": round(bleu.score, 2),
        "length_ratio": round(bleu.sys_len / bleu.ref_len, 3),
        "loops": sum(loop_in(ids) is not None for ids in rows),
        "bleu_cut": round(cut.score, 2),
    }


@torch.no_grad()
def losses_by_label(trained: Trained, data: TrainingData) -> dict[str, float]:
    """The mean loss in nats at the labels `</s>` of the validation split, and at all others."""
    at_end, elsewhere = [], []
    with dropout_off(trained.model):
        for indices in token_batches(data.val, trained.config.max_tokens):
            batch = make_batch([data.val[i] for i in indices])
            x = trained.model(batch.src, batch.tgt, batch.src_mask, batch.tgt_mask)
            log_p = trained.model.generator(x).log_softmax(dim=-1)
            nll = -log_p.gather(-1, batch.tgt_y.unsqueeze(-1)).squeeze(-1)  # (B, T)
            at_end.append(nll[batch.tgt_y == EOS])
            elsewhere.append(nll[(batch.tgt_y != EOS) & (batch.tgt_y != PAD)])
    means = torch.cat(at_end).mean().item(), torch.cat(elsewhere).mean().item()
    return {"end_loss": round(means[0], 3), "other_loss": round(means[1], 3)}


def mean_of_last(weights: Collection[Tensor], steps: int) -> Tensor:
    """The mean of the weights (W,) after the last `steps` steps."""
    return torch.stack([*weights][-steps:]).mean(dim=0)


class KeepsStates(Training):
    """A training that keeps the state after each epoch."""

    def end_epoch(self, row: dict[str, float]) -> None:
        """As ever; and the state that was saved stays, under the epoch's number."""
        super().end_epoch(row)
        state = newest_state(self.folder).path
        write_whole(self.folder / f"after-{self.epoch - 1:03d}.safetensors", state.read_bytes())


class Epochs:
    """A training, and its model with the weights of any epoch."""

    def __init__(self, data: TrainingData):
        self.folder, self.data = runs_folder() / CONFIG.name, data
        resume = bool(saved_states(self.folder))
        self.training = trained_to_end(CONFIG, data, self.folder, resume, kind=KeepsStates)
        self.trained = load_model(self.folder)

    def after(self, epoch: int) -> Trained:
        """The model as it was after that epoch."""
        path = self.folder / f"epoch-{epoch:03d}.safetensors"
        load_weights(self.trained.model, load_tensors(path)[0], path)
        return self.trained

    def row(self, row: dict[str, float]) -> dict[str, float]:
        """One epoch: what training knew, what it read last, and what the translations are."""
        kept = ("epoch", "seconds", "train_loss", "val_loss", "val_bleu")
        lengths = [labels_each(self.data, step) for step in self.training.plan(row["epoch"])]
        sixes = (sum(lengths[i : i + 6]) / 6 for i in range(len(lengths) - 5))
        trained = self.after(row["epoch"])
        return {
            **{name: round(row[name], 4) for name in kept},
            "recent_length": round(sum(lengths[-RECENT:]) / RECENT, 2),
            "longest_six": round(max(sixes), 1),  # steps in a row: their sentences' mean length
            **judged(self.data, translated(trained, self.data)),
            **losses_by_label(trained, self.data),
        }

    def kept(self, name: str, replay: Callable[[], list[dict]]) -> list[dict[str, float]]:
        """What the replay of that name found, in an earlier run of the study or now."""
        path = self.folder / f"replay {name}.json"
        if not path.exists():
            write_whole(path, json.dumps(replay()).encode())
        return json.loads(path.read_text())

    def replay(
        self,
        epoch: int,
        looks: Sequence[int],
        dropout: int | None = None,
        order: Sequence[int] | None = None,
        means: Sequence[int] = (),
    ) -> list[dict[str, float]]:
        """Train again from that epoch's start, and judge after each number of steps in `looks`.

        `dropout` is a seed for other draws; `order` has the numbers of the epoch's steps, if they
        come in another one. `means` asks the last look for the BLEU of mean weights, too: those
        after the last 5 steps, 10 steps, and so on.
        """
        folder, data = self.folder / "replay", self.data
        folder.mkdir(exist_ok=True)
        for old in saved_states(folder):
            old.unlink()
        state = (self.folder / f"after-{epoch - 1:03d}.safetensors").read_bytes()
        write_whole(folder / STATE.format(0), state)
        training = training_of(CONFIG, data, folder, resume=True)
        if order is not None:
            plan = training.plan
            ordered = [plan(epoch)[number] for number in order]
            training.plan = lambda number: ordered if number == epoch else plan(number)
        if dropout is not None:
            torch.manual_seed(dropout)
        training.load()
        rows, lengths, weights = [], [], deque(maxlen=max(means, default=0))
        model = training.model
        for number in range(1, looks[-1] + 1):
            model.train()
            if training.done == len(training.steps):
                training.epoch, training.done = training.epoch + 1, 0
                training.load()
            lengths.append(labels_each(data, training.steps[training.done]))
            training.step()
            training.look()
            weights.append(nn.utils.parameters_to_vector(model.parameters()).detach())
            if number in looks:
                recent = lengths[-RECENT:]
                row = {"step": number, "recent_length": round(sum(recent) / len(recent), 2)}
                rows.append(row | judged(data, translated(training.trained, data)))
                print(rows[-1], flush=True)
        for steps in means:
            nn.utils.vector_to_parameters(mean_of_last(weights, steps), model.parameters())
            rows[-1] |= {
                f"mean of {steps}": judged(data, translated(training.trained, data))["bleu"]
            }
        return rows


def longest(data: TrainingData, steps: list, among: int) -> dict[int, float]:
    """Of the last `among` steps, the numbers of the `LONG` with the longest sentences, in order.

    Each number, from 0, comes with the mean number of labels of the step's sentences.
    """
    lengths = {n: labels_each(data, steps[n]) for n in range(len(steps))[-among:]}
    chosen = sorted(lengths, key=lengths.get)[-LONG:]
    return {number: lengths[number] for number in sorted(chosen)}


def moved(numbers: Sequence[int], chosen: Collection[int], place: int) -> list[int]:
    """The chosen numbers together at `place` among the others, which stay in their order."""
    others = [number for number in numbers if number not in chosen]
    return [*others[:place], *sorted(chosen), *others[place:]]


def orders_of(data: TrainingData, steps: list) -> dict[str, list[int]]:
    """The orders that an epoch is repeated in: the numbers of its steps, each of them once."""
    long, numbers = longest(data, steps, LAST), range(len(steps))
    after = range(max(long) + 1, len(steps))  # the steps that follow the long ones
    late, end = min(long), len(steps) - LONG - len(after)
    orders = {
        "as they came": [*numbers],
        "five others first": moved(numbers, range(late - LONG, late), 0),
        "long steps first": moved(numbers, long, 0),
    }
    before = range(late - len(after), late)
    swapped = moved(moved(numbers, after, before.start), before, len(steps))
    orders["others after the long steps"] = swapped
    for seed in ORDERS:
        order = random.Random(seed).sample(numbers, len(numbers))
        own_end = moved(order, after, len(steps))
        orders[f"order {seed}, long steps late, own end"] = moved(own_end, long, end)
    return orders


def fall_of(run: Epochs, rows: Sequence[dict[str, float]]) -> dict[str, Any]:
    """The deepest fall of BLEU from one epoch to the next, and what each suspect did to it."""
    data, pairs = run.data, run.data.corpus["val"]
    falls = {row["epoch"]: row["bleu"] - before["bleu"] for before, row in pairwise(rows)}
    epoch = min((e for e in falls if e >= SETTLED), key=falls.get)
    ids = {e: translated(run.after(e), data) for e in (epoch - 1, epoch)}
    before, after = (texts(data, of_epoch) for of_epoch in ids.values())
    chance = paired_difference(sentence_parts((before, after), [target for _, target in pairs]))
    beams = {e: judged(data, translated(run.after(e), data, beam=5)) for e in ids}
    plan = run.training.plan(epoch)
    steps, long = len(plan), longest(data, plan, LAST)
    near = range(steps - BEFORE, steps + BEYOND + 1, EVERY)

    def draws(name: str, order: Sequence[int]) -> list[dict[str, Any]]:
        looks = range(steps - 2 * EVERY, steps + 1, EVERY)  # a fall may come and go
        replays = {
            f"{epoch}, {name}, {draw}": partial(run.replay, epoch, looks, draw, order)
            for draw in DRAWS
        }
        found = [run.kept(*replay) for replay in replays.items()]
        return [end | {"earlier": earlier} for *earlier, end in found]

    grown = sorted(range(len(pairs)), key=lambda i: len(ids[epoch][i]) - len(ids[epoch - 1][i]))
    return {
        "epoch": epoch,
        "difference": {k: round(getattr(chance, k), 4) for k in ("difference", "low", "high", "p")},
        "by a beam of 5": beams,
        "step by step": run.kept(f"{epoch}, step by step", partial(run.replay, epoch, near)),
        "long_steps": {number + 1: round(length, 1) for number, length in long.items()},
        "controls": {n: draws(n, order) for n, order in orders_of(data, plan).items()},
        "examples": [
            {
                "source": pairs[i][0],
                "reference": pairs[i][1],
                "before": before[i],
                "after": after[i],
            }
            for i in grown[: -EXAMPLES - 1 : -1]
        ],
    }


def means_of(run: Epochs, epoch: int) -> list[dict[str, Any]]:
    """The last weights of an epoch beside means of its last ones, for each draw of dropout."""
    end = len(run.training.plan(epoch))
    return [
        run.kept(f"{epoch}, means, {draw}", partial(run.replay, epoch, [end], draw, means=MEANS))[0]
        for draw in DRAWS
    ]


def measure(_: Any) -> dict[str, Any]:
    """What each epoch translates, and the deepest fall."""
    keep_memory()
    data = prepare(CONFIG)
    run = Epochs(data)
    rows = [run.row(row) for row in run.training.history]
    split = "test_2016_flickr"
    by_epoch = {
        row["epoch"]: texts(data, translated(run.after(row["epoch"]), data, split)) for row in rows
    }
    captions = [
        {
            "source": source,
            "reference": reference,
            "after": {epoch: translations[i] for epoch, translations in by_epoch.items()},
        }
        for i, (source, reference) in enumerate(data.corpus[split][:CAPTIONS])
    ]
    fall = fall_of(run, rows)
    epochs = (fall["epoch"] - 1, fall["epoch"], fall["epoch"] + 1, CONFIG.epochs)
    means = {epoch: means_of(run, epoch) for epoch in epochs}
    return {"captions": captions, "epochs": rows, "fall": fall, "means": means}


main = record_command("scripts.studies.epochs", "epochs-multi30k", measure)

if __name__ == "__main__":
    raise SystemExit(main())
