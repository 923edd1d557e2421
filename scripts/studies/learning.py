"""Learning from models, chapter 21's recipes: `python -m scripts.studies.learning --save true`.

It runs what is missing: the teacher's translations once, then for each seed every row, and the
reverse model where it is needed first. Whatever took time is kept with all that decided it, and is
used again only where that is the same: models, scores and written corpora alike.
"""

if __name__ == "__main__":  # first, so that Ctrl-C while libraries load is answered, too
    from scripts.book.command import launch

    raise SystemExit(launch("scripts.studies.learning"))

import copy
import itertools
import json
import random
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm

from scripts import ROOT, runs_folder
from scripts.book.command import GOES_ON, Command, as_typed
from scripts.book.files import writable, write_whole
from scripts.book.records import provenance, save_record, sha256
from scripts.ch01_attention import padding_mask
from scripts.ch03_embeddings_and_positions import MAX_LEN
from scripts.ch04_encoder_decoder import EncoderDecoder
from scripts.ch06_training import LabelSmoothing
from scripts.ch07_multi30k import Example, encode_pairs, make_batch, pad_rows
from scripts.ch12_going_fast import keep_memory
from scripts.ch19_ablations import StudyRow
from scripts.ch20_scaling import ONE_PASS, part_indices, part_of
from scripts.ch21_learning_from_models import (
    back_translated,
    chrf_risks,
    distilled,
    distinct_candidates,
    risk_of_candidates,
    sequence_log_probs,
    turned_around,
    word_facts,
)
from scripts.engine.checkpoints import load_tensors, load_weights, save_tensors, weights
from scripts.engine.data import TrainingData, epoch_plan, prepare
from scripts.engine.losses import loss_function_of
from scripts.engine.models import Trained, load_model
from scripts.engine.optimizers import make_optimizer
from scripts.engine.scores import corpus_bleu, corpus_chrf
from scripts.engine.settings import TrainConfig, build_model, pick_device
from scripts.engine.training import identity
from scripts.engine.translating import DecodeOptions, translate
from scripts.studies.rows import train_row, validation_loss
from scripts.studies.runner import Run

TuningLoss = Callable[[EncoderDecoder, Sequence[Example]], Tensor]  # of a model and some pairs


def kept_at(path: Path, given: Run, make: Callable[[], Run]) -> Run:
    """`given` and what `make()` gave with it, from `path`; where it isn't there, it's made now."""
    found = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    if not given.items() <= found.items():
        found = given | make()
        text = json.dumps(found, ensure_ascii=False)
        write_whole(writable(path.parent) / path.name, text.encode())
    return found


@dataclass
class RecipeOptions:
    """What the study of recipes runs."""

    corpus: Literal["sample", "multi30k"] = "multi30k"
    """What to learn from; its shipped model is the teacher."""
    seeds: int = 2
    """Runs of each row."""
    epochs: int = 2
    """Passes over all pairs; a part of them is passed over as many times more."""
    share: int = 4
    """Back-translation knows 1/share of the pairs, and only the English of the others."""
    teacher_beam: int = 1
    """Beam of the teacher's search; 1 is greedy decoding."""
    candidates: int = 8
    """Minimum risk: draws for each source."""
    with_reference: bool = True
    """Minimum risk: the reference is one of the candidates."""
    sharpness: float = 0.05
    """Minimum risk: the alpha of Q."""
    risk_steps: int = 200
    """Steps of fine-tuning, by either loss."""
    risk_sentences: int = 16
    """Sources in such a step."""
    risk_lr: float = 5e-4
    """Learning rate of its first step; it falls to zero along a line."""
    device: str = "cpu"
    """Where they run."""
    save: bool = False
    """Rewrite results/earlier-recipes-CORPUS.json after each run."""


ALL_PAIRS, ONE_PART, REVERSE = "all pairs", "a part", "reverse model"
GREEDY_BACK, SAMPLED_BACK = "a part, back-translated", "a part, back-translated by sampling"
TAUGHT, MORE_STEPS, MINIMUM_RISK = "teacher's translations", "more cross-entropy", "minimum risk"

# Each row, its recipe, and the row that it has to beat.
RECIPE_ROWS: dict[str, tuple[str, str | None]] = {
    ALL_PAIRS: ("base", None),
    ONE_PART: ("back-translation", ALL_PAIRS),
    GREEDY_BACK: ("back-translation", ONE_PART),
    SAMPLED_BACK: ("back-translation", ONE_PART),
    TAUGHT: ("distillation", ALL_PAIRS),
    MORE_STEPS: ("fine-tuning", ALL_PAIRS),
    MINIMUM_RISK: ("fine-tuning", MORE_STEPS),
}


# What of the options decides a run of these rows, besides what decides all.
TUNING = ("risk_steps", "risk_sentences", "risk_lr")
DRAWING = ("candidates", "with_reference", "sharpness")
DECIDES = {MORE_STEPS: TUNING, MINIMUM_RISK: TUNING + DRAWING}


def words_each(texts: Sequence[str]) -> float:
    """The mean number of words of a text."""
    return round(word_facts(texts)["words"] / len(texts), 3)


def minimum_risk(tokenizer: Any, options: RecipeOptions, seed: int) -> TuningLoss:
    """A loss for `fine_tuned`: the mean risk of freshly drawn candidates (Shen et al. 2016)."""
    device = pick_device(options.device)
    generator = torch.Generator(device).manual_seed(seed)

    def loss(model: EncoderDecoder, examples: Sequence[Example]) -> Tensor:
        src = pad_rows([e.src for e in examples]).to(device)  # (B, S)
        limit = min(MAX_LEN, src.size(1) + 10)
        references = [e.tgt[1:] for e in examples] if options.with_reference else None
        drawn = (options.candidates, limit, generator, references)
        candidates = distinct_candidates(model, src, *drawn)
        risks: list[float] = []
        for texts, example in zip(candidates, examples, strict=True):
            reference = tokenizer.decode(example.tgt)
            risks += chrf_risks([tokenizer.decode(ids) for ids in texts], reference)
        log_probs = sequence_log_probs(model, src, padding_mask(src), candidates)  # (N,)
        marks, counts = log_probs.new_tensor(risks), [len(texts) for texts in candidates]
        return risk_of_candidates(log_probs, marks, counts, options.sharpness).mean()

    return loss


def cross_entropy(config: TrainConfig) -> TuningLoss:
    """A loss for `fine_tuned`: the base's own, per token."""
    device = pick_device(config.device)
    loss_of, criterion = loss_function_of(config, device), LabelSmoothing(config.smoothing)

    def loss(model: EncoderDecoder, examples: Sequence[Example]) -> Tensor:
        batch = make_batch(examples).to(device)
        return loss_of(model, batch, criterion)[0] / batch.ntokens

    return loss


def fine_tuned(
    trained: Trained,
    train: Sequence[Example],
    loss_of: TuningLoss,
    options: RecipeOptions,
    seed: int,
) -> EncoderDecoder:
    """A copy of the model after `risk_steps` steps on `loss_of`; a seed decides the sentences."""
    model = copy.deepcopy(trained.model).eval()  # no dropout: Q is the model that is drawn from
    optimizer = make_optimizer(trained.config, model)
    total, size = options.risk_steps, options.risk_sentences
    scheduler = LambdaLR(optimizer, lambda done: options.risk_lr * (1 - done / total))
    order = list(range(len(train)))
    random.Random(f"risk:{seed}").shuffle(order)
    for step in range(total):
        chosen = [order[(step * size + i) % len(order)] for i in range(size)]
        optimizer.zero_grad(set_to_none=True)
        loss_of(model, [train[i] for i in chosen]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), trained.config.clip)
        optimizer.step()
        scheduler.step()
    return model


def short(run: Run) -> Run:
    """A run without what is long."""
    return {k: v for k, v in run.items() if k not in ("key", "translations", "texts")}


class RecipeStudy:
    """The runs of the study: each is made when it is first asked for, and then remembered."""

    def __init__(self, options: RecipeOptions):
        self.options, self.row = options, StudyRow("recipe")
        vocab = ONE_PASS.vocab if options.corpus == "multi30k" else 1000  # the sample has few words
        self.base = replace(ONE_PASS, corpus=options.corpus, vocab=vocab, device=options.device)
        self.data = prepare(self.base)
        self.facts = [word_facts(side) for side in zip(*self.data.corpus["train"], strict=True)]
        self.folder = runs_folder() / f"earlier-recipes-{options.corpus}"
        self.teacher = ROOT / "models" / f"{options.corpus}-de-en"
        self.teacher_key = {
            "model": self.teacher.name,
            "weights_sha256": sha256(self.teacher / "model.safetensors"),
            "beam": options.teacher_beam,
        }
        self.known = {*part_indices(len(self.data.train), options.share)}  # with both sides
        self.done: dict[tuple[str, int], Run] = {}

    def config(self, name: str, seed: int) -> TrainConfig:
        """The settings of a row: a part of the pairs is passed over as many times more."""
        passes = self.options.share if name in (ONE_PART, REVERSE) else 1
        return replace(self.base, seed=seed, epochs=passes * self.options.epochs)

    def key(self, name: str, seed: int) -> dict[str, Any]:
        """All that decides a run of a row."""
        key = identity(self.config(name, seed)) | {"recipe": name, "share": self.options.share}
        key |= {"teacher": self.teacher_key} if name == TAUGHT else {}
        return key | {field: getattr(self.options, field) for field in DECIDES.get(name, ())}

    def path(self, name: str, seed: int, ending: str = ".json") -> Path:
        """Where something of a row's run is kept: by what all depends on, passes and share."""
        slug = re.sub(r"[^a-z0-9]+", "-", name)
        folder = self.folder / f"{self.options.epochs}-{self.options.share}"
        return folder / f"{slug}-{seed}{ending}"

    # What models wrote

    def taught_texts(self) -> Run:
        """The teacher's translations of the training and validation sources, and their BLEU."""

        def make() -> Run:
            teacher = load_model(self.teacher, pick_device(self.options.device))
            how, found = DecodeOptions(beam=self.options.teacher_beam), {}
            for split in ("train", "val"):
                sources, references = zip(*self.data.corpus[split], strict=True)
                found[split] = translate(teacher, sources, how)
                found[f"{split}_bleu"] = round(corpus_bleu(found[split], references).score, 3)
            return found | {"facts": word_facts(found["train"])}

        return kept_at(self.folder / "teacher.json", {"key": self.teacher_key}, make)

    def back_texts(self, name: str, seed: int) -> Run:
        """The reverse model's sources for the targets without one, and what they are like."""

        def make() -> Run:
            how = DecodeOptions(beam=1, sample=name == SAMPLED_BACK, seed=seed)
            pairs = enumerate(self.data.corpus["train"])
            people, targets = zip(*(pair for i, pair in pairs if i not in self.known), strict=True)
            written = translate(self.trained(REVERSE, seed), targets, how)
            bleu = round(corpus_bleu(written, people).score, 3)
            return {"texts": written, "bleu": bleu, "facts": word_facts(written)}

        return kept_at(self.path(f"{name} sources", seed), {"key": self.key(name, seed)}, make)

    def data_of(self, name: str, seed: int) -> TrainingData:
        """What a row learns from."""
        if name == ONE_PART:
            return part_of(self.data, self.options.share)
        if name == REVERSE:
            return turned_around(part_of(self.data, self.options.share))
        if name in (GREEDY_BACK, SAMPLED_BACK):
            texts = self.back_texts(name, seed)["texts"]
            return back_translated(self.data, self.known, lambda _: texts)
        if name == TAUGHT:
            return distilled(self.data, lambda _: self.taught_texts()["train"])
        return self.data

    # Models and scores

    def trained(self, name: str, seed: int) -> Trained:
        """A row's model; trained first where that hasn't been done."""
        self.score(name, seed)
        config, path = self.config(name, seed), self.path(name, seed, ".safetensors")
        model = build_model(config, len(self.data.tokenizer))
        load_weights(model, load_tensors(path)[0], path)
        model = model.to(pick_device(config.device)).eval()
        return Trained(model, self.data.tokenizer, config)

    def make_model_of(self, name: str, seed: int) -> tuple[EncoderDecoder, Run]:
        """Train a row's model; it, and what is known of its training."""
        config, options = self.config(name, seed), self.options
        if name in DECIDES:
            loss_of = cross_entropy(config)
            if name == MINIMUM_RISK:
                loss_of = minimum_risk(self.data.tokenizer, options, seed)
            before, start = self.trained(ALL_PAIRS, seed), time.perf_counter()
            model = fine_tuned(before, self.data.train, loss_of, options, seed)
            found = {"steps": options.risk_steps}
        else:
            data, start = self.data_of(name, seed), time.perf_counter()
            model, losses, _ = train_row(self.row, config, data)
            steps = sum(len(epoch_plan(config, data, e)) for e in range(1, len(losses) + 1))
            found = {"steps": steps, "losses": [round(loss, 5) for loss in losses]}
        return model, found | {"seconds": round(time.perf_counter() - start)}

    def score(self, name: str, seed: int) -> Run:
        """A row's scores on the validation split; where that isn't done, the model is trained."""

        def make() -> Run:
            model, found = self.make_model_of(name, seed)
            found |= self.judge(name, Trained(model, self.data.tokenizer, self.config(name, seed)))
            path = self.path(name, seed, ".safetensors")
            save_tensors(writable(path.parent) / path.name, weights(model), {})
            tqdm.write(f"{name}, seed {seed}: BLEU {found['bleu']:.2f}, {found['seconds']} s")
            return found

        given = {"key": self.key(name, seed)}
        return {"seed": seed} | kept_at(self.path(name, seed), given, make)

    def judge(self, name: str, trained: Trained) -> Run:
        """Greedy translations of the validation split, scores, and the loss on both references."""
        data = turned_around(self.data) if name == REVERSE else self.data
        sources, references = zip(*data.corpus["val"], strict=True)
        texts = translate(trained, sources, DecodeOptions(beam=1))
        score = {"bleu": corpus_bleu(texts, references).score}
        score["chrf"] = corpus_chrf(texts, references).score
        score["loss"] = validation_loss(trained.model, self.row, trained.config, data)
        if name != REVERSE:
            pairs = list(zip(sources, self.taught_texts()["val"], strict=True))
            other = replace(data, val=encode_pairs(pairs, data.tokenizer))
            score["loss_teacher"] = validation_loss(trained.model, self.row, trained.config, other)
        return {k: round(v, 5) for k, v in score.items()} | {"translations": texts}

    def record(self) -> dict[str, Any]:
        """All that is done, with its provenance."""
        command = as_typed(__name__, self.options, always=("corpus",))
        taught, (sources, people) = self.taught_texts(), self.facts
        rows = {
            name: {"recipe": recipe, "against": against}
            | {"runs": [run for (row, _), run in self.done.items() if row == name]}
            for name, (recipe, against) in RECIPE_ROWS.items()
        }
        reverse: dict[str, list[Run]] = {"runs": [], GREEDY_BACK: [], SAMPLED_BACK: []}
        for name, seed in self.done:
            if name == GREEDY_BACK:
                reverse["runs"].append(short(self.score(REVERSE, seed)))
            if name in reverse:
                reverse[name].append(short(self.back_texts(name, seed)) | {"seed": seed})
        return provenance(command, pick_device(self.options.device)) | {
            "corpus": self.options.corpus,
            "train_pairs": len(self.data.train),
            "val_words": words_each([english for _, english in self.data.corpus["val"]]),
            "options": asdict(self.options),
            "config": asdict(self.config(ALL_PAIRS, 1)),
            "teacher": self.teacher_key | {k: taught[k] for k in ("train_bleu", "val_bleu")},
            "sources": sources,
            "targets": {"people": people, "teacher": taught["facts"]},
            "reverse": reverse,
            "rows": rows,
        }


def run_recipes(options: RecipeOptions) -> dict[str, Any]:
    """Run whatever is missing, row by row; the record, saved after each if the options say so."""
    if pick_device(options.device).type == "cpu":
        keep_memory()
    study, record = RecipeStudy(options), {}
    for seed, name in itertools.product(range(1, options.seeds + 1), RECIPE_ROWS):
        score = study.score(name, seed)
        study.done[name, seed] = short(score) | {"words": words_each(score["translations"])}
        record = study.record()
        if options.save:
            save_record(f"earlier-recipes-{options.corpus}", record)
    return record


main = Command(
    __name__,
    RecipeOptions,
    run_recipes,
    "Minimum risk, distillation and back-translation, each beside what it has to beat.",
    interrupted=GOES_ON,
)
