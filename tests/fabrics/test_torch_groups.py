"""Groups of ranks on real processes: the same answers as on the simulator, and failures that name the group."""

import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.core.test_groups import PAIRS, everything, seated
from tests.fabrics.test_torch_failures import AMPLE, DEADLINE, failure
from tests.gang import Gang
from tests.marked import SLACK

from gossamer.core import verbs
from gossamer.core.errors import PeerError
from gossamer.core.groups import within
from gossamer.core.verbs import AllToAll, Compute, Program
from gossamer.fabrics.ledger import Ledger
from gossamer.fabrics.sim import simulate
from gossamer.fabrics.torch.fabric import TorchFabric

pytestmark = pytest.mark.gang

HALVES = ((0, 1), (2, 3))


def answered(rank: int, size: int) -> list[Any]:
    """On two lanes, one of them opened when the groups are there already."""
    fabric = TorchFabric(deadline=20)
    fabric.form(PAIRS)
    fabric.form(PAIRS)
    fabric.open_lane("second")
    group = next(g for g in PAIRS if rank in g)
    out: list[Any] = [fabric.run(within(everything(group.index(rank)), group))]
    out.append(fabric.join(fabric.start(within(verbs.all_reduce(torch.ones(2)), group), lane="second")).tolist())
    out.append(float(fabric.run(verbs.all_reduce(torch.ones(1)))))
    out.append(float(fabric.run(verbs.all_reduce(torch.ones(1), among=(0, 1, 2, 3)))))
    out.append(float(fabric.run(verbs.all_reduce(torch.ones(1), among=(rank,)))))
    fabric.close()
    return out


def test_groups_answer_as_on_the_simulator(gang4: Gang) -> None:
    virtual = simulate(seated(everything)).results
    for rank, real in enumerate(gang4.run(answered)):
        assert real == [virtual[rank], [2.0, 2.0], 4.0, 4.0, 1.0]


def ledgers(rank: int, size: int) -> list[Any]:
    fabric = TorchFabric(deadline=20, ledger=Ledger(per_node=2))
    fabric.form(HALVES)
    fabric.run(verbs.all_reduce(torch.ones(100), among=HALVES[rank // 2]))
    fabric.run(verbs.all_reduce(torch.ones(100)))
    fabric.close()
    return [(e.among, e.sent, e.inside) for e in fabric.ledger]


def test_the_ledger_tells_bytes_inside_a_node_from_bytes_between(gang4: Gang) -> None:
    for rank, entries in enumerate(gang4.run(ledgers)):
        assert entries == [(HALVES[rank // 2], 400, 400), (None, 600, 600 * (rank % 2 == 0))]


def refused(rank: int, size: int) -> list[str]:
    """What never reaches the network, and a program may catch; the lane goes on."""
    fabric = TorchFabric(deadline=20)
    fabric.form(HALVES)

    def program() -> Program[list[str]]:
        seen = list[str]()
        strangers = HALVES[1 - rank // 2]
        for among in (strangers, (rank, 3 - rank), (0, 0), (7,)):
            try:
                yield from verbs.all_reduce(torch.ones(1), among=among)
            except ValueError as error:
                seen.append(str(error))
        return seen

    out = fabric.join(fabric.start(program()))
    fabric.run(verbs.all_reduce(torch.ones(1), among=HALVES[rank // 2]))
    with pytest.raises(ValueError, match="distinct ranks from 0 to 3"):
        fabric.form([(2, 4)])
    fabric.close()
    return out


def test_a_group_that_nobody_made_or_one_is_no_member_of_is_refused(gang4: Gang) -> None:
    for rank, (stranger, unmade, *wrong) in enumerate(gang4.run(refused)):
        assert (
            stranger
            == f"rank {rank} made a request in the group {'2,3' if rank < 2 else '0,1'}, to which it does not belong"
        )
        assert (
            f"no group {rank},{3 - rank} on comm thread 'comm': the part that uses it must list it in `groups`"
            in unmade
        )
        assert all("distinct ranks from 0 to 3" in text for text in wrong)


def other_groups(rank: int, size: int) -> str:
    fabric = TorchFabric(deadline=DEADLINE)
    try:
        fabric.form(HALVES if rank else PAIRS)
    except PeerError as error:
        return str(error)
    finally:
        fabric.close()
    return "no error"


def test_ranks_that_make_other_groups_learn_of_it(gang4: Gang) -> None:
    for text in gang4.run(other_groups):
        assert "makes the groups 0,1, 2,3" in text
        assert "makes the groups 0,2, 3,1" in text


def differs(rank: int, size: int, kind: str) -> tuple[str, str, float]:
    """Rank 3 asks something else of its group; the others' is in order."""
    fabric = TorchFabric(deadline=AMPLE)
    fabric.form(HALVES)
    dist.barrier()  # or the error of one half would find the other still forming its group
    odd, mine = rank == 3, HALVES[rank // 2]
    wire = torch.zeros(20 if odd else 10, dtype=torch.uint8)
    programs: dict[str, Program[Any]] = {
        "size": verbs.all_reduce(torch.ones(20 if odd else 10)),
        "wires": verbs.all_to_all([wire, wire], [wire.numel()] * 2),
    }

    def program() -> Program[None]:
        yield from within(programs[kind], mine)
        yield from verbs.all_reduce(torch.ones(5))

    return failure(fabric, lambda: fabric.join(fabric.start(program(), "head", 3)))


@pytest.mark.parametrize("kind", ["size", "wires"])
def test_ranks_of_a_group_that_disagree_learn_how_and_the_others_too(gang4: Gang, kind: str) -> None:
    outcomes = gang4.run(differs, kind)
    assert [name for name, *_ in outcomes] == ["PeerError"] * 4
    assert "in the group 2,3, collective 1" in outcomes[2][1]
    assert "the ranks are about to run different collectives" in outcomes[2][1]
    if kind == "wires":
        assert "Rank 3 sends 20 bytes to rank 2, which expects 10." in outcomes[2][1]
    mine = "AllReduce sum of 10 float32 in the group 0,1, collective 1" if kind == "size" else "in the group 0,1"
    for _, text, seconds in outcomes[:2]:
        # whose neighbour is already gone may still be in its own group: its last bytes went with the neighbour's lanes
        assert "AllReduce sum of 5 float32, collective 1" in text or mine in text
        assert "the ranks are about to run different collectives" in text
        assert "in the group 2,3" in text
        assert seconds < AMPLE


def never_comes(rank: int, size: int) -> tuple[str, str, float]:
    fabric = TorchFabric(deadline=1.5, patience="work")
    fabric.form(HALVES)
    mine = verbs.all_reduce(torch.ones(4), among=HALVES[rank // 2])
    outcome = "", "", 0.0
    if rank < 2:  # in order among themselves, and then they wait for all
        fabric.join(fabric.start(mine, "head", 8))
        mine = verbs.all_reduce(torch.ones(4))
    if rank < 3:
        outcome = failure(fabric, lambda: fabric.join(fabric.start(mine, "head", 8)))
    dist.barrier()  # rank 3 stays away until all others have given up, however long that takes
    fabric.close()
    return outcome


def test_a_deadline_names_the_group_and_who_is_missing(gang4: Gang) -> None:
    outcomes = gang4.run(never_comes)
    for rank, (name, text, seconds) in enumerate(outcomes[:3]):
        assert name == "PeerError"
        assert "Rank 3 is alive, and busy elsewhere" in text
        assert seconds < 1.5 + 2.0 + SLACK
        assert f"rank {rank} of 4: step 8, 'head', AllReduce sum of 4 float32" in text
    assert "in the group 2,3, collective 1" in outcomes[2][1]


def killed(rank: int, size: int, victim: int) -> tuple[str, str, float]:
    """Within a group, in the midst of a step: its peer waits for it, and the others wait for its peer."""
    fabric = TorchFabric(deadline=DEADLINE, check=2)
    fabric.form([*HALVES, (0, 2)])

    def die() -> None:
        if rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)

    def program() -> Program[None]:
        for _ in range(4):
            yield from verbs.all_reduce(torch.ones(1000), among=HALVES[rank // 2])
        yield Compute(die, "die")
        wires = [torch.zeros(1000, dtype=torch.uint8)] * 2
        yield AllToAll(wires, [1000, 1000], among=HALVES[rank // 2])
        if rank in (0, 2):
            yield from verbs.all_reduce(torch.ones(1000), among=(0, 2))
        yield from verbs.all_reduce(torch.ones(1000), among=HALVES[rank // 2])

    return failure(fabric, lambda: fabric.join(fabric.start(program(), "embedding", step=5)))


@pytest.mark.parametrize("victim", [2, 3])
def test_a_rank_that_dies_within_a_group_is_named_on_all_ranks(victim: int) -> None:
    gang = Gang(4)
    try:
        outcomes = gang.run(killed, victim, lost=[victim])
    finally:
        gang.close()
    for rank, outcome in enumerate(outcomes):
        if rank != victim:
            name, text, seconds = outcome
            assert name == "PeerError"
            assert f"rank {rank} of 4: step 5, 'embedding'" in text
            assert f"No answer from rank {victim}:" in text
            assert "in the group" in text
            assert seconds < DEADLINE + 2.0 + SLACK


def leaves_early(rank: int, size: int) -> tuple[str, str, float]:
    fabric = TorchFabric(deadline=AMPLE)
    fabric.form(HALVES)
    for step in range(1, 11):
        fabric.join(fabric.start(verbs.all_reduce(torch.ones(10), among=HALVES[rank // 2]), "head", step))
    dist.barrier()  # or rank 2's error would find the other half on its way
    if rank != 2:
        fabric.close()
        return "", "", 0.0
    mine = verbs.all_reduce(torch.ones(10), among=HALVES[1])
    return failure(fabric, lambda: fabric.join(fabric.start(mine, "head", 11)))


def test_a_member_that_has_left_is_told_from_one_that_is_late(gang4: Gang) -> None:
    name, text, seconds = gang4.run(leaves_early)[2]
    assert name == "PeerError"
    assert "detached or ended: check that all ranks take equally many steps." in text
    assert "in the group 2,3, collective 11" in text
    assert seconds < AMPLE


def first_come(rank: int, size: int) -> list[int]:
    """Rank 0 reads whoever is first: those who sleep come later."""
    fabric, order = TorchFabric(deadline=20), list[int]()
    for r in (2, 1, 3):
        if rank == r:
            fabric.run(verbs.send(0, torch.full((50_000,), r, dtype=torch.uint8)))
        if rank == 0:
            source, wire = fabric.run(verbs.receive_first(50_000))
            assert int(wire[0]) == source
            order.append(source)
        fabric.run(verbs.all_reduce(torch.ones(1)))
    fabric.close()
    return order


def test_whoever_is_first_is_read_first(gang4: Gang) -> None:
    assert gang4.run(first_come)[0] == [2, 1, 3]
