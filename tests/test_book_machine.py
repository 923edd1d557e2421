"""The report on the machine: every GPU, or why there is none."""

import math
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from scripts.book.machine import gpu_rows, machine_report


def gpu(number: int, name: str, load: float):
    return SimpleNamespace(id=number, name=name, load=load, memoryUsed=1024.0, memoryTotal=24576.0)


def broken():
    raise ValueError("invalid literal for int(): 'NVIDIA-SMI has failed'")


TWO = [gpu(0, "Fake 4090", 0.37), gpu(1, "Fake MIG", math.nan)]
SEEN = [
    ("GPU 0", "Fake 4090, 1,024 of 24,576 MiB in use, load 37%"),
    ("GPU 1", "Fake MIG, 1,024 of 24,576 MiB in use, load not reported"),
]
UNUSED = ("note", "this PyTorch can't use the GPU: everything runs on the CPU")
NONE = ("GPU", "none found: everything runs on the CPU, and that is enough")
NO_ANSWER = ("GPUtil", "gave no answer (ValueError)")


@pytest.mark.parametrize(
    "answer, cuda, rows",
    [
        (lambda: TWO, True, SEEN),
        (lambda: TWO, False, [*SEEN, UNUSED]),
        (lambda: [], False, [NONE]),
        (broken, False, [NO_ANSWER, NONE]),
        (broken, True, [NO_ANSWER, ("GPU 0", "Fake H200")]),
        (None, False, [("GPUtil", "gave no answer (ModuleNotFoundError)"), NONE]),
    ],
)
def test_report_names_every_gpu_or_says_why_there_is_none(monkeypatch, answer, cuda, rows):
    module = ModuleType("GPUtil")
    module.getGPUs = answer
    monkeypatch.setitem(sys.modules, "GPUtil", module if answer else None)  # None: not installed
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: "Fake H200")
    assert gpu_rows() == rows
    report = machine_report()
    assert list(report["part"]) == ["Python", "PyTorch", "CPU threads", *(part for part, _ in rows)]
    assert report.loc[1, "found"] == torch.__version__
