"""Compiles Gossamer's Triton programs for GPUs that are not here, and tells what became of each.

A driver that only names a GPU takes the place of Triton's, and a launch becomes a compilation. So Gossamer's own host
code, called with tensors on the meta device (which have types, lengths and addresses, but no content), says which
programs there are and with which arguments they are launched. What is told comes from the tools in Triton's wheel:
the compiler's own counts of registers, stack and shared memory, and the machine code.

`python tests/kernels/offline.py 80 90` prints a table; `--wide` tries every kind of argument, `--json` prints lines of
JSON. It runs in a process of its own, since it replaces what Triton launches with.
"""

import importlib
import json
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import gossamer.kernels.gpu
from gossamer import kernels
from gossamer.kernels import layout
from gossamer.kernels.forms import E2M1, E4M3, INT8, POWERS, Form, float32_tops, power_tops

Key = tuple[int, int]
KEY: Key = (0xFFFFFFF0, 0x12345678)
HUGE = 2**31 + 4096  # elements that 32 bits do not count
ODD = 4099  # a last block that is not full, rows that are not aligned
BUCKETS = (1, 2, 3, 7, 64, 100, 511, 512, 513, 2560, 4096, 1_000_003, 2**30, 10**12)
TOOL = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


class NoGPU:
    """What Triton asks of a driver before it compiles."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # Triton keeps what it compiled by device, so each kind of GPU is one

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty


class Bench:
    """Compiles what is launched, and keeps one line about each program and kind of arguments."""

    def __init__(self) -> None:
        self.seen: dict[Any, dict[str, Any]] = {}
        self.launched: set[JITFunction[Any]] = set()
        self._run = JITFunction.run

    def __enter__(self) -> "Bench":
        bench = self

        def compile_only(self: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
            bench.look_at(self, args, options)

        JITFunction.run = compile_only  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        JITFunction.run = self._run  # type: ignore[method-assign]

    def look_at(self, program: "JITFunction[Any]", args: tuple[Any, ...], options: dict[str, Any]) -> None:
        disassemble = program not in self.launched  # a spill shows in all variants, as stack
        self.launched.add(program)
        capability = driver.active.capability
        about = {
            "program": f"{program.fn.__module__.rpartition('.')[2]}.{program.fn.__name__}",
            "gpu": f"sm_{capability}",
            "arguments": ", ".join(f"{p.name}={_kind(a)}" for a, p in zip(args, program.params, strict=True)),
        }
        try:
            kernel = self._run(program, *args, grid=(1,), warmup=True, **options)
        except Exception as error:
            reason = [line for line in str(error).splitlines() if line.strip()]
            self.seen[tuple(about.values())] = about | {"failure": f"{type(error).__name__}: {reason[-1:]}"}
            return
        if kernel.hash not in self.seen:
            self.seen[kernel.hash] = about | facts(kernel, disassemble)


def _kind(argument: object) -> str:
    if isinstance(argument, Tensor):
        return f"{argument.dtype}".removeprefix("torch.") + ("" if argument.data_ptr() % 16 == 0 else " unaligned")
    return str(argument)


def facts(kernel: Any, disassemble: bool) -> dict[str, int]:
    """What a program takes, and how often its code does what it must not."""
    ptx, told = kernel.asm["ptx"], ask(kernel.asm["cubin"], "-res-usage")
    code = ask(kernel.asm["cubin"], "-sass") if disassemble else ""
    used = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", told)}
    # the machine divides doubles and takes their roots with an FFMA that adds to a zero register
    fused = re.findall(r"\bFFMA\b(?!.*\bRZ\b)", code) + re.findall(r"\bfma\.", ptx)
    return {
        "registers": used["REG"],
        "shared": kernel.metadata.shared,
        "stack": used["STACK"] + used["LOCAL"],
        "spills": len(re.findall(r"\b(?:STL|LDL)\b", code)),
        "fusion": int(kernel.metadata.enable_fp_fusion),  # whether the assembler was free to fuse
        "fused": len(fused),
        "flushed": len(re.findall(r"\.ftz", ptx)),
        "approximate": len(re.findall(r"\.approx|\bdiv\.full", ptx)),
        "wide divisions": len(re.findall(r"\b(?:div|rem)\.[su]64", ptx)),
    }


def ask(cubin: bytes, option: str) -> str:
    """What cuobjdump says; to disassemble takes it half a second, whatever the program."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([TOOL, option, file.name], capture_output=True, text=True, check=True).stdout


def vector(n: int, dtype: torch.dtype = torch.float32, shift: int = 0) -> Tensor:
    """A vector without content, whose address is `shift` elements off alignment."""
    return torch.empty(n + shift, dtype=dtype, device="meta")[shift:]


def by_segment(n: int, shift: int) -> None:
    """Everything that takes bounds."""
    x, bounds, scales = vector(n, shift=shift), (0, n // 3, n // 3, n), vector(3, shift=shift)
    kernels.absmax(x, bounds)
    kernels.absmax_and_rms(x, bounds)
    kernels.absmax_and_std(x, bounds)
    kernels.ternary_levels(x, bounds, scales, KEY, 5)
    wire = vector(kernels.ternary_bytes(n), torch.uint8, shift)
    kernels.ternary_encode(x, bounds, scales, KEY, out=wire)
    kernels.ternary_encode(x, bounds, scales, KEY, wire, 2.5)
    kernels.ternary_decode(wire, bounds, scales, x, 1.0)
    kernels.ternary_decode(wire, bounds, scales, x)
    bits = vector(kernels.sign_bytes(n), torch.uint8, shift)
    kernels.sign_decode(bits, bounds, scales, x, 1.0)
    kernels.sign_encode(x, bounds, 2, bits)
    kernels.sign_decode(bits, bounds, scales, x)


def by_bucket(n: int, bits: int, bucket: int, shift: int = 0) -> None:
    x, norms = vector(n, shift=shift), vector(-(-n // bucket))
    kernels.bucket_norms(x, bucket, "max")
    wire = vector(kernels.quantise_bytes(n, bits), torch.uint8, shift)
    kernels.quantise_encode(x, bits, bucket, norms, KEY, out=wire)
    kernels.quantise_decode(wire, bits, bucket, norms, x, 1.0)
    kernels.quantise_decode(wire, bits, bucket, norms, x)


def by_form(n: int, form: Form, bucket: int, key: Key | None, shift: int = 0) -> None:
    x, wire = vector(n, shift=shift), vector(n, torch.uint8, shift)
    for width in (torch.float32, torch.uint8) if form in (E4M3, POWERS) else (torch.float32,):
        tops = vector(-(-n // bucket), width)
        kernels.small_encode(x, form, (power_tops if form is POWERS else float32_tops)(form), bucket, key, tops, wire)
        kernels.small_decode(wire, form, bucket, tops, x, 1.0)
        kernels.small_decode(wire, form, bucket, tops, x)


def by_layer(n: int, rows: int, columns: int, shift: int = 0) -> None:
    kernels.sketch_encode(vector(n, shift=shift), rows, columns, KEY)
    kernels.sketch_estimate(vector(rows * columns, shift=shift).view(rows, columns), n, KEY)


def by_block(n: int, bits: int, block: int, shift: int = 0) -> None:
    """Blocks that are rotated."""
    n, wire = n // 64 * 64, vector(layout.plane_bytes(n // 64 * 64, bits), torch.uint8, shift)
    x, scales, key = vector(n, shift=shift), vector(layout.Rotated(n, block).blocks), vector(2, torch.int32)
    kernels.eden_encode(x, layout.Rotation(bits, block), KEY, scales, wire)
    kernels.eden_decode(wire, layout.Rotation(bits, block), key, scales, x, 1.0)
    kernels.eden_decode(wire, layout.Rotation(bits, block), key, scales, x)


def by_row(rows: int, keep: int, n: int, shift: int = 0) -> None:
    """Places in rows."""
    kernels.places_encode(vector(rows * keep, torch.int64, shift).view(rows, keep), n)
    kernels.places_decode(vector(rows * kernels.place_bytes(keep, n), torch.uint8, shift), rows, keep, n)


def quick(capability: int) -> None:
    """Every program, every width of a code; each kind of length and bucket for one of the two GPUs at least."""
    by_segment(ODD, 1)
    by_layer(ODD, 5, 333)
    if capability == 80:
        for bits, bucket in ((3, 512), (8, 513)):
            by_bucket(HUGE, bits, bucket)
        by_block(2**31, 2, 1024)
        by_form(HUGE, INT8, 128, KEY)
        by_form(ODD, E4M3, 100, None, 1)
        by_row(2**26, 128, 4096)  # bits that 32 bits do not count
        by_row(2**26, 32, 4096)
    else:
        by_row(33, 4, 64, 1)
        by_row(33, 63, 64, 1)
        by_form(ODD, POWERS, 4096, KEY)
        by_block(ODD, 1, 4096)
        by_block(ODD, 6, 256, 1)
        for bits, bucket in zip(range(1, 8), (512, 7, 1, 100, 2**30, 512, 10**12), strict=True):
            by_bucket(ODD, bits, bucket)


def wide(capability: int) -> None:
    """All kinds of arguments that the checks let through."""
    sizes = [(n, shift) for n in (1, ODD, 1 << 20, HUGE, HUGE + 1) for shift in (0, 1)]
    for n, shift in sizes:
        by_segment(n, shift)
        for rows, columns in ((1, 4096), (3, 1), (5, 10_000), (9, 1 << 20)):
            if rows * n < 2**30 * columns:
                by_layer(n, rows, columns, shift)
    for bits in range(1, 9):
        for n, shift in sizes:
            by_bucket(n, bits, 512, shift)
    for (n, shift), bits in product(sizes, range(1, 7)):
        if n <= 2**31:
            by_block(n, bits, 64 << bits, shift)
    for n, shift in sizes:
        for form, key in product((INT8, E4M3, E2M1, POWERS), (KEY, None)):
            for bucket in (1, 3, 32, 128, 1000, 4096):
                by_form(n, form, bucket, key, shift)
    for rows, keep, n in (
        (1, 1, 2),
        (33, 31, 64),
        (33, 4, 64),
        (5, 63, 64),
        (1024, 64, 4096),
        (2**26, 32, 4096),
        (2**26, 128, 4096),
        (1, 1300, 40_000),
        (3, 5, 2**33),
    ):
        for shift in (0, 1):
            by_row(rows, keep, n, shift)
    for bucket in BUCKETS:
        for bits in (1, 7):
            by_bucket(ODD, bits, bucket)
            by_bucket(1 << 20, bits, bucket)


def programs() -> set["JITFunction[Any]"]:
    """Every program of gossamer.kernels.gpu, and what it calls."""
    package = gossamer.kernels.gpu
    modules = [importlib.import_module(f"{package.__name__}.{m.name}") for m in pkgutil.iter_modules(package.__path__)]
    return {value for module in modules for value in vars(module).values() if isinstance(value, JITFunction)}


def reached(launched: set["JITFunction[Any]"]) -> set["JITFunction[Any]"]:
    """The programs that were launched, and those that they call."""
    found, open_ends = set[JITFunction[Any]](), list(launched)
    while open_ends:
        program = open_ends.pop()
        if program not in found:
            found.add(program)
            named = (program.fn.__globals__.get(name) for name in program.fn.__code__.co_names)
            open_ends += [value for value in named if isinstance(value, JITFunction)]
    return found


def compiled(capabilities: list[int], everything: bool) -> Iterator[dict[str, Any]]:
    with Bench() as bench, kernels.using("triton"):
        for capability in capabilities:
            driver.set_active(NoGPU(capability))  # type: ignore[arg-type]
            (wide if everything else quick)(capability)
    yield from bench.seen.values()
    for program in programs() - reached(bench.launched):
        yield {"program": program.fn.__qualname__, "gpu": "", "arguments": "", "failure": "nothing launches it here"}


def table(lines: list[dict[str, Any]]) -> str:
    """The worst of each program on each GPU, as Markdown."""
    counts = ("registers", "stack", "shared", "fused", "wide divisions")
    rows = ["| program | " + " | ".join(counts) + " | variants |", "| --- " * (len(counts) + 2) + "|"]
    for name in dict.fromkeys(line["program"] for line in lines):
        own = [line for line in lines if line["program"] == name]
        gpus = sorted({line["gpu"] for line in own}, reverse=True)
        cells = [[str(max(line.get(c, -1) for line in own if line["gpu"] == gpu)) for gpu in gpus] for c in counts]
        cells = [cell[0] if len(set(cell)) == 1 else " / ".join(cell) for cell in cells]
        rows.append(f"| `{name}` | " + " | ".join(cells) + f" | {len(own)} |")
    return "\n".join(rows)


def main() -> None:
    capabilities = [int(word) for word in sys.argv[1:] if word.isdigit()] or [80, 90]
    lines = compiled(capabilities, "--wide" in sys.argv)
    if "--json" in sys.argv:
        for line in lines:
            print(json.dumps(line))
        return
    found = list(lines)
    print(f"Triton {triton.__version__}, worst of the variants on", ", ".join(f"sm_{c}" for c in capabilities))
    print(table(found))
    for line in found:
        if "failure" in line:
            print(line)


if __name__ == "__main__":
    main()
