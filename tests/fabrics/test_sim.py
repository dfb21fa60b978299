"""The simulator: what requests cost on a virtual clock, in which order they are served, and how it fails."""

import time
from contextlib import suppress

import pytest
import torch
from tests.runtime import fleet
from tests.runtime.gym import make, parameters, pull, train

from gossamer.core.errors import DeadlockError, GossamerError, PeerError
from gossamer.core.verbs import (
    AllToAll,
    Compute,
    OptimizerStep,
    Program,
    all_gather,
    all_gather_ragged,
    all_reduce,
    all_to_all,
    join,
    receive,
    send,
    start,
    take_ticket,
    wait_quorum,
)
from gossamer.fabrics.ledger import Ledger
from gossamer.fabrics.sim import Network, simulate

LINK = Network(latency=1e-3, rate=1e6)
SIZES = [1, 2, 3, 4, 8]


def wire(length: int, fill: int = 0) -> torch.Tensor:
    return torch.full((length,), fill, dtype=torch.uint8)


def compute(seconds: float) -> Program[None]:
    yield Compute(lambda: None, "work", seconds)


# -- what things cost -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_an_all_reduce_costs_a_ring(size: int) -> None:
    n = 4 * 840
    outcome = simulate([all_reduce(torch.full((840,), float(r))) for r in range(size)], LINK)
    assert outcome.clocks == pytest.approx([2 * (size - 1) * 1e-3 + 2 * (size - 1) * n / size / 1e6] * size)
    assert all(torch.equal(x, torch.full((840,), size * (size - 1) / 2)) for x in outcome.results)


@pytest.mark.parametrize("size", SIZES)
def test_an_all_gather_costs_every_other_wire(size: int) -> None:
    outcome = simulate([all_gather(wire(500, r)) for r in range(size)], LINK)
    assert outcome.clocks == pytest.approx([(size - 1) * (1e-3 + 500 / 1e6)] * size)
    assert all(torch.equal(torch.cat(x), torch.arange(size).repeat_interleave(500)) for x in outcome.results)


@pytest.mark.parametrize("size", SIZES)
def test_an_all_to_all_costs_the_heaviest_rank(size: int) -> None:
    def program(rank: int) -> Program[list[torch.Tensor]]:
        wires = [wire(100 * (rank + 1) if j != rank else 0, rank) for j in range(size)]
        return (yield from all_to_all(wires, [100 * (j + 1) if j != rank else 0 for j in range(size)]))

    outcome = simulate([program(r) for r in range(size)], LINK)
    assert outcome.clocks == pytest.approx([(size - 1) * (1e-3 + 100 * size / 1e6)] * size)
    for rank, wires in enumerate(outcome.results):
        assert [w.numel() for w in wires] == [100 * (j + 1) if j != rank else 0 for j in range(size)]
        assert all(int(w[0]) == j for j, w in enumerate(wires) if j != rank)


def test_a_slow_link_that_carries_nothing_slows_nobody() -> None:
    def program(rank: int) -> Program[list[torch.Tensor]]:
        lengths = {(0, 1): 1000, (1, 0): 1000}
        wires = [wire(lengths.get((rank, j), 0)) for j in range(3)]
        return (yield AllToAll(wires, [lengths.get((j, rank), 0) for j in range(3)]))

    outcome = simulate([program(r) for r in range(3)], Network(rate=(1e6, 1e6, 1.0)))
    assert outcome.clocks == pytest.approx([1e-3] * 3)


def test_the_slowest_link_sets_the_pace_of_a_collective() -> None:
    outcome = simulate([all_gather(wire(1000)) for _ in range(3)], Network(rate=(1e6, 1e5, 1e6)))
    assert outcome.clocks == pytest.approx([2000 / 1e5] * 3)


@pytest.mark.parametrize("rate", [(1e6, 1e5), (1e5, 1e6)])
def test_a_message_travels_at_the_slower_end(rate: tuple[float, float]) -> None:
    outcome = simulate([send(1, wire(1000)), receive(0, 1000)], Network(latency=1e-3, rate=rate))
    assert outcome.clocks == pytest.approx([0.0, 1e-3 + 1000 / 1e5])


def test_messages_share_the_senders_link_one_after_the_other() -> None:
    def sender() -> Program[None]:
        yield from send(1, wire(1000))
        yield from send(2, wire(3000))

    outcome = simulate([sender(), receive(0, 1000), receive(0, 3000)], LINK)
    assert outcome.clocks == pytest.approx([0.0, 2e-3, 5e-3])


def test_messages_of_one_pair_arrive_in_the_order_of_sending() -> None:
    def sender() -> Program[None]:
        for i in range(5):
            yield from send(1, wire(10, i))

    def receiver() -> Program[list[int]]:
        out = list[int]()
        for _ in range(5):
            out.append(int((yield from receive(0, 10))[0]))
        return out

    assert simulate([sender(), receiver()], LINK).results[1] == [0, 1, 2, 3, 4]


def test_a_collective_begins_when_the_last_rank_has_come() -> None:
    def program(rank: int) -> Program[None]:
        yield from compute(float(rank))
        yield from all_reduce(torch.zeros(0))

    assert simulate([program(r) for r in range(4)], Network(latency=0.25)).clocks == pytest.approx([3 + 6 * 0.25] * 4)


def test_results_are_reduced_in_rank_order_whoever_comes_first() -> None:
    values = [1e8, 1.0, -1e8, 1.0]

    def program(rank: int, delay: float) -> Program[torch.Tensor]:
        yield from compute(delay)
        return (yield from all_reduce(torch.tensor([values[rank]])))

    one = simulate([program(r, r) for r in range(4)]).results
    other = simulate([program(r, 9 - r) for r in range(4)]).results
    assert {float(x) for x in [*one, *other]} == {float(sum(torch.tensor([v]) for v in values))}


@pytest.mark.parametrize(("op", "expected"), [("sum", 6.0), ("max", 3.0), ("min", 0.0)])
def test_every_reduction_is_known(op: str, expected: float) -> None:
    outcome = simulate([all_reduce(torch.tensor(float(r)), op) for r in range(4)])  # pyright: ignore
    assert [float(x) for x in outcome.results] == [expected] * 4


# -- lanes ------------------------------------------------------------------------------------------------------------


def test_a_started_exchange_travels_while_the_rank_computes() -> None:
    def program() -> Program[None]:
        ticket = yield from start(all_reduce(torch.zeros(1000)), "x", 1)
        yield from compute(1.0)
        yield from join(ticket)

    seconds = 4000 / 1e3
    assert simulate([program() for _ in range(2)], Network(rate=1e3)).clocks == pytest.approx([seconds] * 2)
    assert simulate([program() for _ in range(2)], Network(rate=1e6)).clocks == pytest.approx([1.0] * 2)


def test_a_lane_serves_programs_one_after_the_other_in_order_of_starting() -> None:
    served = list[tuple[int, str]]()

    def labelled(rank: int, label: str) -> Program[str]:
        served.append((rank, label))
        yield from all_reduce(torch.zeros(500))
        return label

    def program(rank: int) -> Program[list[str]]:
        tickets = []
        for label in "abc":
            tickets.append((yield from start(labelled(rank, label), label, 1)))
        out = []
        for ticket in reversed(tickets):
            out.append((yield from join(ticket)))
        return out

    outcome = simulate([program(r) for r in range(2)], Network(rate=1e3))
    assert outcome.results == [["c", "b", "a"]] * 2
    assert outcome.clocks == pytest.approx([3 * 2.0] * 2)
    assert [label for rank, label in served if rank == 0] == ["a", "b", "c"]


def test_lanes_of_different_names_do_not_wait_for_each_other() -> None:
    def program() -> Program[None]:
        slow = yield from start(all_reduce(torch.zeros(500)), "slow", 1, lane="one")
        fast = yield from start(all_reduce(torch.zeros(500)), "fast", 1, lane="two")
        yield from join(fast)
        yield from join(slow)

    assert simulate([program() for _ in range(2)], Network(rate=1e3)).clocks == pytest.approx([2.0] * 2)


def test_a_ticket_is_done_when_its_time_has_come_and_not_before() -> None:
    def program() -> Program[list[bool]]:
        ticket = yield from start(all_reduce(torch.zeros(500)), "x", 1)
        seen = [ticket.done()]
        yield from compute(3.0)
        seen.append(ticket.done())
        yield from join(ticket)
        yield from join(ticket)
        return seen

    assert simulate([program() for _ in range(2)], Network(rate=1e3)).results == [[False, True]] * 2


# -- tickets ----------------------------------------------------------------------------------------------------------


def test_tickets_are_drawn_in_the_order_of_virtual_time_and_close_for_all() -> None:
    delays = [3.0, 1.0, 2.0, 5.0]

    def program(rank: int) -> Program[tuple[int, tuple[int, ...]]]:
        yield from compute(delays[rank])
        number = yield from take_ticket("k")
        return number, (yield from wait_quorum("k", 3))

    outcome = simulate([program(r) for r in range(4)], Network(latency=0.5))
    assert outcome.results == [(3, (1, 2, 0)), (1, (1, 2, 0)), (2, (1, 2, 0)), (4, (1, 2, 0))]
    assert outcome.clocks == pytest.approx([3.5, 3.5, 3.5, 5.0])


def test_counters_of_different_names_are_apart() -> None:
    def program() -> Program[list[int]]:
        out = []
        for name in ("a", "b", "a"):
            out.append((yield from take_ticket(name)))
        return out

    assert simulate([program()]).results == [[1, 1, 2]]


# -- replay, size, values ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["qsgd", "topk(ratio=0.1)", "powersgd", "osgp", "backup", *fleet.OVERLAP[:2]])
def test_a_run_replays_exactly(recipe: str) -> None:
    def run() -> tuple[list[float], list[torch.Tensor], list]:
        ranks = make(recipe, 4)
        network = Network(latency=1e-4, rate=(1e6, 2e6, 5e5, 1e6))
        outcome = train(ranks, pull, 6, network, lambda rank, step: 1e-3 * ((rank * 7 + step * 3) % 5 + 1))
        return [r.clock for r in ranks], parameters(ranks), list(outcome.ledger)

    (clocks, models, entries), (again, same_models, same_entries) = run(), run()
    assert clocks == again
    assert entries == same_entries
    assert all(torch.equal(a, b) for a, b in zip(models, same_models))
    assert min(clocks) > 0


@pytest.mark.parametrize("recipe", ["qsgd", "topk(ratio=0.1)", "powersgd", "sgp", "osgp", *fleet.OVERLAP[:2]])
def test_numbers_do_not_depend_on_the_network(recipe: str) -> None:
    def run(network: Network | None) -> list[torch.Tensor]:
        ranks = make(recipe, 4)
        train(ranks, pull, 8, network, lambda rank, step: 1e-3 * ((rank * 7 + step * 3) % 5))
        return parameters(ranks)

    slow = Network(latency=0.3, rate=(1e3, 2e5, 7e4, 1e6))
    assert all(torch.equal(a, b) for a, b in zip(run(None), run(slow)))


def test_five_hundred_ranks_reduce_twenty_times() -> None:
    size, rounds = 512, 20

    def program(rank: int) -> Program[float]:
        total = torch.tensor([float(rank % 7)])
        for _ in range(rounds):
            total = (yield from all_reduce(total)) / size
        return float(total)

    began = time.perf_counter()
    outcome = simulate([program(r) for r in range(size)], Network(latency=1e-3))
    print(f"{size} ranks x {rounds} all-reduces: {time.perf_counter() - began:.2f} s")
    mean = sum(r % 7 for r in range(size)) / size
    assert outcome.results == pytest.approx([mean] * size)
    assert outcome.clocks == pytest.approx([rounds * 2 * (size - 1) * 1e-3] * size)


def test_an_answer_is_nobody_elses_memory() -> None:
    mine = torch.zeros(4)

    def program(rank: int) -> Program[torch.Tensor]:
        given = mine if rank == 0 else torch.ones(4)
        total = yield from all_reduce(given)
        total += rank
        gathered = yield from all_gather(total.view(torch.uint8))
        total.fill_(-1.0)
        return torch.stack([g.clone().view(torch.float32) for g in gathered])

    results = simulate([program(r) for r in range(3)]).results
    for x in results:
        assert torch.equal(x[:, 0], torch.tensor([2.0, 3.0, 4.0]))
    assert torch.equal(mine, torch.zeros(4))


def test_ragged_wires_arrive_whole() -> None:
    outcome = simulate([all_gather_ragged(wire(10 * r, r), 100) for r in range(4)], LINK)
    for wires in outcome.results:
        assert [w.tolist() for w in wires] == [[r] * (10 * r) for r in range(4)]


def test_the_ledger_counts_what_crossed() -> None:
    ledger = Ledger()

    def program(rank: int) -> Program[None]:
        yield from all_reduce(torch.zeros(100))
        yield from all_gather(wire(50))
        yield from (send(1, wire(30)) if rank == 0 else receive(0, 30) if rank == 1 else compute(0.0))

    simulate([program(r) for r in range(4)], ledger=ledger)
    assert ledger.by_verb() == {
        "AllReduce": (4, 4 * 600),
        "AllGather": (4, 4 * 150),
        "Send": (1, 30),
        "Receive": (1, 0),
    }
    assert ledger.handed == 4 * 400 + 4 * 50 + 30
    assert ledger.received == 4 * 600 + 4 * 150 + 30


# -- failures ---------------------------------------------------------------------------------------------------------


def test_a_deadlock_says_who_waits_for_what() -> None:
    def lonely() -> Program[None]:
        yield from all_reduce(torch.zeros(3))

    def gone() -> Program[None]:
        yield from compute(0.0)

    with pytest.raises(DeadlockError, match=r"(?s)rank 0 waits for .*AllReduce\(3 x float32, sum\).*rank 1 has ended"):
        simulate([lonely(), gone()])
    with pytest.raises(DeadlockError, match="rank 0 waits for a message of 8 bytes from rank 1"):
        simulate([receive(1, 8), receive(0, 8)])
    with pytest.raises(DeadlockError, match=r"ticket 3 of 'k' \(0 drawn\)"):
        simulate([wait_quorum("k", 3)])


def test_an_error_of_a_program_surfaces_with_its_type_though_others_wait() -> None:
    class Mine(Exception):
        pass

    def failing(rank: int) -> Program[None]:
        if rank == 1:
            raise Mine("rank 1 has had enough")
        yield from all_reduce(torch.zeros(3))

    with pytest.raises(Mine, match="had enough"):
        simulate([failing(r) for r in range(3)])


def test_an_error_of_local_work_is_thrown_into_the_program() -> None:
    def broken() -> None:
        raise ZeroDivisionError("in the work")

    def careful() -> Program[str]:
        try:
            yield Compute(broken, "broken", 2.0)
        except ZeroDivisionError as error:
            return str(error)
        return ""

    def careless() -> Program[None]:
        yield Compute(broken, "broken")

    outcome = simulate([careful()])
    assert outcome.results == ["in the work"]
    assert outcome.clocks == [2.0]
    with pytest.raises(ZeroDivisionError):
        simulate([careless()])


def test_an_error_of_a_started_program_surfaces_at_join() -> None:
    def failing() -> Program[None]:
        yield from compute(1.0)
        raise KeyError("lost")

    def program() -> Program[None]:
        ticket = yield from start(failing(), "f", 1)
        yield from join(ticket)

    with pytest.raises(KeyError, match="lost"):
        simulate([program()])


def test_a_lane_goes_on_after_a_program_that_failed_and_was_forgiven() -> None:
    def failing() -> Program[None]:
        yield from compute(1.0)
        raise KeyError("lost")

    def program() -> Program[torch.Tensor]:
        first = yield from start(failing(), "f", 1)
        second = yield from start(all_reduce(torch.ones(1)), "g", 1)
        with suppress(KeyError):
            yield from join(first)
        return (yield from join(second))

    assert [float(x) for x in simulate([program(), program()]).results] == [2.0, 2.0]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda: all_reduce(torch.zeros(3)), lambda: all_reduce(torch.zeros(4))),
        (lambda: all_reduce(torch.zeros(3)), lambda: all_reduce(torch.zeros(3, dtype=torch.float64))),
        (lambda: all_reduce(torch.zeros(3)), lambda: all_reduce(torch.zeros(3), "max")),
        (lambda: all_gather(wire(3)), lambda: all_gather(wire(4))),
        (lambda: all_gather(wire(12)), lambda: all_reduce(torch.zeros(3))),
        (lambda: all_to_all([wire(1), wire(2)], [1, 2]), lambda: all_gather(wire(2))),
        (lambda: all_to_all([wire(0), wire(2)], [0, 2]), lambda: all_to_all([wire(2), wire(0)], [3, 0])),
    ],
)
def test_requests_that_do_not_fit_name_both_ranks(one, other) -> None:
    with pytest.raises(PeerError, match=r"rank 0 .*rank 1|rank 1 .*rank 0"):
        simulate([one(), other()])


def test_a_message_of_another_length_is_refused() -> None:
    with pytest.raises(PeerError, match="rank 0 sends 7 bytes to rank 1, which expects 8"):
        simulate([send(1, wire(7)), receive(0, 8)])


@pytest.mark.parametrize(("label", "step"), [("b", 1), ("a", 2)])
def test_equal_requests_of_different_blocks_or_steps_do_not_meet(label: str, step: int) -> None:
    def program(label: str, step: int) -> Program[None]:
        yield from join((yield from start(all_reduce(torch.zeros(3)), label, step)))

    with pytest.raises(PeerError, match=f"rank 0 is at 'a', step 1 while rank 1 is at '{label}', step {step}"):
        simulate([program("a", 1), program(label, step)])


def test_a_descent_is_not_for_the_fabric() -> None:
    def program() -> Program[None]:
        yield OptimizerStep()

    with pytest.raises(GossamerError, match="host"):
        simulate([program()])
