"""Files that are there whole or not at all."""

import os
from pathlib import Path


def write_whole(path: Path, content: bytes) -> None:
    """Write `content` to `path`, whole or not at all; what stood there before stays until then.

    Raises OSError, in one line, where the disk is full or won't be written.
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
            "make room, and give the command again (a training: with --resume)"
        ) from error


def writable(folder: Path) -> Path:
    """`folder`, made where it is missing. Raises ValueError where it can't be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".probe"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ValueError(
            f"can't write to {folder} ({error.strerror}): choose another (for a training by --name)"
        ) from error
    return folder
