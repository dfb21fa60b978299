"""Run a command once per host of a shaped network, and say what became of it."""

import os
import resource
from collections.abc import Mapping, Sequence
from typing import Any

from .access import available, find_tool
from .counters import INTERFACE_VARIABLE
from .errors import LabError, LabInputError
from .network import INTERFACE, MASTER_PORT, MOST_HOSTS, address, plan_hosts, plan_middle
from .owner import OnLine, own_lab
from .rates import Link, parse_latency, parse_links
from .result import LabResult


def print_line(rank: int, line: str) -> None:
    """Print a line of a host with its rank before it."""
    print(f"[{rank}] {line}", flush=True)


def run_lab(
    hosts: int,
    rates: str | Sequence[str | Link] | None,
    command: Sequence[str],
    *,
    latency: str | None = None,
    env: Mapping[str, str] | None = None,
    on_line: OnLine = print_line,
    timeout: float | None = None,
    grace: float = 10.0,
    kill_after: float = 3.0,
) -> LabResult:
    """Run `command` on each of `hosts` hosts and wait for all; output goes to `on_line(rank, line)`.

    When one host fails, the others have `grace` seconds to end by themselves, then SIGTERM, and `kill_after`
    seconds later SIGKILL. An exception here, ctrl-C included, does the same without the grace and is raised
    again at the end.
    """
    _check(hosts, command, timeout, grace, kill_after)
    links, delay = parse_links(rates, hosts), parse_latency(latency)
    reason = available(latency=delay is not None)
    if reason is not None:
        raise LabError(reason)
    plan: dict[str, Any] = {
        **plan_middle(links),
        "hosts": plan_hosts(links, delay),
        "tools": {name: find_tool(name) for name in ("ip", "tc", "mount", "umount")},
        "command": [str(word) for word in command],
        "environment": {**_environment(hosts), **(env or {})},
        "timeout": timeout,
        "grace": grace,
        "kill_after": kill_after,
    }
    return own_lab(plan, links, on_line)


def _check(hosts: int, command: Sequence[str], timeout: float | None, grace: float, kill_after: float) -> None:
    """Refuse what makes no sense before anything is started."""
    if not 1 <= hosts <= MOST_HOSTS:
        raise LabInputError(f"{hosts} hosts: a lab has between 1 and {MOST_HOSTS}")
    files, needed = resource.getrlimit(resource.RLIMIT_NOFILE)[0], 2 * hosts + 50
    if files < needed:
        raise LabError(f"{hosts} hosts need {needed} open files, and {files} are allowed: 'ulimit -n {needed}'")
    if isinstance(command, str) or not command or not command[0]:
        raise LabInputError(f"no command to run: {command!r}; give the program and its arguments as a list")
    if timeout is not None and not timeout > 0:
        raise LabInputError(f"timeout {timeout:g}: give seconds, more than 0; without one a lab waits for ever")
    if not grace >= 0 or not kill_after >= 0:
        raise LabInputError(f"grace {grace:g}, kill_after {kill_after:g}: give seconds, 0 or more")


def _environment(hosts: int) -> dict[str, str]:
    """Return what every host's command sees: our own, and what a launcher of one rank per host sets."""
    # A launcher above us must not reach into the lab: its store's address means nothing there.
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("TORCHELASTIC_")}
    return {
        "PYTHONUNBUFFERED": "1",
        **inherited,
        "WORLD_SIZE": str(hosts),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": address(0),
        "MASTER_PORT": str(MASTER_PORT),
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "NCCL_SOCKET_IFNAME": INTERFACE,
        "OMP_NUM_THREADS": "1",
        INTERFACE_VARIABLE: INTERFACE,
    }
