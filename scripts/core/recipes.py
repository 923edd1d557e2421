"""A recipe for your own pairs, chosen by how many there are, and one for fine-tuning a model."""

from typing import Any

from scripts.core.settings import NARROW

NARROW_RECIPE = NARROW | {"dropout": 0.3, "max_tokens": 1024, "warmup": 200}
# The fewest pairs a recipe is for, its settings, and why. results/sizes-multi30k.json has the runs;
# the recipe of 10,000 pairs lies between its neighbours, and wasn't measured.
RECIPES: list[tuple[int, dict[str, Any], str]] = [
    (
        0,
        NARROW_RECIPE | {"vocab": 2000, "epochs": 120},
        "few pairs: many passes over a narrow model with much dropout, as 1,000 pairs chose",
    ),
    (
        2000,
        NARROW_RECIPE | {"vocab": 4000, "epochs": 60},
        "some thousand pairs: as for 1,000, with more pieces and half the passes",
    ),
    (
        6000,
        {"vocab": 6000, "dropout": 0.3, "epochs": 25, "max_tokens": 1024, "warmup": 200},
        "ten thousand pairs: the wider model; not measured",
    ),
    (20000, {}, "the preset small, as on Multi30k"),
]
# Fine-tuning: half of the peak rate that the model was trained with, and a short warm-up.
TUNING = {"lr": 1e-3, "warmup": 20, "schedule": "cosine", "average": 0, "max_tokens": 1024}
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


def tuning_recipe(pairs: int) -> dict[str, Any]:
    """The settings for fine-tuning on so many training pairs: some hundred gentle steps."""
    return TUNING | {"epochs": min(20, max(3, 20_000 // max(pairs, 1)))}
