"""How to call each kernel: arguments of awkward lengths, made on the CPU."""

from collections.abc import Callable, Iterator
from inspect import isfunction, signature
from itertools import chain, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gossamer import kernels
from gossamer.kernels.forms import (
    E2M1,
    E3M0,
    E4M3,
    E5M2,
    INT8,
    POWERS,
    bfloat16_tops,
    float32_tops,
    ocp_tops,
    power_tops,
)
from gossamer.kernels.layout import ROTATED_LEAST, Rotated, Rotation, plane_bytes

KEY = (0xFFFFFFF0, 0x12345678)  # a counter that overflows
Calls = Callable[[int], Iterator[tuple[Any, ...]]]

# Equal to float32 rounding: sums in an order of their own, and what torch divides on GPUs by the reciprocal of a number.
NEAR = ("absmax_and_rms", "absmax_and_std", "divide")


def names() -> list[str]:
    """Names of all kernels: functions of `gossamer.kernels` that take a tensor."""
    return [n for n in kernels.__all__ if isfunction(f := getattr(kernels, n)) and _takes_a_tensor(f)]


def _takes_a_tensor(function: Callable[..., Any]) -> bool:
    return any(p.annotation in ("Tensor", Tensor) for p in signature(function).parameters.values())


def values(n: int, seed: int = 0) -> Tensor:
    """Random values of all magnitudes, with zeros."""
    rng = torch.Generator().manual_seed(1000 + seed)
    x = torch.randn(n, generator=rng, dtype=torch.float32)
    return torch.where(x.abs() < 0.1, 0.0, x * 10.0 ** torch.randint(-3, 4, (n,), generator=rng))


def spoilt(n: int) -> Tensor:
    """Random values with a NaN and an infinity, if `n` allows."""
    x = values(n)
    x[n // 3 : n // 3 + 1] = float("nan")
    x[n - 1 :] = float("inf")
    return x


def cuts(n: int) -> Iterator[tuple[int, ...]]:
    """Segment bounds: one segment; several with an empty one; many."""
    yield 0, n
    yield 0, n // 3, n // 3, n - n // 7, n
    yield 0, *sorted({n, *range(0, n, 1 + n // 50)}), n


def _both(plain: Calls, more: Calls) -> Calls:
    """Calls without a kernel's last argument, and calls with it."""
    return lambda n: chain(plain(n), more(n))


def _without_weight(accumulated: Calls) -> Calls:
    """Those of decoding, which has no weight: the last argument of what accumulates."""
    return lambda n: (args[:-1] for args in accumulated(n))


def _by_segment(n: int) -> Iterator[tuple[Any, ...]]:
    for bounds in cuts(n):
        yield values(n), bounds
    yield spoilt(n), (0, n // 2, n)


def _to_trits(n: int) -> Iterator[tuple[Any, ...]]:
    for x, bounds in _by_segment(n):
        yield x, bounds, kernels.absmax(x, bounds), KEY


def _clipped_trits(n: int) -> Iterator[tuple[Any, ...]]:
    for x, bounds, scales, key in _to_trits(n):  # unclipped: a deviation agrees to its rounding only
        yield x, bounds, torch.zeros_like(scales), key, torch.zeros(kernels.ternary_bytes(n), dtype=torch.uint8), 0.0


def _counted_levels(n: int) -> Iterator[tuple[Any, ...]]:
    for levels, bucket in ((1, 7), (5, 512), (127, max(n, 1))):
        for x in (values(n), spoilt(n)):
            yield x, levels, bucket, kernels.bucket_norms(x, bucket, "max"), KEY


def _to_rice(n: int) -> Iterator[tuple[Any, ...]]:
    for x, levels, bucket, norms, key in _counted_levels(n):
        room = torch.zeros(kernels.levels_most(n, levels), dtype=torch.uint8)
        yield x, levels, bucket, norms, key, room


def _from_rice(n: int) -> Iterator[tuple[Any, ...]]:
    for x, levels, bucket, norms, key, room in _to_rice(n):
        if x.isfinite().all():
            wire = room[: kernels.levels_encode(x, levels, bucket, norms, key, room)]
            yield wire, levels, bucket, norms, values(n, 1)
            yield wire, levels, bucket, norms, values(n, 1), 0.7


def _to_levels(n: int) -> Iterator[tuple[Any, ...]]:
    for x, bounds, scales, key in _to_trits(n):
        yield x, bounds, scales, key, 5


def _from_trits(n: int) -> Iterator[tuple[Any, ...]]:
    for x, bounds, scales, key in _to_trits(n):
        yield kernels.ternary_encode(x, bounds, scales, key), bounds, scales, values(n, 1), 0.3


def _in_buckets(n: int) -> Iterator[tuple[int, int, Tensor, Tensor]]:
    """Three kinds for each length, since every kind and length is compiled anew; the lengths together take all."""
    kinds = [*zip((4, 1, 2, 3, 5, 6, 7, 8), (512, 100, 513, 64, 2**17, 7, 512, 2560), strict=True)]
    for bits, bucket in [kinds[0], *(kinds[1 + (2 * n + k) % 7] for k in range(2))]:
        for x in (values(n), spoilt(n)):
            yield bits, bucket, x, kernels.bucket_norms(x, bucket, "max")


def _norms(n: int) -> Iterator[tuple[Any, ...]]:
    for _, bucket, x, _ in _in_buckets(n):
        yield x, bucket, "max"


def _to_codes(n: int) -> Iterator[tuple[Any, ...]]:
    for bits, bucket, x, norms in _in_buckets(n):
        yield x, bits, bucket, norms, KEY


def _by_magnitude(n: int) -> Iterator[tuple[Any, ...]]:
    for bits, bucket, x, norms in _in_buckets(n):
        wire = torch.zeros(kernels.quantise_bytes(n, bits), dtype=torch.uint8)
        yield x, bits, bucket, torch.zeros_like(norms), KEY, wire, True


def _from_codes(n: int) -> Iterator[tuple[Any, ...]]:
    for bits, bucket, x, norms in _in_buckets(n):
        wire = kernels.quantise_encode(x, bits, bucket, norms, KEY)
        yield wire, bits, bucket, norms, values(n, 1), 0.7


def _by_chunks(n: int) -> Iterator[tuple[Any, ...]]:
    """Chunks of unequal lengths, one of them empty."""
    edges, keys = (0, n // 3, n // 2, n // 2, n), np.array([KEY, (3, 4), KEY, KEY], np.uint32)
    for bits, bucket in ((4, 512), (1, 100), (7, 2**17)):
        longest = n - n // 2
        width = 4 * -(-longest // bucket) + kernels.quantise_bytes(longest, bits)
        yield values(n), edges, bits, bucket, keys, torch.zeros(4, -(-width // 4) * 4, dtype=torch.uint8)


def _from_rows(n: int) -> Iterator[tuple[Any, ...]]:
    for wire, bits, bucket, norms, out, _ in _from_codes(n):
        rows = [torch.cat([some.view(torch.uint8), wire]) for some in (norms, 2 * norms)]
        yield torch.stack(rows), bits, bucket, out


def _to_small(n: int) -> Iterator[tuple[Any, ...]]:
    kinds = (
        (INT8, float32_tops, 128, KEY),
        (E4M3, power_tops, 32, None),
        (E5M2, ocp_tops, 100, KEY),
        (POWERS, power_tops, 4096, KEY),
        (E2M1, power_tops, 32, KEY),
        (E3M0, float32_tops, 32, None),
    )
    for form, steps, bucket, key in (*kinds, (INT8, bfloat16_tops, 1, None)):
        tops, wire = torch.zeros(-(-n // bucket), dtype=torch.float32), torch.zeros(n, dtype=torch.uint8)
        yield values(n), form, steps(form), bucket, key, tops, wire


def _from_small(n: int) -> Iterator[tuple[Any, ...]]:
    for x, form, steps, bucket, key, tops, wire in _to_small(n):
        kernels.small_encode(x, form, steps, bucket, key, tops, wire)
        tops[-1:] = float("inf")
        yield wire, form, bucket, tops, values(n, 1), 0.7


def _to_rotated(n: int) -> Iterator[tuple[Any, ...]]:
    """Whole blocks and a tail, of every width; a vector that is shorter than a block is in none."""
    inside = n // ROTATED_LEAST * ROTATED_LEAST
    for bits, block in ((1, 64), (2, 1024), (3, 128), (4, 4096), (5, 256), (6, 512)):
        scales = torch.zeros(Rotated(inside, block).blocks, dtype=torch.float32)
        wire = torch.zeros(plane_bytes(inside, bits), dtype=torch.uint8)
        yield values(inside), Rotation(bits, block), KEY, scales, wire


def _from_rotated(n: int) -> Iterator[tuple[Any, ...]]:
    for wire, form, key, scales, out in _decoded_rotated(n):
        yield wire, form, key, scales, values(out.numel(), 1), 0.7


def _decoded_rotated(n: int) -> Iterator[tuple[Any, ...]]:
    words = torch.tensor([KEY[0] - 2**32, KEY[1]], dtype=torch.int32)
    for x, form, key, scales, wire in _to_rotated(n):
        kernels.eden_encode(x, form, key, scales, wire)
        yield wire, form, words, scales, torch.zeros_like(x)


def _divided(n: int) -> Iterator[tuple[Any, ...]]:
    for by in (2, 3, 7):
        yield values(n), by


def _followed(n: int) -> Iterator[tuple[Any, ...]]:
    for model, before, came in (
        (values(n), values(n, 1), None),
        (values(n), 0.3, values(n, 3)),
        (spoilt(n), 0.3, None),
    ):
        yield [*model.tensor_split(3)], before, values(n, 2), came, 0.7, torch.zeros(n, dtype=torch.float32)


def _to_signs(n: int) -> Iterator[tuple[Any, ...]]:
    for x, bounds in _by_segment(n):
        for power in (1, 2):
            yield x, bounds, power, torch.zeros(kernels.sign_bytes(n), dtype=torch.uint8)


def _from_signs(n: int) -> Iterator[tuple[Any, ...]]:
    for bounds in cuts(n):
        wire = torch.zeros(kernels.sign_bytes(n), dtype=torch.uint8)
        yield wire, bounds, kernels.sign_encode(values(n), bounds, 1, wire), values(n, 1), 0.1


def _chosen(n: int) -> Tensor:
    return kernels.topk(values(n), n // 50)


def _topk(n: int) -> Iterator[tuple[Any, ...]]:
    for k in {n // 50, n // 3, n}:
        yield values(n), k


def _topk_each(n: int) -> Iterator[tuple[Any, ...]]:
    for bounds in cuts(n):
        yield values(n), bounds, tuple((b - a + 2) // 3 for a, b in pairwise(bounds))


def _sparse_mean(n: int) -> Iterator[tuple[Any, ...]]:
    indices = [_chosen(n), torch.arange(0, n, 3, dtype=torch.int32)]
    yield indices, [values(i.numel(), 1) for i in indices], values(n)


def _scatter(n: int) -> Iterator[tuple[Any, ...]]:
    indices = _chosen(n)
    yield values(n), indices, values(indices.numel(), 1), 0.3


def _within(n: int) -> Iterator[tuple[Any, ...]]:
    indices = _chosen(n)
    yield indices, values(indices.numel(), 1), n


def _to_gaps(n: int) -> Iterator[tuple[Any, ...]]:
    yield _chosen(n), n


def _from_gaps(n: int) -> Iterator[tuple[Any, ...]]:
    indices = _chosen(n)
    yield kernels.index_encode(indices, n), indices.numel(), n


def _to_places(n: int) -> Iterator[tuple[Any, ...]]:
    """Rows of all lengths, with few places of many and nearly all of them."""
    for size, keep in ((4096, 64), (n, 1), (n, n // 2), (64, 63)):
        rows = torch.rand(5, size, generator=torch.Generator().manual_seed(n), dtype=torch.float32)
        yield rows.topk(min(max(keep, 1), size)).indices.sort(1).values, size


def _from_places(n: int) -> Iterator[tuple[Any, ...]]:
    for places, size in _to_places(n):
        yield kernels.places_encode(places, size), *places.shape, size


def _to_lanes(n: int) -> Iterator[tuple[Any, ...]]:
    yield (torch.arange(n) % 11 - 5).to(torch.int8), 5, 3


def _from_lanes(n: int) -> Iterator[tuple[Any, ...]]:
    for levels, top, size in _to_lanes(n):
        yield kernels.lanes_pack(levels, top, size) * size, n, top, size


def _to_sketch(n: int) -> Iterator[tuple[Any, ...]]:
    for rows, columns in ((5, n // 7 + 1), (3, n + 100)):
        yield values(n), rows, columns, KEY


def _from_sketch(n: int) -> Iterator[tuple[Any, ...]]:
    for x, rows, columns, key in _to_sketch(n):
        yield kernels.sketch_encode(x, rows, columns, key), n, key


def _counters(n: int) -> Iterator[tuple[Any, ...]]:
    yield torch.arange(n, dtype=torch.int64), KEY


CALLS: dict[str, Calls] = {
    "absmax": _by_segment,
    "absmax_and_rms": _by_segment,
    "absmax_and_std": _by_segment,
    "bucket_norms": _norms,
    "divide": _divided,
    "eden_decode": _both(_decoded_rotated, _from_rotated),
    "eden_encode": _to_rotated,
    "follow": _followed,
    "index_decode": _from_gaps,
    "index_encode": _to_gaps,
    "lanes_pack": _to_lanes,
    "lanes_unpack": _from_lanes,
    "mix3": _counters,
    "levels_decode": _from_rice,
    "levels_encode": _to_rice,
    "places_decode": _from_places,
    "places_encode": _to_places,
    "quantise_accumulate_each": _from_rows,
    "quantise_decode": _both(_without_weight(_from_codes), _from_codes),
    "quantise_each": _by_chunks,
    "quantise_encode": _both(_to_codes, _by_magnitude),
    "scatter_add": _scatter,
    "small_decode": _both(_without_weight(_from_small), _from_small),
    "small_encode": _to_small,
    "sparse_mean": _sparse_mean,
    "sign_decode": _both(_without_weight(_from_signs), _from_signs),
    "sign_encode": _to_signs,
    "sketch_encode": _to_sketch,
    "sketch_estimate": _from_sketch,
    "ternary_decode": _both(_without_weight(_from_trits), _from_trits),
    "ternary_encode": _both(_to_trits, _clipped_trits),
    "ternary_levels": _to_levels,
    "topk": _topk,
    "topk_each": _topk_each,
    "within": _within,
}


def calls(name: str, n: int) -> Iterator[tuple[tuple[Any, ...], int]]:
    """The arguments of a kernel, and by how many elements they are off alignment."""
    for args in CALLS[name](n):
        for shift in (0, 1):
            yield args, shift
