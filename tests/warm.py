"""A process that has imported what is slow to import, and forks for each pytest to run."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SERVER = """
import json, os, signal, sys
import altair, IPython, numpy, pandas, pytest, sacrebleu, safetensors, sentencepiece, torch

for line in sys.stdin:
    cwd, log, *words = json.loads(line)
    if not (child := os.fork()):
        signal.alarm(900)
        os.chdir(cwd)  # the first place where modules are looked for
        out = os.open(log, os.O_WRONLY | os.O_CREAT)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(out, 1)
        os.dup2(out, 2)
        code = int(pytest.main(words))
        sys.stdout.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@contextmanager
def server() -> Iterator[Callable[..., int]]:
    """Runs pytest in another process, at once.

    It yields a function of (folder, file for all that is printed, pytest's arguments) that returns
    the exit code.
    """
    plain = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", SERVER], **pipes, env=plain) as process:

        def ask(*line: object) -> int:
            print(json.dumps([str(part) for part in line]), file=process.stdin, flush=True)
            return int(process.stdout.readline())

        yield ask
        process.stdin.close()
