"""What this machine is: Python, PyTorch, its CPU threads, and each GPU with its memory and load."""

from __future__ import annotations

import math
import os
import platform
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import pandas as pd


def gpus_seen() -> list[Any]:
    """GPUtil's view of each NVIDIA GPU; raises whatever GPUtil lacks or runs into.

    GPUtil imports distutils, which Python 3.12 dropped; importing setuptools brings it back.
    """
    if not find_spec("distutils"):
        import setuptools  # noqa: F401
    import GPUtil

    return GPUtil.getGPUs()


def gpu_rows() -> list[tuple[str, str]]:
    """What GPUtil says about each NVIDIA GPU, or plainly that there is none; it never fails.

    GPUtil asks the program nvidia-smi. If that is missing or broken, PyTorch is asked for names.
    """
    rows, gpus = [], []
    try:
        gpus = gpus_seen()
    except Exception as error:  # whatever the parsing of nvidia-smi's answer runs into
        rows.append(("GPUtil", f"gave no answer ({type(error).__name__})"))
    for gpu in gpus:
        load = "load not reported" if math.isnan(gpu.load) else f"load {gpu.load:.0%}"
        memory = f"{gpu.memoryUsed:,.0f} of {gpu.memoryTotal:,.0f} MiB in use"
        rows.append((f"GPU {gpu.id}", f"{gpu.name}, {memory}, {load}"))
    if torch.cuda.is_available() and not gpus:
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        rows += [(f"GPU {i}", name) for i, name in enumerate(names)]
    elif not gpus:
        rows.append(("GPU", "none found: everything runs on the CPU, and that is enough"))
    elif not torch.cuda.is_available():
        rows.append(("note", "this PyTorch can't use the GPU: everything runs on the CPU"))
    return rows


def machine_report() -> pd.DataFrame:
    """Python, PyTorch, CPU threads, and each GPU with its memory and load: one row each."""
    import pandas as pd

    threads = f"PyTorch uses {torch.get_num_threads()} of {os.cpu_count()}"
    rows = [
        ("Python", platform.python_version()),
        ("PyTorch", torch.__version__),
        ("CPU threads", threads),
        *gpu_rows(),
    ]
    return pd.DataFrame(rows, columns=["part", "found"])
