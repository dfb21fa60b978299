"""A fabric goes on with other ranks: after some have left or failed, and when others come."""

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.core.test_groups import everything
from tests.gang import Gang

from gossamer.core import verbs
from gossamer.core.errors import GossamerError, PeerError
from gossamer.core.groups import within
from gossamer.core.verbs import Compute, Program
from gossamer.fabrics.liveness.store import default_store
from gossamer.fabrics.torch.fabric import TorchFabric

pytestmark = pytest.mark.gang

PAIR = (0, 1)


def lanes() -> list[str]:
    return sorted(t.name for t in threading.enumerate() if t.name.startswith("gossamer"))


def work(fabric: TorchFabric) -> list[Any]:
    """Of all ranks, on both lanes, and of two of them."""
    wires = fabric.run(verbs.all_gather(torch.full((3,), fabric.rank, dtype=torch.uint8)))
    total = verbs.all_reduce(torch.full((1000,), fabric.rank + 0.1))
    out: list[Any] = [[w.tolist() for w in wires], fabric.join(fabric.start(total, lane="second")).tolist()]
    fabric.form([PAIR])
    if fabric.rank in PAIR:
        out.append(fabric.run(within(everything(fabric.rank), PAIR)))
    return [*out, [(e.verb, e.sent, e.received) for e in fabric.ledger][-len(out) :]]


def fabric_of(group: Any = None) -> TorchFabric:
    fabric = TorchFabric(group, deadline=20)
    fabric.open_lane("second")
    return fabric


def moved(rank: int, size: int) -> dict[str, Any]:
    """Four ranks, then three of them, then all four again, one of which is new."""
    three: Any = dist.new_group([0, 1, 2])
    fresh = fabric_of()
    seen = {"four": work(fresh)}
    fresh.close()
    if rank < 3:
        fresh = fabric_of(three)
        seen["three"] = work(fresh)
        fresh.close()
    before = lanes()

    fabric = fabric_of()
    threads = lanes()
    renewed = {"four": work(fabric)}
    late = fabric.start(verbs.all_reduce(torch.ones(1)), "seen through")
    if rank < 3:
        fabric.renew(three)
        assert (fabric.rank, fabric.size, lanes()) == (rank, 3, threads)
        assert late.done()
        renewed["three"] = work(fabric)
        fabric.renew()
    else:
        fabric.close()
        assert late.done()
        fabric = fabric_of()
    renewed["again"] = work(fabric)
    fabric.close()
    assert lanes() == before
    assert renewed.pop("again") == renewed["four"]
    return {"fresh": seen, "renewed": renewed}


def test_a_renewed_fabric_answers_as_a_fresh_one(gang4: Gang) -> None:
    for rank, told in enumerate(gang4.run(moved)):
        assert told["fresh"] == told["renewed"]
        assert ("three" in told["fresh"]) == (rank < 3)


def kept_keys(rank: int, size: int) -> list[int]:
    """What lies in the store after each of several renewals, and at the end."""
    fabric, counts = fabric_of(), list[int]()
    for _ in range(4):
        for lane in ("comm", "second"):
            fabric.join(fabric.start(verbs.all_reduce(torch.ones(1)), lane=lane))
        fabric.renew()
        dist.barrier()
        counts.append(default_store().num_keys())
        dist.barrier()
    fabric.close()
    return counts


def test_what_was_renewed_leaves_nothing_in_the_store(gang2: Gang) -> None:
    counts = gang2.run(kept_keys)[0]
    assert counts[-1] <= counts[1]


def failed(rank: int, size: int) -> tuple[str, float, str]:
    """A rank fails, its fabric is lost for all, and the others go on without it."""
    three: Any = dist.new_group([0, 1, 2])
    fabric = fabric_of()

    def program() -> Program[float]:
        if rank == 3:
            yield Compute(lambda: 1 / 0, "fail")
        return float((yield from verbs.all_reduce(torch.ones(1))))

    with pytest.raises((PeerError, ZeroDivisionError)) as caught:
        fabric.run(iter_join(fabric, program()))
    behind = fabric.start(verbs.all_reduce(torch.ones(1)))
    if rank == 3:
        fabric.close()
        return str(caught.value), 3.0, "closed"
    fabric.renew(three)
    answer = float(fabric.run(verbs.all_reduce(torch.ones(1))))
    with pytest.raises((GossamerError, PeerError)) as late:
        fabric.join(behind)
    fabric.close()
    return str(caught.value), answer, str(late.value)


def iter_join(fabric: TorchFabric, program: Program[float]) -> Program[float]:
    ticket = yield from verbs.start(program, "doomed")
    return (yield from verbs.join(ticket))


def test_the_others_go_on_without_a_rank_that_failed(gang4: Gang) -> None:
    for why, answer, late in gang4.run(failed):
        assert "division by zero" in why or "rank 3" in why.lower()
        assert answer == 3.0
        assert late


def test_members_that_do_not_meet_again_are_told_of_at_growing_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them hangs, and has a heartbeat."""
    fabric, failures = TorchFabric(deadline=0.05), [PeerError(f"no answer from rank {r}") for r in range(12)]
    present = SimpleNamespace(ranks=(0, 2), lives=(1, 1))
    ours: Any = SimpleNamespace(
        rank=2, place=1, present=present, joins=False, weights=(), regroup=lambda failure: None, leave=lambda: None
    )

    def meet(group: Any, lanes: Any) -> None:
        time.sleep(0.03)
        if failures:
            raise failures.pop(0)

    monkeypatch.setattr(fabric, "members", ours)
    monkeypatch.setattr(fabric, "_meet", meet)
    with pytest.warns(RuntimeWarning) as told:
        assert fabric.regroup(PeerError("no answer")).ranks == (0, 2)
    fabric.close()
    texts = [str(w.message) for w in told]
    assert 2 <= len(texts) <= 5
    assert all(t.startswith("rank 2: ranks (0, 2) have not met again for ") for t in texts)
    assert all("seconds: no answer from rank " in t for t in texts)
