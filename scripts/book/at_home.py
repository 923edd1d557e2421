"""What a chapter's first cell runs once it has found the series: make it the `scripts` in use.

Nothing here may need the series, nor a package that Colab lacks.
"""

import sys
from pathlib import Path

ROOT_FOUND = Path(__file__).resolve().parents[2]
FETCHED = "from-attention-to-translation"  # the folder into which the first cell clones


def settle() -> None:
    """Put this series first on the path; install what it needs if it was just fetched."""
    sys.path.insert(0, str(ROOT_FOUND))  # first, so that no other package named scripts shadows it
    for name, module in list(sys.modules.items()):
        place = Path(str(getattr(module, "__file__", "")))
        if name.split(".")[0] == "scripts" and not place.is_relative_to(ROOT_FOUND):
            del sys.modules[name]
    if Path(FETCHED).resolve() == ROOT_FOUND:
        from scripts.book.first_cell import install_missing

        install_missing()


if __name__ == "<run_path>":  # as runpy calls it
    settle()
