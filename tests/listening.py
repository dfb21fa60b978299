"""Who listens where, as the kernel has it."""

import os
import socket
import struct
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import NamedTuple

LISTENING = "0A"


class Listener(NamedTuple):
    pid: int
    address: IPv4Address | IPv6Address
    port: int

    @property
    def open_to_others(self) -> bool:
        """Whether another machine could reach it."""
        mapped = getattr(self.address, "ipv4_mapped", None)
        return not (mapped or self.address).is_loopback


def listeners(pids: Iterable[int]) -> list[Listener]:
    """The TCP sockets on which these processes wait for connections, in the network of each."""
    found = list[Listener]()
    for pid in pids:
        own = set(_sockets(pid))
        for name in ("tcp", "tcp6"):
            found += [Listener(pid, *where) for inode, where in _table(pid, name) if inode in own]
    return found


def _sockets(pid: int) -> Iterable[str]:
    """The numbers of a process's sockets; one that has just ended has none."""
    try:
        for file in Path(f"/proc/{pid}/fd").iterdir():
            target = os.readlink(file)
            if target.startswith("socket:["):
                yield target[8:-1]
    except OSError:
        return


def _table(pid: int, name: str) -> list[tuple[str, tuple[IPv4Address | IPv6Address, int]]]:
    try:
        lines = Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]
    except OSError:
        return []
    rows = [line.split() for line in lines]
    return [(row[9], _place(row[1])) for row in rows if row[3] == LISTENING]


def _place(text: str) -> tuple[IPv4Address | IPv6Address, int]:
    """The kernel writes addresses as words of 32 bits in the machine's own order.

    >>> _place("0100007F:1F90")
    (IPv4Address('127.0.0.1'), 8080)
    """
    address, port = text.split(":")
    words = [int(address[i : i + 8], 16) for i in range(0, len(address), 8)]
    raw = struct.pack(f"={len(words)}I", *words)
    family = socket.AF_INET if len(raw) == 4 else socket.AF_INET6
    plain = socket.inet_ntop(family, raw)
    return (IPv4Address(plain) if family == socket.AF_INET else IPv6Address(plain)), int(port, 16)
