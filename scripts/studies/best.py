"""The recipe of the model that ships: `python -m scripts.studies.best` (10 hours of one thread).

It is to be read from top to bottom: each step names what it needs, and is skipped if it is on
record in the folder of runs. The same command goes on where it was stopped. `--only risk-long-3`
does one step, NAME-SEED, with what that needs. `models/ladder-all-mean-3` is what all-mean-3 makes.
"""

from dataclasses import dataclass

from scripts.book.command import GOES_ON, Command
from scripts.core.models import STUDIED
from scripts.studies.lessons import Workshop, turned_around
from scripts.studies.runner import one_thread, step_back

FIRST = STUDIED.name  # chapter 9's model: `python -m scripts.train --preset small` makes it

# From trained weights one goes on in smaller steps.
WIDENED = {"dropout": 0.3, "lr": 1e-3, "warmup": 200, "epochs": 2, "average": 2}
BY_RISK = {"risk": 150.0, "lr": 2e-4, "warmup": 30, "epochs": 1, "average": 0, "max_tokens": 1024}
BY_RISK |= {"step": "eager", "precision": "float32"}


def reverse_onward(shop: Workshop, seed: int) -> str:
    """1. Two models that translate back, from the weights of chapter 9's, with fresh rates."""
    name, data = f"reverse-onward-{seed}", turned_around(shop.data)
    return shop.run(name, {"start": [FIRST]}, data, tests=False, epochs=5, average=3)


def widened(shop: Workshop, seed: int) -> str:
    """2. Two more epochs, on pairs in up to four wordings, which the three models write."""
    reverse = [reverse_onward(shop, 1), reverse_onward(shop, 2)]
    models = {"start": [FIRST], "forward": [FIRST], "reverse": reverse}
    return shop.run(f"widened-{seed}", models, **WIDENED)


def risk_long(shop: Workshop, seed: int) -> str:
    """3. Minimum risk on eight texts of the model's own beam, from chapter 9's weights."""
    return shop.run(f"risk-long-{seed}", {"start": [FIRST]}, **BY_RISK)


def risk_again(shop: Workshop, seed: int) -> str:
    """4. The same once more, from where one of these ended."""
    return shop.run(f"risk-again-{seed}", {"start": [risk_long(shop, seed)]}, **BY_RISK)


def all_mean(shop: Workshop, seed: int) -> str:
    """5. The mean of five runs' weights; validation chooses its length penalty, as for each."""
    runs = [risk_long(shop, seed), risk_long(shop, seed + 1), risk_again(shop, seed)]
    runs += [widened(shop, seed), widened(shop, seed + 1)]
    return shop.run(f"all-mean-{seed}", {"start": [FIRST], "mean_of": runs})


RECIPE = (reverse_onward, widened, risk_long, risk_again, all_mean)
STEPS = {step.__name__.replace("_", "-"): step for step in RECIPE}


@dataclass
class BestOptions:
    """How much of it."""

    only: str = "all-mean-3"
    """The step to do, NAME-SEED, with what it needs."""
    save: bool = False
    """Write each step's record to results/ladder-NAME-SEED.json, too."""

    def __post_init__(self):
        name, _, seed = self.only.rpartition("-")
        if name not in STEPS or not seed.isdecimal():
            raise ValueError(f"--only must be NAME-SEED with a name of {', '.join(STEPS)}")


def run_recipe(options: BestOptions) -> None:
    """Train the model that ships, from chapter 9's, or the steps of it that are missing."""
    step_back()  # hours, beside other work
    one_thread()
    name, _, seed = options.only.rpartition("-")
    shop = Workshop(options.save)
    print(shop.folder(STEPS[name](shop, int(seed))))


main = Command("scripts.studies.best", BestOptions, run_recipe, interrupted=GOES_ON)

if __name__ == "__main__":
    raise SystemExit(main())
