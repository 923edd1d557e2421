"""Chapter 21's live students again: `python -m scripts.studies.word_targets --save`.

Each kind of targets at three rates with seed 0; then eight other seeds at the chapter's rate, and
at the best of the three if that is another. Ten minutes of a thread.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from scripts import ROOT
from scripts.ch06_training import Batch
from scripts.ch21_learning_from_models import lessons_of, student_of
from scripts.core.models import Trained, load_model
from scripts.core.scores import corpus_bleu
from scripts.corpora.load import load_corpus
from scripts.fast.translating import DecodeOptions, translate
from scripts.studies.runner import SWEEP, Plan, Run, study_command, these

SETTING = {"corpus": "sample", "pairs": 500, "judged": 200}
TARGETS = (("one word", 1), ("all words", 1), ("doubt alone", 2), ("all words", 2))
RATES, RATE, SEEDS = (0.003, 0.006, 0.012), 0.006, range(1, 9)  # RATE is the chapter's


def plan_runs(plan: Plan) -> None:
    """The sweep, and then the seeds that count."""
    places = [{"targets": targets, "tau": tau} for targets, tau in TARGETS]
    plan += [place | {"lr": rate, "seed": SWEEP} for place in places for rate in RATES]
    for place in places:
        swept = these(plan.runs, **place, seed=SWEEP)
        best = max(swept, key=lambda run: run["bleu"])["lr"] if len(swept) == len(RATES) else RATE
        for rate in dict.fromkeys((RATE, best)):
            plan.seeds(place | {"lr": rate}, SEEDS)


@cache
def lessons(pairs: int) -> tuple[Trained, list[Batch], dict[tuple[str, int], list[Tensor]]]:
    """The teacher, and what it has to teach, as in the chapter."""
    torch.set_default_dtype(torch.float64)
    teacher = load_model(ROOT / "models" / "sample-de-en")
    teacher.model.double()
    return teacher, *lessons_of(teacher, load_corpus("sample")["train"][:pairs])


def taught(setting: Mapping[str, Any], task: Run) -> Run:
    """The BLEU of a student's greedy translations."""
    teacher, batches, targets = lessons(setting["pairs"])
    of_task = targets[task["targets"], task["tau"]]
    model = student_of(batches, of_task, task["tau"], task["seed"], task["lr"])
    sources, references = zip(*load_corpus("sample")["val"][: setting["judged"]], strict=True)
    student = Trained(model, teacher.tokenizer, teacher.config)
    texts = translate(student, sources, DecodeOptions(beam=1))
    return {"bleu": round(corpus_bleu(texts, references).score, 2)}


main = study_command("scripts.studies.word_targets", SETTING, plan_runs, taught)

if __name__ == "__main__":
    raise SystemExit(main())
