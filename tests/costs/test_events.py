"""Events of a simulated run: what a file may say, what is refused, and what holds when."""

from math import inf
from pathlib import Path

import pytest

from gossamer.core.errors import CostError
from gossamer.costs import from_flags
from gossamer.costs.event_file import random_events, read_events
from gossamer.costs.events import (
    Absence,
    Begin,
    EventClock,
    Events,
    LateMessages,
    LaterStart,
    LinkRate,
    RequestTime,
    SlowSteps,
)

GOOD = """seed = 7
[[event]]
kind = "slow"
at = 10
rank = 3
factor = 4
steps = 50

[[event]]
kind = "link"
at = "2 s"
rank = 1
rate = "5 Mbit/s"
seconds = "30 s"

[[event]]
kind = "delay"
p = 0.01
seconds = "200 ms"
"""

AWAY = """[[event]]
kind = "die"
at = 9
rank = 2
back = "30 s"

[[event]]
kind = "leave"
at = "2 min"
rank = 1

[[event]]
kind = "join"
at = "3 min"
rank = 3
"""


def test_ranks_that_go_and_come_are_read(tmp_path: Path) -> None:
    path = tmp_path / "events.toml"
    path.write_text(AWAY)
    found = read_events(path, 4)
    assert found.absences == (Absence(2, 30.0, False, Begin(step=9)), Absence(1, inf, True, Begin(seconds=120.0)))
    assert found.arrivals == (LaterStart(3, Begin(seconds=180.0)),)
    assert found.changes_ranks
    assert found.sentences() == [
        "rank 2 is lost, for 30 s, at step 9",
        "rank 1 leaves, and says so, for ever, at 120 s",
        "rank 3 comes at 180 s",
    ]


def test_a_machine_may_fall_silent(tmp_path: Path) -> None:
    path = tmp_path / "events.toml"
    path.write_text(AWAY.replace('back = "30 s"', "silent = true"))
    found = read_events(path, 4)
    assert found.absences[0] == Absence(2, begin=Begin(step=9), silent=True)
    assert found.sentences()[0] == "rank 2 falls silent, for ever, at step 9"


def test_who_is_there_follows_steps_and_time() -> None:
    events = Events(absences=(Absence(2, 30.0, begin=Begin(step=9)),), arrivals=(LaterStart(3, Begin(step=4)),))
    clock = EventClock(events)
    assert clock.present(range(4), 0.0) == [0, 1, 2]
    assert clock.next_loss(0.0) == inf
    clock.begin(0, 4, 5.0)
    assert (clock.next_loss(0.0), clock.present(range(4), 5.0)) == (5.0, [0, 1, 2, 3])
    clock.begin(1, 9, 11.0)  # another rank's step
    clock.begin(2, 9, 12.0)
    assert (clock.next_loss(5.0), clock.present(range(4), 12.0)) == (12.0, [0, 1, 3])
    assert (clock.next_loss(12.0), clock.present(range(4), 42.0)) == (42.0, [0, 1, 2, 3])
    clock.begin(2, 9, 50.0)  # the step is made again, and the rank is not lost again
    assert clock.next_loss(42.0) == inf


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "events.toml"
    path.write_text(GOOD)
    found = read_events(path, 4)
    assert found == Events(
        slow=(SlowSteps(3, 4.0, 50, Begin(step=10)),),
        links=(LinkRate(1, 625e3, 30.0, Begin(seconds=2.0)),),
        late=(LateMessages(0.01, 0.2),),
        seed=7,
    )
    assert found.sentences() == [
        "rank 3 computes 4 times as long in 50 steps, from step 10 on",
        "the link of rank 1 has 5 Mbit/s for 30 s, from 2 s on",
        "a message is 200 ms late with chance 0.01, from the start on",
    ]


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('"slow"', '"dye"', "line 3: kind must be one of slow, link, delay, die, leave, join, not 'dye'"),
        ('kind = "slow"\n', "", "line 2: kind must be one of slow, link, delay, die, leave, join, not None"),
        ("seed = 7", "sead = 7", "line 1: sead is not known in a table. Did you mean 'seed'"),
        ("seed = 7", "event = 3", "is not TOML"),
        ("factor = 4", "faktor = 4", "line 6: faktor is not known in a table. Did you mean 'factor'"),
        ("p = 0.01", "p = 0.01\nrank = 1", "line 19: rank is not known in a table"),
        ('rate = "5 Mbit/s"\n', "", "line 9: rate is missing; an event of the kind 'link' needs rank, rate, seconds"),
        ("rank = 1", "rank = 4", "line 12: rank must lie from 0 to 3, not 4"),
        ("rank = 3", "rank = -1", "line 5: rank must lie from 0 to 3, not -1"),
        ("factor = 4", "factor = -4", "line 6: factor must be more than 0, not -4"),
        ("factor = 4", "factor = nan", "line 6: factor must be more than 0, not nan"),
        ("steps = 50", "steps = 0", "line 7: steps must be at least 1, not 0"),
        ("steps = 50", "steps = 1.5", "line 7: steps must be a whole number"),
        ("at = 10", "at = -1", "line 4: at must be a step, 1 or more, or a time such as '2 s', not -1"),
        ('at = "2 s"', 'at = "-2 s"', "line 11: at '-2 s' is negative"),
        ('rate = "5 Mbit/s"', 'rate = "-5 Mbit/s"', "line 13: rate '-5 Mbit/s' must be more than 0"),
        ('seconds = "30 s"', 'seconds = "0 s"', "line 14: seconds must be more than 0, not 0"),
        ('seconds = "200 ms"', 'seconds = "-1 ms"', "line 19: seconds '-1 ms' is negative"),
        ("p = 0.01", "p = 1.5", "line 18: p must lie above 0 and up to 1, not 1.5"),
        ('"delay"', '"delay"\nat = "1 s"', "line 18: at is 1 s, and an event above begins at 2 s; put events in order"),
        (
            GOOD[9:],
            AWAY.replace("at = 9\n", ""),
            "line 2: at is missing; an event of the kind 'die' needs a step or a time",
        ),
        (GOOD[9:], AWAY.replace("rank = 2\n", ""), "line 2: rank is missing; an event of the kind 'die' needs rank"),
        (GOOD[9:], AWAY.replace('"30 s"', '"0 s"'), "line 6: back must be more than 0, not 0"),
        (GOOD[9:], AWAY.replace('"30 s"', "30"), "line 6: back must be a text with a unit, not 30"),
        (GOOD[9:], AWAY.replace('back = "30 s"', "silent = 1"), "line 6: silent must be true or false, not 1"),
        (GOOD[9:], "", "event must be one [[event]] table or several"),
    ],
)
def test_a_broken_file_is_refused_with_its_line_and_field(old: str, new: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "events.toml"
    assert old in GOOD
    path.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(CostError) as refused:
        read_events(path, 4)
    assert str(refused.value).startswith(str(path))
    assert says in str(refused.value)


def test_events_are_drawn_by_seed_rank_and_kind() -> None:
    """A rank's events are the same in a larger cluster. Of 400 ranks 65 to 135 are slow: 4 sigma of a share of 1/4."""
    few, many = (random_events(3, from_flags(nodes=n, rate=1e6), 20, 0.1) for n in (50, 400))
    assert few.slow == tuple(slow for slow in many.slow if slow.rank < 50)
    assert few.links == tuple(link for link in many.links if link.rank < 50)
    assert few.late == many.late
    assert few != random_events(4, from_flags(nodes=50, rate=1e6), 20, 0.1)
    assert all(65 <= len(found) <= 135 for found in (many.slow, many.links))
    assert random_events(3, from_flags(nodes=50, rate=inf), 20, 0.1).links == ()


def test_as_many_losses_are_drawn_as_asked_for_and_nothing_else_changes() -> None:
    cluster = from_flags(nodes=8, rate=1e6)
    none, some = random_events(3, cluster, 20, 0.1), random_events(3, cluster, 20, 0.1, losses=5)
    assert (none.absences, len(some.absences)) == ((), 5)
    assert (some.slow, some.links, some.late) == (none.slow, none.links, none.late)
    assert all(0.1 <= each.seconds <= 0.5 and 1 <= each.begin.step <= 20 for each in some.absences)


def test_slow_steps_are_counted_from_the_first_that_begins_then() -> None:
    clock = EventClock(Events(slow=(SlowSteps(0, 3.0, 2, Begin(step=2)), SlowSteps(0, 5.0, 1, Begin(seconds=2.5)))))
    found = list[float]()
    for step in range(1, 6):
        clock.begin(0, step, float(step))  # steps begin at 1, 2, 3, ...
        clock.begin(1, step, float(step))
        found.append(clock.factor(0))
        assert clock.factor(1) == 1.0
    assert found == [1.0, 3.0, 15.0, 1.0, 1.0]


def test_a_link_at_a_step_waits_for_its_rank_and_the_slowest_event_counts() -> None:
    clock = EventClock(Events(links=(LinkRate(1, 10.0, 4.0, Begin(step=2)), LinkRate(0, 5.0, 1.0, Begin(seconds=3.0)))))
    cards = [(range(2), 100.0)]
    clock.begin(1, 1, 0.0)
    assert clock.transfer_seconds(200.0, cards, 0.5, 0.0) == pytest.approx(3 + 1 + (200 - 150 - 2.5) / 50)
    clock.begin(1, 2, 2.0)
    assert clock.transfer_seconds(20.0, cards, 1.0, 2.0) == pytest.approx(1 + 1 + 0.5)
    assert clock.transfer_seconds(20.0, [(range(2, 4), 100.0)], 1.0, 2.0) == 0.2


def test_messages_are_late_as_often_as_they_should_be() -> None:
    """Of 4,000 requests of two messages each, with chance 1 - .9^2 = .19; 4 sigma are .025. A rank's draws repeat."""
    events = Events(late=(LateMessages(0.1, 0.2, Begin(step=5)),), seed=1)

    def drawn(clock: EventClock, rank: int) -> list[float]:
        return [clock.lateness(rank, 2, RequestTime(0.0, step, "w")) for step in range(1, 4005)]

    clock = EventClock(events)
    first, second = drawn(clock, 0), drawn(clock, 1)
    assert {*first} == {0.0, 0.2}
    assert not any(first[:4])
    assert abs(sum(map(bool, first)) / 4000 - 0.19) < 0.025
    assert first == drawn(EventClock(events), 0) != second
    assert clock.lateness(0, 0, RequestTime(0.0, 9, "w")) == 0.0  # no message leaves the node


@pytest.mark.parametrize(
    ("second", "says"),
    [
        ('kind = "leave"\nat = 9\nrank = 1\n', "line 8: rank 1 is gone for ever by an event above"),
        ('kind = "join"\nat = "9 s"\nrank = 1\n', "line 8: rank 1 goes or comes in an event above"),
    ],
)
def test_who_is_gone_for_ever_cannot_go_or_come(second: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "events.toml"
    gone = '[[event]]\nkind = "die"\nat = 3\nrank = 1\n'
    path.write_text(gone + "[[event]]\n" + second)
    with pytest.raises(CostError, match=says):
        read_events(path, 4)
    path.write_text(gone + "[[event]]\n" + second.replace("rank = 1", "rank = 2"))
    assert len(read_events(path, 4).absences) >= 1
    back = gone + 'back = "1 s"\n[[event]]\nkind = "die"\nat = 9\nrank = 1\n'
    path.write_text(back)
    assert len(read_events(path, 4).absences) == 2
