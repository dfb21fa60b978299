"""What became of a lab, of each of its hosts, and of the ranks on them."""

from dataclasses import dataclass

from .counters import Counters
from .rates import Link

TIMED_OUT = 124  # as the program `timeout` says it


@dataclass(frozen=True)
class RankResult:
    """What one rank did.

    `stopped`: the lab ended it, and it did not end by itself. `frozen`: that found it stopped by a signal such as SIGSTOP,
    so the others may have failed for want of it.
    """

    rank: int
    exit_code: int
    stopped: bool
    seconds: float
    frozen: bool = False


@dataclass(frozen=True)
class HostResult:
    """What one host did: the traffic over its link, and its ranks."""

    number: int
    link: Link
    counters: Counters
    ranks: tuple[RankResult, ...]

    @property
    def exit_code(self) -> int:
        """That of its first rank that did not end well."""
        return next((rank.exit_code for rank in self.ranks if rank.exit_code), 0)

    @property
    def stopped(self) -> bool:
        """The lab ended one of its ranks at least."""
        return any(rank.stopped for rank in self.ranks)

    @property
    def frozen(self) -> bool:
        return any(rank.frozen for rank in self.ranks)

    @property
    def sent_bytes(self) -> int:
        """Bytes that left the host, with packet headers."""
        return self.counters.sent_bytes

    @property
    def received_bytes(self) -> int:
        """Bytes that reached the host, with packet headers."""
        return self.counters.received_bytes


@dataclass(frozen=True)
class LabResult:
    """What became of a lab: 0, the exit code of the first failure, or 124 when it took too long."""

    exit_code: int
    first_failure: int | None
    timed_out: bool
    seconds: float
    hosts: tuple[HostResult, ...]

    @property
    def ranks(self) -> tuple[RankResult, ...]:
        """What all ranks did, by number."""
        return tuple(rank for host in self.hosts for rank in host.ranks)
