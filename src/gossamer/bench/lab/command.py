"""Run a command once per rank on the hosts of a shaped network, and return the result."""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from .access import available, find_tool
from .counters import INTERFACE_VARIABLE
from .errors import LabError, LabInputError
from .network import (
    INTERFACE,
    MASTER_PORT,
    MOST_HOSTS,
    MOST_RANKS,
    address,
    plan_changes,
    plan_hosts,
    plan_middle,
    plan_ranks,
)
from .owner import LabResult, OnLine, own_lab
from .rates import Link, parse_latency, parse_later, parse_links


def name_rank(rank: int, per_host: int = 1) -> str:
    """Name of a rank; with its host if hosts have several ranks.

    >>> name_rank(5), name_rank(5, per_host=4)
    ('rank 5', 'rank 5 on host1')
    """
    return f"rank {rank}" + (f" on host{rank // per_host}" if per_host > 1 else "")


def name_ranks(ranks: Sequence[int], per_host: int = 1) -> str:
    """Names of ranks; host by host if hosts have several.

    >>> name_ranks([1, 2, 5]), name_ranks([1, 2, 5], per_host=4)
    ('rank 1, 2, 5', 'rank 1, 2 on host0, rank 5 on host1')
    """
    hosts = {host: [r for r in ranks if r // per_host == host] for host in sorted({r // per_host for r in ranks})}
    if per_host == 1:
        hosts = {0: [*ranks]}
    said = [f"rank {', '.join(map(str, here))}" for here in hosts.values()]
    return ", ".join(s + (f" on host{host}" if per_host > 1 else "") for host, s in zip(hosts, said))


def print_line(rank: int, line: str, per_host: int = 1) -> None:
    """Print a line of a rank after its number, and its host if hosts have several ranks."""
    print(f"[{rank if per_host == 1 else name_rank(rank, per_host)}] {line}", flush=True)


def run_lab(
    hosts: int,
    rates: str | Sequence[str | Link] | None,
    command: Sequence[str],
    *,
    later: Sequence[str] = (),
    per_host: int = 1,
    latency: str | None = None,
    env: Mapping[str, str] | None = None,
    on_line: OnLine | None = None,
    timeout: float | None = None,
    grace: float = 10.0,
    kill_after: float = 3.0,
) -> LabResult:
    """Run `command` `per_host` times on each of `hosts` hosts and wait for all; output goes to `on_line(rank, line)`.

    `later` are rates from a moment on, such as "300s:50mbit", counted from the start of the ranks.

    Ranks are numbered host by host. Those of one host share its link, and reach each other over its loopback. Without
    `on_line`, lines are printed. When one rank fails, the others have `grace` seconds to end by themselves, then SIGTERM, and `kill_after`
    seconds later SIGKILL. An exception here, ctrl-C included, does the same without the grace and is raised
    again at the end.
    """
    _check(hosts, per_host, command, timeout, grace, kill_after)
    links, delay, changes = parse_links(rates, hosts), parse_latency(latency), parse_later(later, hosts)
    reason = available(latency=delay is not None)
    if reason is not None:
        raise LabError(reason)
    plan: dict[str, Any] = {
        **plan_middle(links),
        "hosts": plan_hosts(links, delay, changes),
        "changes": plan_changes(changes, delay),
        "ranks": plan_ranks(hosts, per_host),
        "tools": {name: find_tool(name) for name in ("ip", "tc", "mount", "umount")},
        "command": [str(word) for word in command],
        "environment": {**_environment(hosts, per_host), **(env or {})},
        "timeout": timeout,
        "grace": grace,
        "kill_after": kill_after,
    }
    return own_lab(plan, on_line or partial(print_line, per_host=per_host))


def _check(
    hosts: int, per_host: int, command: Sequence[str], timeout: float | None, grace: float, kill_after: float
) -> None:
    """Raise an error for wrong arguments before anything is started."""
    if not 1 <= hosts <= MOST_HOSTS:
        raise LabInputError(f"{hosts} hosts: a lab has between 1 and {MOST_HOSTS}")
    ranks = hosts * per_host
    if not hosts <= ranks <= MOST_RANKS:
        raise LabInputError(f"{hosts} hosts of {per_host} ranks: a host has 1 or more, and a lab at most {MOST_RANKS}")
    with suppress(ImportError):  # Windows has no such limit, nor labs
        import resource

        files, needed = resource.getrlimit(resource.RLIMIT_NOFILE)[0], 2 * ranks + 50
        if files < needed:
            who = f"{hosts} hosts" if per_host == 1 else f"{ranks} ranks"
            raise LabError(f"{who} need {needed} open files, and {files} are allowed: 'ulimit -n {needed}'")
    if isinstance(command, str) or not command or not command[0]:
        raise LabInputError(f"no command to run: {command!r}; give the program and its arguments as a list")
    if timeout is not None and not timeout > 0:
        raise LabInputError(f"timeout {timeout:g}: give seconds above 0, or leave it out to wait without limit")
    if not grace >= 0 or not kill_after >= 0:
        raise LabInputError(f"grace {grace:g}, kill_after {kill_after:g}: give seconds, 0 or more")


def _environment(hosts: int, per_host: int) -> dict[str, str]:
    """Environment of every rank: our own, and the variables of a launcher."""
    # Remove an outer launcher's variables: its store cannot be reached from the lab.
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("TORCHELASTIC_")}
    return {
        "PYTHONUNBUFFERED": "1",
        **inherited,
        "WORLD_SIZE": str(hosts * per_host),
        "LOCAL_WORLD_SIZE": str(per_host),
        "MASTER_ADDR": address(0),
        "MASTER_PORT": str(MASTER_PORT),
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "NCCL_SOCKET_IFNAME": INTERFACE,
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",  # else torch ends the others minutes after a rank is lost
        "OMP_NUM_THREADS": "1",
        INTERFACE_VARIABLE: INTERFACE,
    }
