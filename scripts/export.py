"""Write a model for ONNX Runtime and for CTranslate2: `python -m scripts.export FOLDER`.

It needs the packages of `pip install -e '.[export]'`.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from scripts.book.command import Command
from scripts.ch14_leaving_home import export_ctranslate2, export_onnx
from scripts.fast.export import need_packages
from scripts.fast.translating import ModelOptions, open_model


@dataclass
class ExportOptions:
    """What to write, and where."""

    folder: str
    """Where to write; each format gets a folder of its own in it."""
    model: str | None = None
    """A model's folder; by default the best one that ships."""
    format: Literal["onnx", "ctranslate2", "both"] = "both"
    """What to write."""


def run_export(options: ExportOptions) -> None:
    """Write a model for ONNX Runtime and for CTranslate2.

    Raises ValueError if a package is missing, OSError if the folder can't be written.
    """
    writers = {"onnx": export_onnx, "ctranslate2": export_ctranslate2}
    packages = {"onnx": ["onnx", "onnxscript"], "ctranslate2": ["ctranslate2"]}
    chosen = list(writers) if options.format == "both" else [options.format]
    for name in chosen:
        need_packages(*packages[name])  # before anything is written
    folders = {name: Path(options.folder) / name for name in chosen}
    for folder in folders.values():
        if (folder / "model.safetensors").exists():  # other files would spoil it
            raise ValueError(f"{folder} holds a model: choose another folder")
    trained = open_model(ModelOptions(model=options.model, device="cpu"))
    for name, folder in folders.items():
        writers[name](trained, folder)
        size = sum(path.stat().st_size for path in folder.iterdir())
        print(f"{folder}: {size / 1e6:.1f} MB")


places = {"folder": "Where to write: FOLDER/onnx, FOLDER/ctranslate2."}
main = Command("scripts.export", ExportOptions, run_export, places)

if __name__ == "__main__":
    raise SystemExit(main())
