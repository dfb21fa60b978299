"""Check GPUs: which one a rank has, and whether Triton runs on it."""

import warnings
from contextlib import suppress
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from gossamer.bench.compare.gpu.check_spec import CheckSpec, Placement
from gossamer.bench.compare.gpu.findings import Finding
from gossamer.fabrics.torch.nccl import card_of as place_of
from gossamer.kernels.backends import triton_runs

DRIVER = Path("/proc/driver/nvidia/version")


def check(spec: CheckSpec, placement: Placement, subject: str) -> Finding:
    return _card(spec, placement) if subject == "card" else _triton(spec, placement)


def _card(spec: CheckSpec, placement: Placement) -> Finding:
    facts = card(placement.device)
    if "absent" in facts:
        return Finding(spec.title, "card", "failed", facts["absent"])
    says = f"{facts['name']}, compute capability {facts['capability']}, driver {facts['driver']}"
    return Finding(spec.title, "card", "measured", says, facts)


def _triton(spec: CheckSpec, placement: Placement) -> Finding:
    if find_spec("triton") is None:
        why = "Triton is not installed, so codecs run as slower torch operations: pip install '.[gpu]' in the clone"
        return Finding(spec.title, "triton", "left out", why)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        if triton_runs(placement.device):
            return Finding(spec.title, "triton", "passed")
    return Finding(spec.title, "triton", "failed", " ".join(str(w.message) for w in told))


def card(device: torch.device) -> dict[str, Any]:
    """Facts about a GPU that do not identify the machine: its place is a hash."""
    if not torch.cuda.is_available():
        return {"absent": "torch sees no GPU on this rank's machine"}
    facts: dict[str, Any] = {
        "name": torch.cuda.get_device_name(device),
        "capability": ".".join(map(str, torch.cuda.get_device_capability(device))),
        "driver": _driver(),
        "cuda": torch.version.cuda,
        "place": sha256(place_of(device).encode()).hexdigest()[:8] if place_of(device) else "",
        "nccl": "",
    }
    with suppress(Exception):  # not every build or driver has it
        facts["gb"] = round(torch.cuda.get_device_properties(device).total_memory / 1e9, 1)
    with suppress(Exception):
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # pyright: ignore
    return facts


def _driver() -> str:
    """
    >>> _read("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19")
    '535.104.05'
    """
    try:
        return _read(DRIVER.read_text())
    except OSError:
        return "unknown"


def _read(text: str) -> str:
    words = text.split("\n", maxsplit=1)[0].split()
    return next((w for w in words if w[:1].isdigit() and "." in w), "unknown")


def shared(places: dict[int, str]) -> str:
    """Which ranks share a GPU, and what that means for NCCL; empty if no ranks do."""
    holders = dict[str, list[int]]()
    for rank, place in places.items():
        if place:
            holders.setdefault(place, []).append(rank)
    crowds = [ranks for ranks in holders.values() if len(ranks) > 1]
    if not crowds:
        return ""
    said = " and ".join("ranks " + ", ".join(map(str, ranks)) for ranks in crowds)
    return f"{said} share one GPU, so each is a machine of its own to NCCL (NCCL_HOSTID): messages cross sockets, and take turns"
