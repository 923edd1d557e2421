"""Chapter 26's experiments with eight seeds: `python -m scripts.studies.ruvel` (ten minutes).

Data and splits stay; the seed decides weights, dropout and the order of the batches.
"""

from dataclasses import replace
from typing import Any

from tqdm import tqdm

from scripts.book.figures.own_pair import BEFORE
from scripts.ch26_your_own_pair import (
    LEARNER,
    case_scores,
    exact,
    fitted,
    honest_split,
    random_split,
    ruvel_corpus,
    shares,
    translations,
    tuned,
    tunings,
)
from scripts.core.data import TrainingData, prepare
from scripts.corpora.invented import Pair, ruvel_pairs
from scripts.studies.subject import record_command

SEEDS = range(1, 9)


def one_seed(seed: int, data: TrainingData, new: list[Pair]) -> dict[str, Any]:
    """The scores of the chapter's models, and what they say of four new sentences."""
    fifty, negated, old = new[:50], new[50:], data.corpus["test"]
    first = ruvel_pairs(200, construction="object first")
    models = {BEFORE: fitted(replace(LEARNER, seed=seed), data)}
    for name, (pairs, epochs) in tunings(data, fifty).items():
        models[name] = tuned(models[BEFORE], data, pairs, epochs)
    shown = [negated[4], negated[2], first[0], first[1], old[0], old[2]]
    without = [(source.replace(" nok ", " "), target) for source, target in negated]
    both = (translations(models[BEFORE], pairs) for pairs in (negated, without))
    splits = {"at random": random_split, "honest": honest_split}
    return {
        "seed": seed,
        "tuned": {name: shares(model, old, negated) for name, model in models.items()},
        "object_first": {name: exact(model, first) for name, model in models.items()},
        "same_without_nok": sum(a == b for a, b in zip(*both, strict=True)) / len(negated),
        "outputs": {
            name: [
                {"source": source, "reference": reference, "output": output}
                for (source, reference), output in zip(
                    shown, translations(model, shown), strict=True
                )
            ]
            for name, model in models.items()
        },
        "case": {
            name: {test: round(score, 1) for test, score in case_scores(split, seed).items()}
            for name, split in splits.items()
        },
    }


def ruvel_with_seeds() -> dict[str, Any]:
    """Eight runs of the chapter; only the first keeps its translations."""
    data, new = prepare(LEARNER, ruvel_corpus()), ruvel_pairs(250, construction="negation")
    runs = [one_seed(seed, data, new) for seed in tqdm(SEEDS)]
    outputs = [run.pop("outputs") for run in runs]
    return {"runs": runs, "outputs": outputs[0]}


main = record_command("scripts.studies.ruvel", "ruvel", lambda _: ruvel_with_seeds())

if __name__ == "__main__":
    raise SystemExit(main())
