"""A small language model, and tables of counts (chapter 17): `python -m scripts.studies.gpt`.

For each dropout, short trainings sweep the rate. The best of all is used in three long ones, with
fresh seeds. The tables take minutes.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from torch import Tensor

from scripts import ch17_small_gpt as ch17
from scripts.ch01_attention import subsequent_mask
from scripts.ch06_training import Batch, LabelSmoothing
from scripts.ch07_multi30k import Example
from scripts.ch19_ablations import STUDY, StudyRow
from scripts.core.data import TrainingData
from scripts.core.models import Trained
from scripts.core.scores import held_out_splits
from scripts.core.settings import TrainConfig
from scripts.corpora.load import load_corpus
from scripts.fast.losses import LossOf
from scripts.studies.rows import one_run
from scripts.studies.runner import Plan, Run, study_command
from scripts.studies.stacks import fast_stack_loss, one_stack

LONGEST = 250  # characters; longer captions are cut
BASE = replace(
    STUDY,
    layers=4,
    d_model=128,
    d_ff=512,
    dropout=0.1,
    smoothing=0.0,
    epochs=8,
    optimizer="muon",  # Adam takes many more passes
    lr=1.6e-2,
    warmup=400,
    name="gpt",
)
SHORT = 2  # passes of the trainings that choose the rate
DROPOUTS = (0.0, 0.1, 0.2)
MODEL, COUNTS, PPM = "mini-GPT", "n-grams", "PPM"
ORDERS = range(1, 15)  # of the n-gram models
PPM_ORDERS = (4, 6, 8, 10, 12)
TEMPERATURES = (0.5, 0.8, 1.0, 1.5)


def texts_of(corpus: str) -> dict[str, list[str]]:
    """The English captions of training and of two held-out splits."""
    pairs = load_corpus(corpus)
    names = ("train", "val", held_out_splits(pairs)[0])
    return {name: [english[:LONGEST] for _, english in pairs[name]] for name in names}


@cache
def letters_of(corpus: str) -> tuple[TrainingData, dict[str, list[list[int]]]]:
    """What a character model reads: targets without a source; and each held-out split's rows."""
    texts = texts_of(corpus)
    characters = ch17.Characters(texts["train"])
    rows = {name: [*map(characters.encode, lines)] for name, lines in texts.items()}
    train, val = ([Example([], row) for row in rows[name]] for name in ("train", "val"))
    del rows["train"]
    return TrainingData({}, characters, train, val), rows


# Tables.


def counted(corpus: str) -> list[Run]:
    """Bits per character of n-gram models of each order, counted on the training captions."""
    data, held_out = letters_of(corpus)
    counts, table = ch17.gram_counts([example.tgt for example in data.train], max(ORDERS)), []
    for order in ORDERS:
        model = ch17.KneserNey(counts[:order], len(data.tokenizer))
        table.append({"order": order, "entries": sum(map(len, model.tables))})
        for name, rows in held_out.items():
            bits = ch17.bits_per_character([model.nats(row) for row in rows], rows)
            table[-1][name] = round(bits, 4)
    return table


def packed(corpus: str) -> list[Run]:
    """Bits per character of PPM (variant H): what captions add to a compressed training split."""
    import pyppmd

    def size(text: str, order: int) -> int:
        return len(pyppmd.compress(text.encode(), max_order=order, mem_size=2**28, variant="H"))

    lines = {name: "\n".join([*texts, ""]) for name, texts in texts_of(corpus).items()}
    train = lines.pop("train")
    return [
        {"order": order}
        | {
            name: round(8 * (size(train + text, order) - size(train, order)) / len(text), 4)
            for name, text in lines.items()
        }
        for order in PPM_ORDERS
    ]


# Models.


class LanguageRow(StudyRow):
    """One stack that is asked for the next character of a target."""

    def build(self, config: TrainConfig, vocab: int) -> ch17.OneStack:
        """The model over `vocab` characters, from the global seed."""
        return one_stack(config, vocab, positions="learned", max_len=LONGEST + 2)

    def loss_of(self, config: TrainConfig) -> LossOf:
        """Chapter 17's question about the targets of chapter 6's batch, by the fast path."""

        def loss(
            model: ch17.OneStack, batch: Batch, criterion: LabelSmoothing
        ) -> tuple[Tensor, Tensor]:
            asked = ch17.Asked(batch.tgt, batch.tgt_y, subsequent_mask(batch.tgt.size(1)))
            return fast_stack_loss(model, asked, criterion)

        return loss


def written(row: StudyRow, trained: Trained, data: TrainingData) -> Run:
    """Bits on held-out splits; and at each temperature three of 200 texts, and counts of all."""
    model, characters = trained.model, trained.tokenizer
    run: Run = {
        name: round(ch17.bits_per_character(ch17.row_nats(model, rows), rows), 4)
        for name, rows in letters_of(trained.config.corpus)[1].items()
    }
    run |= {"parameters": sum(p.numel() for p in model.parameters()), "samples": {}}
    known = {characters.decode(example.tgt) for example in data.train}
    for temperature in TEMPERATURES:
        drawn = ch17.sample_texts(model, 200, temperature, 1).tolist()
        texts = [characters.decode(ids) for ids in drawn]
        words = [word for text in texts for word in text.rstrip(".").lower().split()]
        run["samples"][f"{temperature:g}"] = {
            "texts": texts[:3],
            "copied": sum(text in known for text in texts),
            "words": len(words),
            "different words": len({*words}),
        }
    return run


def plan_runs(plan: Plan) -> None:
    """The tables, each dropout's rate, and then the best one's seeds."""
    plan += [{"row": COUNTS}, {"row": PPM}]
    short = {"row": MODEL, "epochs": SHORT}
    if best := plan.best([short | {"dropout": dropout} for dropout in DROPOUTS], BASE.lr):
        plan.seeds(best | {"epochs": BASE.epochs})


def work(setting: Mapping[str, Any], task: Run) -> Run:
    """One run of the study."""
    if task["row"] != MODEL:
        table = {COUNTS: counted, PPM: packed}[task["row"]]
        return {"orders": table(setting["corpus"])}
    data, _ = letters_of(setting["corpus"])
    return one_run(LanguageRow("gpt"), setting, task, written, data)


main = study_command("scripts.studies.gpt", BASE, plan_runs, work)

if __name__ == "__main__":
    raise SystemExit(main())
