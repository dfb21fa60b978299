"""Import cost, the fallback without Numba, compilation, and the benchmark."""

import subprocess
import sys

import pytest
import torch

from gossamer import kernels
from gossamer.kernels import bench

WITHOUT_NUMBA = """
import sys
sys.modules["numba"] = None
import importlib.util
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name in ("numba", "triton") else real(name, *a)
import torch, gossamer.kernels as kernels
assert kernels.backends() == ("torch",), kernels.backends()
x = torch.randn(1000)
scale = kernels.absmax(x, (0, 1000))
kernels.ternary_accumulate(kernels.ternary_encode(x, (0, 1000), scale, (1, 2)), (0, 1000), scale, x)
kernels.warmup()
"""
LAZY = """
import sys, gossamer.kernels
assert not {"numba", "triton"} & set(sys.modules)
"""


@pytest.mark.parametrize("script", [WITHOUT_NUMBA, LAZY])
def test_numba_is_optional_and_imported_late(script):
    head = f"import sys; sys.path[:0] = {sys.path!r}\n"
    subprocess.run([sys.executable, "-W", "error", "-c", head + script], check=True, timeout=120)


@pytest.mark.skipif("numba" not in kernels.backends(), reason="numba is not installed")
def test_warmup_compiles_everything_that_a_step_needs():
    from gossamer.kernels.cpu import cast, indices, lanes, quantise, scales, select, sign, ternary

    def compiled() -> int:
        modules = (cast, indices, lanes, quantise, scales, select, sign, ternary)
        values = [value for module in modules for value in vars(module).values()]
        return sum(len(value.signatures) for value in values if hasattr(value, "signatures"))

    kernels.warmup()
    before = compiled()
    bench.measure(elements=1000, rounds=1)
    x = torch.ones(10)
    kernels.scatter_add(x, *kernels.compact(x, 0.5), weight=0.5)
    kernels.lanes_unpack(kernels.lanes_pack(kernels.ternary_levels(x, (0, 10), x[:1], (1, 2)), 1, 8), 10, 1, 8)
    kernels.sign_accumulate(torch.zeros(2, dtype=torch.uint8), (0, 10), x[:1], x, 0.5)
    kernels.cast_accumulate(torch.zeros(20, dtype=torch.uint8), torch.bfloat16, x, 0.5)
    kernels.absmax_and_std(x, (0, 3, 10))
    assert compiled() == before


def test_the_benchmark_has_a_row_for_every_kernel():
    rows = bench.measure(elements=70_000, rounds=1)
    assert [row.kernel for row in rows] == [
        "absmax",
        "ternary.encode",
        "ternary.decode",
        "quantise4.encode",
        "quantise4.decode",
        "sign_feedback",
        "cast_feedback.bf16",
        "compact.0.1%",
        "compact.1%",
        "topk.0.1%",
        "topk.1%",
        "index.encode.1%",
        "index.decode.1%",
    ]
    assert all(row.gb_per_s > 0 and row.ratio_to_memcpy > 0 for row in rows)
