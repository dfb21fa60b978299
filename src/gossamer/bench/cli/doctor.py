"""gossamer doctor: check this machine and the network between ranks."""

import importlib.util
import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.markup import escape
from rich.table import Table

import gossamer
from gossamer.bench.cli import gpu as gpus
from gossamer.bench.cli import network_cards
from gossamer.bench.cli.console import console
from gossamer.bench.cli.errors import InputError
from gossamer.bench.cli.output import Force, writing
from gossamer.bench.cli.run_output import is_a_rank
from gossamer.bench.compare.calibrate import calibrate, say_severity
from gossamer.bench.compare.gpu.calibrate import calibrate_gpus
from gossamer.bench.compare.link import AlphaBeta, between_two_ranks, over_each_network
from gossamer.bench.compare.load import cores
from gossamer.bench.kernels import measure
from gossamer.bench.lab import available, in_lab, privilege
from gossamer.core import files
from gossamer.core.errors import PeerError
from gossamer.costs import severity
from gossamer.costs.cluster_file import write_cluster
from gossamer.costs.quantities import say_rate
from gossamer.kernels.backends import chosen, numba_fault

BACKENDS = ("gloo", "nccl", "ucc", "mpi")
COMPILERS = {"cpu": ("numba", "fast"), "cuda": ("triton", "gpu")}  # and the extra that installs it
NAMES = {"cpu": "CPU", "cuda": "GPU"}
KERNELS = ("ternary.encode", "ternary.decode", "quantise4.encode", "quantise4.decode")
CLUSTER = files.FileKind("cluster file", (b"format = ",))

Found = dict[str, Any]


def doctor(
    quick: Annotated[bool, typer.Option(help="Leave out what takes seconds.")] = False,
    gpu: Annotated[bool, typer.Option("--gpu", help="Try everything on GPUs, and write a report to send.")] = False,
    out: Annotated[Path, typer.Option(help="Where that report goes.")] = gpus.REPORT,
    save: Annotated[
        Path | None, typer.Option(help="Measure the links between the ranks, and write them for 'gossamer plan'.")
    ] = None,
    force: Force = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Versions, kernels and their speed, network cards, the lab, and the link between two ranks on this machine.

    As one of several ranks, under torchrun or in a lab, it measures the link between all of them instead, over each network
    that they share, and says which cards they use.

    With --gpu: every kernel's bits and speed, streams, every preset over NCCL and over gloo, and a rank that dies, on the
    ranks that a launcher has started, or on all GPUs of this machine.
    """
    is_a_rank()  # refuses what is no number
    if quick and (gpu or save is not None):
        raise InputError(f"--quick leaves out what {'--gpu' if gpu else '--save'} is for: give one of them")
    if out != gpus.REPORT and (save is not None or not gpu):
        raise InputError("--out is for the report of --gpu, and no other is written: add --gpu, or leave it out")
    if save is not None and as_json:
        raise InputError("--save writes the file for 'gossamer plan' and prints a table: leave out --json")
    if save is not None:
        raise typer.Exit(_save(save, force, gpu))
    if gpu:
        raise typer.Exit(gpus.examine(out, force, as_json))
    link, ranks = ({}, {}) if quick else _link()
    if int(os.environ.get("RANK", "0")) == 0:
        # The other ranks have ended by now: on this machine they would have slowed the kernels down.
        found = environment() | ({} if quick else {"kernel_speed": _kernel_speed(), "link": link} | ranks)
        print(json.dumps(found, indent=1)) if as_json else _print(found)
    raise typer.Exit(int("broken" in link))


def environment() -> Found:
    """Facts that need no measurement."""
    has_gpu = torch.cuda.is_available()
    return {
        "gossamer": gossamer.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "backends": [b for b in BACKENDS if dist.is_available() and getattr(dist, f"is_{b}_available")()],
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "kernels": {device: chosen(torch.device(device)) for device in COMPILERS if device == "cpu" or has_gpu},
        "cards": network_cards.found_here(),
        "lab": _lab(),
    }


def _lab() -> Found:
    if in_lab():
        return {"inside": True}
    reason = available()
    if reason is not None:
        return {"possible": False, "reason": reason}
    return {"possible": True, "how": privilege(), "why_no_latency": available(latency=True)}


def _kernel_speed() -> Found:
    rows = measure(4_000_000, 1, KERNELS)
    return {r.kernel: {"gb_per_s": round(r.gb_per_s, 2), "of_memcpy": round(r.ratio_to_memcpy, 2)} for r in rows}


def _save(path: Path, force: bool, gpu: bool) -> int:
    """Measure on all ranks; rank 0 writes the file and says how sure each figure is."""
    if gpu and not torch.cuda.is_available():
        raise InputError(gpus.NO_GPU)
    first, began = _may_save(path, force), perf_counter()
    found = calibrate_gpus() if gpu else calibrate()
    if not first:
        return 0
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, text, spread in found.rows():
        table.add_row(name, escape(text), f"+- {spread:.0%}" if spread else "")
    console().print(table)  # also where the disk is full: measuring took minutes
    with writing(path, "give another name"):
        files.write(path, write_cluster(found.cluster()), CLUSTER, force=True)
    console().print(
        escape(f"Written to {path} after {perf_counter() - began:.0f} s: gossamer plan MODEL --cluster {path}")
    )
    return 0


def _may_save(path: Path, force: bool) -> bool:
    """Refuse what cannot be saved before it is measured; True on the rank that writes."""
    if "RANK" not in os.environ:
        raise InputError(
            "--save measures between ranks: start it on all of them, as in 'torchrun --nproc-per-node 1 --nnodes 4 ... -m gossamer "
            "doctor --save cluster.toml' or 'gossamer lab --hosts 4 --rate 200mbit -- gossamer doctor --save cluster.toml'"
        )
    first = os.environ["RANK"] == "0"
    if first and (path.is_dir() or not path.parent.is_dir()):
        raise InputError(f"{path} is no name for a file: give --save a file in a folder that is there")
    if first:
        with writing(path, "give another name"):
            files.writable(path, CLUSTER, force=True)
            if path.exists() and not force and not path.read_bytes().startswith(CLUSTER.marks):
                raise InputError(f"{path} exists and is no cluster file; give another name, or --force")
    return first


def _link() -> tuple[Found, Found]:
    """Alpha and beta between two ranks here or all that there are; and of the latter, which cards they use."""
    ranks: Found = {}
    try:
        if "RANK" in os.environ:
            found, everybody, crossed = over_each_network()
            ranks = network_cards.found_on_ranks(everybody, crossed)
        else:
            found = between_two_ranks()
    except (PeerError, RuntimeError, ValueError) as error:  # the other results are still useful
        found = " ".join(str(error).split())
    return _link_facts(found), ranks


def _link_facts(found: AlphaBeta | str) -> Found:
    if isinstance(found, str):
        return {"broken": found}
    if found.size == 1:
        return {"ranks": 1}
    return {
        "severity": severity(10**6, found.rate, 1.0),
        "ranks": found.size,
        "alpha_us": round(found.alpha * 1e6, 1),
        "bits_per_s": round(found.rate * 8),
    }


def _print(found: Found) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, text in _rows(found):
        table.add_row(name, escape(text))
    console().print(table)


def _rows(found: Found) -> list[tuple[str, str]]:
    """Results as table rows, with advice where one is bad."""
    rows = [(name, str(found[name])) for name in ("gossamer", "python", "torch", "system", "cores")]
    several = found["threads"] > 1
    rows += [
        ("torch threads", f"{found['threads']}" + several * "; with several ranks on a machine set OMP_NUM_THREADS=1"),
        ("backends", ", ".join(found["backends"]) or "none: this torch is built without torch.distributed"),
        ("GPUs", ", ".join(found["gpus"]) or "none"),
    ]
    rows += [(f"{NAMES[device]} kernels", _compiler(device, name)) for device, name in found["kernels"].items()]
    for name, speed in found.get("kernel_speed", {}).items():
        rows.append((f"  {name}", f"{speed['gb_per_s']:.1f} GB/s, {speed['of_memcpy']:.2f} of a memory copy"))
    rows += network_cards.in_words(found["cards"])
    rows += _lab_in_words(found["lab"])
    if "link" in found:
        rows.append(("link", _link_in_words(found["link"])))
        if "severity" in found["link"]:
            rows.append(("severity", say_severity(found["link"]["severity"])))
    rows += network_cards.of_ranks_in_words(found)
    return rows


def _compiler(device: str, name: str) -> str:
    package, extra = COMPILERS[device]
    if name == package:
        try:
            return f"{package} {version(package)}"
        except PackageNotFoundError:  # torch for ROCm, and its nightlies, bring triton under another name
            return package
    if importlib.util.find_spec(package) is None:
        return f"plain torch, which is slower; for {package}: pip install '.[{extra}]' in the clone"
    fault = numba_fault() if package == "numba" else None
    why = f"; numba cannot be used ({fault}): pip install --upgrade numba" if fault else ""
    return f"plain torch, which is slower{why}"


def _lab_in_words(lab: Found) -> list[tuple[str, str]]:
    if "inside" in lab:
        return [("lab", "this is a host of one")]
    if not lab["possible"]:
        return [("lab", lab["reason"])]
    return [("lab", f"can be made here, {lab['how']}"), ("lab latency", lab["why_no_latency"] or "can be made here")]


def _link_in_words(link: Found) -> str:
    if "broken" in link:
        return f"broken: {link['broken']}"
    if link["ranks"] == 1:
        return "one rank alone has none"
    where = "" if "RANK" in os.environ else " on this machine"
    alpha, rate = (
        f"{link['alpha_us']:.0f} us a message (alpha)",
        f"{say_rate(link['bits_per_s'] / 8)} each way (1 / beta)",
    )
    return f"{link['ranks']} ranks{where}: {alpha}, {rate}"
