"""gossamer doctor: what this machine and this network can do."""

import importlib.util
import json
import os
import platform
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.markup import escape
from rich.table import Table

import gossamer
from gossamer.cli.console import console
from gossamer.core.errors import PeerError
from gossamer.kernels import backends
from gossamer.lab import available

BROKEN = "link broken"
COMPILED = {"numba": "fast kernels on the CPU: pip install 'gossamer[fast]'", "triton": "fast kernels on a GPU"}


def doctor(
    quick: Annotated[bool, typer.Option(help="Leave out what takes seconds.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Versions, backends, kernel speed, the lab, and the link between two ranks on this machine.

    Under torchrun it measures the link between all ranks instead.
    """
    facts = environment()
    if not quick:
        facts |= _kernel_speed() | _link()
    if int(os.environ.get("RANK", "0")):
        return
    if as_json:
        print(json.dumps(facts, indent=1))
    else:
        table = Table(box=None, pad_edge=False, show_header=False)
        for name, value in facts.items():
            table.add_row(name, escape(str(value)))
        console().print(table)
    raise typer.Exit(int(BROKEN in facts))


def environment() -> dict[str, Any]:
    facts: dict[str, Any] = {
        "gossamer": gossamer.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "torch threads": torch.get_num_threads(),
        "gloo": dist.is_available() and dist.is_gloo_available(),
        "nccl": dist.is_available() and dist.is_nccl_available(),
        "GPUs": torch.cuda.device_count(),
        "kernels": ", ".join(sorted(backends())),
        "lab": available() or "can be made here",
    }
    for package, use in COMPILED.items():
        if importlib.util.find_spec(package) is None:
            facts[package] = f"missing; {use}"
    if torch.get_num_threads() > 1:
        facts["torch threads"] = f"{torch.get_num_threads()}; with several ranks on one machine set OMP_NUM_THREADS=1"
    return facts


def _kernel_speed() -> dict[str, Any]:
    from gossamer.kernels.bench import measure

    wanted = ("ternary.encode", "ternary.decode", "quantise4.encode", "quantise4.decode")
    rows = measure(4_000_000, 1)
    return {f"kernel {r.kernel}": f"{r.gb_per_s:.1f} GB/s" for r in rows if r.kernel in wanted}


def _link() -> dict[str, Any]:
    """Latency and rate of an all-reduce, from a small and a large one."""
    from gossamer.trial.link import alpha_beta, between_two_ranks

    try:
        latency, rate = alpha_beta() if "RANK" in os.environ else between_two_ranks()
    except (PeerError, RuntimeError, ValueError) as error:  # the other facts are worth knowing all the more
        return {BROKEN: str(error)}
    if rate == float("inf"):
        return {"link": "one rank alone has none"}
    return {"link latency": f"{latency * 1e6:.0f} us a hop", "link rate": f"{rate * 8 / 1e9:.2f} Gbit/s"}
