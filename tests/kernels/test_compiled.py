"""Every Triton program compiles for real GPUs, and into what it should, although none is here.

A quarter of a minute for one GPU and one length or bucket of each kind, with the Triton that torch 2.13 brings;
`make test-all` tries them all, for two GPUs, and with older and newer ones too: a program that one compiles in seconds
may take another for ever.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gossamer import kernels

pytestmark = pytest.mark.skipif("triton" not in kernels.backends(), reason="triton is not installed")

OFFLINE = Path(__file__).parent / "offline.py"
WIDE = os.environ.get("GOSSAMER_WIDE") == "1"
GPUS = ["80", "90"] if WIDE else ["90"]  # the same sources, of which each GPU takes half the time


@pytest.fixture(scope="module")
def lines() -> list[dict[str, Any]]:
    command = [sys.executable, str(OFFLINE), *GPUS, "--json", *(["--wide"] if WIDE else [])]
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=7200 if WIDE else 600)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_every_program_compiles_for_every_argument(lines: list[dict[str, Any]]) -> None:
    assert [line for line in lines if "failure" in line] == []
    assert {line["gpu"] for line in lines} == {f"sm_{gpu}" for gpu in GPUS}


@pytest.mark.parametrize(
    "count",
    [
        pytest.param("stack", id="no register is spilled to memory"),
        pytest.param("spills", id="the machine code neither"),
        pytest.param("fusion", id="nobody may fuse what the reference multiplies and adds"),
        pytest.param("fused", id="and nobody does"),
        pytest.param("flushed", id="small numbers are not flushed to zero"),
        pytest.param("approximate", id="no division or root is approximate"),
        pytest.param("wide divisions", id="nothing is divided in 64 bits"),
    ],
)
def test_the_code_does_what_the_reference_does_and_no_more(lines: list[dict[str, Any]], count: str) -> None:
    assert [line for line in lines if line.get(count)] == []
