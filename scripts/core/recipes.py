"""A recipe for your own pairs, chosen by how many there are, and one for fine-tuning a model."""

from typing import Any

from scripts.core.settings import NARROW

NARROW_RECIPE = NARROW | {"dropout": 0.3, "max_tokens": 1024, "warmup": 200}
# The fewest pairs a recipe is for, its settings, and why. results/sizes-multi30k.json has the runs;
# with 10,000 pairs `small` was better than a recipe between the two, by 1.5 BLEU.
RECIPES: list[tuple[int, dict[str, Any], str]] = [
    (
        0,
        NARROW_RECIPE | {"vocab": 2000, "epochs": 120},
        "few pairs: many passes; a narrow model is as good, and three times as fast",
    ),
    (
        2000,
        NARROW_RECIPE | {"vocab": 4000, "epochs": 60},
        "some thousand pairs: a narrow model, 60 passes; a wide one is better, and thrice as slow",
    ),
    (6000, {}, "the preset small, as for all of Multi30k: with 10,000 pairs it won, too"),
]
# Fine-tuning: a short warm-up, and a tenth of the usual rate, chosen on Ruvel with one seed. Among
# old pairs a model forgets less, so there the rate is 4e-3. On sentences that no score comes from
# it got 43.5 to 60.5% of the negations right, 2e-3 18 to 20 and 1e-3 none, with 98 to 100% of the
# old ones (results/ruvel-rates.json, three seeds; none was higher): try your own by --valid.
TUNING = {"lr": 2e-4, "warmup": 20, "schedule": "cosine", "average": 0, "max_tokens": 1024}
TUNING |= {"optimizer": "adam", "accumulate": 1}


def recipe_for(pairs: int, letters: int = 0) -> dict[str, Any]:
    """The settings for so many training pairs, where they aren't the preset small's.

    Each of the `letters` that occur is a piece: scripts with thousands of them get more pieces.
    """
    settings = next(recipe for fewest, recipe, _ in reversed(RECIPES) if pairs >= fewest)
    vocab = settings.get("vocab", 8192)
    return settings | {"vocab": max(vocab, letters + vocab // 2)}


def reason_for(pairs: int) -> str:
    """Why `recipe_for` chooses as it does, in words."""
    return next(reason for fewest, _, reason in reversed(RECIPES) if pairs >= fewest)


def tuning_recipe(pairs: int, mixed: bool = False) -> dict[str, Any]:
    """The settings for fine-tuning on so many pairs, `mixed` with pairs that the model knows."""
    rate = {"lr": 4e-3} if mixed else {}
    return TUNING | rate | {"epochs": min(20, max(3, 20_000 // max(pairs, 1)))}
