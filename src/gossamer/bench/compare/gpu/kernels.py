"""Check kernels: each must give the CPU's bits; its speed is compared with a copy on the device."""

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gossamer import kernels
from gossamer.bench.compare.gpu import samples
from gossamer.bench.compare.gpu.check_spec import CheckSpec, Placement, Sizes
from gossamer.bench.compare.gpu.findings import Finding
from gossamer.bench.kernels import event_seconds
from gossamer.fabrics.torch.stream import tensors_in

REPEATS = 7


def check(spec: CheckSpec, placement: Placement, subject: str) -> Finding:
    if subject not in samples.CALLS:
        return Finding(spec.title, subject, "failed", "samples.CALLS has no arguments for it, so it was not tried")
    for n in spec.sizes.lengths:
        for args, shift in samples.calls(subject, n):
            if wrong := difference(subject, args, placement.device, shift):
                return Finding(spec.title, subject, "failed", f"of {n} elements{' off alignment' * shift}, {wrong}")
    numbers = speed(subject, spec.sizes, placement.device)
    says = f"{numbers['gb_per_s']:.0f} GB/s of float32, {numbers['of_a_copy']:.2f} of a copy on the device"
    return Finding(spec.title, subject, "passed", says, numbers)


def difference(name: str, args: tuple[Any, ...], device: torch.device, shift: int) -> str:
    """Compare what a kernel returns and writes on the device with the CPU; empty if all bits are equal."""
    ours, theirs = (called(name, args, place, shift) for place in (torch.device("cpu"), device))
    if len(ours) != len(theirs):
        return f"it returns {len(theirs)} tensors, and {len(ours)} on the CPU"
    return next((w for a, b in zip(ours, theirs) if (w := _differ(a, b, name in samples.NEAR))), "")


def called(name: str, args: tuple[Any, ...], place: torch.device, shift: int) -> list[Tensor]:
    """Call a kernel; all tensors that come out: the results, and the arguments as they are afterwards."""
    given = [_moved(a, place, shift) for a in args]
    out = getattr(kernels, name)(*given)
    return [t.cpu() for t in (*tensors_in(out), *tensors_in(given))]


def _moved(x: Any, place: torch.device, shift: int) -> Any:
    """Copy each tensor to a device, `shift` elements off the start of its memory."""
    if isinstance(x, list):
        return [_moved(each, place, shift) for each in x]
    if not isinstance(x, Tensor):
        return x
    flat = x.reshape(-1)
    return torch.cat([flat[:1].repeat(shift), flat]).to(place)[shift if x.numel() else 0 :].view(x.shape)


def _differ(a: Tensor, b: Tensor, near: bool) -> str:
    if a.dtype != b.dtype or a.shape != b.shape:
        return f"it returns {b.dtype} of {tuple(b.shape)}, and {a.dtype} of {tuple(a.shape)} on the CPU"
    same = _equal(a, b, near)
    if bool(same.all()):
        return ""
    first = int((~same).int().argmax())
    wrong = int((~same).sum())
    return f"{wrong} of {a.numel()} values differ, the first at {first}: {_value(b, first)}, and {_value(a, first)} on the CPU"


def _equal(a: Tensor, b: Tensor, near: bool) -> Tensor:
    """Elementwise equality of bits; NaNs are equal to each other."""
    if not a.is_floating_point():
        return a == b
    if near:
        return torch.isclose(a, b, rtol=1e-6, atol=0, equal_nan=True)
    return (a.view(torch.int32) == b.view(torch.int32)) | (a.isnan() & b.isnan())


def _value(x: Tensor, i: int) -> str:
    return f"{x[i].item():.9g}"


def speed(name: str, sizes: Sizes, device: torch.device) -> dict[str, float]:
    """Median speed of a kernel and its ratio to a copy; both are timed in turns, under the same load.

    The device is kept busy before, so that a call is queued whole when its time begins: else the host's launches are in it.
    """
    elements, busy = sizes.elements, keeps_busy(sizes, device)
    args = next(samples.CALLS[name](elements))
    given = [_moved(a, device, 0) for a in args]
    source = torch.ones(elements, device=device, dtype=torch.float32)
    target = torch.empty_like(source)
    copies, calls = list[float](), list[float]()
    getattr(kernels, name)(*given)
    for _ in range(REPEATS):
        busy()
        copies.append(event_seconds(lambda: target.copy_(source), device))
        busy()
        calls.append(event_seconds(lambda: getattr(kernels, name)(*given), device))
    copy, call = statistics.median(copies), statistics.median(calls)
    return {"gb_per_s": round(4 * elements / call / 1e9, 2), "of_a_copy": round(copy / call, 3)}


def keeps_busy(sizes: Sizes, device: torch.device) -> Callable[[], object]:
    """A function that keeps the current stream busy for a while."""
    a = torch.full((sizes.side, sizes.side), 1.0 / sizes.side, device=device, dtype=torch.float32)

    def work() -> Tensor:
        x = a
        for _ in range(sizes.products):
            x = x @ a
        return x

    return work
