"""A minute of truth on a GPU: do all ways to compute a step give the same numbers?"""

from typing import Any

import torch


def truth(device: torch.device, tiny: bool) -> dict[str, Any]:
    """What was compared, by its kind, and what this device couldn't run."""
    return {"kinds": {}, "not_run": []}
