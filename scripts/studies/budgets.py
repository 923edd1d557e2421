"""Four widths, one budget (chapter 20): `python -m scripts.studies.budgets`.

Each model reads all pairs so often that all four cost about the same, by a schedule that ends
there. The rate is swept for one pass, at both ends of the widths.
"""

from dataclasses import asdict

from scripts.studies.grid import BASE, rate_at, work
from scripts.studies.runner import Plan, study_command

AT_EIGHT = {(16, 8): 0.0336, (96, 8): 0.0084}  # what the grid's sweeps found for eight passes
PASSES_OF = {96: 1, 64: 2, 48: 3, 32: 6}


def plan_runs(plan: Plan) -> None:
    """Two sweeps, then each width once."""
    swept = {}
    for (width, _), rate in AT_EIGHT.items():
        swept[width, 1] = plan.sweep({"d_model": width, "share": 1, "epochs": 1}, rate)
    if None not in swept.values():
        corners = AT_EIGHT | {end: best["lr"] for end, best in swept.items()}
        for width, epochs in PASSES_OF.items():
            place = {"d_model": width, "share": 1, "epochs": epochs}
            plan.seeds(place | {"lr": rate_at(width, epochs, corners)}, seeds=(1,))


main = study_command("scripts.studies.budgets", asdict(BASE), plan_runs, work)

if __name__ == "__main__":
    raise SystemExit(main())
