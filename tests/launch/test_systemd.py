"""systemd understands the units of a member and of the store."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "launch" / "ssh"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
@pytest.mark.parametrize("name", ["gossamer-member@.service", "gossamer-store.service"])
def test_a_unit_is_one(name: str, tmp_path: Path) -> None:
    unit = (FOLDER / name).read_text().replace("/opt/gossamer/.venv/bin/python", sys.executable)

    def said(text: str) -> str:
        file = tmp_path / name.replace("@", "@2")
        file.write_text(text)
        command = ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(file)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        return "\n".join(line for line in (done.stdout + done.stderr).splitlines() if file.name in line)

    assert said(unit) == ""
    assert "Restarts" in said(unit.replace("Restart=", "Restarts="))
