"""What starts the ranks of a benchmark says how they ended; and those of the tests look for garbage."""

import gc
import sys

import pytest
from benchmarks.ranks import start_ranks
from tests.gang import Gang

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


def looks_for_garbage(rank: int, size: int) -> bool:
    return gc.isenabled()


def test_ranks_that_were_forked_while_none_was_looked_for_look_for_garbage(gang2: Gang) -> None:
    assert gang2.run(looks_for_garbage) == [True, True]
