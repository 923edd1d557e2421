"""What a chapter's first cell runs once it has found the series: make it the `scripts` in use.

A chapter that is imported past the series' own loader would run its show: that is refused here.
Nothing here may need the series, nor a package that Colab lacks.
"""

import sys
from pathlib import Path
from types import ModuleType

ROOT_FOUND = Path(__file__).resolve().parents[2]
FETCHED = "from-attention-to-translation"  # the folder into which the first cell clones


def is_ours(module: ModuleType) -> bool:
    """Whether a module comes from this series; a namespace package has no file, and doesn't."""
    place = getattr(module, "__file__", None)
    return place is not None and Path(place).resolve().is_relative_to(ROOT_FOUND)


def refuse_another_package() -> None:
    """Raise ImportError if the package `scripts` in use isn't the series'."""
    package = sys.modules.get("scripts")
    if package and not is_ours(package):
        place = Path(next(iter(getattr(package, "__path__", [package.__file__])))).resolve()
        raise ImportError(
            f"the package scripts in {place} hides the series' own in {ROOT_FOUND / 'scripts'}: "
            f"start Python as `python -P`, or keep {place.parent} off Python's path"
        )


def refuse_an_import() -> None:
    """Raise ImportError if the chapter whose first cell is running is imported, and not run."""
    frame = sys._getframe(1)
    while (name := frame.f_globals.get("__name__")) in (__name__, "runpy", None):
        frame = frame.f_back
    if name != "__main__":
        refuse_another_package()
        chapter = Path(frame.f_code.co_filename).stem
        raise ImportError(
            f"imported as {name}, this chapter would run its whole show: import scripts.{chapter}"
        )


def settle() -> None:
    """Put this series first on the path; install what it needs if it was just fetched."""
    refuse_an_import()
    sys.path.insert(0, str(ROOT_FOUND))  # first, so that no other package named scripts shadows it
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "scripts" and not is_ours(module):
            del sys.modules[name]
    if Path(FETCHED).resolve() == ROOT_FOUND:
        from scripts.book.first_cell import install_missing

        install_missing()


if __name__ == "<run_path>":  # as runpy calls it
    settle()
