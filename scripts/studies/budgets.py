"""Budgets that are trained to their own end (chapter 20): `python -m scripts.studies.budgets`.

Some widths of the grid read all pairs once or twice, by a schedule that ends there. The rate is
swept; the seeds are the grid's, so each run compares with a reading on the way of the same seed.
"""

from dataclasses import asdict

from scripts.studies.grid import BASE, work
from scripts.studies.runner import Plan, study_command

# Width and passes, and the grid's rate for eight passes.
ONE_UNIT = {(48, 1): 0.0144, (32, 2): 0.0197}  # they cost about the same
ENDS = {(16, 1): 0.0336, (96, 1): 0.0084}


def plan_runs(plan: Plan) -> None:
    """A sweep of each; with one unit also the seeds that count."""
    for (width, passes), rate in (ENDS | ONE_UNIT).items():
        best = plan.sweep({"d_model": width, "share": 1, "epochs": passes}, rate)
        if (width, passes) in ONE_UNIT:
            plan.seeds(best)


main = study_command("scripts.studies.budgets", asdict(BASE), plan_runs, work)

if __name__ == "__main__":
    raise SystemExit(main())
