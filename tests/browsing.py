"""Shared by the tests that run JavaScript: Node, headless Chromium, a server on this machine.

Nothing is skipped: if a program is missing, the test fails and says which package has it.
"""

import functools
import http.server
import json
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


def program(*names: str, package: str) -> str:
    """The path of the first of these programs that is installed; if none is, the test fails."""
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        pytest.fail(f"{names[0]} is not installed: apt-get install {package}", pytrace=False)
    return found


def chromium() -> str:
    return program("chromium", "chromium-browser", "google-chrome", package="chromium")


@functools.cache
def node() -> str:
    """Node.js, 20 or newer."""
    found = program("node", package="nodejs npm (Node.js 20 or newer)")
    version = subprocess.run([found, "--version"], capture_output=True, text=True).stdout
    if int(version[1:].split(".")[0]) < 20:
        pytest.fail(f"Node.js 20 or newer is needed, this is {version.strip()}", pytrace=False)
    return found


def run_script(script: Path, *arguments: str, request: dict) -> Any:
    """A script's answer to a request, both as JSON."""
    done = subprocess.run(
        [node(), str(script), *arguments],
        input=json.dumps(request).encode(),
        capture_output=True,
        timeout=1800,  # for a busy machine
    )
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """Serve `folder` under a sub-path, as on a project's site, and yield its address."""
    handler = functools.partial(QuietHandler, directory=str(folder.parent))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/{folder.name}/"
        server.shutdown()
