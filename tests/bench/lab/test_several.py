"""Several ranks on a host: they share its link, and reach each other over its loopback."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gossamer.bench.lab import LabInputError, LabResult, run_lab
from gossamer.bench.lab.network import plan_ranks

Run = Callable[..., tuple[LabResult, list[list[str]]]]
SENDER = Path(__file__).parent / "programs" / "sender.py"


def test_ranks_are_numbered_host_by_host_as_a_launcher_does() -> None:
    told = [(rank["host"], *rank["environment"].values()) for rank in plan_ranks(2, 3)]
    assert told == [
        (0, "0", "0", "0"),
        (0, "1", "1", "0"),
        (0, "2", "2", "0"),
        (1, "3", "0", "1"),
        (1, "4", "1", "1"),
        (1, "5", "2", "1"),
    ]


@pytest.mark.parametrize(("hosts", "per_host"), [(2, 0), (2, -1), (250, 5)])
def test_as_many_as_nobody_can_have_are_refused(hosts: int, per_host: int) -> None:
    with pytest.raises(LabInputError, match=f"{hosts} hosts of {per_host} ranks"):
        run_lab(hosts, None, ["true"], per_host=per_host)


@pytest.mark.lab
def test_inside_a_host_the_link_is_neither_waited_for_nor_counted(run: Run) -> None:
    size = 4_000_000  # half a minute over the link
    result, lines = run(1, "1mbit", "sender.py", str(size), per_host=2)
    assert result.exit_code == 0
    assert float(lines[1][0]) < 10
    assert result.hosts[0].sent_bytes == result.hosts[0].received_bytes == 0


@pytest.mark.lab
def test_what_leaves_a_host_is_counted_once_for_all_its_ranks(run: Run) -> None:
    """Of several tries: where processes have no processor, TCP sends small pieces, and some of them twice."""
    # Rank 0 is on host 0. Of the ranks on host 1 one sends, and the other looks on.
    size = 2_000_000
    program = f"[ $RANK = 1 -o $RANK = 3 ] || exec {sys.executable} {SENDER} {size}; hostname"
    for _ in range(4):
        result, lines = run(2, "200mbit", "sh", "-c", program, per_host=2)
        assert (result.exit_code, lines[1], lines[3]) == (0, ["host0"], ["host1"])
        receiver, sender = result.hosts
        if sender.sent_bytes <= 1.05 * size:
            break
    assert size <= sender.sent_bytes <= 1.05 * size
    assert size <= receiver.received_bytes <= 1.05 * size


@pytest.mark.lab
def test_who_failed_is_known_by_rank_and_host(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    program = "[ $RANK = 3 ] && { echo no; exit 7; }; exec sleep 60"
    result, _ = run(2, None, "sh", "-c", program, per_host=2, grace=0.1, on_line=None)
    assert capsys.readouterr().out == "[rank 3 on host1] no\n"
    assert (result.exit_code, result.first_failure) == (7, 3)
    assert [(r.rank, r.exit_code, r.stopped) for r in result.hosts[1].ranks] == [(2, 143, True), (3, 7, False)]
    assert [rank.rank for rank in result.ranks] == [0, 1, 2, 3]
