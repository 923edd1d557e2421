"""Chapter 26's controls, with three seeds: `python -m scripts.studies.ruvel_controls`.

Does the case's model overfit? Then fewer epochs would help on fresh sentences. Do fifty sentences
teach anything when each comes once a pass? And which rate would fine-tuning get from sentences that
no score of the chapter comes from?
"""

from dataclasses import replace
from typing import Any

from tqdm import tqdm

from scripts.ch26_your_own_pair import (
    LEARNER,
    case_scores,
    exact,
    fitted,
    random_split,
    ruvel_corpus,
    tunings,
)
from scripts.core.data import prepare, with_pairs
from scripts.corpora.invented import ruvel_pairs
from scripts.studies.subject import record_command

SEEDS = (1, 2, 3)
EPOCHS = (8, 20, 40)  # of the case's training; the chapter takes 20
RATES = (5e-4, 1e-3, 2e-3, 4e-3)  # of fine-tuning; the chapter takes 2e-3
ONCE = 6  # passes through 1,750 pairs: about as many steps as the chapter's


def one_seed(seed: int) -> dict[str, Any]:
    """The controls with one seed: BLEU of the case, shares that are exactly right of the rest."""
    data = prepare(LEARNER, ruvel_corpus())
    negated = ruvel_pairs(350, construction="negation")
    fifty, asked, others = negated[:50], negated[50:250], negated[250:]  # the last: in no score
    start = fitted(replace(LEARNER, seed=seed), data)

    def shares(pairs: list, epochs: int, lr: float, old: str, new: list) -> dict[str, float]:
        config = replace(start.config, lr=lr, warmup=10, epochs=epochs)
        after = fitted(config, with_pairs(data, pairs), start)
        return {"old": exact(after, data.corpus[old]), "negated": exact(after, new)}

    mixed, epochs = tunings(data, fifty)["mixed"]
    known = data.corpus["train"]
    return {
        "seed": seed,
        "case": {n: case_scores(random_split, seed, epochs=n) for n in EPOCHS},
        "once": shares(known + fifty, ONCE, 2e-3, "test", asked),
        "mixed, by rate": {lr: shares(mixed, epochs, lr, "val", others) for lr in RATES},
    }


def controls() -> dict[str, Any]:
    """The controls of all seeds."""
    return {"runs": [one_seed(seed) for seed in tqdm(SEEDS)]}


main = record_command("scripts.studies.ruvel_controls", "ruvel-controls", lambda _: controls())

if __name__ == "__main__":
    raise SystemExit(main())
