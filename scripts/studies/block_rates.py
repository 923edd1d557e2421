"""Chapter 22's small models at every rate, eight seeds: `python -m scripts.studies.block_rates`.

Some five minutes of a thread.
"""

from functools import partial
from typing import Any

import torch

from scripts.ch22_todays_block import (
    SLOWED,
    STARTS,
    TAKEN_BACK,
    slowed_model,
    small_model,
    started_model,
    swept,
)
from scripts.studies.subject import record_command


def eight_seeds() -> dict[str, Any]:
    """The final loss of every run, and how sharp its attention became."""
    torch.set_default_dtype(torch.float64)  # as in the chapter, where models begin so
    torch.set_num_threads(1)
    models = {part: partial(small_model, part) for part in TAKEN_BACK}
    models |= {part: partial(slowed_model, part) for part in SLOWED}
    models |= {start: partial(started_model, start) for start in STARTS}
    return {"runs": swept(models, seeds=range(1, 9)).round(4).to_dict("records")}


main = record_command("scripts.studies.block_rates", "block-rates", lambda _: eight_seeds())

if __name__ == "__main__":
    raise SystemExit(main())
