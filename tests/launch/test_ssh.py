"""The loop of plain ssh, in a lab: a host is taken away and given back, without notice and with it."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tests.marked import wait_for

from gossamer.bench.lab import run_lab

TRY = Path(__file__).parents[2] / "examples" / "launch" / "ssh" / "host_away.sh"
PAGE = TRY.parents[3] / "docs" / "launch" / "ssh.md"
OPTIONS = "--steps 2500 --pause 0.02"  # so long that those who are away come back before the end


@pytest.mark.lab
@pytest.mark.slow
def test_hosts_that_are_taken_away_come_back_and_all_end_with_one_model(tmp_path: Path) -> None:
    said = dict[int, list[str]]()
    command = [str(TRY), str(tmp_path), *OPTIONS.split()]
    result = run_lab(
        4,
        "200mbit",
        command,
        timeout=280,
        on_line=lambda rank, line: said.setdefault(rank, []).append(line),
        env={"PYTHON": sys.executable, "PYTHONPATH": str(TRY.parents[3] / "src")},
    )
    assert result.exit_code == 0, said
    text = {host - 1: "\n".join(lines) for host, lines in said.items()}
    assert "host of member 1 is away: exit code 137" in text[1]
    assert "host of member 2 is away: exit code 75" in text[2]
    assert "rank 2 was told to stop, and left" in text[2]
    for rank in (1, 2):
        assert f"host of member {rank} is back" in text[rank]
        assert f"rank {rank} {'is lost' if rank == 1 else 'has left'}" in text[0]
        assert f"rank {rank} is back" in text[0]
        assert text[rank].count("trains from step") == 2
    files = [torch.load(tmp_path / "run" / f"member{rank}.pt", weights_only=True) for rank in range(3)]
    assert [file["steps"] for file in files] == [2500] * 3
    first, *rest = (file["model"] for file in files)
    assert all(torch.equal(t, other[name]) for other in rest for name, t in first.items())


def test_a_machine_that_is_given_away_between_two_members_starts_none_again(tmp_path: Path) -> None:
    (failing := tmp_path / "failing.py").write_text(
        "import sys; open(sys.argv[1], 'a').write('started\\n'); sys.exit(1)\n"
    )
    started = tmp_path / "started"
    with socket.create_server(("127.0.0.1", 0)) as store:
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.getsockname()[1])}
        command = ["bash", str(TRY.with_name("member.sh")), str(started)]
        env = os.environ | where | {"PYTHON": sys.executable, "MEMBER": str(failing)}
        with subprocess.Popen(command, env=env) as loop:
            wait_for(started.exists)
            time.sleep(1.0)  # it has failed, and is started again after 5 seconds
            loop.terminate()
            assert loop.wait(60) == 1
    assert started.read_text().splitlines() == ["started"]


@pytest.mark.parametrize("text", [PAGE, TRY], ids=lambda path: path.name)
def test_what_is_shown_to_type_lasts_until_all_are_back(text: Path) -> None:
    assert f"{OPTIONS}\n" in text.read_text()
