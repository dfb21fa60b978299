"""The loop of plain ssh, in a lab: a host is taken away and given back, without notice and with it."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.marked import wait_for

from gossamer.bench.lab import run_lab

TRY = Path(__file__).parents[2] / "examples" / "launch" / "ssh" / "host_away.sh"


@pytest.mark.lab
@pytest.mark.slow
def test_hosts_that_are_taken_away_come_back_and_all_end_with_one_model(tmp_path: Path) -> None:
    said = dict[int, list[str]]()
    command = [str(TRY), str(tmp_path), "--steps", "2500", "--every", "20", "--pause", "0.02"]
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


def sleeps(pid: int) -> bool:
    """True if a shell waits for `sleep`."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return any(Path(f"/proc/{child}/cmdline").read_bytes().startswith(b"sleep") for child in children)
    except OSError:
        return False


def test_a_loop_that_is_told_between_two_members_starts_no_other_one(tmp_path: Path) -> None:
    member, log = tmp_path / "member.sh", tmp_path / "log"
    member.write_text('echo started >>"$1"; exit 1\n')
    with socket.create_server(("127.0.0.1", 0)) as store:
        own = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.getsockname()[1])}
        own |= {"PYTHON": "bash", "MEMBER": str(member)}
        loop = subprocess.Popen(["bash", str(TRY.parent / "member.sh"), str(log)], env=os.environ | own)
        wait_for(lambda: log.exists() and sleeps(loop.pid))
        loop.send_signal(signal.SIGTERM)
        assert loop.wait(60.0) == 75
    assert log.read_text() == "started\n"
