"""Chapter 22's small models at every rate, eight seeds: `python -m scripts.studies.block_rates`.

Some four minutes of a thread.
"""

from functools import partial
from typing import Any

import pandas as pd
import torch

from scripts.ch22_todays_block import STARTS, TAKEN_BACK, small_model, started_model, swept
from scripts.studies.subject import record_command

SEEDS = range(1, 9)


def eight_seeds() -> dict[str, Any]:
    """Every run's last loss and sharpness: a part taken back to 2017, then each way to start."""
    torch.set_default_dtype(torch.float64)  # as in the chapter, where models begin so
    torch.set_num_threads(1)
    runs = swept({part: partial(small_model, part) for part in TAKEN_BACK}, SEEDS)
    starts = [
        swept({start: partial(started_model, start, zeroed) for start in STARTS}, SEEDS)
        .drop(columns="sharpness")
        .assign(zeroed=zeroed)
        for zeroed in (False, True)
    ]
    frames = {"runs": runs, "starts": pd.concat(starts)}
    return {name: frame.round(4).to_dict("records") for name, frame in frames.items()}


main = record_command("scripts.studies.block_rates", "block-rates", lambda _: eight_seeds())

if __name__ == "__main__":
    raise SystemExit(main())
