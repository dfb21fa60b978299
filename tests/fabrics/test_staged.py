"""A GPU's tensors over gloo: the same answers as gloo's, by way of pinned memory."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.fabrics import streams
from tests.gang import Gang
from torch import Tensor

from gossamer.core.verbs import AllGather, AllReduce, AllToAll, Receive, Send
from gossamer.core.wire import LazyWire
from gossamer.fabrics.liveness.store import SharedStore, poll
from gossamer.fabrics.torch import staged
from gossamer.fabrics.torch.connection import Connection
from gossamer.fabrics.torch.gloo import Gloo
from gossamer.fabrics.torch.rendezvous import gloo
from gossamer.fabrics.torch.staged import Staged

pytestmark = pytest.mark.gang

CPU = torch.device("cpu")  # the pretended device of tests/gpu knows what lies where; here the numbers are looked at


def connected(rank: int, size: int, name: str) -> Any:
    import threading

    store = SharedStore(dist.distributed_c10d._get_default_store(), rank, size).under(f"test-staged/{name}")

    def meet(text: str) -> dict[int, str]:
        return store.meet("book", text, lambda ready: poll(ready, 20.0, threading.Event()))

    return gloo(meet, rank, size, 20.0)


def answers(connection: Connection) -> list[Any]:
    """Everything that a connection can be asked, with lengths that differ from rank to rank."""
    rank, size = connection.rank, connection.size
    heard = list[tuple[str, int, list[int]]]()
    made = list[int]()

    def wire(length: int, value: int) -> Tensor:
        return torch.full((length,), value, dtype=torch.uint8)

    def promised(j: int) -> LazyWire:
        def make() -> Tensor:
            made.append(j)
            return wire(1 + rank + j, 10 * rank + j)

        return LazyWire(make, 1 + rank + j)

    def read(source: int, came: Tensor) -> None:
        heard.append(("read", source, came.tolist()))

    strided = torch.arange(6.0).view(2, 3).t() + rank
    total = connection.answer(AllReduce(strided))
    assert total is strided
    nothing = torch.empty(0)
    assert connection.answer(AllReduce(nothing)) is nothing
    gathered = connection.answer(AllGather(wire(4, rank)))
    lengths = [1 + j + rank for j in range(size)]
    exchanged = connection.answer(AllToAll([promised(j) for j in range(size)], lengths))
    assert connection.answer(AllGather(wire(40_000, rank), read)) == []
    assert connection.answer(AllToAll([wire(n, rank) for n in lengths], lengths, read)) == []
    to, source = (rank + 1) % size, (rank - 1) % size
    for i in range(2):
        connection.answer(Send(to, wire(50_000, rank + i), [(source, 50_000)]))
    letters = [connection.answer(Receive(source, 50_000)) for _ in range(2)]
    plain = [t.tolist() for t in [total, *gathered, *exchanged, *letters]]
    return [plain, heard, made]


def both_ways(rank: int, size: int) -> tuple[list[Any], list[Any], int, int]:
    pinned = list[int]()

    def counted(length: int) -> Tensor:
        pinned.append(length)
        return torch.empty(length, dtype=torch.uint8)

    with pytest.MonkeyPatch.context() as patch:
        streams.install(patch)
        patch.setattr(staged, "pinned", counted)
        straight, around = (
            Gloo(connected(rank, size, "a"), rank, size),
            Staged(connected(rank, size, "b"), rank, size, CPU),
        )
        try:
            one, other = answers(straight), answers(around)
        finally:
            straight.hang_up(5.0)
            around.hang_up(5.0)
        return one, other, sum(pinned), len(around._rising)


@pytest.mark.parametrize("ranks", [2, 4])
def test_it_answers_as_gloo_does(gang_of: Callable[[int], Gang], ranks: int) -> None:
    for one, other, pinned, _ in gang_of(ranks).run(both_ways):
        assert one == other
        assert pinned > 300_000
