"""Start ranks for a check and collect their output, however they end."""

import json
import subprocess
from typing import NamedTuple, Protocol

from gossamer.bench.compare.control_group import ControlGroup
from gossamer.bench.compare.gpu.check_spec import CheckSpec
from gossamer.bench.compare.local import beside_this_rank, ending, run_here
from gossamer.bench.compare.parent_death import program

STARTING = 180.0  # seconds that a process may need before its first subject and after its last
MODULE = "gossamer.bench.compare.gpu.rank"


class Reply(NamedTuple):
    """Output lines of a rank's process, and how it ended; empty if it ended well."""

    lines: list[str]
    ending: str = ""


class Runner(Protocol):
    size: int

    def run(self, spec: CheckSpec) -> list[Reply]:
        """Replies by rank; ranks that take no part have empty ones."""
        ...


class LocalRanks:
    """Starts ranks on this machine, one per GPU; three ranks share a single GPU."""

    def __init__(self, gpus: int) -> None:
        self.size = gpus if gpus > 1 else 3

    def run(self, spec: CheckSpec) -> list[Reply]:
        lines = [list[str]() for _ in range(self.size)]
        try:
            exits = run_here(self.size, _command(spec), lambda rank, line: lines[rank].append(line), _patience(spec))
        except TimeoutError:
            return [Reply(said, f"was not done after {_patience(spec):g} seconds") for said in lines]
        missing = "was ended, since another rank had failed"
        return [Reply(lines[r], _ending(exits.codes[r]) if r in exits.codes else missing) for r in range(self.size)]


class JoinedRanks:
    """Ranks that a launcher has started, on any machines; each starts one process per check."""

    def __init__(self, control: ControlGroup, rank: int, size: int) -> None:
        self.size = size
        self._control, self._rank = control, rank

    def run(self, spec: CheckSpec) -> list[Reply]:
        mine = self._part(spec) if self._rank in spec.ranks else Reply([])
        return [Reply(*json.loads(text)) for text in self._control.texts(json.dumps(mine))]

    def _part(self, spec: CheckSpec) -> Reply:
        """Run this rank's process; its store belongs to the launcher, so it outlives the process."""
        try:
            done = subprocess.run(
                _command(spec),
                env=beside_this_rank(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=_patience(spec),
                check=False,
            )
        except subprocess.TimeoutExpired as late:
            return Reply(_lines(late.output), f"was not done after {_patience(spec):g} seconds")
        except OSError as error:
            return Reply([], f"could not be started: {error.strerror}")
        return Reply(_lines(done.stdout), _ending(done.returncode))


def _command(spec: CheckSpec) -> list[str]:
    return program(MODULE, spec.to_json())


def _patience(spec: CheckSpec) -> float:
    return STARTING + spec.sizes.limit * len(spec.subjects)


def _lines(output: bytes | None) -> list[str]:
    return (output or b"").decode(errors="replace").splitlines()


def _ending(code: int) -> str:
    return ending(code) if code else ""
