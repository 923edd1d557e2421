"""Chapter 21's live students again: `python -m scripts.studies.word_targets --save`.

The targets that the chapter compares, with eight seeds; and at half and twice its learning rate
with the first. In float32, where a student takes a third of the time. Ten minutes of a thread.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

from torch import Tensor

from scripts import ROOT
from scripts.ch06_training import Batch
from scripts.ch21_learning_from_models import student_of, taught_batches
from scripts.core.models import Trained, load_model
from scripts.core.scores import corpus_bleu
from scripts.corpora.load import load_corpus
from scripts.fast.translating import DecodeOptions, translate
from scripts.studies.runner import Plan, Run, study_command

SETTING = {"corpus": "sample", "pairs": 500, "judged": 200}
ALL, EVEN, SHUFFLED, ONE = "all words", "even words", "shuffled words", "one word"
TARGETS = ((ALL, 2), (SHUFFLED, 2), (EVEN, 2), (ALL, 1), (EVEN, 1), (ONE, 1))
RATE, SEEDS = 0.006, range(1, 9)  # RATE is the chapter's


def plan_runs(plan: Plan) -> None:
    """Seed by seed, so that the rows can be compared early; then the other rates."""
    places = [{"targets": targets, "tau": tau} for targets, tau in TARGETS]
    plan += [place | {"lr": RATE, "seed": seed} for seed in SEEDS for place in places]
    rates = (RATE / 2, 2 * RATE)
    plan += [place | {"lr": rate, "seed": SEEDS[0]} for rate in rates for place in places]


@cache
def lessons(pairs: int) -> tuple[Trained, list[Batch], dict[tuple[str, int], Tensor]]:
    """The teacher, and what it has to teach, as in the chapter."""
    teacher = load_model(ROOT / "models" / "sample-de-en")
    return teacher, *taught_batches(teacher, load_corpus("sample")["train"][:pairs])


def taught(setting: Mapping[str, Any], task: Run) -> Run:
    """The BLEU of a student's greedy translations."""
    teacher, batches, targets = lessons(setting["pairs"])
    q = targets[task["targets"], task["tau"]]
    model = student_of(batches, q, task["tau"], task["seed"], task["lr"])
    sources, references = zip(*load_corpus("sample")["val"][: setting["judged"]], strict=True)
    student = Trained(model, teacher.tokenizer, teacher.config)
    texts = translate(student, sources, DecodeOptions(beam=1))
    return {"bleu": round(corpus_bleu(texts, references).score, 2)}


main = study_command("scripts.studies.word_targets", SETTING, plan_runs, taught)

if __name__ == "__main__":
    raise SystemExit(main())
