"""Wires are a format: these bytes may never change without a new version of it.

`GOSSAMER_REGENERATE=1 pytest tests/kernels/test_golden.py` writes the files anew from the torch reference; do that
only when the format is meant to change. Inputs come from the hash itself, so no random generator of torch matters.
"""

import json
import os
from pathlib import Path

import pytest
import torch

from gossamer import kernels
from gossamer.kernels.forms import E4M3, E5M2, INT8, POWERS, bfloat16_tops, float32_tops, power_tops
from gossamer.kernels.layout import Rotated, Rotation, plane_bytes

FILE = Path(__file__).parents[1] / "golden" / "kernels" / "wires.json"
KEY = (0x01234567, 0x89ABCDEF)
BEHIND = (KEY[0] + 3, KEY[1])  # the same random numbers, from the fourth on
SIZES = (1, 5, 64, 321, 1000)


def values(n: int) -> torch.Tensor:
    """Heavy-tailed numbers with exact float32 arithmetic: hashed integers, cubed, some of them zero."""
    whole = kernels.mix3(torch.arange(n), (7, 11)) % 201 - 100
    return (whole**3).float() / 4096.0


def wires() -> dict[str, str]:
    found: dict[str, torch.Tensor] = {
        "mix3": kernels.mix3(torch.arange(8), KEY).view(torch.uint8),
        "mix3.wrap": kernels.mix3(torch.tensor([2**32 - 1, -1, 2**31]), KEY).view(torch.uint8),
    }
    for n in SIZES:
        x, bounds = values(n), (0, n // 3, n)
        scales = kernels.absmax(x, bounds)
        found[f"absmax.{n}"] = scales.view(torch.uint8)
        found[f"ternary.{n}"] = kernels.ternary_encode(x, bounds, scales, BEHIND)
        levels = kernels.ternary_levels(x, bounds, scales, KEY, 3)
        found[f"lanes.{n}"] = kernels.lanes_pack(levels, 3, 4).view(torch.uint8)
        for bits in range(1, 9):
            norms = kernels.bucket_norms(x, 100, "max")
            found[f"quantise{bits}.{n}"] = kernels.quantise_encode(x, bits, 100, norms, BEHIND)
        for top in (1, 7, 127):
            room = torch.empty(kernels.levels_most(n, top), dtype=torch.uint8)
            norms = kernels.bucket_norms(x, 100, "max")
            found[f"levels{top}.{n}"] = room[: kernels.levels_encode(x, top, 100, norms, BEHIND, room)]
        small = {
            "int8": (INT8, bfloat16_tops),
            "e4m3": (E4M3, float32_tops),
            "e5m2": (E5M2, power_tops),
            "powers": (POWERS, power_tops),
        }
        for name, (form, steps) in small.items():
            for key in (KEY, None):
                tops, codes = torch.zeros(-(-n // 100)), torch.zeros(n, dtype=torch.uint8)
                kernels.small_encode(x, form, steps(form), 100, key, tops, codes)
                found[f"{name}{'' if key else '.nearest'}.{n}"] = torch.cat([tops.view(torch.uint8), codes])
        wire = torch.empty(kernels.sign_bytes(n), dtype=torch.uint8)
        scales = kernels.sign_encode(x, bounds, 1, wire)
        kernels.sign_decode(wire, bounds, scales, pending := x.clone(), -1.0)
        scales = kernels.sign_encode(pending.add_(x), bounds, 1, wire)  # what the first message lost, and x again
        found[f"sign.{n}"] = torch.cat([wire, scales.view(torch.uint8)])
        inside = x[: n // 64 * 64]
        for bits in range(1, 7):
            said = torch.zeros(Rotated(inside.numel(), 256).blocks)
            codes = torch.zeros(plane_bytes(inside.numel(), bits), dtype=torch.uint8)
            kernels.eden_encode(inside, Rotation(bits, 256), KEY, said, codes)
            found[f"eden{bits}.{n}"] = torch.cat([said.view(torch.uint8), codes])
        for part in (2, 10):
            chosen = kernels.topk(x, -(-n // part))
            found[f"indices{part}.{n}"] = kernels.index_encode(chosen, n)
            found[f"places{part}.{n}"] = kernels.places_encode(chosen.long().view(1, -1), n)
    return {name: bytes(wire.tolist()).hex() for name, wire in found.items()}


@pytest.mark.parametrize("backend", [b for b in kernels.backends() if b != "triton"])
def test_wires_are_those_of_the_golden_file(backend):
    if os.environ.get("GOSSAMER_REGENERATE"):
        with kernels.using("torch"):
            FILE.write_text(json.dumps(wires(), indent=1) + "\n")
    with kernels.using(backend):
        found = wires()
    golden = json.loads(FILE.read_text())
    assert found.keys() == golden.keys()
    assert [name for name in golden if found[name] != golden[name]] == []
