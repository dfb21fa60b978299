"""Reads the events of a simulated run from a TOML file, or draws them by a seed."""

import random
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

from gossamer.core.errors import CostError
from gossamer.costs import quantities
from gossamer.costs.cluster import Cluster
from gossamer.costs.events import Absence, Begin, Events, LateMessages, LaterStart, LinkRate, SlowSteps
from gossamer.costs.toml_reader import TomlReader, number, text_as, truth, whole

TOP = -1  # in place of an event's number: a field outside of events
SHARE = 0.25  # of ranks that an event of a kind befalls when events are drawn
Event = SlowSteps | LinkRate | LateMessages | Absence | LaterStart


def _begin(value: Any) -> Begin:
    if isinstance(value, str):
        return Begin(seconds=quantities.seconds(value))
    if type(value) is not int or value < 1:
        raise CostError(f"must be a step, 1 or more, or a time such as '2 s', not {value!r}")
    return Begin(step=value)


KINDS: Mapping[str, tuple[Callable[..., Event], dict[str, Callable[[Any], Any]]]] = {
    "slow": (SlowSteps, {"rank": whole, "factor": number, "steps": whole}),
    "link": (LinkRate, {"rank": whole, "rate": text_as(quantities.rate), "seconds": text_as(quantities.seconds)}),
    "delay": (LateMessages, {"p": number, "seconds": text_as(quantities.seconds)}),
    "die": (Absence, {"rank": whole, "back": text_as(quantities.seconds), "silent": truth}),
    "leave": (partial(Absence, told=True), {"rank": whole, "back": text_as(quantities.seconds)}),
    "join": (LaterStart, {"rank": whole}),
}
OPTIONAL = ("back", "silent")


def read_events(path: Path, size: int) -> Events:
    """Read the events of so many ranks. An error names the file, the line and the field."""
    return _EventReader(path).events(size)


class _EventReader(TomlReader):
    def events(self, size: int) -> Events:
        top = self.fields(self.table, {"seed": whole, "event": lambda tables: tables}, TOP)
        tables = top.get("event")
        if not isinstance(tables, list) or not tables or not all(isinstance(each, dict) for each in tables):
            self.fail("event", "must be one [[event]] table or several", TOP)
        found = list[Event]()
        for n, table in enumerate(tables):
            found.append(self._event(table, n, size))
            if "at" in table:
                self._in_order(found, n)
                self._there(found, n)
        return _events(found, top.get("seed", 0))

    def _event(self, table: dict[str, Any], n: int, size: int) -> Event:
        kind = table.get("kind")
        if not isinstance(kind, str) or kind not in KINDS:
            self.fail("kind", f"must be one of {', '.join(KINDS)}, not {kind!r}", n)
        make, takes = KINDS[kind]
        given = self.fields(table, {"kind": str, "at": _begin, **takes}, n)
        del given["kind"]
        if missing := [name for name in takes if name not in given and name not in OPTIONAL]:
            needed = ", ".join(name for name in takes if name not in OPTIONAL)
            self.fail(missing[0], f"is missing; an event of the kind {kind!r} needs {needed}", n)
        if kind in ("die", "leave", "join") and "at" not in given:
            self.fail("at", f"is missing; an event of the kind {kind!r} needs a step or a time at which it happens", n)
        if not 0 <= given.get("rank", 0) < size:
            self.fail("rank", f"must lie from 0 to {size - 1}, not {given['rank']}", n)
        begin = given.pop("at", Begin())
        if "back" in given:
            given["seconds"] = given.pop("back")
        try:
            return make(**given, begin=begin)
        except CostError as error:
            field, _, wrong = str(error).partition(" ")
            self.fail(field, wrong, n)

    def _in_order(self, found: list[Event], n: int) -> None:
        """Refuse an event that begins before an earlier one whose `at` has the same unit."""
        begin = found[n].begin
        earlier = [each.begin for each in found[:n] if bool(each.begin.step) == bool(begin.step)]
        if earlier and max(earlier) > begin:
            self.fail("at", f"is {begin}, and an event above begins at {max(earlier)}; put events in order of time", n)

    def _there(self, found: list[Event], n: int) -> None:
        """Refuse that a rank goes which is gone for ever, and that one comes which an event above speaks of."""
        event = found[n]
        if not isinstance(event, Absence | LaterStart):
            return
        before = [e for e in found[:n] if isinstance(e, Absence | LaterStart) and e.rank == event.rank]
        if isinstance(event, LaterStart) and before:
            self.fail(
                "rank",
                f"{event.rank} goes or comes in an event above: a rank comes once, and one that is lost is there again by its 'back'",
                n,
            )
        if any(isinstance(each, Absence) and each.seconds == inf for each in before):
            self.fail(
                "rank", f"{event.rank} is gone for ever by an event above; give that one a 'back', or leave this out", n
            )

    def line_of(self, field: str, n: int) -> int:
        """The line of a field in the n-th event, or else that of the event; of a field outside of events, its first."""
        if n == TOP:
            return next(iter(self.lines_of(field)), 0)
        heads = [*self.lines_of("event"), len(self.lines) + 1]
        n = min(n, len(heads) - 2)
        return next((line for line in self.lines_of(field) if heads[n] <= line < heads[n + 1]), heads[n])


def _events(found: Iterable[Event], seed: int) -> Events:
    every = list(found)
    return Events(
        slow=tuple(each for each in every if isinstance(each, SlowSteps)),
        links=tuple(each for each in every if isinstance(each, LinkRate)),
        late=tuple(each for each in every if isinstance(each, LateMessages)),
        absences=tuple(each for each in every if isinstance(each, Absence)),
        arrivals=tuple(each for each in every if isinstance(each, LaterStart)),
        seed=seed,
    )


def random_events(seed: int, cluster: Cluster, steps: int, step_seconds: float, losses: int = 0) -> Events:
    """Draw events that begin within so many steps: of each rank, with chance 1/4 each, slow steps and a slow link; late
    messages; and so many losses of ranks, each of which is back after 5 to 25 % of the steps' time of computing.

    >>> from gossamer.costs import from_flags
    >>> random_events(1, from_flags(nodes=8, rate=1e6), 20, 0.1) == random_events(1, from_flags(nodes=8, rate=1e6), 20, 0.1)
    True
    """
    found = list[Event]()
    for rank in range(cluster.size):
        dice = random.Random(f"{seed} {rank} slow")
        begin = Begin(step=dice.randint(1, steps))
        if dice.random() < SHARE:
            found.append(SlowSteps(rank, round(dice.uniform(1.5, 8), 1), dice.randint(1, max(steps // 2, 1)), begin))
        dice = random.Random(f"{seed} {rank} link")
        begin = Begin(step=dice.randint(1, steps))
        if dice.random() < SHARE and cluster.rate < inf:
            found.append(
                LinkRate(rank, cluster.rate * dice.uniform(0.1, 0.5), step_seconds * dice.uniform(1, 20), begin)
            )
    dice = random.Random(f"{seed} lost")
    for _ in range(losses):
        rank, begin = dice.randrange(cluster.size), Begin(step=dice.randint(1, steps))
        found.append(Absence(rank, steps * step_seconds * dice.uniform(0.05, 0.25), begin=begin))
    return _events([*found, LateMessages(random.Random(f"{seed} delay").uniform(0.001, 0.01), 0.2)], seed)
