"""Programs that need torch, as forks of a server that has loaded it: an interpreter of its own takes seconds to do so."""

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.gang import PRELOADED
from tests.marked import PATIENCE


def run(command: list[str], *, env: Mapping[str, str], **options: Any) -> "subprocess.CompletedProcess[str]":
    """What `subprocess.run` gives for a command of `parent_death.program`; its output and its errors are always captured."""
    words = command[command.index("ignore") + 2 :]  # behind `python -W ignore parent_death.py`
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        said = [Path(folder) / name for name in ("out", "err")]
        process = context.Process(target=_become, args=(words, dict(env), said))
        process.start()
        process.join(PATIENCE)
        assert process.exitcode is not None, f"no end of {words} within {PATIENCE:g} seconds"
        return subprocess.CompletedProcess(command, process.exitcode, *(path.read_text() for path in said))


def _become(words: list[str], env: dict[str, str], said: list[Path]) -> None:
    for number, path in enumerate(said, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    os.environ.clear()
    os.environ.update(env)
    warnings.simplefilter("ignore")
    sys.argv = words
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)


# In place of the module `subprocess`, where it starts such commands and nothing else.
SUBPROCESS = SimpleNamespace(run=run, TimeoutExpired=subprocess.TimeoutExpired)
