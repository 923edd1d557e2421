"""Loss by parameters and passes (chapter 20): `python -m scripts.studies.budgets`.

Models of six widths read all pairs once, twice or four times, each by a schedule that ends there.
(Eight passes are in the grid's record.) The rate is swept at one pass, at both ends of the widths.
"""

from itertools import product

from scripts.ch20_scaling import WIDTHS
from scripts.studies.grid import BASE, rate_at, work
from scripts.studies.runner import Plan, study_command

EPOCHS = (1, 2, 4)
AT_EIGHT = {(16, 8): 0.0336, (96, 8): 0.0084}  # what the grid's sweeps found for eight passes


def plan_runs(plan: Plan) -> None:
    """Two sweeps, then every width and number of passes, once."""
    swept = {}
    for (width, _), rate in AT_EIGHT.items():
        swept[width, 1] = plan.sweep({"d_model": width, "share": 1, "epochs": 1}, rate)
    if None not in swept.values():
        corners = AT_EIGHT | {end: best["lr"] for end, best in swept.items()}
        for epochs, width in product(EPOCHS, WIDTHS):
            place = {"d_model": width, "share": 1, "epochs": epochs}
            plan.seeds(place | {"lr": rate_at(width, epochs, corners)}, seeds=(1,))


main = study_command("scripts.studies.budgets", BASE, plan_runs, work)

if __name__ == "__main__":
    raise SystemExit(main())
