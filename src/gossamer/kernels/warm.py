"""Calls each kernel once on a few elements, so that it is compiled before training begins."""

from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor

from gossamer.kernels.eden import eden_decode, eden_encode
from gossamer.kernels.follow import follow
from gossamer.kernels.forms import E4M3, INT8, float32_tops
from gossamer.kernels.indices import index_decode, index_encode
from gossamer.kernels.lanes import lanes_pack, lanes_unpack
from gossamer.kernels.layout import Rotated, Rotation, plane_bytes
from gossamer.kernels.levels import levels_decode, levels_encode, levels_most
from gossamer.kernels.places import places_decode, places_encode
from gossamer.kernels.quantise import bucket_norms, quantise_decode, quantise_encode
from gossamer.kernels.scales import absmax, absmax_and_rms, absmax_and_std, divide
from gossamer.kernels.select import scatter_add, sparse_mean, topk, topk_each
from gossamer.kernels.sign import sign_bytes, sign_decode, sign_encode
from gossamer.kernels.sketch import sketch_encode, sketch_estimate
from gossamer.kernels.small import small_decode, small_encode
from gossamer.kernels.ternary import ternary_decode, ternary_encode, ternary_levels

_KEY = (1, 2)
# Triton compiles anew for lengths and addresses that are multiples of 16, so there are vectors of both kinds.
_LENGTHS = {"cpu": (64,), "cuda": (4096, 4099)}


def warmup(*families: str, device: torch.device | str = "cpu") -> None:
    """Compile kernels, or load them from the cache, so that the first training step does not wait.

    All of them, or those of some families: "scales", "ternary", "quantise" (4 bits in buckets of 512), "levels", "sign",
    "select", "indices", "places", "lanes", "sketch", "small" (int8 and e4m3, at random), "follow" (in single precision), "eden" (2 bits in
    blocks of 1024). On a GPU a few variants are left to the first step, as others of bits and buckets.
    """
    unknown = sorted(set(families) - set(_FAMILIES))
    if unknown:
        raise ValueError(f"unknown kernels {', '.join(unknown)}; there are {', '.join(_FAMILIES)}")
    place = torch.device(device)
    for n in _LENGTHS.get(place.type, (64,)):
        x = torch.ones(n + 1, device=place, dtype=torch.float32)[n % 2 :][:n]
        for family in families or _FAMILIES:
            _FAMILIES[family](x)


def _scales(x: Tensor) -> None:
    for measure in (absmax, absmax_and_rms, absmax_and_std):
        measure(x, (0, x.numel()))
    divide(x.clone(), 1)


def _ternary(x: Tensor) -> None:
    bounds, scales = (0, x.numel()), x[:1].clone()
    ternary_levels(x, bounds, scales, _KEY)
    wire, out = ternary_encode(x, bounds, scales, _KEY), x.clone()
    ternary_encode(x, bounds, scales, _KEY, wire, clip=2.5)
    ternary_decode(wire, bounds, scales, out, 1.0)
    ternary_decode(wire, bounds, scales, out)


def _quantise(x: Tensor) -> None:
    norms = bucket_norms(x, 512, "max")
    wire, out = quantise_encode(x, 4, 512, norms, _KEY), x.clone()
    quantise_encode(x, 4, 512, norms, _KEY, wire, measure=True)
    quantise_decode(wire, 4, 512, norms, out, 1.0)
    quantise_decode(wire, 4, 512, norms, out)


def _small(x: Tensor) -> None:
    tops, wire, out = x[:1].clone().expand(-(-x.numel() // 128)).contiguous(), x.to(torch.uint8), x.clone()
    for form in (INT8, E4M3):
        small_encode(x, form, float32_tops(form), 128, _KEY, tops, wire)
        small_decode(wire, form, 128, tops, out, 1.0)
        small_decode(wire, form, 128, tops, out)


def _levels(x: Tensor) -> None:
    norms = bucket_norms(x, 512, "max")
    wire = torch.empty(levels_most(x.numel(), 7), dtype=torch.uint8, device=x.device)
    length = levels_encode(x, 7, 512, norms, _KEY, wire, True)
    levels_decode(wire[:length], 7, 512, norms, x.clone(), 1.0)


def _sign(x: Tensor) -> None:
    bounds = (0, x.numel())
    wire = torch.empty(sign_bytes(x.numel()), dtype=torch.uint8, device=x.device)
    scales = sign_encode(x, bounds, 2, wire)
    sign_decode(wire, bounds, scales, x.clone(), 1.0)
    sign_decode(wire, bounds, scales, x.clone())


def _select(x: Tensor) -> None:
    scatter_add(x.clone(), topk(x, 32), x[:32].clone())
    chosen = topk_each(x, (0, x.numel()), (32,))
    sparse_mean([chosen], [x[:32].clone()], x.clone())


def _indices(x: Tensor) -> None:
    chosen = torch.arange(32, dtype=torch.int32, device=x.device)
    index_decode(index_encode(chosen, x.numel()), 32, x.numel())


def _places(x: Tensor) -> None:
    for keep in (4, 16):  # as a row of bits, and as a number
        chosen = torch.arange(keep, device=x.device).expand(2, keep)
        places_decode(places_encode(chosen, 64), 2, keep, 64)


def _lanes(x: Tensor) -> None:
    lanes_unpack(lanes_pack(x.to(torch.int8), 1, 5), x.numel(), 1, 5)


def _sketch(x: Tensor) -> None:
    sketch_estimate(sketch_encode(x, 5, 16, _KEY), x.numel(), _KEY)


def _eden(x: Tensor) -> None:
    inside, form = x[: x.numel() // 64 * 64], Rotation(2, 1024)
    scales, key = inside.new_zeros(Rotated(inside.numel(), 1024).blocks), inside.new_zeros(2, dtype=torch.int32)
    wire = torch.empty(plane_bytes(inside.numel(), 2), dtype=torch.uint8, device=x.device)
    eden_encode(inside, form, _KEY, scales, wire)
    eden_decode(wire, form, key, scales, inside.clone(), 1.0)
    eden_decode(wire, form, key, scales, inside.clone())


def _follow(x: Tensor) -> None:
    for before, came in product((x, 1.0), (None, x)):
        follow([x.clone()], before, x, came, 1.0, x.clone())


_FAMILIES: dict[str, Callable[[Tensor], None]] = {
    "scales": _scales,
    "ternary": _ternary,
    "quantise": _quantise,
    "levels": _levels,
    "sign": _sign,
    "select": _select,
    "indices": _indices,
    "places": _places,
    "lanes": _lanes,
    "sketch": _sketch,
    "small": _small,
    "follow": _follow,
    "eden": _eden,
}
