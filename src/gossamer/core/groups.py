"""Process groups: run a program among some of the ranks."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

from gossamer.core.programs import through
from gossamer.core.verbs import (
    AllGather,
    AllReduce,
    AllToAll,
    Program,
    Receive,
    Send,
    Shared,
    Start,
    TakeTicket,
    Verb,
    WaitQuorum,
)

T = TypeVar("T")


def within(program: Program[T], ranks: Sequence[int]) -> Program[T]:
    """The same program among some ranks: rank i in it is `ranks[i]`. Each of those ranks runs its own program.

    What it starts runs among them too. Within a group, ranks are those of the group, so that groups nest.

    >>> import torch
    >>> from gossamer.core.verbs import all_reduce
    >>> from gossamer.fabrics.sim import simulate
    >>> pairs = [(0, 1), (0, 1), (2, 3), (2, 3)]
    >>> programs = [within(all_reduce(torch.tensor(float(r))), pairs[r]) for r in range(4)]
    >>> [float(total) for total in simulate(programs).results]
    [1.0, 1.0, 5.0, 5.0]
    """

    def ask(verb: Verb) -> Program[Any]:
        return (yield among(verb, tuple(ranks)))

    return through(program, ask)


def among(verb: Verb, ranks: tuple[int, ...]) -> Verb:
    """The same request among these ranks; requests that involve no other rank stay as they are."""
    match verb:
        case AllReduce() | AllGather() | AllToAll() | Send() | Receive() | TakeTicket() | WaitQuorum():
            return replace(verb, among=ranks if verb.among is None else tuple(ranks[i] for i in verb.among))
        case Start(program):
            return replace(verb, program=within(program, ranks))
        case _:
            return verb


def members(verb: Shared, size: int) -> Sequence[int]:
    """The ranks that take part in a request, in a world of this size."""
    return range(size) if verb.among is None else verb.among


def plain(verb: Shared, size: int) -> Shared:
    """The same request with `among=None` if all ranks take part in their order."""
    everybody = verb.among is not None and verb.among == tuple(range(size))
    return replace(verb, among=None) if everybody else verb


def place(verb: Verb, rank: int, size: int) -> tuple[int, int]:
    """This rank's index in the request's group, and the group's size."""
    if not isinstance(verb, Shared) or verb.among is None:
        return rank, size
    return verb.among.index(rank), len(verb.among)


def refuse_group(verb: Shared, rank: int, size: int) -> None:
    """Raise ValueError if the request's group is invalid or does not contain this rank."""
    ranks = verb.among
    if ranks is None:
        return
    if not ranks or len(set(ranks)) < len(ranks) or not all(0 <= r < size for r in ranks):
        raise ValueError(f"a group must hold distinct ranks from 0 to {size - 1}, got {listed(ranks)}")
    if rank not in ranks:
        raise ValueError(f"rank {rank} made a request in the group {listed(ranks)}, to which it does not belong")


def listed(ranks: Sequence[int]) -> str:
    """
    >>> listed((2, 3))
    '2,3'
    """
    return ",".join(map(str, ranks)) or "of nobody"


def named(ranks: Any) -> str:
    """The suffix of a request's name that gives its group; empty if all ranks take part."""
    return f" in the group {listed(ranks)}" if ranks is not None else ""
