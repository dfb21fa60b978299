"""gossamer doctor --gpu: run all GPU checks, and write a report to send."""

import os
import platform
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.markup import escape
from rich.table import Table

import gossamer
from gossamer.bench.cli.console import console
from gossamer.bench.cli.errors import InputError
from gossamer.bench.cli.output import writing
from gossamer.bench.compare.control_group import ControlGroup, meet
from gossamer.bench.compare.gpu import launch
from gossamer.bench.compare.gpu.examine import Examination
from gossamer.bench.compare.gpu.report import KIND, Report
from gossamer.core import files
from gossamer.core.errors import GossamerError

REPORT = Path("gossamer-gpu.md")
NO_GPU = (
    "torch sees no GPU here, so there is nothing to check: torch may be built for CPUs only, or the driver is missing "
    "(run nvidia-smi); gossamer doctor without --gpu checks the rest of this machine"
)
WAIT = 3600.0  # seconds that ranks on other machines may be slower than this one
COLOURS = {"failed": "red", "passed": "green"}


def examine(out: Path, force: bool, as_json: bool) -> int:
    """Run the checks as one of a launcher's ranks, or with new ranks; return 1 if anything failed."""
    if "RANK" in os.environ:
        return _as_a_rank(out, force, as_json)
    if not torch.cuda.is_available():
        raise InputError(NO_GPU)
    _check_file(out, force)
    return _conclude(_examine(launch.LocalRanks(torch.cuda.device_count()), _show_progress), out, force, as_json)


def _as_a_rank(out: Path, force: bool, as_json: bool) -> int:
    """Run the checks as one rank; rank 0 prints and writes the report. All ranks end if any refuses."""
    meet(120.0)
    rank, size = dist.get_rank(), dist.get_world_size()
    control = ControlGroup(WAIT)
    refusals = control.texts(_refusal(out, force, rank == 0))
    refused = next((f"rank {r}: {text}" for r, text in enumerate(refusals) if text), "")
    code = 2
    if not refused:
        report = _examine(launch.JoinedRanks(control, rank, size), _show_progress if rank == 0 else lambda text: None)
        code = _conclude(report, out, force, as_json) if rank == 0 else int(bool(report.failures))
    dist.barrier()
    dist.destroy_process_group()
    if refused and rank == 0:
        raise InputError(refused)
    return code


def _refusal(out: Path, force: bool, writes: bool) -> str:
    if not torch.cuda.is_available():
        return NO_GPU
    try:
        if writes:
            _check_file(out, force)
    except GossamerError as error:
        return str(error)
    return ""


def _check_file(out: Path, force: bool) -> None:
    """Check the output file before the checks, which take minutes."""
    if not out.absolute().parent.is_dir():
        raise InputError(
            f"there is no folder {out.absolute().parent} to write {out.name} to; name another file with --out"
        )
    with writing(out, "name another file with --out, or --force"):
        files.writable(out, KIND, force)


def _examine(runner: launch.Runner, say: Callable[[str], None]) -> Report:
    return Report(versions(), Examination(runner, say=say).run())


def versions() -> dict[str, Any]:
    """Versions that matter for GPUs; nothing identifies the machine, and no GPU is touched."""
    return {
        "gossamer": gossamer.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
        "triton": _version("triton"),
        "numba": _version("numba"),
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "backends": [b for b in ("gloo", "nccl") if getattr(dist, f"is_{b}_available")()],
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _show_progress(text: str) -> None:
    print(f"{text[:200]} ...", file=sys.stderr, flush=True)


def _conclude(report: Report, out: Path, force: bool, as_json: bool) -> int:
    """Print the report, then write it, so that a full disk does not lose it."""
    if as_json:
        print(report.to_json())
    else:
        _print(report)
    with writing(out, "name another file with --out, or --force"):
        files.write(out, report.as_markdown(), KIND, force)
    print(f"the report to send is {out}", file=sys.stderr)
    return int(bool(report.failures))


def _print(report: Report) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    for check in report.checks():
        table.add_row(f"[bold]{escape(check)}[/bold]", "", "")
        for f in report.of(check):
            colour = COLOURS.get(f.outcome, "default")
            table.add_row(f"  {escape(f.subject)}", f"[{colour}]{f.outcome}[/{colour}]", escape(f.says))
    console().print(table)
    console().print(escape(report.verdict()))
    for sentence in report.failures:
        console().print(escape(f"- {sentence}"))
