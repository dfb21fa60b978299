"""Seats: who may start and come, which seat each gets, and what is refused before anybody waits."""

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from tests.marked import wait_for
from torch.distributed import HashStore, PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

import gossamer
from gossamer.core.errors import AttachError, GossamerError, PeerError
from gossamer.fabrics.liveness import members, seats, store_server
from gossamer.fabrics.liveness import node as nodes
from gossamer.fabrics.liveness.launch import MemberLaunch
from gossamer.fabrics.liveness.members import Members
from gossamer.fabrics.liveness.node import NodeRanks
from gossamer.fabrics.liveness.seats import Seats, Terms
from gossamer.fabrics.liveness.store import SharedStore

SILENCE = 0.3  # seconds, for members that have no connection that could break


class Crowd:
    """Members of one store, each of which enters in a thread of its own, as processes would."""

    def __init__(self) -> None:
        self.store = HashStore()
        self.all, self._pool = list[Members](), ThreadPoolExecutor(8)

    def member(self, rank: int | None = None, size: int = 4, least: int | None = 2, **more: Any) -> Members:
        self.all.append(Members(self.store, rank, size, SILENCE, least, **more))
        return self.all[-1]

    def enter(self, member: Members, deadline: float = 20.0) -> "Future[None]":
        return self._pool.submit(member.enter, deadline)

    def start(self, count: int, **more: Any) -> list[Members]:
        """So many members that train."""
        found = [self.member(**more) for _ in range(count)]
        for future in [self.enter(each) for each in found]:
            future.result(30.0)
        for each in found:
            each.at_work()
        return sorted(found, key=lambda each: each.rank)

    def close(self) -> None:
        for each in self.all:
            each.leave()
        self._pool.shutdown()


def dies(member: Members) -> None:
    """Its heart stands still, and it says nothing."""
    member._over.set()
    heart = member._heart
    assert heart is not None
    heart.join()
    member._heart = None


@pytest.fixture
def crowd(monkeypatch: pytest.MonkeyPatch) -> Iterator[Crowd]:
    monkeypatch.setattr(members, "BEAT", 0.02)
    monkeypatch.setattr(seats, "BEAT", 0.02)
    monkeypatch.setattr(seats, "LOOK", 0.4)
    made = Crowd()
    yield made
    made.close()


def join(crowd: Crowd, old: list[Members], new: Members) -> None:
    """Let a member in, for which the others regroup, as a broken collective makes them do."""
    future = crowd.enter(new)
    number = old[0].epoch.number
    wait_for(lambda: old[0].latest().number > number)
    for each in old:
        each.regroup(RuntimeError("called"))
    future.result(30.0)
    new.at_work()


def test_the_store_gives_seats_in_order_and_who_comes_later_takes_the_next(crowd: Crowd) -> None:
    first, second = crowd.start(2)
    assert (first.rank, second.rank) == (0, 1)
    assert first.epoch.ranks == second.epoch.ranks == (0, 1)
    assert not first.joins
    third = crowd.member()
    join(crowd, [first, second], third)
    assert third.rank == 2
    assert third.joins
    assert first.epoch == second.epoch == third.epoch
    assert first.epoch.ranks == (0, 1, 2)


def test_who_comes_waits_until_those_before_it_are_at_work(crowd: Crowd) -> None:
    """Else it would break what they do in attach."""
    first = crowd.member(least=1)
    crowd.enter(first).result(20.0)
    second = crowd.member(least=1)
    future = crowd.enter(second)
    time.sleep(1.5)
    assert first.latest().number == first.epoch.number
    first.at_work()
    wait_for(lambda: first.latest().number > first.epoch.number)
    future.result(20.0)
    assert second.epoch.ranks == (0, 1)


def test_the_seat_of_a_dead_member_is_given_again_once_the_others_have_left_it_out(crowd: Crowd) -> None:
    first, second, third = crowd.start(3, least=3)
    dies(second)
    first.regroup(RuntimeError("its connection broke"))
    third.regroup(RuntimeError("its connection broke"))
    assert first.epoch.ranks == third.epoch.ranks == (0, 2)
    new = crowd.member(least=3)
    join(crowd, [first, third], new)
    assert new.rank == 1
    assert first.epoch.ranks == (0, 1, 2)
    assert new.life not in {first.life, second.life, third.life}


def test_after_all_have_died_their_seats_are_given_again(crowd: Crowd) -> None:
    for each in crowd.start(2, size=2):
        dies(each)
    new = crowd.start(2, size=2)
    assert [each.rank for each in new] == [0, 1]
    assert not new[0].joins


def test_a_seat_that_is_asked_for_is_given_but_not_to_two(crowd: Crowd) -> None:
    first, second = crowd.member(rank=3, least=1), crowd.member(rank=3, least=1)
    crowd.enter(first).result(20.0)
    assert first.rank == 3
    first.at_work()
    with pytest.raises(
        AttachError, match=r"RANK is 3, and process \d+ on .* is that rank and lives: give each process a RANK"
    ):
        crowd.enter(second).result(20.0)
    dies(first)
    crowd.enter(again := crowd.member(rank=3, least=1)).result(20.0)
    assert again.rank == 3


def test_more_than_the_most_are_told(crowd: Crowd) -> None:
    crowd.start(2, size=2)
    with pytest.raises(AttachError, match=r"all 2 seats are taken by members that live: .* larger most="):
        crowd.enter(crowd.member(size=2)).result(30.0)


def test_too_few_are_told_who_came(crowd: Crowd) -> None:
    alone = crowd.member(least=3)
    with pytest.raises(
        PeerError, match=r"waited 1 seconds, and 1 of at least 3 members came: 0 \(process \d+ on .*\)\. Start more"
    ):
        crowd.enter(alone, deadline=1.0).result(20.0)
    everybody = crowd.member(rank=2, least=None)
    crowd.store = HashStore()
    everybody = crowd.member(rank=2, least=None)
    with pytest.raises(PeerError, match=r"no rank trains: ranks 0, 1, 3 of 4 have not started; there are 2 \(process"):
        crowd.enter(everybody, deadline=1.0).result(20.0)


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"size": 8}, "most=4 there and 8 here"),
        ({"least": 1}, "least=2 there and 1 here"),
        ({"size": 8, "least": 4, "node": NodeRanks(0, 2)}, "ranks on each node: 1 there and 2 here"),
    ],
)
def test_a_member_that_was_started_otherwise_is_refused(crowd: Crowd, other: dict[str, Any], told: str) -> None:
    crowd.start(2)
    with pytest.raises(AttachError, match=f"cannot join the members that train: .*{told}"):
        crowd.enter(crowd.member(**other)).result(20.0)


def test_a_member_of_another_version_is_refused(crowd: Crowd) -> None:
    crowd.start(2)
    newer = crowd.member()
    newer.seats.terms = newer.seats.terms._replace(version="9.9")
    with pytest.raises(AttachError, match=r"gossamer .* there and 9\.9 here"):
        crowd.enter(newer).result(20.0)


def test_a_store_may_serve_another_run_when_one_is_over(crowd: Crowd) -> None:
    for each in crowd.start(3, size=4, least=3):
        each.leave()
    new = crowd.start(2, size=2, least=2)
    assert [each.rank for each in new] == [0, 1]
    assert new[0].epoch.ranks == (0, 1)


def test_who_was_frozen_and_lost_its_seat_is_told(crowd: Crowd) -> None:
    first, second = crowd.start(2, size=2)
    dies(second)
    first.regroup(RuntimeError("silent"))
    new = crowd.member(size=2)
    join(crowd, [first], new)
    assert new.rank == 1
    with pytest.raises(
        PeerError, match=r"rank 1 was silent for more than 0\.3 seconds, and its seat was given to another process"
    ):
        second.regroup(RuntimeError("a broken connection"))


def test_who_was_frozen_and_kept_its_seat_comes_back(crowd: Crowd) -> None:
    first, second = crowd.start(2, size=2)
    before = second.life
    dies(second)
    first.regroup(RuntimeError("silent"))
    assert first.epoch.ranks == (0,)
    future = crowd._pool.submit(second.regroup, RuntimeError("a broken connection"))
    wait_for(lambda: first.latest().ranks == (0, 1))
    first.regroup(RuntimeError("called"))
    future.result(20.0)
    assert second.life != before
    assert first.epoch == second.epoch


def test_who_comes_and_cannot_be_connected_to_does_not_end_the_others(crowd: Crowd) -> None:
    """It beats, so that nobody is missing, and each attempt to connect fails."""
    first, second = crowd.start(2)
    third, failure = crowd.member(), PeerError("connection refused")
    future = crowd.enter(third)
    wait_for(lambda: first.latest().number > first.epoch.number)
    for each in (first, second):
        each.regroup(RuntimeError("called"))
    future.result(30.0)
    for each in (first, second, third):
        each.regroup(failure)
    assert first.epoch.ranks == (0, 1, 2)
    for each in (first, second):
        each.regroup(failure)
    assert first.epoch == second.epoch
    assert first.epoch.ranks == (0, 1)
    with pytest.raises(
        PeerError, match=r"rank 2 has come to others .* and go on without it: check with `gossamer doctor"
    ):
        third.regroup(failure)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 8, 9, 700])
def test_who_comes_finds_the_latest_of_many_generations_in_few_requests(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Each is a round trip, and the others wait for whoever comes."""
    member = Members(HashStore(), 0, 4)
    for number in range(1, count + 1):
        member.store.raise_flag(f"epoch/{number}", json.dumps([number, 1, [0], [number]]))
    asked, ask = list[str](), SharedStore.flag_is_up
    monkeypatch.setattr(SharedStore, "flag_is_up", lambda store, name: asked.append(name) or ask(store, name))
    assert member.latest() == (count, 1, (0,), (count,))
    assert len(asked) <= 2 * count.bit_length() + 1
    member.epoch, known = member.latest(), len(asked)
    assert member.latest() is member.epoch
    assert len(asked) == known + 1


def test_weights_are_those_of_who_is_there(crowd: Crowd) -> None:
    first, second = crowd.start(2)
    assert first.weights == ()
    third = crowd.member()
    third.weight = 2.5
    join(crowd, [first, second], third)
    assert first.weights == second.weights == third.weights == (1.0, 1.0, 2.5)
    second.leave()
    for each in (first, third):
        each.regroup(RuntimeError("its connection broke"))
        assert each.weights == (1.0, 2.5)
    third.leave()
    first.regroup(RuntimeError("its connection broke"))
    assert first.weights == ()


def test_who_has_a_seat_and_no_heartbeat_yet_is_not_counted_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it writes before its first heartbeat may not be there yet; on a node other ranks may not have started."""
    places = Seats(SharedStore(HashStore(), 0, 2).under("gossamer/members"), Terms(1, 2))
    places.prepare()
    takes = threading.Timer(0.1, places.take, (None, dict, 1.0))
    takes.start()
    assert places.moving([0]) == {}
    takes.join()
    assert [*places.beats()] == [0]
    monkeypatch.setattr(seats, "LOOK", 60.0)
    threading.Timer(0.1, places.beat, (1, 0, "0 0")).start()
    assert places.moving([0]) == {0: 1}


# -- nodes -----------------------------------------------------------------------------------------------------------------


def node(crowd: Crowd, ranks: int = 2, **more: Any) -> list[Members]:
    """The ranks of one node, which share a store of their torchrun."""
    own = HashStore()
    parts = [NodeRanks(i, ranks, SharedStore(PrefixStore("n", own), i, ranks)) for i in range(ranks)]
    return [crowd.member(size=4 * ranks, least=2 * ranks, node=part, **more) for part in parts]


def test_the_ranks_of_a_node_sit_together_and_leave_together(crowd: Crowd) -> None:
    nodes = [node(crowd), node(crowd)]
    for future in [crowd.enter(each) for ranks in nodes for each in ranks]:
        future.result(20.0)
    (a, b), (c, d) = sorted(nodes, key=lambda ranks: ranks[0].rank)
    assert [each.rank for each in (a, b, c, d)] == [0, 1, 2, 3]
    assert a.epoch.ranks == d.epoch.ranks == (0, 1, 2, 3)
    assert a.life == b.life != c.life == d.life
    dies(d)
    with pytest.raises(PeerError, match=r"a rank of this node \(ranks 2, 3\) is lost, so rank 2 leaves too"):
        c.regroup(RuntimeError("its connection broke"))
    c.leave()
    for each in (a, b):
        each.regroup(RuntimeError("its connection broke"))
        assert each.epoch.ranks == (0, 1)


def test_a_node_takes_its_seat_when_all_its_ranks_are_there(crowd: Crowd) -> None:
    """Else others would let in ranks that have not started, and wait for what those have not written."""
    first, second = node(crowd)
    early = crowd.enter(first)
    time.sleep(1.0)
    assert not any(holder.life for holder in first.seats.holders().values())
    futures = [crowd.enter(each) for each in (second, *node(crowd))]
    for future in (early, *futures):
        future.result(20.0)
    assert first.life == second.life
    assert first.epoch.ranks == (0, 1, 2, 3)
    with pytest.raises(PeerError, match=r"waited for local rank\(s\) 1, 2, which have not come"):
        crowd.enter(node(crowd, 3)[0], 0.5).result(20.0)


def test_nodes_of_several_ranks_follow_members_of_one_in_the_same_store(crowd: Crowd) -> None:
    """The seats of the run before have no heartbeats of second ranks, and must not be waited for."""
    for each in crowd.start(2):
        each.leave()
    ranks = [*node(crowd), *node(crowd)]
    for future in [crowd.enter(each) for each in ranks]:
        future.result(20.0)
    assert {each.epoch.ranks for each in ranks} == {(0, 1, 2, 3)}


def test_a_node_that_joins_once_more_takes_a_seat_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each `members()` has its own part of the node's store; else ranks hear of the seat that they had before."""
    monkeypatch.setattr(nodes.dist, "is_initialized", lambda: True)
    held = HashStore()
    monkeypatch.setattr(nodes, "default_store", lambda: held)
    first, second = NodeRanks.of_torchrun(0, 2)._store, NodeRanks.of_torchrun(0, 2)._store
    assert first is not None
    assert second is not None
    first.raise_flag("claim/0", "")
    assert not second.flag_is_up("claim/0")


def test_a_node_of_another_number_of_ranks_is_refused_on_all_its_ranks(crowd: Crowd) -> None:
    for future in [crowd.enter(each) for ranks in (node(crowd), node(crowd)) for each in ranks]:
        future.result(20.0)
    first, second, third = [crowd.enter(each) for each in node(crowd, 3)]
    with pytest.raises(AttachError, match="ranks on each node: 2 there and 3 here"):
        first.result(20.0)
    for other in (second, third):
        with pytest.raises(PeerError, match=r"the first rank of this node cannot join: .*2 there and 3 here"):
            other.result(20.0)


# -- how it is started -----------------------------------------------------------------------------------------------------

CLEAN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID")
AT = "127.0.0.1:29500"
TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "GROUP_WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("given", "environment", "told"),
    [
        ({"least": 5, "most": 4, "store": AT}, {}, r"members\(least=5, most=4\): .* give a least from 1 to 4"),
        ({"least": 0, "most": 4, "store": AT}, {}, "give a least from 1 to 4"),
        ({"most": 0, "store": AT}, {}, "give a number from 1"),
        ({"store": AT}, {}, r"does not know how many can take part: give members\(most=\)"),
        ({"most": 4}, {}, r"MASTER_PORT is ''.*or give members\(store="),
        ({"most": 4, "store": "10.0.0.1"}, {}, "give the store's address as 'host:port'"),
        ({"most": 4, "store": "10.0.0.1:70000"}, {}, "the store's port is 70000: give a number from 1 to 65535"),
        ({"most": 4}, {"MASTER_PORT": "0"}, "the store's port is 0"),
        ({"most": 4, "store": AT}, {"RANK": "4"}, "RANK is 4 and there are 4 seats"),
        ({"most": 4, "store": AT}, {"RANK": "two"}, "RANK is 'two', not a number"),
        ({"most": 4, "store": AT, "silence": 0}, {}, r"silence=0"),
        ({"most": 4}, {"TORCHELASTIC_RUN_ID": "x", "MASTER_PORT": "1"}, "torchrun has started with all others"),
        (
            {"most": 4, "store": AT},
            {"TORCHELASTIC_RUN_ID": "x", "GROUP_WORLD_SIZE": "2"},
            "torchrun has started with all",
        ),
        ({"most": 4, "store": AT}, {**TORCHRUN, "LOCAL_RANK": "abc"}, "LOCAL_RANK is 'abc', not a number"),
        ({"most": 4, "store": AT}, TORCHRUN, "LOCAL_RANK is None and LOCAL_WORLD_SIZE is 2"),
        ({"most": 4, "store": AT}, {**TORCHRUN, "LOCAL_RANK": "2"}, "LOCAL_RANK is 2 and LOCAL_WORLD_SIZE is 2"),
    ],
)
def test_what_makes_no_sense_is_said_at_once(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], environment: dict[str, str], told: str
) -> None:
    for name in CLEAN:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(GossamerError, match=told):
        gossamer.members(**given)


def test_what_is_given_and_what_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in CLEAN:
        monkeypatch.delenv(name, raising=False)
    launch = MemberLaunch.read(2, 16, "[::1]:29500")
    assert (launch.seat, launch.least, launch.most, launch.host, launch.port) == (None, 2, 16, "::1", 29500)
    assert MemberLaunch.read(2, 16, AT).starts_store
    assert not MemberLaunch.read(2, 16, "192.0.2.1:29500").starts_store  # an address that no machine has
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    launch = MemberLaunch.read(None, None, None)
    assert (launch.seat, launch.least, launch.most, launch.host) == (0, 4, 4, "192.0.2.1")
    assert launch.starts_store


def test_where_no_store_answers_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_server, "CONNECT", 0.1)

    def nobody(host: str, port: int) -> bool:
        return False

    monkeypatch.setattr(store_server, "_answers", nobody)
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(PeerError, match=r"no store answers at 127\.0\.0\.1:29500 after 0\.1 seconds: it is started by"):
        gossamer.members(most=2, store=AT)


def test_a_store_that_is_gone_is_said_to_who_comes() -> None:
    held = [TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=5), wait_for_workers=False)]
    client = TCPStore("127.0.0.1", held[0].port, None, False, timedelta(seconds=5), wait_for_workers=False)
    member = Members(client, None, 4, least=2)
    failed = list[BaseException]()

    def enter() -> None:
        try:
            member.enter(20.0)
        except PeerError as error:
            failed.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    wait_for(lambda: held[0].check(["gossamer/members/terms"]))
    held.clear()
    thread.join(300.0)
    assert "the store that holds the list of members does not answer" in str(failed[0])


def test_what_no_member_writes_is_refused() -> None:
    store = SharedStore(HashStore(), 0, 2).under("gossamer/members")
    places = Seats(store, Terms(1, 2))
    places.prepare()
    for text in ("x", "1 2", "1 x machine"):
        store.raise_flag("seat/0", text)
        with pytest.raises(PeerError, match="holds a value that gossamer does not write"):
            places.beats()
    for text in ("{}", "[1]", '{"least": -1, "most": 2, "per_node": 1, "version": "0"}'):
        with pytest.raises(PeerError, match="holds a value that gossamer does not write"):
            store.parsed("terms", text, Terms.of)
