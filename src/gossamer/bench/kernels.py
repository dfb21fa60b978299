"""How fast each kernel is beside a plain memory copy of its input.

On a CPU by one thread, beside libc's memcpy; on a GPU beside a copy on the device, between events. Every timing of a kernel
is preceded by one of the copy on the same input, so that both see the same disturbances; medians within a round, the best
of the rounds. A ratio of 1 means: as fast as copying the input.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import time
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from gossamer import kernels
from gossamer.kernels.backends import chosen
from gossamer.kernels.forms import E4M3, INT8, float32_tops
from gossamer.kernels.layout import Rotated, Rotation, plane_bytes

_REPEATS = 7
_SIDE, _PRODUCTS = 4096, 2  # of matrix products that keep a GPU busy: some 5 ms
_KEY = (0x243F6A88, 0x85A308D3)


class KernelSpeed(NamedTuple):
    kernel: str
    backend: str
    elements: int
    gb_per_s: float
    ratio_to_memcpy: float


def measure(
    elements: int = 25_600_000, rounds: int = 3, only: Collection[str] = (), device: torch.device | str = "cpu"
) -> list[KernelSpeed]:
    """One row per kernel, or per kernel of `only`; GB/s counts the float32 input only."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        x = torch.randn(elements, generator=torch.Generator().manual_seed(0), dtype=torch.float32).to(device)
        copy, timed = (_memcpy(x), _seconds) if x.device.type == "cpu" else (_device_copy(x), _device_clock(x.device))
        backend = chosen(x.device)
        rows: list[KernelSpeed] = []
        for name, call in _calls(x):
            if only and len(rows) == len(only):
                break  # what comes after them is not even prepared
            if only and name not in only:
                continue
            ratio, seconds = max(_round(copy, call, timed) for _ in range(rounds))
            rows.append(KernelSpeed(name, backend, elements, 4 * elements / seconds / 1e9, ratio))
        return rows
    finally:
        torch.set_num_threads(threads)


def _calls(x: Tensor) -> Iterator[tuple[str, Callable[[], object]]]:
    n = x.numel()
    bounds, out = (0, n), torch.zeros_like(x)
    scales = kernels.absmax(x, bounds)
    yield "absmax", lambda: kernels.absmax(x, bounds)
    wire = kernels.ternary_encode(x, bounds, scales, _KEY)
    yield "ternary.encode", lambda: kernels.ternary_encode(x, bounds, scales, _KEY)
    yield "ternary.decode", lambda: kernels.ternary_decode(wire, bounds, scales, out, 1.0)
    norms = kernels.bucket_norms(x, 512, "max")
    codes = kernels.quantise_encode(x, 4, 512, norms, _KEY)
    yield "quantise4.encode", lambda: kernels.quantise_encode(x, 4, 512, norms, _KEY)
    yield "quantise4.decode", lambda: kernels.quantise_decode(codes, 4, 512, norms, out, 1.0)
    yield from _levels(x, norms, out)
    yield from _rotations(x, out)
    tops = x.new_zeros(-(-n // 128))
    small = x.new_zeros(n, dtype=torch.uint8)
    for name, form in (("int8", INT8), ("e4m3", E4M3)):
        steps = float32_tops(form)
        yield f"{name}.encode", lambda f=form, s=steps: kernels.small_encode(x, f, s, 128, _KEY, tops, small)
        yield f"{name}.decode", lambda f=form: kernels.small_decode(small, f, 128, tops, out, 1.0)
    bits = x.new_empty(kernels.sign_bytes(n), dtype=torch.uint8)
    said = kernels.sign_encode(x, bounds, 2, bits)
    yield "sign.encode", lambda: kernels.sign_encode(x, bounds, 2, bits)
    yield "sign.decode", lambda: kernels.sign_decode(bits, bounds, said, out)
    columns = max(min(131_072, n // 10), 1)
    table = kernels.sketch_encode(x, 5, columns, _KEY)
    yield "sketch.encode", lambda: kernels.sketch_encode(x, 5, columns, _KEY)
    yield "sketch.estimate", lambda: kernels.sketch_estimate(table, n, _KEY, out)
    yield from _selections(x)


def _levels(x: Tensor, norms: Tensor, out: Tensor) -> Iterator[tuple[str, Callable[[], object]]]:
    room = x.new_zeros(kernels.levels_most(x.numel(), 7), dtype=torch.uint8)
    wire = room[: kernels.levels_encode(x, 7, 512, norms, _KEY, room, True)]
    yield "levels7.encode", lambda: kernels.levels_encode(x, 7, 512, norms, _KEY, room, True)
    yield "levels7.decode", lambda: kernels.levels_decode(wire, 7, 512, norms, out, 1.0)


def _rotations(x: Tensor, out: Tensor) -> Iterator[tuple[str, Callable[[], object]]]:
    """Of whole blocks: at most 63 elements are left out."""
    x, out = (each[: x.numel() // 64 * 64] for each in (x, out))
    key = x.new_zeros(2, dtype=torch.int32)
    for bits in (1, 2, 4):
        form = Rotation(bits, 1024)
        scales = x.new_zeros(Rotated(x.numel(), 1024).blocks)
        wire = x.new_zeros(plane_bytes(x.numel(), bits), dtype=torch.uint8)
        yield f"eden{bits}.encode", lambda f=form, s=scales, w=wire: kernels.eden_encode(x, f, _KEY, s, w)
        yield f"eden{bits}.decode", lambda f=form, s=scales, w=wire: kernels.eden_decode(w, f, key, s, out, 1.0)


def _selections(x: Tensor) -> Iterator[tuple[str, Callable[[], object]]]:
    n = x.numel()
    counts = {"0.1%": max(n // 1000, 1), "1%": max(n // 100, 1)}
    for name, k in counts.items():
        yield f"topk.{name}", lambda k=k: kernels.topk(x, k)
    chosen_indices = kernels.topk(x, counts["1%"])
    wire = kernels.index_encode(chosen_indices, n)
    yield "index.encode.1%", lambda: kernels.index_encode(chosen_indices, n)
    yield "index.decode.1%", lambda: kernels.index_decode(wire, counts["1%"], n)


def _memcpy(x: Tensor) -> Callable[[], object]:
    target = torch.zeros_like(x)
    memcpy = ctypes.CDLL("msvcrt" if os.name == "nt" else None).memcpy
    memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    length = x.numel() * x.element_size()
    return lambda: memcpy(target.data_ptr(), x.data_ptr(), length)


def _device_copy(x: Tensor) -> Callable[[], object]:
    target = torch.zeros_like(x)
    return lambda: target.copy_(x)


def _round(
    copy: Callable[[], object], call: Callable[[], object], timed: Callable[[Callable[[], object]], float]
) -> tuple[float, float]:
    """(memcpy time / kernel time, kernel time), medians of alternated repeats."""
    call()
    copies: list[float] = []
    calls: list[float] = []
    for _ in range(_REPEATS):
        copies.append(timed(copy))
        calls.append(timed(call))
    return statistics.median(copies) / statistics.median(calls), statistics.median(calls)


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _device_clock(device: torch.device) -> Callable[[Callable[[], object]], float]:
    """Seconds that a GPU needs for a call. It is kept busy before, so that the call is queued whole when its time begins."""
    a = torch.ones(_SIDE, _SIDE, device=device, dtype=torch.float32)

    def seconds(call: Callable[[], object]) -> float:
        for _ in range(_PRODUCTS):
            torch.mm(a, a)
        return event_seconds(call, device)

    return seconds


def event_seconds(call: Callable[[], object], device: torch.device) -> float:
    """Seconds the device needs for the queued work, from one CUDA event to another."""
    stream = torch.cuda.current_stream(device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record(stream)
    call()
    end.record(stream)
    end.synchronize()
    return max(begin.elapsed_time(end) / 1000, 1e-9)
