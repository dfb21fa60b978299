"""What became of a lab and of each of its hosts."""

from dataclasses import dataclass

from .counters import Counters
from .rates import Link

TIMED_OUT = 124  # as the program `timeout` says it


@dataclass(frozen=True)
class HostResult:
    """What one host did.

    `stopped`: the lab ended it, and it did not end by itself. `frozen`: that found it stopped by a signal such as SIGSTOP,
    so the other hosts may have failed for want of it.
    """

    rank: int
    link: Link
    exit_code: int
    stopped: bool
    seconds: float
    counters: Counters
    frozen: bool = False

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
