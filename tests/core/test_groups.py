"""A program among some ranks: what it asks, what it starts, and what is thrown into it."""

from collections.abc import Generator
from typing import Any

import pytest
import torch

from gossamer.core.groups import refuse_group, within
from gossamer.core.verbs import (
    AllReduce,
    Compute,
    Program,
    Send,
    Start,
    TakeTicket,
    Verb,
    all_reduce,
    all_to_all,
    join,
    receive,
    receive_first,
    send,
    start,
    take_ticket,
    wait_quorum,
)
from gossamer.fabrics.ledger import Ledger
from gossamer.fabrics.sim import Network, simulate


def wire(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.uint8)


def asked(program: Program[Any]) -> Verb:
    return next(program)


def test_a_request_of_nobody_in_particular_is_asked_of_the_group_and_groups_nest() -> None:
    def program() -> Program[None]:
        yield AllReduce(torch.ones(1))

    inner = asked(within(program(), (4, 6, 8)))
    outer = asked(within(within(program(), (2, 0)), (4, 6, 8)))
    assert isinstance(inner, AllReduce)
    assert isinstance(outer, AllReduce)
    assert (inner.among, outer.among) == ((4, 6, 8), (8, 4))


def test_what_is_no_business_of_others_stays_as_it_is() -> None:
    work = Compute(lambda: None, "work")

    def program() -> Program[None]:
        yield work

    assert asked(within(program(), (1, 2))) is work


def test_what_is_started_runs_among_them_too_also_when_it_starts_something() -> None:
    def deep() -> Program[Any]:
        return (yield from join((yield from start(start(take_ticket("x"))))))

    request, depth = asked(within(deep(), (3, 5))), 0
    while isinstance(request, Start):
        request, depth = asked(request.program), depth + 1
    assert isinstance(request, TakeTicket)
    assert (request.among, depth) == ((3, 5), 2)


class Mine(Exception):
    pass


def test_what_is_thrown_reaches_the_program_and_what_it_raises_comes_out() -> None:
    def program() -> Program[str]:
        try:
            yield AllReduce(torch.ones(1))
        except Mine:
            yield Send(0, wire(1))
            raise ValueError("told") from None
        return ""

    wrapped = within(program(), (0, 1))
    next(wrapped)
    assert isinstance(wrapped.throw(Mine()), Send)
    with pytest.raises(ValueError, match="told"):
        wrapped.send(None)


def test_closing_closes_the_program() -> None:
    seen = list[str]()

    def program() -> Program[None]:
        try:
            yield AllReduce(torch.ones(1))
        finally:
            seen.append("closed")

    wrapped: Generator[Any, Any, Any] = within(program(), (0, 1))
    next(wrapped)
    wrapped.close()
    assert seen == ["closed"]


@pytest.mark.parametrize("among", [(0, 0), (0, 4), (-1, 0), ()])
def test_a_group_is_of_different_ranks_that_there_are(among: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="distinct ranks from 0 to 3"):
        refuse_group(AllReduce(torch.ones(1), among=among), 0, 4)
    with pytest.raises(ValueError, match="rank 2 made a request in the group 0,1, to which it does not belong"):
        refuse_group(AllReduce(torch.ones(1), among=(0, 1)), 2, 4)


# -- on the simulator --------------------------------------------------------------------------------------------------

PAIRS = [(0, 2), (3, 1)]


def everything(rank: int) -> Program[list[Any]]:
    """All that can be asked of others, in a group of two; `rank` is that of the group."""
    other = 1 - rank
    total = yield from all_reduce(torch.tensor([rank + 1.0]))
    wires = yield from all_to_all([wire(rank, 0), wire(rank, 1)], [2, 2])
    yield from send(other, wire(10 + rank))
    letter = yield from receive(other, 1)
    yield from send(other, wire(20 + rank))
    first = yield from receive_first(1)
    ticket = yield from take_ticket("k")
    holders = yield from wait_quorum("k", 2)
    later = yield from start(all_reduce(torch.tensor([5.0])), "later", 1)
    return [
        float(total),
        [w.tolist() for w in wires],
        int(letter),
        (first[0], int(first[1])),
        ticket in (1, 2),
        sorted(holders),
        float((yield from join(later))),
    ]


def seated(make: Any) -> list[Program[Any]]:
    groups = {rank: group for group in PAIRS for rank in group}
    return [within(make(groups[r].index(r)), groups[r]) for r in range(4)]


def test_every_request_is_answered_within_the_group() -> None:
    results = simulate(seated(everything), Network(1e-3, 1e6)).results
    expected = [[3.0, [[0, r], [1, r]], 10 + (1 - r), (1 - r, 20 + (1 - r)), True, [0, 1], 10.0] for r in (0, 1, 0, 1)]
    assert [results[r] for r in (0, 2, 3, 1)] == expected


def test_all_ranks_in_their_order_are_everybody_however_they_are_said() -> None:
    programs = [within(all_reduce(torch.ones(1)), (0, 1)), all_reduce(torch.ones(1))]
    assert [float(t) for t in simulate(programs).results] == [2.0, 2.0]


def test_a_stranger_to_the_group_is_refused() -> None:
    with pytest.raises(ValueError, match="rank 1 made a request in the group 0,2, to which it does not belong"):
        simulate([all_reduce(torch.ones(1), among=(0, 2)) for _ in range(3)])


def test_the_ledger_tells_what_stays_within_a_node_and_among_whom() -> None:
    """Two nodes of two: pairs inside, then one of each node."""
    ledger = Ledger(per_node=2)

    def program(rank: int) -> Program[None]:
        node, place = divmod(rank, 2)
        yield from all_reduce(torch.ones(100), among=(2 * node, 2 * node + 1))
        yield from all_reduce(torch.ones(100), among=(place, 2 + place))
        yield from all_to_all([wire(*range(10))] * 4, [10] * 4)
        yield from all_reduce(torch.ones(100))

    simulate([program(r) for r in range(4)], ledger=ledger)
    assert ledger.inside == 4 * 400 + 4 * 10 + 2 * 600
    assert ledger.between == 4 * 400 + 4 * 20 + 2 * 600
    assert ledger.sent == ledger.inside + ledger.between
    mine = [(e.among, e.sent, e.inside) for e in ledger if e.rank == 1]
    assert mine == [((0, 1), 400, 400), ((1, 3), 400, 0), (None, 30, 10), (None, 600, 0)]


def test_ranks_of_a_node_share_its_link_and_what_they_tell_each_other_is_fast() -> None:
    slow = Network(latency=1e-3, rate=1e3, per_node=2)

    def inside(rank: int) -> Program[Any]:
        return all_reduce(torch.ones(1000), among=(rank // 2 * 2, rank // 2 * 2 + 1))

    assert simulate([inside(r) for r in range(4)], slow).clocks == [0.0] * 4
    fifth = Network(rate=1e3, per_node=2, inside=5e3)
    assert simulate([inside(r) for r in range(4)], fifth).clocks == pytest.approx([4000 / 5e3] * 4)
    both = [
        all_to_all([wire(*range(10))] * 4, [10] * 4) for _ in range(4)
    ]  # 20 bytes each to the other node, by one card
    assert simulate(both, slow).clocks == pytest.approx([3e-3 + 40 / 1e3] * 4)


# -- whoever is first ---------------------------------------------------------------------------------------------------


def late(seconds: float, to: int, length: int) -> Program[None]:
    yield Compute(lambda: None, "work", seconds)
    yield from send(to, torch.zeros(length, dtype=torch.uint8))


def readers(length: int, count: int) -> Program[list[int]]:
    seen = list[int]()
    for _ in range(count):
        source, _ = yield from receive_first(length)
        seen.append(source)
    return seen


def test_whoever_arrives_first_is_read_first_whether_waited_for_or_there_already() -> None:
    programs = [readers(10, 3), late(3.0, 0, 10), late(1.0, 0, 10), late(2.0, 0, 10)]
    assert simulate(programs, Network(latency=0.1)).results[0] == [2, 3, 1]

    def sleeper() -> Program[list[int]]:
        yield Compute(lambda: None, "work", 9.0)
        return (yield from readers(10, 3))

    outcome = simulate([sleeper(), late(3.0, 0, 10), late(1.0, 0, 10), late(2.0, 0, 10)])
    assert outcome.results[0] == [2, 3, 1]
    assert outcome.clocks[0] == 9.0


def test_a_message_that_left_first_may_arrive_last() -> None:
    def slowly() -> Program[None]:
        yield from send(0, torch.zeros(10, dtype=torch.uint8))

    programs = [readers(10, 2), slowly(), late(1.0, 0, 10)]
    outcome = simulate(programs, Network(rate=(1e3, 1.0, 1e3)))
    assert outcome.results[0] == [2, 1]
    assert outcome.clocks[0] == 10.0


def test_a_deadlock_names_the_group() -> None:
    def inner_first() -> Program[None]:
        yield from all_reduce(torch.ones(3), among=(0, 1))
        yield from all_reduce(torch.ones(3))

    def outer_first() -> Program[None]:
        yield from all_reduce(torch.ones(3))
        yield from all_reduce(torch.ones(3), among=(0, 1))

    with pytest.raises(Exception, match=r"rank 0 waits.*AllReduce\(3 x float32, sum\) in the group 0,1"):
        simulate([inner_first(), outer_first(), all_reduce(torch.ones(3))])
    with pytest.raises(Exception, match="from any rank in the group 0,1"):
        simulate([within(receive_first(8), (0, 1)), receive_first(8), receive_first(8)])


def test_requests_of_a_group_that_do_not_fit_name_its_ranks() -> None:
    programs = [all_reduce(torch.ones(1)) for _ in range(2)]
    programs += [all_reduce(torch.ones(n), among=(2, 3)) for n in (3, 4)]
    with pytest.raises(Exception, match=r"rank 2 asks .* in the group 2,3 while rank 3 asks"):
        simulate(programs)
