"""Results of a lab, its hosts and their ranks."""

from dataclasses import dataclass

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
    """Result of one host: bytes over its link, with packet headers, and its ranks."""

    number: int
    sent_bytes: int
    received_bytes: int
    ranks: tuple[RankResult, ...]


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
