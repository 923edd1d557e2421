"""The recipe of the model that ships: `python -m scripts.studies.best` (10 hours of one thread).

It is to be read from top to bottom: each step names what it needs, and is skipped if it is on
record in the folder of runs. The same command goes on where it was stopped. `--only risk-long-3`
does one step, NAME-SEED, with what that needs. `models/ladder-all-mean-3` is what all-mean-3 makes.
"""

from dataclasses import dataclass

from scripts.book.command import GOES_ON, Command
from scripts.ch21_learning_from_models import turned_around
from scripts.core.models import STUDIED
from scripts.studies.lessons import Workshop
from scripts.studies.runner import one_thread, step_back

# From trained weights one goes on in smaller steps.
WIDENED = {"dropout": 0.3, "lr": 1e-3, "warmup": 200, "epochs": 2, "average": 2}
BY_RISK = {"risk": 150.0, "candidates": 8, "sharpness": 6.0, "lr": 2e-4, "warmup": 30}
BY_RISK |= {"epochs": 1, "average": 0, "max_tokens": 1024, "step": "eager", "precision": "float32"}


def small(shop: Workshop, seed: int = 1) -> str:
    """1. Chapter 9's model, from nothing: the small preset. It ships, so it is at hand."""
    if STUDIED.is_dir() and not shop.tiny:
        return STUDIED.name
    return shop.run(f"small-{seed}", {})


def reverse_onward(shop: Workshop, seed: int) -> str:
    """2. Two models that translate back, from the weights of the first, with fresh rates."""
    data, changes = turned_around(shop.data), {"epochs": 5, "average": 3}
    name, models = f"reverse-onward-{seed}", {"start": [small(shop)]}
    return shop.run(name, models, data, tests=False, **changes)


def widened(shop: Workshop, seed: int) -> str:
    """3. Two more epochs, on pairs in up to four wordings, which the three models write."""
    forward, reverse = [small(shop)], [reverse_onward(shop, 1), reverse_onward(shop, 2)]
    models = {"forward": forward, "reverse": reverse, "start": forward}
    return shop.run(f"widened-{seed}", models, shop.more_pairs(forward, reverse), **WIDENED)


def risk_long(shop: Workshop, seed: int) -> str:
    """4. Minimum risk on eight texts of the model's own beam, from chapter 9's weights."""
    return shop.run(f"risk-long-{seed}", {"start": [small(shop)]}, **BY_RISK)


def risk_again(shop: Workshop, seed: int) -> str:
    """5. The same once more, from where one of these ended."""
    return shop.run(f"risk-again-{seed}", {"start": [risk_long(shop, seed)]}, **BY_RISK)


def all_mean(shop: Workshop, seed: int) -> str:
    """6. The mean of five runs' weights; validation chooses its length penalty, as for each."""
    runs = [risk_long(shop, seed), risk_long(shop, seed + 1), risk_again(shop, seed)]
    runs += [widened(shop, seed), widened(shop, seed + 1)]
    return shop.run(f"all-mean-{seed}", {"mean_of": runs, "start": [small(shop)]})


RECIPE = (small, reverse_onward, widened, risk_long, risk_again, all_mean)
STEPS = {step.__name__.replace("_", "-"): step for step in RECIPE}


@dataclass
class BestOptions:
    """How much of it."""

    only: str = "all-mean-3"
    """The step to do, NAME-SEED, with what it needs."""
    tiny: bool = False
    """All of it at tiny size, on a few pairs of the sample corpus."""
    save: bool = False
    """Write each step's record to results/ladder-NAME-SEED.json, too."""

    def __post_init__(self):
        name, _, seed = self.only.rpartition("-")
        if name not in STEPS or not seed.isdecimal():
            raise ValueError(f"--only must be NAME-SEED with a name of {', '.join(STEPS)}")


def run_recipe(options: BestOptions) -> None:
    """Train the model that ships, from nothing, or the steps of it that are missing."""
    if not options.tiny:  # hours, beside other work
        step_back()
    one_thread()
    name, _, seed = options.only.rpartition("-")
    repeat = "python -m scripts.studies.best --only {name} --save"
    shop = Workshop(repeat, tiny=options.tiny, save=options.save)
    print(shop.folder(STEPS[name](shop, int(seed))))


main = Command("scripts.studies.best", BestOptions, run_recipe, interrupted=GOES_ON)

if __name__ == "__main__":
    raise SystemExit(main())
