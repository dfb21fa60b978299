"""Calls every compiled kernel once on a few elements."""

from __future__ import annotations

import torch

from gossamer.kernels.cpu import cast, indices, lanes, quantise, scales, select, sign, ternary


def run() -> None:
    x, out = torch.ones(4), torch.zeros(4)
    bounds, one, key = (0, 4), torch.ones(1), (1, 2)
    scales.absmax(x, bounds)
    scales.absmax_and_std(x, bounds)
    ternary.levels(x, bounds, one, key, 1, 0)
    ternary.accumulate(ternary.encode(x, bounds, one, key, 0), bounds, one, out)
    quantise.max_norms(x, 4)
    quantise.accumulate(quantise.encode(x, 4, 4, one, key, 0), 4, 4, one, out)
    wire, _ = sign.feedback(x, out.clone(), one, bounds)
    sign.accumulate(wire, bounds, one, out)
    cast.accumulate(cast.feedback(x, out.clone(), torch.bfloat16), torch.bfloat16, out, 1.0)
    chosen, values = select.compact(x, 0.5)
    select.scatter_add(out, chosen, values, 1.0)
    indices.decode(indices.encode(select.topk(torch.ones(64), 32), 64), 32, 64)
    lanes.unpack(lanes.pack(torch.ones(4, dtype=torch.int8), 1, 5, 6), 4, 1, 5, 6)
