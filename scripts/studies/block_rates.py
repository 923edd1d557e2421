"""Chapter 22's small models at every rate, eight seeds: `python -m scripts.studies.block_rates`.

Some three minutes of a thread.
"""

from typing import Any

import torch

from scripts.ch22_todays_block import TAKEN_BACK, ZEROED, swept
from scripts.studies.subject import record_command


def eight_seeds() -> dict[str, Any]:
    """The final loss of every run, and how sharp its attention became."""
    torch.set_default_dtype(torch.float64)  # as in the chapter, where models begin so
    torch.set_num_threads(1)
    parts = dict.fromkeys([*TAKEN_BACK, *ZEROED, *ZEROED.values()])
    runs = swept(parts, seeds=range(1, 9))
    return {"runs": runs.round(4).to_dict("records")}


main = record_command("scripts.studies.block_rates", "block-rates", lambda _: eight_seeds())

if __name__ == "__main__":
    raise SystemExit(main())
