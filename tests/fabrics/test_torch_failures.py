"""Whatever goes wrong on one rank, every rank hears of it in time, and learns who and where."""

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.gang import Gang, GangError
from tests.marked import SLACK
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from gossamer.core import verbs
from gossamer.core.errors import GossamerError, PeerError
from gossamer.core.verbs import AllToAll, Compute, Program
from gossamer.fabrics.liveness.store import SharedStore
from gossamer.fabrics.torch.driver import NetworkDriver
from gossamer.fabrics.torch.fabric import TorchFabric

pytestmark = pytest.mark.gang

DEADLINE = 5.0
AMPLE = 30.0  # where nobody may wait for the deadline: a slow machine must not come near it


def failure(fabric: TorchFabric, drive: Callable[[], Any]) -> tuple[str, str, float]:
    """The error that a call raises, its kind, and the seconds that it took."""
    begin = time.monotonic()
    try:
        drive()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - begin
    finally:
        fabric.close()
    return "", "no error", time.monotonic() - begin


def one_program_fails(rank: int, size: int) -> list[tuple[str, str, float]]:
    fabric = TorchFabric(deadline=AMPLE)

    def program() -> Program[None]:
        yield from verbs.all_reduce(torch.ones(3))
        if rank == 1:
            raise ValueError("the codec has a bug")
        yield from verbs.all_gather(torch.zeros(3, dtype=torch.uint8))

    first = fabric.start(program(), "block.7", step=12)
    queued = fabric.start(verbs.all_reduce(torch.ones(3)), "block.8", step=12)
    outcomes = [failure(fabric, lambda t=t: fabric.join(t)) for t in (first, queued)]
    later = fabric.start(verbs.all_reduce(torch.ones(3)), "block.9", step=13)
    return [*outcomes, failure(fabric, lambda: fabric.join(later))]


def test_a_programs_error_is_raised_at_its_join_and_told_to_the_others(gang4: Gang) -> None:
    for rank, outcomes in enumerate(gang4.run(one_program_fails)):
        assert len({text for _, text, _ in outcomes}) == 1  # queued and later tickets fail with it, at once
        kind, text, seconds = outcomes[0]
        assert seconds < AMPLE
        if rank == 1:
            assert (kind, text) == ("ValueError", "the codec has a bug")
        else:
            assert kind == "PeerError"
            assert f"rank {rank} of 4: step 12, 'block.7', AllGather of 3 bytes" in text
            assert "Rank 1 is at step 12, 'block.7'" in text
            assert "ValueError: the codec has a bug" in text


def handled(rank: int, size: int) -> list[Any]:
    """What a program may catch: errors of its own requests that never reached the network."""
    fabric = TorchFabric(deadline=DEADLINE)

    def fails() -> None:
        raise KeyError("gone")

    def program() -> Program[list[str]]:
        seen = list[str]()
        for verb in (
            Compute(fails, "work"),
            verbs.AllReduce(torch.ones(3, dtype=torch.bool)),
            verbs.AllGather(torch.ones(3)),
            AllToAll([torch.zeros(1, dtype=torch.uint8)], [1, 2, 3]),
            verbs.Send(size, torch.zeros(1, dtype=torch.uint8)),
            verbs.Start(verbs.all_reduce(torch.ones(1)), lane="unknown"),
        ):
            try:
                yield verb
            except Exception as error:
                seen.append(type(error).__name__)
        later = yield from verbs.start(verbs.all_reduce(torch.ones(1)), "later")
        try:
            yield from verbs.join(later)
        except RuntimeError as error:
            seen.append(str(error))
        return seen

    seen = fabric.join(fabric.start(program()))
    total = float(fabric.run(verbs.all_reduce(torch.ones(1))))
    fabric.close()
    return [*seen, total]


def test_impossible_requests_are_refused_before_the_backend_sees_them(gang2: Gang) -> None:
    deadlock = "deadlock: a program on comm thread 'comm' joins 'later', which is queued behind it; start it on another comm thread"
    expected = ["KeyError", "TypeError", "TypeError", "ValueError", "ValueError", "ValueError", deadlock, 2.0]
    assert gang2.run(handled) == [expected] * 2


def mismatch(rank: int, size: int, kind: str, check: int) -> tuple[str, str, float]:
    fabric = TorchFabric(deadline=20.0 if check else 2.0, check=check)
    n = 100 if rank == size - 1 else 10
    programs: dict[str, Program[Any]] = {
        "verb": verbs.all_reduce(torch.ones(4)) if rank else verbs.all_gather(torch.zeros(16, dtype=torch.uint8)),
        "size": verbs.all_reduce(torch.ones(n)),
        "dtype": verbs.all_reduce(torch.ones(4, dtype=torch.int32 if rank else torch.float32)),
        "wires": verbs.all_to_all([torch.zeros(n, dtype=torch.uint8)] * size, [n] * size),
        "label": verbs.all_reduce(torch.ones(4)),
    }
    label = f"block.{rank % 2}" if kind == "label" else "block"
    return failure(fabric, lambda: fabric.join(fabric.start(programs[kind], label, step=3)))


@pytest.mark.parametrize("kind", ["verb", "size", "dtype", "wires", "label"])
def test_ranks_that_disagree_learn_how(gang4: Gang, kind: str) -> None:
    for rank, (name, text, seconds) in enumerate(gang4.run(mismatch, kind, 32)):
        assert name == "PeerError"
        assert f"rank {rank} of 4: step 3, 'block" in text
        assert "the ranks are about to run different collectives" in text
        assert "Rank " in text
        assert seconds < 20.0  # nobody waited for the deadline


def test_a_mismatch_is_explained_even_where_nothing_was_compared(gang2: Gang) -> None:
    zero, one = gang2.run(mismatch, "verb", 0)
    assert "Rank 1 is at step 3, 'block', AllReduce sum of 4 float32" in zero[1]
    assert "Rank 0 is at step 3, 'block', AllGather of 16 bytes" in one[1]
    assert max(zero[2], one[2]) < 2.0 + 2.0 + SLACK


def changes_its_mind(rank: int, size: int, kind: str) -> tuple[str, str, float]:
    """Long after the first collectives were compared, the last rank's message is of another size."""
    fabric = TorchFabric(deadline=DEADLINE)

    def program(n: int) -> Program[Any]:
        yield from verbs.all_reduce(torch.ones(3))
        if kind == "reduce":
            yield from verbs.all_reduce(torch.ones(n))
        else:
            yield from verbs.all_gather(torch.zeros(n, dtype=torch.uint8))

    for step in range(1, 21):
        fabric.join(fabric.start(program(10 + step // 15), "head", step))  # a change on all ranks is no trouble
    n = 100 if rank == size - 1 else 11
    return failure(fabric, lambda: fabric.join(fabric.start(program(n), "head", step=21)))


@pytest.mark.parametrize("kind", ["reduce", "gather"])
def test_a_size_that_changes_on_one_rank_only_is_told_to_all(gang4: Gang, kind: str) -> None:
    said = "AllReduce sum of {} float32" if kind == "reduce" else "AllGather of {} bytes"
    for rank, (name, text, seconds) in enumerate(gang4.run(changes_its_mind, kind)):
        assert name == "PeerError"
        mine, others = said.format(100), said.format(11)
        if rank != 3:
            mine, others = others, mine
        assert f"rank {rank} of 4: step 21, 'head', {mine}" in text
        assert f"Rank {3 if rank != 3 else 0} is at step 21, 'head', {others}" in text
        assert seconds < DEADLINE + 2.0 + SLACK


def takes_a_turn_of_its_own(rank: int, size: int) -> tuple[str, str, float]:
    """One rank alone does what all should do together."""
    fabric = TorchFabric(deadline=DEADLINE)
    for step in range(1, 21):
        fabric.join(fabric.start(verbs.all_reduce(torch.ones(10)), "head", step))
    if rank == 0:
        return failure(fabric, lambda: fabric.run(verbs.all_reduce(torch.ones(1000))))
    return failure(fabric, lambda: fabric.join(fabric.start(verbs.all_reduce(torch.ones(10)), "head", 21)))


def test_what_one_rank_does_alone_is_told_to_all(gang2: Gang) -> None:
    zero, one = gang2.run(takes_a_turn_of_its_own)
    assert zero[0] == one[0] == "PeerError"
    assert "'unlabelled', AllReduce sum of 1000 float32" in zero[1]
    assert "Rank 1 is at step 21, 'head', AllReduce sum of 10 float32" in zero[1]
    assert "Rank 0 is at step 0, 'unlabelled', AllReduce sum of 1000 float32" in one[1]


def comparisons(rank: int, size: int) -> list[int]:
    """Keys in the store, as sizes go on changing on all ranks."""
    fabric, keys = TorchFabric(deadline=20), list[int]()
    for step in range(1, 41):
        fabric.join(fabric.start(verbs.all_reduce(torch.ones(step)), "head", step))
        for _ in range(2):  # the second one is usual, and so nobody is deleting after it
            fabric.run(verbs.all_reduce(torch.ones(1)))
        if step in (20, 40):
            keys.append(dist.distributed_c10d._get_default_store().num_keys())
            fabric.run(verbs.all_reduce(torch.ones(1)))
    fabric.close()
    return keys


def test_comparisons_leave_no_keys_behind(gang2: Gang) -> None:
    assert all(later == earlier for earlier, later in gang2.run(comparisons))


def ends_early(rank: int, size: int) -> tuple[str, str, float]:
    fabric = TorchFabric(deadline=AMPLE)
    for step in range(1, 11):
        fabric.join(fabric.start(verbs.all_reduce(torch.ones(10)), "head", step))
    if rank == 1:
        fabric.close()
        return "", "", 0.0
    return failure(fabric, lambda: fabric.join(fabric.start(verbs.all_reduce(torch.ones(10)), "head", 11)))


def test_a_rank_that_has_ended_is_not_called_dead(gang4: Gang) -> None:
    for rank, (name, text, seconds) in enumerate(gang4.run(ends_early)):
        if rank != 1:
            assert name == "PeerError"
            assert "Rank 1 has detached or ended: check that all ranks take equally many steps." in text
            assert "No answer from" not in text
            assert seconds < AMPLE


def never_comes(rank: int, size: int, check: int) -> tuple[str, str, float]:
    fabric = TorchFabric(deadline=1.5, check=check, patience="work")
    outcome = "", "", 0.0
    if rank != 1:
        ticket = fabric.start(verbs.all_reduce(torch.ones(4)), "head", step=8)
        outcome = failure(fabric, lambda: fabric.join(ticket))
    dist.barrier()  # rank 1 stays away until all others have given up, however long that takes
    fabric.close()
    return outcome


@pytest.mark.parametrize("check", [0, 32])
def test_a_rank_that_does_not_come_is_named(gang4: Gang, check: int) -> None:
    for rank, (name, text, seconds) in enumerate(gang4.run(never_comes, check)):
        if rank != 1:
            assert name == "PeerError"
            assert "Rank 1 is alive, and busy elsewhere" in text
            assert "step 8, 'head', AllReduce sum of 4 float32" in text
            assert "16 bytes" in text
            assert seconds < 1.5 + 2.0 + SLACK


def unread_letter(rank: int, size: int) -> list[tuple[str, str, float]]:
    """A letter is on its way when the lane breaks."""
    fabric = TorchFabric(deadline=DEADLINE)

    def program() -> Program[None]:
        yield from verbs.send(1 - rank, torch.zeros(1_000_000, dtype=torch.uint8))
        yield from verbs.all_reduce(torch.ones(1))
        if rank == 0:
            raise ValueError("stop here")
        yield from verbs.all_reduce(torch.ones(1))

    return [failure(fabric, lambda: fabric.join(fabric.start(program(), "gossip", step=2)))]


def test_a_letter_on_its_way_does_not_hinder_the_end(gang2: Gang) -> None:
    (zero,), (one,) = gang2.run(unread_letter)
    assert zero[:2] == ("ValueError", "stop here")
    assert one[0] == "PeerError"
    assert one[2] < DEADLINE + 2.0 + SLACK
    assert "ValueError: stop here" in one[1]


def lanes_differ(rank: int, size: int) -> str:
    fabric = TorchFabric(deadline=DEADLINE)
    try:
        fabric.open_lane("one" if rank else "other")
    except PeerError as error:
        return str(error)
    finally:
        fabric.close()
    return "no error"


def test_lanes_are_opened_in_one_order(gang2: Gang) -> None:
    for text in gang2.run(lanes_differ):
        assert "opens comm thread 'one'" in text
        assert "opens comm thread 'other'" in text


def test_closing_ends_what_waits() -> None:
    fabric = TorchFabric()
    waiting = fabric.start(verbs.wait_quorum("never", 1))
    queued = fabric.start(verbs.all_reduce(torch.ones(1)))
    begin = time.monotonic()
    fabric.close()
    fabric.close()
    assert time.monotonic() - begin < 1.0 + SLACK
    for ticket in (waiting, queued, fabric.start(verbs.all_reduce(torch.ones(1)))):
        with pytest.raises(GossamerError, match="comm thread 'comm' was closed"):
            fabric.join(ticket)


def raises(rank: int, size: int) -> int:
    if rank == 1:
        raise ValueError("on purpose")
    return rank


def test_a_gang_shows_the_remote_traceback_and_starts_again(gang2: Gang) -> None:
    with pytest.raises(GangError, match=r"rank 1 of 2:(.|\n)*ValueError: on purpose"):
        gang2.run(raises)
    assert gang2.run(handled)[0][-1] == 2.0


def test_a_gang_of_which_a_rank_has_died_between_two_tests_is_replaced(gang2: Gang) -> None:
    assert gang2.run(handled)[0][-1] == 2.0
    gang2._processes[1].kill()
    gang2._processes[1].join()
    with pytest.raises(OSError):
        gang2.run(handled)
    assert gang2.run(handled)[0][-1] == 2.0


def lives(rank: int, size: int) -> int:
    return rank


def test_a_rank_that_was_to_die_and_has_not_is_an_error(gang2: Gang) -> None:
    with pytest.raises(GangError, match="rank 1 of 2:\nit was to die, and returned 1"):
        gang2.run(lives, lost=[1])


def over_two_cards(rank: int, size: int, before: int) -> tuple[list[float], str, bool]:
    """Rank 1 makes one request fewer than the others; is their thread free of gloo afterwards?"""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("GLOO_SOCKET_IFNAME", "lo,lo")
        fabric = TorchFabric(deadline=2.0, patience="work", check=0)
    sums = [float(fabric.run(verbs.all_reduce(torch.ones(1)))) for _ in range(before)]
    thread, kind = fabric.session.lanes["comm"].thread._thread, ""
    if rank != 1:
        kind, _, _ = failure(fabric, lambda: fabric.run(verbs.all_reduce(torch.ones(1))))
        thread.join(SLACK)
    dist.barrier()
    fabric.close()
    return sums, kind, thread.is_alive()


@pytest.mark.parametrize("before", [2, 3])
def test_gloo_connects_over_several_network_cards_and_is_torn_off_all(gang2: Gang, before: int) -> None:
    """Requests take turns over them."""
    (sums, kind, stuck), (others, *_) = gang2.run(over_two_cards, before)
    assert sums == others == [2.0] * before
    assert kind == "PeerError"
    assert not stuck


def test_a_wait_in_the_store_ends_where_the_members_are_to_meet_again() -> None:
    """A shard's ranks have a part of the store, in which nobody says that the generation has ended."""
    parent: Any = SimpleNamespace(members=SimpleNamespace(is_called=False), amend=None)
    pulse: Any = None
    driver = NetworkDriver(parent, "comm", SharedStore(HashStore(), 0, 2), pulse, 0, torch.device("cpu"))
    waits = threading.Thread(target=driver._poll, args=(lambda: False, halt := threading.Event()), daemon=True)
    waits.start()
    waits.join(0.3)
    assert waits.is_alive()
    parent.members.is_called = True
    waits.join(SLACK)
    assert not waits.is_alive()
    halt.set()
