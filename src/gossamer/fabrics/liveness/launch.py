"""How a member was started: its seat, if it asks for one, how many start and train, where the store is, and its node."""

import os
import socket
from typing import NamedTuple

from gossamer.core.errors import AttachError
from gossamer.fabrics.liveness.node import NodeRanks
from gossamer.fabrics.liveness.seats import MANY

_EXAMPLE = "WORLD_SIZE=4 MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 python train.py"


class MemberLaunch(NamedTuple):
    """What `members()` was given, and what it has read from the environment."""

    seat: int | None
    least: int
    most: int
    host: str
    port: int
    node: NodeRanks

    @property
    def starts_store(self) -> bool:
        """True if this process starts the store where none answers: it is on that machine, or rank 0."""
        return self.node.local == 0 and (self.seat == 0 or (self.seat is None and bool(usable_address(self.host))))

    @staticmethod
    def read(least: int | None, most: int | None, store: str | None) -> "MemberLaunch":
        by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
        if by_torchrun:
            _refuse_torchrun_of_all(store)
        host, port = _address(store)
        if not 0 < port < 2**16:
            raise AttachError(f"the store's port is {port}: give a number from 1 to {2**16 - 1}")
        rank, world = (None, None) if by_torchrun else (environment_number("RANK"), environment_number("WORLD_SIZE"))
        most = world if most is None else most
        if most is None:
            or_else = "" if by_torchrun else f", or set WORLD_SIZE, for instance {_EXAMPLE}"
            raise AttachError(f"members() does not know how many can take part: give members(most=){or_else}")
        least = most if least is None else least
        if not 0 < most <= MANY:
            raise AttachError(f"members(most={most}): give a number from 1 to {MANY}")
        if not 0 < least <= most:
            raise AttachError(
                f"members(least={least}, most={most}): training starts when `least` members are there, of at most `most`; give a least from "
                f"1 to {most}"
            )
        if rank is not None and rank >= most:
            raise AttachError(
                f"RANK is {rank} and there are {most} seats: set RANK to a number from 0 to {most - 1}, or leave it out, and the store "
                "gives this process a seat"
            )
        return MemberLaunch(rank, least, most, host, port, _node_of_torchrun() if by_torchrun else NodeRanks())


def _refuse_torchrun_of_all(store: str | None) -> None:
    if store is not None and os.environ.get("GROUP_WORLD_SIZE", "1") == "1":
        return
    raise AttachError(
        "members() in a process that torchrun has started with all others: when one of them ends, torchrun ends all. Start each process "
        f"by itself, {_EXAMPLE}; or, where a member is a node, give each node a torchrun of its own (--nnodes 1), and "
        "members(least=2, most=16, store='10.0.0.1:29500'), the address at which the nodes find one another"
    )


def _node_of_torchrun() -> NodeRanks:
    local, size = environment_number("LOCAL_RANK"), environment_number("LOCAL_WORLD_SIZE")
    if local is None or size is None or local >= size:
        raise AttachError(
            f"LOCAL_RANK is {local} and LOCAL_WORLD_SIZE is {size}, and torchrun sets both, for ranks from 0: leave them as it sets them, or "
            "unset TORCHELASTIC_RUN_ID where no torchrun has started this process"
        )
    return NodeRanks.of_torchrun(local, size)


def _address(store: str | None) -> tuple[str, int]:
    if store is None:
        port = environment_number("MASTER_PORT")
        if port is None:
            raise AttachError(
                f"the environment variable MASTER_PORT is '', not a number: set MASTER_ADDR and MASTER_PORT, for instance {_EXAMPLE}, or "
                "give members(store='10.0.0.1:29500')"
            )
        return os.environ.get("MASTER_ADDR") or "127.0.0.1", port
    host, _, port = store.rpartition(":")
    if not host or not is_number(port):
        raise AttachError(
            f"members(store={store!r}): give the store's address as 'host:port', such as '10.0.0.1:29500'"
        )
    return host.strip("[]"), int(port)


def environment_number(name: str) -> int | None:
    """The number in an environment variable of launchers; None if it is not set."""
    value = os.environ.get(name, "")
    if value and not is_number(value):
        raise AttachError(
            f"the environment variable {name} is {value!r}, not a number: set it as torchrun does, for instance {_EXAMPLE}, "
            "or leave it out"
        )
    return int(value) if value else None


def is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 10


def usable_address(host: str) -> str:
    """The first address of a name that a socket of this machine can be bound to; empty if none is."""
    try:
        found = socket.getaddrinfo(host, None, socket.AF_UNSPEC, socket.SOCK_STREAM)
    except OSError:
        return ""
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as tried:
                tried.bind(address)
        except OSError:
            continue
        return str(address[0])
    return ""
