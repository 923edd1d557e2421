"""C beside Python: a file of this folder, compiled once for this very processor and loaded.

A caller must also have PyTorch's way to do the same, for machines without a compiler, and for
others than x86 under Linux. `kernels.py` (decoding) and `passes.py` (training) say what the files
hold.
"""

import ctypes
import functools
import hashlib
import os
import platform
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HERE = Path(__file__).parent
FLAGS = ["-O3", "-march=native", "-mprefer-vector-width=512", "-fno-math-errno"]
FLAGS += ["-fno-trapping-math", "-fno-strict-aliasing", "-shared", "-fPIC"]
LANES = 16  # numbers processed together: a head's width must be a multiple of it
P = ctypes.c_void_p  # a pointer, or a 64-bit integer


def source(file: str, name: str) -> str:
    """A function of FILE.c as it is written, with the comment above it."""
    text = (HERE / f"{file}.c").read_text("utf-8")
    at = text.index(f"void {name}(")
    return text[text.rindex("\n\n", 0, at) + 2 : text.index("\n}\n", at) + 2]


def for_threads() -> list[str]:
    """Flags for C on several threads: PyTorch's own, as a second set would be in their way."""
    package = Path(torch.__path__[0])
    bundled = [*package.glob("lib/libgomp*"), *package.with_name("torch.libs").glob("libgomp*")]
    return ["-fopenmp", "-Wl,--as-needed", *map(str, bundled)]


def built(name: str, folder: Path) -> Path:
    """The compiled NAME.c in `folder`, made if there is none yet for this processor.

    Raises OSError or CalledProcessError if there is no compiler, it fails, or this isn't Linux.
    """
    about = Path("/proc/cpuinfo").read_text().splitlines()
    processor = sorted({line for line in about if line.startswith("flags")})
    code, openmp = HERE / f"{name}.c", for_threads() if name == "passes" else ["-fopenmp-simd"]
    texts = [path.read_bytes() for path in (code, HERE / "simd.h")]
    # All that decides what the compiler writes: a home folder may be shared by unlike machines.
    inputs = repr((texts, FLAGS, openmp, platform.machine(), processor)).encode()
    path = folder / f"{name}-{hashlib.sha256(inputs).hexdigest()[:16]}.so"
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as own:
            fresh = Path(own) / "fresh.so"
            command = [os.environ.get("CC", "cc"), *FLAGS, code, *openmp, "-o", fresh, "-lm"]
            subprocess.run(command, check=True, capture_output=True)
            fresh.replace(path)  # whole or not at all, in case another process looks
    return path


@functools.cache
def loaded(name: str) -> ctypes.CDLL | None:
    """The compiled functions of NAME.c; None on a machine that can't compile or keep them."""
    try:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        return ctypes.CDLL(str(built(name, Path(home) / "from-attention-to-translation")))
    except (OSError, RuntimeError, subprocess.CalledProcessError):
        return None


def works_on(file: str, x: Tensor, *kinds: torch.dtype) -> bool:
    """Whether the functions of FILE.c can work on x: on a CPU, numbers of one of these kinds."""
    return x.is_cpu and x.dtype in kinds and loaded(file) is not None


def fields(names: str) -> list[tuple[str, Any]]:
    """Fields of a C struct: pointers and 64-bit integers."""
    return [(name, P) for name in names.split()]


def as_argument(x: Any) -> Any:
    """What C gets for x: the address of a tensor, a struct or a float; an integer as it is."""
    if isinstance(x, Tensor):
        return x.data_ptr()
    if isinstance(x, float):
        return ctypes.byref(ctypes.c_float(x))
    return ctypes.byref(x) if isinstance(x, ctypes.Structure) else x


def call(file: str, name: str, *arguments: Any) -> None:
    """Call `name` of FILE.c."""
    function = getattr(loaded(file), name)
    if function.argtypes is None:
        function.argtypes = [P] * len(arguments)
    function(*map(as_argument, arguments))
