"""The owner's side of a lab: start the keeper, read its events and the ranks' output, and end it.

The keeper (`inside.py`) runs as long as the pipe to its standard input is open. Closing the pipe ends the lab, and the
kernel closes it when this process dies.
"""

import contextlib
import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .access import find_way
from .counters import Counters, parse_devices
from .errors import LabError
from .network import port
from .output import LineSplitter

_KEEPER = str(Path(__file__).with_name("inside.py"))
_CHUNK = 1 << 16
TIMED_OUT = 124  # as the program `timeout` returns it
OnLine = Callable[[int, str], None]
Plan = dict[str, Any]
Streams = dict[int, tuple[int | None, LineSplitter]]  # by file descriptor: the rank (None: the keeper), and its lines


@dataclass(frozen=True)
class RankResult:
    """Result of one rank.

    `stopped`: the lab ended it. `frozen`: the lab found it stopped by a signal such as SIGSTOP, so it may be the cause of
    other failures.
    """

    rank: int
    exit_code: int
    stopped: bool
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


@dataclass
class _LabEvents:
    """Events of the keeper so far."""

    hosts: int
    placed: Sequence[int]  # the host of every rank
    began: float
    devices: dict[str, Counters]
    exits: dict[int, RankResult]
    first_failure: int | None = None
    frozen: Sequence[int] = ()
    timed_out: bool = False
    error: str = ""
    noise: str = ""
    result: LabResult | None = None

    def take(self, line: str) -> None:
        """Take one line of the keeper: an event, or an error of a keeper that could not start."""
        if not line.startswith("{"):
            self.noise += line + "\n"
            return
        event: dict[str, Any] = json.loads(line)
        match event["event"]:
            case "start":
                self.began, self.devices = time.monotonic(), parse_devices(event["devices"])
            case "exit":
                self._exit(event["rank"], event["code"], event["stopped"])
            case "stop":
                self.timed_out, self.frozen = event["reason"] == "timeout", event["frozen"]
            case "end":
                self._end(parse_devices(event["devices"]))
            case _:
                self.error = event["text"]

    def _exit(self, rank: int, code: int, stopped: bool) -> None:
        if code != 0 and not stopped and self.first_failure is None:
            self.first_failure = rank
        self.exits[rank] = RankResult(rank, code, stopped)

    def _end(self, devices: dict[str, Counters]) -> None:
        hosts = tuple(self._host(number, devices) for number in range(self.hosts))
        failed = 0 if self.first_failure is None else self.exits[self.first_failure].exit_code
        code = failed or (TIMED_OUT if self.timed_out else 0)
        seconds = time.monotonic() - self.began
        self.result = LabResult(code, self.first_failure, self.timed_out, seconds, hosts)

    def _host(self, number: int, devices: dict[str, Counters]) -> HostResult:
        # Counted at the bridge's end of the link, which programs of the host cannot change: received there is sent here.
        before, now = self.devices[port(number)], devices[port(number)]
        sent, received = now.received_bytes - before.received_bytes, now.sent_bytes - before.sent_bytes
        here = [rank for rank in sorted(self.exits) if self.placed[rank] == number]
        ranks = tuple(replace(self.exits[rank], frozen=rank in self.frozen) for rank in here)
        return HostResult(number, sent, received, ranks)


def own_lab(plan: Plan, on_line: OnLine) -> LabResult:
    """Run a planned lab from beginning to end."""
    events = _LabEvents(len(plan["hosts"]), [rank["host"] for rank in plan["ranks"]], time.monotonic(), {}, {})
    with _keeper(plan) as (process, streams):
        try:
            _listen(streams, events, on_line)
        except BaseException as error:
            assert process.stdin is not None
            process.stdin.close()
            # After ctrl-C the last lines are still passed on; after an error of `on_line` they are dropped.
            _listen(streams, events, on_line if isinstance(error, KeyboardInterrupt) else lambda rank, line: None)
            raise
        process.wait()
    if events.result is None:
        why = events.error or events.noise.strip() or f"its keeper was killed (status {process.returncode})"
        raise LabError(f"the lab broke down: {why}")
    return events.result


@contextlib.contextmanager
def _keeper(plan: Plan) -> Generator[tuple[subprocess.Popen[bytes], Streams]]:
    """Start the keeper; yield it and the streams to read."""
    pipes = [os.pipe() for _ in plan["ranks"]]
    for rank, (_, end) in zip(plan["ranks"], pipes):
        rank["output"] = end
    process = subprocess.Popen(
        [*find_way(), sys.executable, "-I", "-S", _KEEPER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        bufsize=0,
        pass_fds=[end for _, end in pipes],
        start_new_session=True,  # ctrl-C reaches the owner only, which then ends the lab in order
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        for _, end in pipes:
            os.close(end)
        with contextlib.suppress(BrokenPipeError):  # it has died already; its output is read below
            _write(process.stdin.fileno(), json.dumps(plan).encode() + b"\n")
        streams: Streams = {start: (rank, LineSplitter()) for rank, (start, _) in enumerate(pipes)}
        yield process, {process.stdout.fileno(): (None, LineSplitter()), **streams}
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()
        for start, _ in pipes:
            os.close(start)


def _write(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]


def _listen(streams: Streams, events: _LabEvents, on_line: OnLine) -> None:
    """Read every stream to its end; streams that have ended leave the dict, so that a second call goes on."""
    with selectors.DefaultSelector() as selector:
        for stream in streams:
            selector.register(stream, selectors.EVENT_READ)
        while streams:
            for key, _ in selector.select():
                data = os.read(key.fd, _CHUNK)
                rank, lines = streams[key.fd]
                if not data:
                    selector.unregister(key.fd)
                    del streams[key.fd]
                for line in lines.feed(data):
                    events.take(line) if rank is None else on_line(rank, line)
