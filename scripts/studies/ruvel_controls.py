"""Chapter 26's controls, with three seeds: `python -m scripts.studies.ruvel_controls`.

Does the case's model overfit? Then fewer epochs would help on fresh sentences. Does another draw of
its honest split score as low? How often must fifty sentences stand among others, and what does
practice on the others give alone? Which rate would fine-tuning get from sentences that no score of
the chapter comes from? Is the ending of an object that comes first read at all?
"""

import re
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

from scripts.ch26_your_own_pair import (
    LEARNER,
    PAIRS,
    case_scores,
    exact,
    fitted,
    honest_split,
    random_split,
    ruvel_corpus,
    shares,
    translations,
    tuned,
)
from scripts.core.data import prepare
from scripts.core.models import Trained
from scripts.corpora.invented import ruvel_pairs
from scripts.studies.subject import record_command

SEEDS = (1, 2, 3)
EPOCHS = (8, 20, 40)  # of the case's training; the chapter takes 20
RATES = (1e-3, 4e-3)  # of fine-tuning; the chapter takes 2e-3
PASSES = {0: 7, 1: 7, 2: 7, 3: 6, 5: 6, 10: 5}  # by repeats of the fifty; each 246 to 273 steps


def another_draw(pairs: PAIRS, share: float, seed: int) -> tuple[PAIRS, PAIRS]:
    """The honest split, drawn by the next seed."""
    return honest_split(pairs, share, seed + 1)


def articles(trained: Trained, sources: list[str]) -> float:
    """The share of outputs with "a" or "an"."""
    outputs = translations(trained, [(source, "") for source in sources])
    return sum(bool(re.search(r"\ban?\b", output)) for output in outputs) / len(outputs)


def one_seed(seed: int) -> dict[str, Any]:
    """The controls with one seed: BLEU of the case, shares of the outputs of the rest."""
    data = prepare(LEARNER, ruvel_corpus())
    known, old, val = (data.corpus[name] for name in ("train", "test", "val"))
    negated, first = (ruvel_pairs(350, construction=name) for name in ("negation", "object first"))
    fifty, asked, unscored = negated[:50], negated[50:250], negated[250:]
    model = fitted(replace(LEARNER, seed=seed), data)
    repeated = {n: tuned(model, data, known + n * fifty, passes) for n, passes in PASSES.items()}
    rates = {lr: tuned(model, data, known + 10 * fifty, PASSES[10], lr) for lr in RATES}
    rates[2e-3] = repeated[10]
    moved = tuned(model, data, known + 10 * first[:50], PASSES[10])
    sources = [source for source, _ in first[50:250]]
    without = [re.sub(r"t[ae]\b", "", source, count=1) for source in sources]
    return {
        "seed": seed,
        "case": {n: case_scores(random_split, seed, epochs=n) for n in EPOCHS},
        "another draw": case_scores(another_draw, seed),
        "repeats": {n: shares(after, old, asked) for n, after in repeated.items()},
        "mixed, by rate": {lr: shares(rates[lr], val, unscored) for lr in sorted(rates)},
        "object first": {
            "exact": exact(moved, first[50:250]),
            "old": exact(moved, old),
            "articles": articles(model, sources),
            "articles without the ending": articles(model, without),
        },
    }


def controls() -> dict[str, Any]:
    """The controls of all seeds."""
    with ProcessPoolExecutor(len(SEEDS)) as pool:
        return {"runs": list(pool.map(one_seed, SEEDS))}


main = record_command("scripts.studies.ruvel_controls", "ruvel-controls", lambda _: controls())

if __name__ == "__main__":
    raise SystemExit(main())
