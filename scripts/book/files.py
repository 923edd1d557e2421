"""Files that are there whole or not at all."""

import os
import tempfile
from pathlib import Path


def write_whole(path: Path, content: bytes) -> None:
    """Write `content` to `path`, whole or not at all; what was there before stays until then.

    Raises OSError, in one line, if the disk is full or can't be written.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        with open(partial, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise OSError(
            f"could not write {path} ({error.strerror}); what was saved before is untouched: "
            "make room, and run the command again (a training run: with --resume)"
        ) from error


def writable(folder: Path) -> Path:
    """`folder`, made if it is missing. Raises ValueError if it can't be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(
            f"can't write to {folder} ({error.strerror}): choose another (for a run, by --name)"
        ) from error
    return folder
