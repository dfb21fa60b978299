"""Several ranks a host, as a user starts them in a lab: the report's bytes are those of the hosts' cards."""

import sys

import pytest
from tests.bench.cli.conftest import Shell

from gossamer.bench.record import Record

pytestmark = [pytest.mark.gang, pytest.mark.lab, pytest.mark.slow]
PLACE = ("--hosts", "2", "--per-host", "2", "--rate", "200mbit")


def test_a_card_carries_what_the_ledger_says_of_all_its_ranks(shell: Shell) -> None:
    words = (
        "compare",
        "qsgd",
        "qsgd + per_node(2)",
        "--workload",
        "lm-bytes",
        *PLACE,
        "--steps",
        "2",
        "--chunk",
        "1",
        "--patience",
        "1",
    )
    code, out, err = shell.run(*words, "--out", "a")
    assert code == 0, err
    assert "4 ranks on 2 hosts, at 200mbit" in out
    record = Record.read(shell.folder / "a" / "record.json")
    assert (record.hosts, record.per_host) == (2, 2)
    flat, two = record.runs
    for run in record.runs:
        assert run.nic_bytes is not None
        assert run.wire_bytes is not None
        assert 1.0 <= run.nic_bytes / run.wire_bytes < 1.05
    assert (two.wire_bytes or 0) < 0.6 * (flat.wire_bytes or 0)
    assert (flat.inside_bytes or 0) < (two.inside_bytes or 0)
    shell.expect_nothing()


def test_a_run_that_joins_the_ranks_of_a_lab_knows_them_too(shell: Shell) -> None:
    words = ("train", "qsgd + per_node(2)", "--workload", "ridge", "--steps", "4", "--out", "a")
    code, _, err = shell.run("lab", *PLACE, "--", sys.executable, "-m", "gossamer.bench.cli", *words)
    assert code == 0, err
    record = Record.read(shell.folder / "a" / "record.json")
    assert (record.hosts, record.per_host, record.runs[0].status) == (2, 2, "ok")
    assert record.runs[0].inside_bytes
