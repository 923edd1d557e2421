"""What the first cell of a chapter runs once the series is found.

From inside the zip, this unpacks the series beside the notebook. In a series that was unpacked or
fetched there, it installs what is missing. Anywhere else it does nothing.
"""

import importlib
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

from scripts import ROOT

FETCHED = "from-attention-to-translation"  # the folder beside the notebook


def unpack(zipped: Path) -> Path:
    """Unpack the series beside its zip, and have it imported from there from now on."""
    with zipfile.ZipFile(zipped) as archive:
        archive.extractall(home := zipped.with_suffix(""))
    importlib.invalidate_caches()  # Python remembers that the folder wasn't there
    for name in [name for name in sys.modules if name.split(".")[0] == "scripts"]:
        del sys.modules[name]
    return home


def is_here(requirement: str) -> bool:
    """Whether a package is installed in a version that fits, such as "numpy>=1.26"."""
    from packaging.requirements import Requirement  # every Jupyter has it

    needed = Requirement(requirement)
    try:
        return needed.specifier.contains(metadata.version(needed.name), prereleases=True)
    except metadata.PackageNotFoundError:
        return False


def install_missing(home: Path) -> None:
    """Install the dependencies that are not here. What is here and fits stays as it is."""
    project = tomllib.loads((home / "pyproject.toml").read_text("utf-8"))["project"]
    if missing := [line for line in project["dependencies"] if not is_here(line)]:
        print("installing what is missing (a minute or two)", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *missing], check=True)
        importlib.invalidate_caches()  # what was just installed can be imported without a restart


home = unpack(ROOT) if ROOT.suffix == ".zip" else ROOT
if Path(FETCHED).resolve() == home:
    install_missing(home)
