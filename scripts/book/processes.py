"""A chapter's definitions in another process, for what can only be set when a program starts."""

import json
import os
import subprocess
import sys
from typing import Any

import torch

from scripts import ROOT


def in_new_process(call: str, **variables: str) -> Any:
    """What `call` returns in a new Python with these environment variables, by way of JSON.

    A function of a module, such as "scripts.ch11_where_the_time_goes.matrix_rates()". There are
    as many threads as here. CalledProcessError if the new process fails.
    """
    code = f"""
import json, torch, {call.partition("(")[0].rpartition(".")[0]}
torch.set_num_threads({torch.get_num_threads()})
print(json.dumps({call}))
"""
    command, environment = [sys.executable, "-c", code], os.environ | variables
    return json.loads(subprocess.check_output(command, cwd=ROOT, env=environment))
