"""The Triton programs write the same bits as the reference.

Without a GPU they run in Triton's interpreter, which must be chosen before Triton is imported: hence a process of
its own. It checks the programs' logic, not the code generated for a device.
"""

import os
import subprocess
import sys

import pytest
import torch

from gossamer import kernels

SCRIPT = """
import torch
from gossamer import kernels
from gossamer.kernels.backends import twin
from gossamer.kernels.forms import E2M1, E3M0, E4M3, E5M2, INT8, POWERS, float32_tops, bfloat16_tops, ocp_tops, power_tops
from gossamer.kernels.layout import Places, Rotated, Rotation, plane_bytes
device = "cuda" if torch.cuda.is_available() else "cpu"
KEY = (0xFFFFFFF0, 0x12345678)
BUCKETS = ((6, 7), (1, 512), (2, 100), (4, 4600), (3, 64), (5, 2**17), (7, 513), (8, 2560))  # a short vector takes every other one

def both(call):
    results = []
    for backend in ("torch", "triton"):
        with kernels.using(backend):
            results.append([r.cpu() for r in call()])
    for a, b in zip(*results):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), (n, a, b)

def near(call):
    with kernels.using("torch"):
        (top, deviation) = call()
    with kernels.using("triton"):
        (top2, deviation2), (_, again) = call(), call()
    assert torch.equal(top.view(torch.int32), top2.view(torch.int32)), (n, top, top2)
    torch.testing.assert_close(deviation, deviation2, rtol=1e-6, atol=0, equal_nan=True)
    assert torch.equal(deviation2.view(torch.int32), again.view(torch.int32))  # one order, run after run

for n in LENGTHS:
    x = torch.randn(n, generator=torch.Generator().manual_seed(n)).to(device)
    many = sorted({n, *range(0, n, 1 + n // 9), min(n, 5), n // 2, min(n, n // 2 + 1)})
    for bounds in ((0, n), (0, n // 3, n // 3, n - n // 7, n), (0, *many, n)):
        both(lambda: [kernels.absmax(x, bounds)])
        near(lambda: kernels.absmax_and_rms(x, bounds))
        near(lambda: kernels.absmax_and_std(x, bounds))
        if len(bounds) > 5 and n != 640:
            continue  # the interpreter is slow
        scales = kernels.absmax(x, bounds)
        both(lambda: [kernels.ternary_encode(x, bounds, scales, KEY)])
        both(lambda: [kernels.ternary_levels(x, bounds, scales, KEY, 5)])
        wire = kernels.ternary_encode(x, bounds, scales, KEY)
        def at_once():
            found, out = torch.zeros_like(scales), torch.zeros_like(wire)
            kernels.ternary_encode(x, bounds, found, KEY, out, 0.0)
            return [found, out]
        both(at_once)
        def decode():
            out, over = x.clone(), x.clone()
            kernels.ternary_decode(wire, bounds, scales, out, 0.3)
            kernels.ternary_decode(wire, bounds, scales, over)
            return [out, over]
        both(decode)
        def signs():
            wire, out, over = x.new_zeros(kernels.sign_bytes(n), dtype=torch.uint8), x.clone(), x.clone()
            said = kernels.sign_encode(x, bounds, 1, wire)
            kernels.sign_decode(wire, bounds, said, out, 0.1)
            kernels.sign_decode(wire, bounds, said, over)
            return [wire, said, out, over]
        both(signs)
    tables = ((1, n + 9), (3, 701), (5, 2070))
    for rows, columns in tables if ALL or n > 321 else tables[:1]:
        if n:
            table = kernels.sketch_encode(x, rows, columns, KEY)
            both(lambda: [kernels.sketch_encode(x, rows, columns, KEY), kernels.sketch_estimate(table, n, KEY)])
    small = ((INT8, bfloat16_tops, 128, KEY), (E4M3, float32_tops, 100, KEY), (E5M2, ocp_tops, 7, None), (POWERS, power_tops, 4096, KEY),
             (E2M1, power_tops, 32, KEY), (E2M1, float32_tops, 7, None), (E3M0, float32_tops, 32, KEY), (E3M0, ocp_tops, 16, None))
    for form, steps, bucket, key in small:
        width = torch.uint8 if steps in (power_tops, ocp_tops) else torch.float32
        tops, wire = x.new_zeros(-(-n // bucket), dtype=width), x.new_zeros(n, dtype=torch.uint8)
        def written():
            kernels.small_encode(x, form, steps(form), bucket, key, tops, wire)
            return [tops.clone(), wire.clone()]
        both(written)
        def said():
            out, over = x.clone(), x.clone()
            kernels.small_decode(wire, form, bucket, tops, out, 0.7)
            kernels.small_decode(wire, form, bucket, tops, over)
            return [out, over]
        both(said)
    inside = x[: n // 64 * 64]
    for bits, block in ((1, 64), (3, 128)) if n < 1000 else ((2, 1024), (4, 2048), (5, 256), (6, 512)):
        scales = x.new_zeros(Rotated(inside.numel(), block).blocks)
        wire = x.new_zeros(plane_bytes(inside.numel(), bits), dtype=torch.uint8)
        def rotated():
            kernels.eden_encode(inside, Rotation(bits, block), KEY, scales, wire)
            return [scales.clone(), wire.clone()]
        both(rotated)
        words = torch.tensor([KEY[0] - 2**32, KEY[1]], dtype=torch.int32, device=device)
        def said():
            out, over = inside.clone(), inside.clone()
            kernels.eden_decode(wire, Rotation(bits, block), words, scales, out, 0.7)
            kernels.eden_decode(wire, Rotation(bits, block), words, scales, over)
            return [out, over]
        both(said)
    for bits, bucket in BUCKETS if n != 321 else BUCKETS[::2]:
        both(lambda: [kernels.bucket_norms(x, bucket, "max")])
        norms = kernels.bucket_norms(x, bucket, "max")
        both(lambda: [kernels.quantise_encode(x, bits, bucket, norms, KEY)])
        def at_once():
            measured, out = torch.zeros_like(norms), x.new_zeros(kernels.quantise_bytes(n, bits), dtype=torch.uint8)
            kernels.quantise_encode(x, bits, bucket, measured, KEY, out, True)
            return [measured, out]
        both(at_once)
        codes = kernels.quantise_encode(x, bits, bucket, norms, KEY)
        def decode():
            out, over = x.clone(), x.clone()
            kernels.quantise_decode(codes, bits, bucket, norms, out, 0.7)
            kernels.quantise_decode(codes, bits, bucket, norms, over)
            return [out, over]
        both(decode)
SHAPES = ((1, 64, 256), (5, 128, 4096), (2, 63, 64), (9, 3, 9), (2, 1, 2), (1, 1300, 40_000), (1, 32, 2**33))
for at, (rows, keep, n) in enumerate(SHAPES):
    spread = torch.randint(0, n // keep, (rows, keep), generator=torch.Generator().manual_seed(n))
    places, form = (spread + n // keep * torch.arange(keep)).to(device), Places(keep, n)
    both(lambda: [kernels.places_encode(places, n)])
    wire = kernels.places_encode(places, n)
    assert torch.equal(kernels.places_decode(wire, rows, keep, n), places)
    for k in range(8) if ALL else range(at % 2, 8, 2):  # rows that nobody wrote: a bit turned over, more and more of them
        noise, where = wire.clone(), torch.randint(0, wire.numel(), (2**k,), generator=torch.Generator().manual_seed(k))
        noise[where.to(device)] ^= 1 << k
        both(lambda: [twin("numbered" if form.number_bits else "places", "decode", noise.device)(noise, form)])
for bad in (float("nan"), float("inf")):
    x = torch.tensor([1.0, bad, 3.0, 3.0, 3.0, 2.0], device=device)
    both(lambda: [kernels.absmax(x, (0, 2, 5, 6)), kernels.bucket_norms(x, 4, "max")])
    def spoilt():
        tops, out = x.new_zeros(2), x.clone()
        kernels.small_encode(x, E4M3, float32_tops(E4M3), 4, KEY, tops, x.new_zeros(6, dtype=torch.uint8))
        kernels.small_decode(x.new_ones(6, dtype=torch.uint8), E4M3, 4, tops, out, 1.0)
        return [tops, out.isnan()]
    both(spoilt)
    near(lambda: kernels.absmax_and_rms(x, (0, 2, 5, 6)))
    near(lambda: kernels.absmax_and_std(x, (0, 2, 5, 6)))
    with kernels.using("triton"):
        assert kernels.absmax_and_std(x, (0, 2, 5, 6))[1][1:].tolist() == [0.0, 0.0]  # constant: exactly none
print("equal")
"""


@pytest.mark.skipif("triton" not in kernels.backends(), reason="triton is not installed")
@pytest.mark.parametrize(  # the interpreter is slow: lengths below, at and beyond a program's block
    "lengths", [(321, 2050), pytest.param((0, 1, 4, 512, 640, 5300), marks=pytest.mark.slow)]
)
def test_triton_writes_the_same_bits(lengths: tuple[int, ...]):
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    if not torch.cuda.is_available():
        environment["TRITON_INTERPRET"] = "1"
    done = subprocess.run(
        [sys.executable, "-c", f"LENGTHS, ALL = {lengths}, {len(lengths) > 2}\n{SCRIPT}"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "equal"
