"""What a run shows while it trains: a bar, a line and a row for each epoch, the GPU's state.

The rows go to log.csv. Nothing here changes the run.
"""

import csv
import io
import math
from pathlib import Path
from typing import Any

import torch

from scripts.book.files import write_whole
from scripts.book.machine import gpus_seen


def in_figures(training: Any) -> dict[str, str]:
    """What the bar shows: loss, learning rate, and real target tokens a second in all processes."""
    if not (training.report.tokens and training.seconds):  # nothing has been read, or timed, yet
        return {}
    rate = training.report.tokens * training.ranks.world / training.seconds
    loss, lr = training.report.loss_per_token, training.lr_at(training.steps_taken)
    return {"loss": f"{loss:.3f}", "lr": f"{lr:.2g}", "tok/s": f"{rate:,.0f}"}


def in_words(row: dict[str, float], epochs: int) -> str:
    """An epoch's row as a line for the terminal."""
    text = (
        f"epoch {row['epoch']}/{epochs}  loss {row['train_loss']:.3f}  "
        f"val ppl {row['val_ppl']:.2f}  val BLEU {row['val_bleu']:.1f}  {row['seconds']:.0f} s"
    )
    if "gpu_load" in row:
        text += "  GPU {gpu_load:.0%}, {gpu_mib:,.0f} MiB, {gpu_celsius:.0f} °C".format(**row)
    return text


def write_log(folder: Path, history: list[dict[str, float]]) -> None:
    """The history so far as log.csv, for a spreadsheet or pandas."""
    text = io.StringIO(newline="")
    columns = dict.fromkeys(name for row in history for name in row)  # a GPU may come or go
    writer = csv.DictWriter(text, fieldnames=columns)
    writer.writeheader()
    writer.writerows(history)
    write_whole(folder / "log.csv", text.getvalue().encode())


def gpu_row(device: torch.device) -> dict[str, float]:
    """GPUtil's view of the GPU: load from 0 to 1, memory in MiB, °C; nothing for a CPU."""
    if device.type != "cuda":
        return {}
    try:
        ours = str(torch.cuda.get_device_properties(device).uuid)  # its index counts visible ones
        gpu = next(gpu for gpu in gpus_seen() if ours in gpu.uuid)
    except Exception:  # whatever nvidia-smi lacks: no run ends for want of a thermometer
        return {}
    row = {"gpu_load": gpu.load, "gpu_mib": gpu.memoryUsed, "gpu_celsius": gpu.temperature}
    return row if all(map(math.isfinite, row.values())) else {}  # some say "[N/A]"
