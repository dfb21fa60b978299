"""The ledger counts everything, also what it does not keep."""

from pathlib import Path

from gossamer.fabrics.ledger import Ledger, LedgerEntry


def test_totals_go_on_when_entries_are_dropped(tmp_path: Path) -> None:
    ledger = Ledger(keep=2)
    for step in range(1, 5):
        ledger.note(LedgerEntry(step, 0, "AllReduce" if step % 2 else "Send", "head", 10, 15, 20, 0.5))
    assert [entry.step for entry in ledger] == [1, 2]
    assert (ledger.requests, ledger.handed, ledger.sent, ledger.received, ledger.seconds) == (4, 40, 60, 80, 2.0)
    assert ledger.by_verb() == {"AllReduce": (2, 30), "Send": (2, 30)}
    for path in (tmp_path / "ledger.jsonl", str(tmp_path / "ledger")):
        ledger.write(path)
        assert list(Ledger.read(path)) == list(ledger)
