"""What the ranks of a trial say to one another between turns. Nothing is pickled."""

import json
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist

from gossamer.core.errors import PeerError

MARGIN = 10.0  # seconds beyond the deadline: those who wait for a rank that failed give up first, and then join it here


class Circle:
    """A group of its own: a contender that fails in the middle of a collective leaves this one in step."""

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.group = new_group(deadline + MARGIN)

    def all_fine(self, fine: bool, hurry: bool = False) -> bool:
        """Did it work on every rank? In a `hurry`, whoever waited for somebody in vain does not wait as long again."""
        flag = torch.tensor([int(not fine)])
        with _lost():
            patience = MARGIN if hurry else self.deadline + MARGIN
            work = dist.all_reduce(flag, group=self.group, async_op=True)
            assert work is not None
            work.wait(timedelta(seconds=patience))
        return not int(flag)

    def texts(self, mine: str, most: int = 4096) -> list[str]:
        """Every rank's text."""
        raw = mine.encode()[:most]
        data = torch.tensor(list(raw) + [0] * (most - len(raw)), dtype=torch.uint8)
        rows = [torch.zeros_like(data) for _ in range(dist.get_world_size())]
        with _lost():
            dist.all_gather(rows, data, group=self.group)
        return [bytes(row.tolist()).rstrip(b"\0").decode(errors="ignore") for row in rows]

    def means(self, *values: float) -> list[float]:
        """The mean over ranks of each value."""
        table = torch.tensor(values, dtype=torch.float64)
        with _lost():
            dist.all_reduce(table, group=self.group)
        return (table / dist.get_world_size()).tolist()

    def first_says(self, yes: bool) -> bool:
        """Rank 0 decides: clocks differ by a hair between ranks, decisions must not."""
        flag = torch.tensor([int(yes)])
        with _lost():
            dist.broadcast(flag, 0, group=self.group)
        return bool(flag)

    def same(self, what: str, facts: dict[str, Any]) -> None:
        """Every rank raises the same error if any two differ."""
        everyone = [json.loads(t) for t in self.texts(json.dumps(facts))]
        for name, value in everyone[0].items():
            for rank, other in enumerate(everyone):
                if other[name] != value:
                    raise PeerError(f"{what}: {name} is {value!r} on rank 0 and {other[name]!r} on rank {rank}")


def new_group(timeout: float) -> dist.ProcessGroup:
    """A group of all ranks; all make it together."""
    with _lost():
        made = dist.new_group(timeout=timedelta(seconds=timeout))
    assert isinstance(made, dist.ProcessGroup)
    return made


@contextmanager
def _lost() -> Generator[None, None, None]:
    """What gloo says of ranks that are gone, as an error of ours."""
    try:
        yield
    except RuntimeError as error:
        raise PeerError(f"other ranks are gone: {str(error).splitlines()[0]}") from None


def attempt(circle: Circle, do: Callable[[], None]) -> str:
    """Do something that all ranks do; if it fails on any, it has failed on all. Returns why, or nothing."""
    mine, began = "", monotonic()
    try:
        do()
    except Exception as error:
        mine = f"{type(error).__name__}: {error}"
    try:
        if circle.all_fine(not mine, hurry=bool(mine) and monotonic() - began >= circle.deadline):
            return ""
        return _name_first(circle.texts(mine[:1500]))
    except PeerError as error:
        raise PeerError(mine or str(error)) from None  # what happened first says more


def _name_first(texts: Sequence[str]) -> str:
    return next((f"rank {r}: {t}" for r, t in enumerate(texts) if t), "failed, and no rank says why")
