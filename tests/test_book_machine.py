"""The report on the machine: every GPU, or why there is none."""

import math
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from scripts.book.machine import machine_report


def gpu(number, load):
    memory = {"memoryUsed": 1024.0, "memoryTotal": 24576.0}
    return SimpleNamespace(id=number, name="Fake", load=load, **memory)


TWO = [gpu(0, 0.37), gpu(1, math.nan)]
SEEN = [
    ("GPU 0", "Fake, 1,024 of 24,576 MiB in use, load 37%"),
    ("GPU 1", "Fake, 1,024 of 24,576 MiB in use, load not reported"),
]
UNUSED = ("note", "this PyTorch can't use the GPU: everything runs on the CPU")
NONE = ("GPU", "none found: everything runs on the CPU, and that is enough")
BROKEN = ("GPUtil", "gave no answer (TypeError)")


@pytest.mark.parametrize(
    "answer, cuda, rows",
    [
        (lambda: TWO, True, SEEN),
        (lambda: TWO, False, [*SEEN, UNUSED]),
        (list, False, [NONE]),
        (None, False, [BROKEN, NONE]),
        (None, True, [BROKEN, ("GPU 0", "Fake H200")]),
    ],
)
def test_the_report_names_every_gpu_or_says_why_there_is_none(monkeypatch, answer, cuda, rows):
    module = ModuleType("GPUtil")
    module.getGPUs = answer
    monkeypatch.setitem(sys.modules, "GPUtil", module)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: "Fake H200")
    report = machine_report()
    assert list(report.itertuples(index=False, name=None))[3:] == rows
    assert list(report["part"])[:3] == ["Python", "PyTorch", "CPU threads"]
