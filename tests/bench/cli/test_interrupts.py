"""Ctrl-C and SIGTERM: one line and an exit code, at whatever moment they come."""

import signal
from pathlib import Path

import pytest
from tests.bench.cli.conftest import Shell

ENDINGS = [(signal.SIGINT, 130, "SIGINT"), (signal.SIGTERM, 143, "SIGTERM")]
# Torch is long in loading, and not all of it lets an exception through.
DEAF = """
import time
print("loading", flush=True)
while True:
    try:
        time.sleep(60)
    except BaseException:
        pass
"""


@pytest.mark.parametrize(("number", "code", "name"), ENDINGS)
def test_while_torch_is_loading(shell: Shell, tmp_path: Path, number: int, code: int, name: str) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(DEAF)
    shell.environment["PYTHONPATH"] = f"{tmp_path}:{shell.environment['PYTHONPATH']}"
    process = shell.start("recipes", "qsgd")
    assert process.stdout is not None
    assert process.stdout.readline() == "loading\n"
    process.send_signal(number)
    out, err = process.communicate(timeout=300)
    assert (process.returncode, out, err) == (code, "", f"gossamer: interrupted by {name}\n")


@pytest.mark.lab
@pytest.mark.parametrize(("number", "code", "name"), ENDINGS)
def test_while_a_command_runs(shell: Shell, number: int, code: int, name: str) -> None:
    process = shell.start("lab", "--hosts", "1", "--", "sh", "-c", "echo up; exec sleep 60")
    assert process.stdout is not None
    assert process.stdout.readline() == "[0] up\n"
    process.send_signal(number)
    _, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (code, f"gossamer: interrupted by {name}\n")
    shell.expect_nothing()
