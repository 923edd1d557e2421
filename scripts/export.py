from typing import Literal
from pathlib import Path
from dataclasses import dataclass
from scripts.ch09_decoding_and_bleu import export_ctranslate2
from scripts.ch09_decoding_and_bleu import export_onnx
from scripts.ch09_decoding_and_bleu import need_packages
# IMPORTS


@dataclass
class ExportOptions:
    """Options of `export`."""

    folder: str
    """Where to write; each format gets a folder of its own in it."""
    model: str | None = None
    """A model's folder; by default the best one that ships."""
    format: Literal["onnx", "ctranslate2", "both"] = "both"
    """What to write."""


def run_export(options: ExportOptions) -> None:
    """Write the model in the chosen formats. Raises ValueError where that can't be."""
    writers = {"onnx": export_onnx, "ctranslate2": export_ctranslate2}
    chosen = list(writers) if options.format == "both" else [options.format]
    need_packages(*chosen)  # before anything is written
    trained = open_model(ModelOptions(model=options.model, device="cpu"))
    for name in chosen:
        folder = Path(options.folder) / name
        try:
            writers[name](trained, folder)
        except OSError as error:
            reason = f"can't write to {folder} ({error.strerror or error})"
            raise ValueError(f"{reason}: choose another folder") from error
        size = sum(path.stat().st_size for path in folder.iterdir())
        print(f"{folder}: {size / 1e6:.1f} MB")
