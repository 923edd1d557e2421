"""One pass, to its own end (chapter 20): `python -m scripts.studies.budgets`.

The narrowest and the widest model of the grid read all pairs once, by a schedule that ends there.
The rate is swept: its seed is that of the grid's sweeps, so the two compare run by run.
"""

from dataclasses import asdict

from scripts.studies.grid import BASE, work
from scripts.studies.runner import Plan, study_command

BEST_OF_EIGHT = {16: 0.0336, 96: 0.0084}  # what the grid's sweeps found for eight passes


def plan_runs(plan: Plan) -> None:
    """A sweep of each width."""
    for width, rate in BEST_OF_EIGHT.items():
        plan.sweep({"d_model": width, "share": 1, "epochs": 1}, rate)


main = study_command("scripts.studies.budgets", asdict(BASE), plan_runs, work)

if __name__ == "__main__":
    raise SystemExit(main())
