"""Chapter 22's small models at every rate, eight seeds: `python -m scripts.studies.block_rates`.

Some eight minutes of a thread.
"""

from typing import Any

import torch

from scripts.ch22_todays_block import (
    RATES,
    STARTS,
    TAKEN_BACK,
    small_model,
    started_model,
    swept,
)
from scripts.studies.subject import record_command

SEEDS = range(1, 9)


def eight_seeds() -> dict[str, Any]:
    """The final loss of every run, and how sharp its attention became."""
    torch.set_default_dtype(torch.float64)  # as in the chapter, where models begin so
    torch.set_num_threads(1)
    slowed = swept(small_model, ("Qwen3", "no QK-norm"), SEEDS, slow=0.25)
    tables = [
        swept(small_model, TAKEN_BACK, SEEDS).assign(steps=60),
        slowed.assign(part=slowed["part"] + ", slowed", steps=60),
        swept(started_model, STARTS[1:], SEEDS).assign(steps=60),
        swept(started_model, STARTS[:2], SEEDS, RATES[1:], steps=240).assign(steps=240),
    ]
    return {"runs": [run for table in tables for run in table.round(4).to_dict("records")]}


main = record_command("scripts.studies.block_rates", "block-rates", lambda _: eight_seeds())

if __name__ == "__main__":
    raise SystemExit(main())
