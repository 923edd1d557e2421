"""Students of three small models, on a GPU: `python -m scripts.studies.students agreed|taught`.

`agreed` reads texts that the three write, under R-Drop; `taught` learns from their probabilities,
word by word. Two of the models are those of `python -m scripts.gpu`, in runs/gpu-small-SEED.
"""

from dataclasses import dataclass
from typing import Literal

from scripts.book.command import GOES_ON, Command
from scripts.core.models import STUDIED
from scripts.core.settings import pick_device
from scripts.studies.lessons import Workshop

MODELS = (STUDIED.name, "small-1", "small-3")
AGREED = {"dropout": 0.3, "r_drop": 5.0, "epochs": 16, "average": 3}
TAUGHT = {"taught": 0.5, "epochs": 14}


@dataclass
class StudentOptions:
    """Which student, and where."""

    student: Literal["agreed", "taught"] = "agreed"
    """Which one."""
    device: Literal["cuda", "cpu"] = "cuda"
    """Where."""
    tiny: bool = False
    """At tiny size, on a few pairs of the sample corpus, from models trained now."""
    save: bool = False
    """Write the record to results/gpu-STUDENT-1.json, too."""


def run_student(options: StudentOptions) -> None:
    """Train a student of three small models."""
    pick_device(options.device)  # a missing GPU is said before anything is read
    repeat = f"python -m scripts.studies.students {options.student} --save"
    shop = Workshop(repeat, "gpu", options.device, options.tiny, options.save)
    models = [shop.train("small-1", shop.data)] if options.tiny else MODELS
    if options.student == "agreed":
        data = shop.more_pairs(models)
        shop.train("agreed-1", data, forward=models, **AGREED)
    else:
        shop.train("taught-1", shop.data, teachers=models, **TAUGHT)


PLACES = {"student": "agreed or taught"}
main = Command("scripts.studies.students", StudentOptions, run_student, PLACES, GOES_ON)

if __name__ == "__main__":
    raise SystemExit(main())
