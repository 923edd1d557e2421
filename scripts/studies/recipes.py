"""Pairs that models write, and minimum risk (chapter 21): `python -m scripts.studies.recipes`.

Back-translation gets one pair in sixteen, and only the English of the others. Every row uses the
rate that a sweep found best for it; what counts is three fresh seeds. Runs on record aren't
repeated, so the work can be done in pieces; models that others need are kept in the folder of runs.
"""

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from scripts import ROOT, runs_folder
from scripts.book.domains import list_of_texts
from scripts.book.records import sha256
from scripts.ch04_encoder_decoder import EncoderDecoder
from scripts.ch07_multi30k import encode_pairs
from scripts.ch19_ablations import STUDY, StudyRow
from scripts.ch21_learning_from_models import back_translated, distilled, turned_around
from scripts.core.data import TrainingData
from scripts.core.models import Trained, load_model
from scripts.core.scores import corpus_bleu, corpus_chrf
from scripts.core.settings import TrainConfig
from scripts.fast.translating import DecodeOptions, translate
from scripts.studies.judging import plain_words
from scripts.studies.rows import (
    Wanted,
    data_of,
    found_by,
    one_run,
    part_indices,
    part_of,
    train_row,
    trained_once,
    validation_loss,
)
from scripts.studies.runner import Run, kept_at, study_command
from scripts.studies.tuning import Tuning, cross_entropy, fine_tuned, minimum_risk

BASE = replace(STUDY, dropout=0.0, name="recipes")
SHARE, PASSES = 16, (8, 16, 32)  # one pair in so many has both sides; passes over these to try
TUNING_LR = 5e-4  # where the sweeps of fine-tuning begin
ALL, TAUGHT, MORE, RISK = (
    "all pairs",
    "teacher's translations",
    "more cross-entropy",
    "minimum risk",
)
PART, GREEDY, SAMPLED = "a part", "a part, back-translated", "a part, back-translated by sampling"
REVERSE = "reverse model"
ROW = StudyRow("recipe")


def config_of(setting: Mapping[str, Any], row: str, lr: float, seed: int) -> TrainConfig:
    """The settings of a training."""
    epochs = max(PASSES) if row == REVERSE else setting["epochs"]
    return replace(TrainConfig(**setting), epochs=epochs, lr=lr, seed=seed)


# What models write.


@cache
def teacher_texts(corpus: str) -> Run:
    """What the shipped model makes of the sources of training and validation."""
    folder = ROOT / "models" / f"{corpus}-de-en"
    data = data_of(corpus, BASE.vocab).corpus

    def write() -> Run:
        teacher, found = load_model(folder), {}
        for split in ("train", "val"):
            sources, references = zip(*data[split], strict=True)
            found[split] = translate(teacher, sources, DecodeOptions(beam=1))
            found[f"{split}_bleu"] = round(corpus_bleu(found[split], references).score, 3)
        return found

    key = {"model": folder.name, "weights_sha256": sha256(folder / "model.safetensors")}
    return kept_at(runs_folder() / f"teacher-{corpus}.json", {"key": key}, write)


def reverse_texts(setting: Mapping[str, Any], wanted: Run) -> list[str]:
    """Sources that a reverse model writes for the targets without one, as the row asks."""
    seed = max(1, wanted["seed"])  # a sweep uses the first of the models that count
    model = kept_model(setting, REVERSE, wanted["reverse_lr"], seed)
    how = DecodeOptions(beam=1, sample=wanted["row"] == SAMPLED, seed=seed)
    pairs = data_of(setting["corpus"], setting["vocab"]).corpus["train"]
    known = {*part_indices(len(pairs), SHARE)}
    return translate(model, [target for i, (_, target) in enumerate(pairs) if i not in known], how)


def word_facts(texts: Sequence[str]) -> dict[str, float]:
    """How many words and different words, and the next word's entropy in nats, given the last."""
    texts = list_of_texts("texts", texts, some=True)
    lines = [["<s>", *plain_words(text), "</s>"] for text in texts]
    firsts = Counter(word for line in lines for word in line[:-1])
    neighbours = Counter(pair for line in lines for pair in itertools.pairwise(line))
    total = firsts.total()
    entropy = -sum(n * math.log(n / firsts[a]) for (a, _), n in neighbours.items()) / total
    return {"words": total - len(texts), "types": len(firsts) - 1, "entropy": round(entropy, 4)}


def read_by(setting: Mapping[str, Any], wanted: Run) -> tuple[TrainingData, Run]:
    """What a row learns from; and what is known about the texts that a model wrote for it."""
    data, row = data_of(setting["corpus"], setting["vocab"]), wanted["row"]
    if row == TAUGHT:
        texts = teacher_texts(setting["corpus"])
        people, judged = ([target for _, target in data.corpus[name]] for name in ("train", "val"))
        said = {"facts": word_facts(texts["train"]), "people": word_facts(people)}
        said |= {"val_words": word_facts(judged)["words"] / len(judged), "teacher": texts["key"]}
        said |= {key: texts[key] for key in ("train_bleu", "val_bleu")}
        return distilled(data, lambda _: texts["train"]), said
    if row in (GREEDY, SAMPLED):
        texts = reverse_texts(setting, wanted)
        known = {*part_indices(len(data.train), SHARE)}
        people = [s for i, (s, _) in enumerate(data.corpus["train"]) if i not in known]
        said = {"facts": word_facts(texts), "people": word_facts(people)}
        said["back_bleu"] = round(corpus_bleu(texts, people).score, 2)
        return back_translated(data, known, lambda _: texts), said
    part = part_of(data, SHARE) if row in (PART, REVERSE) else data
    return (turned_around(part) if row == REVERSE else part), {}


# Models and scores.


def kept_model(setting: Mapping[str, Any], row: str, lr: float, seed: int) -> Trained:
    """A model that others need; trained once, and kept."""
    config, wanted = config_of(setting, row, lr, seed), {"row": row, "seed": seed}
    data, _ = read_by(setting, wanted)
    model = ROW.build(config, len(data.tokenizer))

    def train_it(model: EncoderDecoder) -> None:
        model.load_state_dict(train_row(ROW, config, data)[0].state_dict())

    name = "-".join([row.replace(" ", "-"), setting["corpus"], f"{lr:g}", str(seed)])
    model = trained_once(name, model, config, train_it)
    return Trained(model.eval(), data.tokenizer, config)


def scored(row: StudyRow, trained: Trained, data: TrainingData) -> Run:
    """Scores of greedy translations of the validation split, and their words."""
    sources, references = zip(*data.corpus["val"], strict=True)
    texts = translate(trained, sources, DecodeOptions(beam=1))
    chrf = corpus_chrf(texts, references).score
    return {
        "bleu": round(corpus_bleu(texts, references).score, 2),
        "chrf": round(chrf, 2),
        "risk": round(1 - chrf / 100, 4),
        "words": round(word_facts(texts)["words"] / len(texts), 2),
    }


def student_scored(row: StudyRow, trained: Trained, data: TrainingData) -> Run:
    """As `scored`; and the loss with the teacher's translations as references."""
    sources = [source for source, _ in data.corpus["val"]]
    pairs = list(zip(sources, teacher_texts(trained.config.corpus)["val"], strict=True))
    other = replace(data, val=encode_pairs(pairs, data.tokenizer))
    loss = validation_loss(trained.model, row, trained.config, other)
    return scored(row, trained, data) | {"loss_teacher": round(loss, 5)}


def tuned(setting: Mapping[str, Any], wanted: Run) -> Run:
    """A run of fine-tuning, by either loss, from the model of all pairs."""
    data, seed = data_of(setting["corpus"], setting["vocab"]), wanted["seed"]
    before = kept_model(setting, ALL, wanted["before_lr"], seed)
    how = Tuning(lr=wanted["lr"])
    loss_of = cross_entropy(before.config)
    if wanted["row"] == RISK:
        loss_of = minimum_risk(before, how, seed)

    def train() -> tuple[EncoderDecoder, list[float], list[float]]:
        model = fine_tuned(before, data.train, loss_of, how, seed)
        return model, [validation_loss(model, ROW, before.config, data)], []

    return found_by(train, lambda model: scored(ROW, replace(before, model=model), data))


# The study.


def wanted_runs(runs: Sequence[Run]) -> list[Run]:
    """All that is wanted so far: what others need first, each row's sweep, then its seeds."""
    plan, rates = Wanted(runs), {}
    for row in (ALL, REVERSE, TAUGHT):
        rates[row] = plan.sweep(BASE.lr, row=row)
        plan.seeds(rates[row], row=row)
    if part := plan.best(BASE.lr, [{"row": PART, "epochs": passes} for passes in PASSES]):
        plan.seeds(part.pop("lr"), **part)
    if rates[REVERSE] is not None:
        for row in (GREEDY, SAMPLED):
            place = {"row": row, "reverse_lr": rates[REVERSE]}
            plan.seeds(plan.sweep(BASE.lr, **place), **place)
    if rates[ALL] is not None:
        for row in (MORE, RISK):  # each at the rate with the lowest risk
            place = {"row": row, "before_lr": rates[ALL]}
            plan.seeds(plan.sweep(TUNING_LR, by="risk", **place), **place)
    return plan.wanted


def work(setting: Mapping[str, Any], wanted: Run) -> Run:
    """One run of the study."""
    if wanted["row"] in (MORE, RISK):
        return tuned(setting, wanted)
    row = wanted["row"]
    data, said = read_by(setting, wanted)
    epochs = config_of(setting, row, wanted["lr"], 0).epochs
    score = student_scored if row in (ALL, TAUGHT) else scored
    return one_run(ROW, {**setting, "epochs": epochs}, wanted, score, data) | said


main = study_command("scripts.studies.recipes", BASE, wanted_runs, work)

if __name__ == "__main__":
    raise SystemExit(main())
