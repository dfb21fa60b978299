"""Commands without what Windows lacks: modules, signals and calls of the system are hidden here, since there is no Windows.

What torch and the standard library ask for on Linux alone is there before.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

WITHOUT = """
import asyncio, json, os, signal, socket, sys, types
import torch
sys.modules.update(dict.fromkeys(["fcntl", "resource"]))
for name in ("SIGHUP", "SIGUSR1", "SIGUSR2", "SIGCONT", "SIGSTOP", "SIGKILL", "SIGPIPE", "SIGXFSZ"):
    delattr(signal, name)
for name in ("killpg", "sched_getaffinity", "O_NOFOLLOW", "O_NONBLOCK", "uname"):
    delattr(os, name)
del socket.if_nameindex  # in place of /proc/net, without which no card is asked for
from gossamer.bench.cli import main
from gossamer.bench.lab import access
access.sys = types.SimpleNamespace(platform="win32")
codes = []
for words in json.loads(sys.argv.pop()):
    sys.argv[1:] = words.split()
    codes.append(main())
sys.stderr.write(json.dumps(codes))
"""
RUN = [
    "recipes",
    "recipes qsgd",
    "explain qsgd",
    "plan gpt2 qsgd --rate 1gbit --nodes 2 --gpus 1 --step 350ms",
    "simulate ridge --recipe qsgd --workers 2 --rate 10mbit --step 10ms --rounds 1",
    "doctor --quick",
]
REFUSED = {
    "lab --hosts 2 -- true": "a lab is made of Linux namespaces; this is win32",
    "compare ddp qsgd --workload ridge --steps 2 --rate 10mbit": "a lab is made of Linux namespaces; this is win32",
    "compare ddp qsgd --workload ridge --steps 2": "ranks are started on Linux and macOS only; on Windows do it under WSL",
}


def test_commands_that_need_no_linux_run_and_the_others_say_what_they_need(tmp_path: Path) -> None:
    words = json.dumps([*RUN, *REFUSED])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", WITHOUT, words]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    codes = done.stderr.splitlines()[-1]
    assert json.loads(codes) == [0] * len(RUN) + [1] * len(REFUSED), done.stderr
    assert all(sentence in done.stderr for sentence in REFUSED.values())
    assert "Traceback" not in done.stderr
    assert "a lab is made of Linux namespaces; this is win32" in done.stdout  # the doctor's row
