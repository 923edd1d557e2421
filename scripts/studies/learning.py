"""Learning from models, chapter 21's recipes: `python -m scripts.studies.learning --save true`.

It runs what is missing: the teacher's translations once, then for each seed every row, and the
reverse model where it is needed first. Whatever took time is kept with all that decided it, and is
used again only where that is the same: models, scores and written corpora alike.
"""

if __name__ == "__main__":  # first, so that Ctrl-C while libraries load is answered, too
    from scripts.book.command import launch

    raise SystemExit(launch("scripts.studies.learning"))

import copy
import json
import random
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
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
from scripts.ch10_judging import paired_difference
from scripts.ch12_going_fast import keep_memory
from scripts.ch19_ablations import STUDY, StudyRow
from scripts.ch20_scaling import part_indices, part_of
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


def kept_at(path: Path, key: dict[str, Any], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `make()` gave when it was last asked with this key, from `path`; else it's asked now."""
    found = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    if found.get("key") != key:
        found = {"key": key} | make()
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
    """Rewrite results/recipes-CORPUS.json after each run."""


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


def words_each(texts: Sequence[str]) -> float:
    """The mean number of words of a text."""
    return round(word_facts(texts)["words"] / len(texts), 3)


class MinimumRisk:
    """A loss for `fine_tuned`: the mean risk of freshly drawn candidates (Shen et al. 2016)."""

    def __init__(self, tokenizer: Any, options: RecipeOptions, seed: int):
        self.tokenizer, self.options, self.seed = tokenizer, options, seed
        self.generator: torch.Generator | None = None  # made where the model is

    def __call__(self, model: EncoderDecoder, examples: Sequence[Example]) -> Tensor:
        """The loss of these pairs, with its gradient."""
        device = next(model.parameters()).device
        if self.generator is None:
            self.generator = torch.Generator(device).manual_seed(self.seed)
        src = pad_rows([e.src for e in examples]).to(device)  # (B, S)
        limit = min(MAX_LEN, src.size(1) + 10)
        references = [e.tgt[1:] for e in examples] if self.options.with_reference else None
        drawn = (self.options.candidates, limit, self.generator, references)
        candidates = distinct_candidates(model, src, *drawn)
        risks = [
            risk
            for texts, example in zip(candidates, examples, strict=True)
            for risk in chrf_risks(
                [self.tokenizer.decode(ids) for ids in texts], self.tokenizer.decode(example.tgt)
            )
        ]
        log_probs = sequence_log_probs(model, src, padding_mask(src), candidates)  # (N,)
        marks = log_probs.new_tensor(risks)  # (N,)
        counts = [len(texts) for texts in candidates]
        return risk_of_candidates(log_probs, marks, counts, self.options.sharpness).mean()


def cross_entropy(config: TrainConfig) -> Callable[[EncoderDecoder, Sequence[Example]], Tensor]:
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
    loss_of: Callable[[EncoderDecoder, Sequence[Example]], Tensor],
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


class RecipeStudy:
    """The runs of the study: each is made when it is first asked for, and then remembered."""

    def __init__(self, options: RecipeOptions):
        self.options, self.row = options, StudyRow("recipe")
        vocab = STUDY.vocab if options.corpus == "multi30k" else 1000  # the sample has few words
        self.base = replace(STUDY, corpus=options.corpus, vocab=vocab, device=options.device)
        self.data = prepare(self.base)
        self.folder = runs_folder() / f"recipes-{options.corpus}"  # and below it, what depends on
        self.slug = f"{options.epochs}-{options.share}"  # passes and share
        self.teacher_folder = ROOT / "models" / f"{options.corpus}-de-en"
        self.teacher_key = {
            "model": self.teacher_folder.name,
            "weights_sha256": sha256(self.teacher_folder / "model.safetensors"),
            "beam": options.teacher_beam,
        }
        self.known = {*part_indices(len(self.data.train), options.share)}  # with both sides
        self.done: dict[tuple[str, int], dict[str, Any]] = {}

    def config(self, name: str, seed: int) -> TrainConfig:
        """The settings of a row: a part of the pairs is passed over as many times more."""
        passes = self.options.share if name in (ONE_PART, REVERSE) else 1
        return replace(self.base, seed=seed, epochs=passes * self.options.epochs)

    def key(self, name: str, seed: int) -> dict[str, Any]:
        """All that decides a run of a row."""
        key = identity(self.config(name, seed)) | {"recipe": name, "share": self.options.share}
        if name == TAUGHT:
            key |= {"teacher": self.teacher_key}
        if name in (MORE_STEPS, MINIMUM_RISK):
            names = ("risk_steps", "risk_sentences", "risk_lr")
            if name == MINIMUM_RISK:
                names += ("candidates", "with_reference", "sharpness")
            key |= {field: getattr(self.options, field) for field in names}
        return key

    def path(self, name: str, seed: int) -> Path:
        """Where a row's run is kept, without its ending."""
        return self.folder / self.slug / (re.sub(r"[^a-z0-9]+", "-", name) + f"-{seed}")

    # What people wrote, and what models wrote

    @cached_property
    def facts(self) -> dict[str, dict[str, float]]:
        """The words of both sides of the training pairs."""
        sources, targets = zip(*self.data.corpus["train"], strict=True)
        return {"sources": word_facts(sources), "targets": word_facts(targets)}

    def taught_texts(self) -> dict[str, Any]:
        """The teacher's translations of the training and validation sources, and their BLEU."""

        def make() -> dict[str, Any]:
            teacher = load_model(self.teacher_folder, pick_device(self.options.device))
            how, found = DecodeOptions(beam=self.options.teacher_beam), {}
            for split in ("train", "val"):
                sources, references = zip(*self.data.corpus[split], strict=True)
                found[split] = translate(teacher, sources, how)
                found[f"{split}_bleu"] = round(corpus_bleu(found[split], references).score, 3)
            return found | {"facts": word_facts(found["train"])}

        return kept_at(self.folder / "teacher.json", self.teacher_key, make)

    def back_texts(self, name: str, seed: int) -> dict[str, Any]:
        """The reverse model's sources for the targets without one, and what they are like."""

        def make() -> dict[str, Any]:
            how = DecodeOptions(beam=1, sample=name == SAMPLED_BACK, seed=seed)
            pairs = enumerate(self.data.corpus["train"])
            people, targets = zip(*(pair for i, pair in pairs if i not in self.known), strict=True)
            written = translate(self.trained(REVERSE, seed), targets, how)
            bleu = round(corpus_bleu(written, people).score, 3)
            return {"texts": written, "bleu": bleu, "facts": word_facts(written)}

        return kept_at(
            self.path(f"{name} sources", seed).with_suffix(".json"), self.key(name, seed), make
        )

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
        config, path = self.config(name, seed), self.path(name, seed).with_suffix(".safetensors")
        model = build_model(config, len(self.data.tokenizer))
        load_weights(model, load_tensors(path)[0], path)
        model = model.to(pick_device(config.device)).eval()
        return Trained(model, self.data.tokenizer, config)

    def make_model_of(self, name: str, seed: int) -> tuple[EncoderDecoder, dict[str, Any]]:
        """Train a row's model; it, and what is known of its training."""
        config, options = self.config(name, seed), self.options
        if name in (MORE_STEPS, MINIMUM_RISK):
            loss_of = cross_entropy(config)
            if name == MINIMUM_RISK:
                loss_of = MinimumRisk(self.data.tokenizer, options, seed)
            before, start = self.trained(ALL_PAIRS, seed), time.perf_counter()
            model = fine_tuned(before, self.data.train, loss_of, options, seed)
            found = {"steps": options.risk_steps}
        else:
            data, start = self.data_of(name, seed), time.perf_counter()
            model, losses, _ = train_row(self.row, config, data)
            steps = sum(len(epoch_plan(config, data, e)) for e in range(1, len(losses) + 1))
            found = {"steps": steps, "losses": [round(loss, 5) for loss in losses]}
        return model, found | {"seconds": round(time.perf_counter() - start)}

    def score(self, name: str, seed: int) -> dict[str, Any]:
        """A row's scores on the validation split; where that isn't done, the model is trained."""

        def make() -> dict[str, Any]:
            model, found = self.make_model_of(name, seed)
            found |= self.judge(name, Trained(model, self.data.tokenizer, self.config(name, seed)))
            path = self.path(name, seed).with_suffix(".safetensors")
            save_tensors(writable(path.parent) / path.name, weights(model), {})
            tqdm.write(f"{name}, seed {seed}: BLEU {found['bleu']:.2f}, {found['seconds']} s")
            return found

        path = self.path(name, seed).with_suffix(".json")
        return {"seed": seed} | kept_at(path, self.key(name, seed), make)

    def judge(self, name: str, trained: Trained) -> dict[str, Any]:
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

    def chance(self, name: str, seed: int) -> float | None:
        """The p of a row's BLEU against the row that it has to beat: chapter 10's swaps."""
        against = RECIPE_ROWS[name][1]
        if against is None:
            return None
        both = [self.score(row, seed)["translations"] for row in (against, name)]
        given = {"key": [self.key(row, seed) for row in (against, name)]}
        references = [english for _, english in self.data.corpus["val"]]
        path = self.path(f"{name} chance", seed).with_suffix(".json")
        return kept_at(
            path, given, lambda: {"p": round(paired_difference(*both, references).p, 4)}
        )["p"]

    def record(self) -> dict[str, Any]:
        """All that is done, with its provenance."""
        command = as_typed(__name__, self.options, always=("corpus",))
        taught = self.taught_texts()
        seeds = sorted({seed for _, seed in self.done})
        hidden = ("key", "translations", "texts")
        rows = {
            name: {"recipe": recipe, "against": against}
            | {"runs": [self.done[name, seed] for seed in seeds if (name, seed) in self.done]}
            for name, (recipe, against) in RECIPE_ROWS.items()
        }
        reverse: dict[str, Any] = {"runs": []}
        for name in (GREEDY_BACK, SAMPLED_BACK):
            made = [seed for seed in seeds if (name, seed) in self.done]
            of_each = [self.back_texts(name, seed) | {"seed": seed} for seed in made]
            reverse[name] = [{k: v for k, v in one.items() if k not in hidden} for one in of_each]
            if name == GREEDY_BACK:
                runs = [self.score(REVERSE, seed) for seed in made]
                reverse["runs"] = [
                    {k: v for k, v in run.items() if k not in hidden} for run in runs
                ]
        return provenance(command, pick_device(self.options.device)) | {
            "corpus": self.options.corpus,
            "train_pairs": len(self.data.train),
            "val_words": words_each([english for _, english in self.data.corpus["val"]]),
            "options": asdict(self.options),
            "config": asdict(self.config(ALL_PAIRS, 1)),
            "teacher": self.teacher_key | {k: taught[k] for k in ("train_bleu", "val_bleu")},
            "sources": self.facts["sources"],
            "targets": {"people": self.facts["targets"], "teacher": taught["facts"]},
            "reverse": reverse,
            "rows": rows,
        }


def run_recipes(options: RecipeOptions) -> dict[str, Any]:
    """Run whatever is missing, row by row; the record, saved after each if the options say so."""
    if pick_device(options.device).type == "cpu":
        keep_memory()
    study, record = RecipeStudy(options), {}
    for seed in range(1, options.seeds + 1):
        for name in RECIPE_ROWS:
            score = study.score(name, seed) | {"p": study.chance(name, seed)}
            short = {k: v for k, v in score.items() if k not in ("key", "translations")}
            short["words"] = words_each(score["translations"])
            study.done[name, seed] = short
            record = study.record()
            if options.save:
                save_record(f"recipes-{options.corpus}", record)
    return record


main = Command(
    __name__,
    RecipeOptions,
    run_recipes,
    "Minimum risk, distillation and back-translation, each beside what it has to beat.",
    interrupted=GOES_ON,
)
