"""Pairs that models write, and minimum risk (chapter 21): `python -m scripts.studies.recipes`.

Back-translation gets one pair in sixteen, and only the English of the others. Every row uses the
rate that a sweep found best for it; what counts is three fresh seeds. Models that others need are
kept in the folder of runs.

One row shows how far the loss falls beside sources that say nothing: `SHUFFLED` has the same
captions, each beside another's German, and the rate of the row of drawn German. Each model is also
asked for the loss beside another caption's German, and for how many different texts it writes.
"""

import copy
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from scripts import ROOT, runs_folder
from scripts import ch21_learning_from_models as ch21
from scripts.book.records import sha256
from scripts.ch01_attention import padding_mask, subsequent_mask
from scripts.ch03_embeddings_and_positions import MAX_LEN
from scripts.ch04_encoder_decoder import EncoderDecoder
from scripts.ch06_training import BOS, LabelSmoothing
from scripts.ch07_multi30k import Example, encode_pairs, make_batch, pad_rows
from scripts.ch08_decoding import until_end
from scripts.ch10_judging import tokens_13a
from scripts.ch19_ablations import STUDY, StudyRow
from scripts.core.data import TrainingData
from scripts.core.models import Trained, load_model
from scripts.core.optimizers import make_optimizer
from scripts.core.scores import corpus_bleu, corpus_chrf
from scripts.core.settings import TrainConfig
from scripts.fast.searching import cached_sample
from scripts.fast.translating import DecodeOptions, translate
from scripts.studies.lessons import distilled, turned_around
from scripts.studies.rows import (
    data_of,
    one_run,
    outcome,
    part_indices,
    part_of,
    train_row,
    trained_once,
    validation_loss,
)
from scripts.studies.runner import Plan, Run, kept_at, study_command

BASE = replace(STUDY, dropout=0.0, name="recipes")
SHARE, PASSES = 16, (8, 16, 32)  # one pair in so many has both sides; passes over these to try
TUNING_LR = 5e-4  # where the sweeps of fine-tuning begin; a rate falls linearly to zero
STEPS, SENTENCES = 200, 16  # of fine-tuning; source sentences in a step
CANDIDATES, SHARPNESS = 8, 0.05  # draws for each source; the α of Q
ALL, TAUGHT, PART, REVERSE = "all pairs", "teacher's translations", "a part", "reverse model"
SHORT = "a part, in 8 passes"  # all of its rate's decay comes before the part is known by heart
GREEDY, SAMPLED = "a part, back-translated", "a part, back-translated by sampling"
SHUFFLED = "a part, with shuffled German"
MORE, RISK = "more cross-entropy", "minimum risk"
ROW = StudyRow("recipe")

TuningLoss = Callable[[EncoderDecoder, Sequence[Example]], Tensor]  # of a model and some pairs


def config_of(setting: Mapping[str, Any], task: Run) -> TrainConfig:
    """The settings of a training."""
    epochs = max(PASSES) if task["row"] == REVERSE else setting["epochs"]
    return replace(TrainConfig(**setting), epochs=epochs, lr=task["lr"], seed=task["seed"])


# What models write.


@cache
def teacher_texts(corpus: str) -> Run:
    """What the shipped model makes of the sources of training and validation."""
    folder = ROOT / "models" / f"{corpus}-de-en"
    data = data_of(corpus, BASE.vocab).corpus

    def write() -> Run:
        teacher, written = load_model(folder), {}
        for split in ("train", "val"):
            sources = [source for source, _ in data[split]]
            written[split] = translate(teacher, sources, DecodeOptions(beam=1))
        return written

    key = {"model": folder.name, "weights_sha256": sha256(folder / "model.safetensors")}
    return kept_at(runs_folder() / f"teacher-{corpus}.json", {"key": key}, write)


def mean_words(texts: Sequence[str]) -> float:
    """How many words a text has, without punctuation."""
    words = [token for text in texts for token in tokens_13a(text) if any(map(str.isalnum, token))]
    return len(words) / len(texts)


def read_by(setting: Mapping[str, Any], task: Run) -> tuple[TrainingData, Run]:
    """What a row learns from; and what is known about the texts that a model wrote for it."""
    data, row = data_of(setting["corpus"], setting["vocab"]), task["row"]
    if row == TAUGHT:
        texts = teacher_texts(setting["corpus"])
        words = mean_words([target for _, target in data.corpus["val"]])
        facts = {"val_words": words, "teacher": texts["key"]}
        return distilled(data, lambda _: texts["train"]), facts
    if row in (GREEDY, SAMPLED, SHUFFLED):
        known = {*part_indices(len(data.train), SHARE)}
        unknown = [pair for i, pair in enumerate(data.corpus["train"]) if i not in known]
        people, targets = map(list, zip(*unknown, strict=True))
        seed = max(1, task["seed"])  # a sweep uses the first of the models that count
        if row == SHUFFLED:
            random.Random(f"shuffled:{seed}").shuffle(people)
            return ch21.back_translated(data, known, lambda _: people), {}
        reverse = kept_model(setting, REVERSE, task["reverse_lr"], seed)
        texts = translate(reverse, targets, DecodeOptions(beam=1, sample=row == SAMPLED, seed=seed))
        facts = {"back_bleu": round(corpus_bleu(texts, people).score, 2)}
        return ch21.back_translated(data, known, lambda _: texts), facts
    part = part_of(data, SHARE) if row in (PART, SHORT, REVERSE) else data
    return (turned_around(part) if row == REVERSE else part), {}


def kept_model(setting: Mapping[str, Any], row: str, lr: float, seed: int) -> Trained:
    """A model that others need; trained once, and kept."""
    task = {"row": row, "lr": lr, "seed": seed}
    config, (data, _) = config_of(setting, task), read_by(setting, task)
    name = f"{row}-{config.corpus}-{lr:g}-{seed}".replace(" ", "-")
    fresh = ROW.build(config, len(data.tokenizer))
    model = trained_once(name, fresh, config, lambda: train_row(ROW, config, data)[0])
    return Trained(model.eval(), data.tokenizer, config)


# Fine-tuning.


def sequence_log_probs(
    model: EncoderDecoder, src: Tensor, candidates: Sequence[Sequence[Sequence[int]]]
) -> Tensor:
    """log P of every candidate given its source, by teacher forcing: (N,), with its gradient.

    src (B, S); `candidates` holds for each source the ids of its texts, eos included where they
    end.
    """
    counts = torch.tensor([len(texts) for texts in candidates], device=src.device)  # (B,)
    owner = torch.arange(len(src), device=src.device).repeat_interleave(counts)  # (N,)
    rows = [list(text) for texts in candidates for text in texts]
    ids = pad_rows(rows).to(src.device)  # (N, T)
    lengths = torch.tensor([len(row) for row in rows], device=src.device)  # (N,)
    real = torch.arange(ids.size(1), device=src.device) < lengths.unsqueeze(1)  # (N, T)
    tgt = torch.cat((torch.full_like(ids[:, :1], BOS), ids[:, :-1]), dim=1)  # (N, T)
    src_mask = padding_mask(src)  # (B, 1, S)
    memory = model.encode(src, src_mask)[owner]  # (N, S, D): each source is encoded once
    # Padding comes last, so the causal mask hides it from all that counts.
    causal = subsequent_mask(tgt.size(1), src.device)
    x = model.decode(memory, src_mask[owner], tgt, causal)  # (N, T, D)
    log_probs = model.generator(x[real]).log_softmax(dim=-1)  # (M, V), of the M real tokens
    chosen = log_probs.gather(-1, ids[real].unsqueeze(-1)).squeeze(-1)  # (M,)
    return chosen.new_zeros(len(rows)).index_add(0, real.nonzero()[:, 0], chosen)


def distinct_candidates(
    model: EncoderDecoder,
    src: Tensor,
    count: int,
    max_len: int,
    generator: torch.Generator,
    references: Sequence[Sequence[int]] | None = None,
) -> list[list[tuple[int, ...]]]:
    """The different texts of `count` draws for each source of src (B, S); a reference comes first.

    Ids without bos, and with eos where a text ended within `max_len`. Drawn from the model as it
    is: temperature 1, without dropout.
    """
    wide = src.repeat_interleave(count, dim=0)  # (B·count, S)
    ids, _ = cached_sample(model, wide, padding_mask(wide), max_len, generator=generator)
    drawn = [tuple(until_end(row)) for row in ids.tolist()]
    found = [drawn[i : i + count] for i in range(0, len(drawn), count)]
    if references is not None:
        found = [[tuple(r), *texts] for r, texts in zip(references, found, strict=True)]
    return [list(dict.fromkeys(texts)) for texts in found]  # each once, in the order of appearance


def minimum_risk(trained: Trained, seed: int) -> TuningLoss:
    """A loss for `fine_tuned`: the mean risk of freshly drawn candidates (Shen et al. 2016)."""
    tokenizer, generator = trained.tokenizer, torch.Generator().manual_seed(seed)

    def loss(model: EncoderDecoder, examples: Sequence[Example]) -> Tensor:
        src = pad_rows([example.src for example in examples])  # (B, S)
        limit = min(MAX_LEN, src.size(1) + 10)
        references = [example.tgt[1:] for example in examples]
        candidates = distinct_candidates(model, src, CANDIDATES, limit, generator, references)
        risks: list[float] = []
        for texts, example in zip(candidates, examples, strict=True):
            reference = tokenizer.decode(example.tgt)
            risks += ch21.chrf_risks([tokenizer.decode(ids) for ids in texts], reference)
        log_probs = sequence_log_probs(model, src, candidates)  # (N,)
        counts = [len(texts) for texts in candidates]
        of_sources = ch21.risk_of_candidates(
            log_probs, log_probs.new_tensor(risks), counts, SHARPNESS
        )
        return of_sources.mean()

    return loss


def cross_entropy(config: TrainConfig) -> TuningLoss:
    """A loss for `fine_tuned`: the base's own, per token."""
    loss_of, criterion = ROW.loss_of(config), LabelSmoothing(config.smoothing)

    def loss(model: EncoderDecoder, examples: Sequence[Example]) -> Tensor:
        batch = make_batch(examples)
        return loss_of(model, batch, criterion)[0] / batch.ntokens

    return loss


def fine_tuned(
    trained: Trained, train: Sequence[Example], loss_of: TuningLoss, lr: float, seed: int
) -> EncoderDecoder:
    """A copy of the model after `STEPS` steps on `loss_of`; a seed decides the sentences."""
    model = copy.deepcopy(trained.model).eval()  # no dropout: Q is the model that is drawn from
    optimizer = make_optimizer(trained.config, model)
    scheduler = LambdaLR(optimizer, lambda done: lr * (1 - done / STEPS))
    order = list(range(len(train)))
    random.Random(f"risk:{seed}").shuffle(order)
    sentences = itertools.cycle(order)
    for _ in range(STEPS):
        optimizer.zero_grad(set_to_none=True)
        loss_of(model, [train[next(sentences)] for _ in range(SENTENCES)]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), trained.config.clip or math.inf)
        optimizer.step()
        scheduler.step()
    return model


# Scores.


def scored(row: StudyRow, trained: Trained, data: TrainingData) -> Run:
    """Scores of greedy translations of the validation split, their words, how many differ.

    And the loss of each caption beside another's source.
    """
    sources, references = zip(*data.corpus["val"], strict=True)
    texts = translate(trained, sources, DecodeOptions(beam=1))
    chrf = corpus_chrf(texts, references).score
    other = replace(data, val=ch21.beside_others(data.val))
    (commonest, times), *_ = Counter(texts).most_common()
    return {
        "other_loss": round(validation_loss(trained.model, row, trained.config, other), 5),
        "distinct": len({*texts}),
        "commonest": {"text": commonest, "times": times},
        "bleu": round(corpus_bleu(texts, references).score, 2),
        "chrf": round(chrf, 2),
        "risk": round(1 - chrf / 100, 4),
        "words": round(mean_words(texts), 2),
    }


def student_scored(row: StudyRow, trained: Trained, data: TrainingData) -> Run:
    """As `scored`; and the loss with the teacher's translations as references."""
    sources = [source for source, _ in data.corpus["val"]]
    pairs = list(zip(sources, teacher_texts(trained.config.corpus)["val"], strict=True))
    other = replace(data, val=encode_pairs(pairs, data.tokenizer))
    loss = validation_loss(trained.model, row, trained.config, other)
    return scored(row, trained, data) | {"loss_teacher": round(loss, 5)}


def tuned(setting: Mapping[str, Any], task: Run) -> Run:
    """A run of fine-tuning, by either loss, from the model of all pairs."""
    data, seed = data_of(setting["corpus"], setting["vocab"]), task["seed"]
    before = kept_model(setting, ALL, task["before_lr"], seed)
    minimum = minimum_risk(before, seed)
    loss_of = minimum if task["row"] == RISK else cross_entropy(before.config)

    def train() -> tuple[EncoderDecoder, list[float], list[float]]:
        model = fine_tuned(before, data.train, loss_of, task["lr"], seed)
        return model, [validation_loss(model, ROW, before.config, data)], []

    return outcome(train, lambda model: scored(ROW, replace(before, model=model), data))


# The study.


def plan_runs(plan: Plan) -> None:
    """What others need first, each row's sweep, then its seeds."""
    whole, reverse, taught = (plan.sweep({"row": row}, BASE.lr) for row in (ALL, REVERSE, TAUGHT))
    part = plan.best([{"row": PART, "epochs": passes} for passes in PASSES], BASE.lr)
    for place in (whole, reverse, taught, part):
        plan.seeds(place)
    short = plan.sweep({"row": PART, "epochs": PASSES[0]}, BASE.lr)
    plan.seeds(short and short | {"row": SHORT})
    for row in (GREEDY, SAMPLED) if reverse else ():
        swept = plan.sweep({"row": row, "reverse_lr": reverse["lr"]}, BASE.lr)
        plan.seeds(swept)
        if swept and row == SAMPLED:  # compared with this row, so at its rate
            plan.seeds({"row": SHUFFLED, "lr": swept["lr"]})
    for row in (MORE, RISK) if whole else ():  # each at the rate with the lowest risk
        plan.seeds(plan.sweep({"row": row, "before_lr": whole["lr"]}, TUNING_LR, by="risk"))


def work(setting: Mapping[str, Any], task: Run) -> Run:
    """One run of the study."""
    row = task["row"]
    if row in (MORE, RISK):
        return tuned(setting, task)
    data, facts = read_by(setting, task)
    score = student_scored if row in (ALL, TAUGHT) else scored
    return one_run(ROW, asdict(config_of(setting, task)), task, score, data) | facts


main = study_command("scripts.studies.recipes", asdict(BASE), plan_runs, work)

if __name__ == "__main__":
    raise SystemExit(main())
