"""gossamer lab: run any command once per host of a shaped network."""

import signal
import sys
from typing import Annotated

import typer

from gossamer.cli.errors import InputError
from gossamer.lab import HostResult, run_lab


def lab(
    context: typer.Context,
    hosts: Annotated[int, typer.Option(min=1, help="How many hosts.")] = 2,
    rate: Annotated[
        str | None, typer.Option(help="'200mbit', one per host '1gbit,100mbit', or up/down '20mbit/100mbit'.")
    ] = None,
    latency: Annotated[str | None, typer.Option(help="One-way delay, such as '10ms', where the kernel has it.")] = None,
    timeout: Annotated[float | None, typer.Option(help="Seconds after which everything is ended.")] = None,
) -> None:
    """Run a command on every host of a small slow network: gossamer lab --hosts 4 --rate 200mbit -- python train.py

    RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and GLOO_SOCKET_IFNAME are set. The exit code is that of the first failure.
    """
    command = list(context.args)
    if not command:
        raise InputError("no command to run; give it after '--': gossamer lab --hosts 4 -- python train.py")
    result = run_lab(hosts, rate, command, latency=latency, timeout=timeout)
    for host in result.hosts:
        print(_line(host), file=sys.stderr)
    if result.timed_out:
        print(f"gossamer: not done after {timeout:g} s, so the lab was ended", file=sys.stderr)
    raise typer.Exit(result.exit_code)


def _line(host: HostResult) -> str:
    traffic = f"host {host.rank}: {host.sent_bytes / 1e6:.2f} MB sent, {host.received_bytes / 1e6:.2f} MB received"
    return "; ".join(filter(None, [traffic, _ending(host)]))


def _ending(host: HostResult) -> str:
    """How a host ended, if not well."""
    if host.stopped:
        return "frozen by a signal, and ended with the lab" if host.frozen else "ended with the lab"
    if host.exit_code == 0:
        return ""
    killers = {128 + number: number.name for number in signal.Signals}
    return f"killed by {killers[host.exit_code]}" if host.exit_code in killers else f"exit code {host.exit_code}"
