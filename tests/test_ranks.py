"""What starts the ranks of a benchmark says how they ended."""

import sys

import pytest
from benchmarks.ranks import start_ranks

PROGRAMS = {
    0: "pass",
    3: "import os; raise SystemExit(3 * int(os.environ['RANK']))",
    137: "import os, signal; os.environ['RANK'] == '1' and os.kill(os.getpid(), signal.SIGKILL)",
}


@pytest.mark.parametrize("code", PROGRAMS)
def test_a_rank_that_a_signal_ended_is_a_failure_as_one_is_that_ended_with_a_code(
    code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["-c", PROGRAMS[code]])
    assert start_ranks(2, port=29501) == code
