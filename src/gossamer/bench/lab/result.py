"""Results of a lab, its hosts and their ranks."""

from dataclasses import dataclass

from .counters import Counters
from .rates import Link

TIMED_OUT = 124  # as the program `timeout` returns it


@dataclass(frozen=True)
class RankResult:
    """Result of one rank.

    `stopped`: the lab ended it. `frozen`: the lab found it stopped by a signal such as SIGSTOP, so it may be the cause of
    other failures.
    """

    rank: int
    exit_code: int
    stopped: bool
    seconds: float
    frozen: bool = False


@dataclass(frozen=True)
class HostResult:
    """Result of one host: the traffic over its link, and its ranks."""

    number: int
    link: Link
    counters: Counters
    ranks: tuple[RankResult, ...]

    @property
    def exit_code(self) -> int:
        """Exit code of its first rank that failed, else 0."""
        return next((rank.exit_code for rank in self.ranks if rank.exit_code), 0)

    @property
    def stopped(self) -> bool:
        """True if the lab ended any of its ranks."""
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
    """Result of a lab. The exit code is 0, that of the first failure, or 124 after a timeout."""

    exit_code: int
    first_failure: int | None
    timed_out: bool
    seconds: float
    hosts: tuple[HostResult, ...]

    @property
    def ranks(self) -> tuple[RankResult, ...]:
        """Results of all ranks, by number."""
        return tuple(rank for host in self.hosts for rank in host.ranks)
