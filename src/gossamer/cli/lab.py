"""gossamer lab: run any command once per host of a shaped network."""

import sys
from typing import Annotated

import typer

from gossamer.cli.errors import InputError, as_input
from gossamer.lab import parse_latency, parse_links, run_lab


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
    as_input(lambda: (parse_links(rate, hosts), parse_latency(latency)))
    result = run_lab(hosts, rate, command, latency=latency, timeout=timeout)
    for host in result.hosts:
        sent, received = host.sent_bytes / 1e6, host.received_bytes / 1e6
        print(f"host {host.rank}: {sent:.2f} MB sent, {received:.2f} MB received", file=sys.stderr)
    raise typer.Exit(result.exit_code)
