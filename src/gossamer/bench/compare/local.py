"""Start ranks as processes on this machine, with a store that other machines cannot reach."""

import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from gossamer.bench.compare.parent_death import PARENT
from gossamer.bench.lab.inside import is_stopped
from gossamer.bench.lab.output import LineSplitter
from gossamer.core.errors import PeerError, plainly

HERE = "127.0.0.1"
_ENDS = {"TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}  # else torch ends the others minutes after a rank of NCCL is lost
GRACE = 3.0  # seconds for the other ranks to end by themselves after one has failed
PATIENCE = 5.0  # seconds from SIGTERM to SIGKILL
PAUSE = 0.1  # seconds between two checks which ranks still run

OnLine = Callable[[int, str], None]
Process = subprocess.Popen[bytes]


@dataclass
class RankExits:
    """Exit codes of the ranks that ended by themselves, as Popen gives them, in the order they ended."""

    codes: dict[int, int] = field(default_factory=dict)
    # Ranks that a signal such as SIGSTOP had stopped when we ended them.
    frozen: list[int] = field(default_factory=list)

    @property
    def failures(self) -> dict[int, int]:
        return {rank: code for rank, code in self.codes.items() if code}

    @property
    def first(self) -> tuple[int, int] | None:
        """The rank that failed first, and its code. A killed rank comes before ranks that failed because of it."""
        killed = {rank: code for rank, code in self.failures.items() if code < 0}
        return next(iter((killed or self.failures).items()), None)


def ending(code: int) -> str:
    """How a rank ended, by its exit code; that of a signal as Popen or as a shell gives it.

    >>> ending(-15), ending(143), ending(3)
    ('was killed by SIGTERM', 'was killed by SIGTERM', 'ended with code 3')
    """
    number = -code if code < 0 else code - 128
    if number not in set(signal.Signals):
        return f"ended with code {code}"
    how = "frozen" if number == signal.SIGSTOP else "killed"
    hint = " (the kernel does this when memory runs out)" if number == signal.SIGKILL else ""
    return f"was {how} by {signal.Signals(number).name}{hint}"


def run_here(size: int, command: Sequence[str], on_line: OnLine, timeout: float = float("inf")) -> RankExits:
    """Run a command once per rank and wait for all; their output goes to `on_line(rank, line)`.

    Torch's own launcher uses a store that listens on every interface and unpickles its values, so it is not used here.
    When a rank fails, the others have some seconds to end by themselves. All ranks are ended after `timeout` (TimeoutError)
    or after an exception here, ctrl-C included.
    """
    if not hasattr(os, "killpg"):  # nor could one wait there for the output of several processes
        raise PeerError("ranks are started on Linux and macOS only; on Windows do it under WSL")
    ranks = list[Process]()
    with _store() as port:
        try:
            for rank in range(size):
                ranks.append(_start(rank, size, port, command))
            return _RankWatch(ranks, on_line, timeout).run()
        finally:
            _end(ranks)
            for process in ranks:
                assert process.stdout is not None
                process.stdout.close()


@contextmanager
def _store() -> Generator[int]:
    """Open a store on loopback and yield its port. Torch would bind to all interfaces without a socket of ours."""
    try:
        listener = socket.create_server((HERE, 0))
        port: int = listener.getsockname()[1]
        store = TCPStore(HERE, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    except (OSError, RuntimeError) as error:
        raise PeerError(
            f"no rank could be started: {plainly(error)}; check that the loopback interface is up"
        ) from None
    yield port
    del store  # until here it serves


def _start(rank: int, size: int, port: int, command: Sequence[str]) -> Process:
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=_environment(rank, size, port),
            start_new_session=True,  # ctrl-C reaches this process only, which then ends the ranks in order
        )
    except OSError as error:  # too many files or processes, too long a command
        raise PeerError(f"rank {rank} of {size} could not be started: {error.strerror}") from None


def beside_this_rank() -> dict[str, str]:
    """Environment of a process that a launcher's rank starts beside itself; the launcher's store outlives it."""
    here = {PARENT: str(os.getpid()), "TORCHELASTIC_USE_AGENT_STORE": "True", "PYTHONUNBUFFERED": "1"}
    return os.environ | here | _ENDS


def _environment(rank: int, size: int, port: int) -> dict[str, str]:
    """Environment of one rank, as a launcher sets it. Variables of an outer launcher are removed."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("TORCHELASTIC_")}
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), "")  # the second on a Mac
    return {
        **inherited,
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": HERE,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store exists already, so rank 0 opens none
        **_ENDS,
        # Otherwise gloo listens on the address of the host's name.
        **({"GLOO_SOCKET_IFNAME": loopback} if loopback else {}),
        PARENT: str(os.getpid()),
    }


class _RankWatch:
    """Reads the output of the ranks and records how each one ends."""

    def __init__(self, ranks: Sequence[Process], on_line: OnLine, timeout: float) -> None:
        self.alive = dict(enumerate(ranks))
        self.on_line, self.exits = on_line, RankExits()
        self.until = time.monotonic() + timeout
        self.give_up = float("inf")  # time at which ranks that outlive a failure are ended
        self.selector = selectors.DefaultSelector()
        for rank, process in self.alive.items():
            assert process.stdout is not None
            self.selector.register(process.stdout, selectors.EVENT_READ, (rank, LineSplitter()))

    def run(self) -> RankExits:
        with self.selector:
            check_at = 0.0
            while self.alive:
                self._read_output(PAUSE)
                if time.monotonic() >= check_at:
                    self._check_processes()
                    check_at = time.monotonic() + PAUSE
            while self._read_output(0.0):  # read what is left in the pipes; a rank's own children may hold them open
                pass
        return self.exits

    def _check_processes(self) -> None:
        for rank, process in list(self.alive.items()):
            if process.poll() is not None:
                self.exits.codes[rank] = process.returncode
                del self.alive[rank]
        now = time.monotonic()
        if self.exits.failures:
            self.give_up = min(self.give_up, now + GRACE)
        if now >= self.until and self.alive:
            raise TimeoutError
        if now >= self.give_up:
            self.exits.frozen = [rank for rank, process in self.alive.items() if is_stopped(process.pid)]
            _end(list(self.alive.values()))
            self.alive.clear()

    def _read_output(self, patience: float) -> bool:
        if not self.selector.get_map():
            time.sleep(patience)  # all have closed their output, and not all have ended
            return False
        ready = self.selector.select(patience)
        for key, _ in ready:
            rank, lines = key.data
            data = os.read(key.fd, 1 << 16)
            if not data:
                self.selector.unregister(key.fileobj)
            for line in lines.feed(data):
                self.on_line(rank, line)
        return bool(ready)


def _end(ranks: Sequence[Process]) -> None:
    """Send SIGTERM to the ranks, and SIGKILL to those that do not end."""
    for process in ranks:
        _signal(process, signal.SIGTERM)
        _signal(process, signal.SIGCONT)  # a frozen process handles SIGTERM only after SIGCONT
    until = time.monotonic() + PATIENCE
    for process in ranks:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, until - time.monotonic()))
        _signal(process, signal.SIGKILL)
        process.wait()


def _signal(process: Process, number: int) -> None:
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
