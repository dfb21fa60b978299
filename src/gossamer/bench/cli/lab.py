"""gossamer lab: run any command on the hosts of a shaped network."""

import signal
import sys
from typing import Annotated

import typer

from gossamer.bench.cli.errors import InputError
from gossamer.bench.lab import HostResult, RankResult, name_rank, run_lab


def lab(
    context: typer.Context,
    hosts: Annotated[int, typer.Option(min=1, help="How many hosts.")] = 2,
    per_host: Annotated[int, typer.Option(min=1, help="How many ranks on each; they share its link.")] = 1,
    rate: Annotated[
        str | None,
        typer.Option(
            help="'200mbit', one per host '1gbit,100mbit', one slow host '200mbit,3:20mbit', or up/down '20mbit/100mbit'."
        ),
    ] = None,
    then: Annotated[
        list[str] | None,
        typer.Option(help="Other rates later: '300s:50mbit', in seconds after the start; may be given several times."),
    ] = None,
    latency: Annotated[str | None, typer.Option(help="One-way delay, such as '10ms', where the kernel has it.")] = None,
    timeout: Annotated[float | None, typer.Option(help="End everything after this many seconds.")] = None,
) -> None:
    """Run a command on every host of a small slow network: gossamer lab --hosts 4 --rate 200mbit -- python train.py

    With --per-host it runs so many times on each: ranks of a host share its link, and its loopback. RANK, WORLD_SIZE,
    LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT and GLOO_SOCKET_IFNAME are set, as torchrun does. The exit code is
    that of the first failure.
    """
    command = list(context.args)
    if not command:
        raise InputError("no command to run; give it after '--': gossamer lab --hosts 4 -- python train.py")
    if command[0].startswith("-"):
        raise InputError(f"gossamer lab has no option {command[0]!r}; its options come first, then -- and the command")
    result = run_lab(hosts, rate, command, later=then or (), per_host=per_host, latency=latency, timeout=timeout)
    for host in result.hosts:
        print(_line(host, per_host), file=sys.stderr)
    if result.timed_out:
        print(f"gossamer: not done after {timeout:g} s, so the lab was ended", file=sys.stderr)
    raise typer.Exit(result.exit_code)


def _line(host: HostResult, per_host: int) -> str:
    traffic = f"host {host.number}: {host.sent_bytes / 1e6:.2f} MB sent, {host.received_bytes / 1e6:.2f} MB received"
    return "; ".join(filter(None, [traffic, *(_ending(rank, per_host) for rank in host.ranks)]))


def _ending(rank: RankResult, per_host: int) -> str:
    """Text for a rank that did not end well, with its number if a host has several."""
    how = _how(rank)
    return f"{name_rank(rank.rank)} {how}" if how and per_host > 1 else how


def _how(rank: RankResult) -> str:
    if rank.stopped:
        return "frozen by a signal, and ended with the lab" if rank.frozen else "ended with the lab"
    if rank.exit_code == 0:
        return ""
    killers = {128 + number: number.name for number in signal.Signals}
    return f"killed by {killers[rank.exit_code]}" if rank.exit_code in killers else f"exit code {rank.exit_code}"
