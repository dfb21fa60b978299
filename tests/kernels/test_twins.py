"""The Numba loops write and read the very same bits as the torch reference."""

from collections import Counter
from collections.abc import Callable
from importlib import import_module
from itertools import pairwise, product
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer import kernels
from gossamer.kernels.backends import twin
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
    stretched,
)
from gossamer.kernels.layout import Places
from gossamer.kernels.scales import clipped_scales

pytestmark = pytest.mark.skipif("numba" not in kernels.backends(), reason="numba is not installed")

SIZES = [0, 1, 2, 3, 4, 5, 63, 64, 65, 319, 320, 321, 511, 512, 513, 1000, 5003]
KEY = (0x9E3779B9, 0xDEADBEEF)


def cut(n: int, parts: int, seed: int) -> tuple[int, ...]:
    inner = torch.randint(0, n + 1, (parts - 1,), generator=torch.Generator().manual_seed(seed))
    return (0, *sorted(inner.tolist()), n)


def values(n: int, seed: int) -> torch.Tensor:
    x = torch.randn(n, generator=torch.Generator().manual_seed(seed))
    return torch.where(x.abs() < 0.1, 0.0, x) * 10.0 ** (seed % 7 - 3)


def both(call):
    with kernels.using("torch"):
        a = call()
    with kernels.using("numba"):
        b = call()
    for left, right in zip(a, b, strict=True):
        assert left.dtype == right.dtype
        assert left.shape == right.shape
        if left.dtype == torch.float32:
            assert torch.equal(left.isnan(), right.isnan())
            left, right = left.nan_to_num(0.0), right.nan_to_num(0.0)
        assert torch.equal(left, right)
    return a


def anew(decode, n):
    """What is decoded over numbers that were there, as bits; -0.0 and 0.0 are not the same."""
    out = torch.full((n,), float("nan"))
    decode(out)
    return out.view(torch.int32)


@pytest.mark.parametrize("backend", ["torch", "numba"])
def test_to_decode_is_to_add_to_zeros(backend):
    """To the bit: where a scale is zero, a level below zero makes a zero with a sign, and adding it makes one without."""
    n, wire = 3000, torch.arange(3000).to(torch.uint8)
    bounds, scales = (0, 1000, n), torch.tensor([0.0, 1.5])
    norms = torch.tensor([0.0, 2.0, 0.0, 1.0, 0.5, 3.0])
    with kernels.using(backend):
        added = torch.zeros(n)
        kernels.ternary_decode(wire[: kernels.ternary_bytes(n)], bounds, scales, added, 1.0)
        decoded = anew(lambda out: kernels.ternary_decode(wire[: kernels.ternary_bytes(n)], bounds, scales, out), n)
        assert torch.equal(added.view(torch.int32), decoded)
        for bits in range(1, 9):
            codes, added = wire[: kernels.quantise_bytes(n, bits)], torch.zeros(n)
            kernels.quantise_decode(codes, bits, 512, norms, added, 1.0)
            decoded = anew(lambda out, c=codes, b=bits: kernels.quantise_decode(c, b, 512, norms, out), n)
            assert torch.equal(added.view(torch.int32), decoded)


cases = given(n=st.sampled_from(SIZES) | st.integers(0, 3000), parts=st.integers(1, 5), seed=st.integers(0, 2**20))


@settings(deadline=None)
@cases
def test_absmax(n, parts, seed):
    x = values(n, seed)
    if n > 3 and seed % 3 == 0:
        x[seed % n] = [float("nan"), float("inf"), -float("inf")][seed % 9 // 3]
    bounds = cut(n, parts, seed)
    both(lambda: [kernels.absmax(x, bounds)])


@pytest.mark.parametrize("measure", [kernels.absmax_and_rms, kernels.absmax_and_std])
@settings(deadline=None)
@cases
def test_deviation(measure, n, parts, seed):
    x, bounds = values(n, seed), cut(n, parts, seed)
    with kernels.using("torch"):
        top, deviation = measure(x, bounds)
    with kernels.using("numba"):
        top2, deviation2 = measure(x, bounds)
    assert torch.equal(top, top2)
    torch.testing.assert_close(deviation, deviation2, rtol=1e-6, atol=0)


@settings(deadline=None)
@cases
def test_ternary(n, parts, seed):
    x, bounds, start = values(n, seed), cut(n, parts, seed), values(n, seed + 1)
    scales = kernels.absmax(x, bounds) * (0.5 if seed % 2 else 1.0)
    key = (KEY[0] + seed * 7919) % 2**32, KEY[1]
    (wire,) = both(lambda: [kernels.ternary_encode(x, bounds, scales, key)])
    assert wire.numel() == kernels.ternary_bytes(n)

    def decode():
        out = start.clone()
        kernels.ternary_decode(wire, bounds, scales, out, 0.3)
        return [out]

    both(decode)
    both(lambda: [anew(lambda out: kernels.ternary_decode(wire, bounds, scales, out), n)])

    def at_once():
        found, out = torch.full_like(scales, 7.0), torch.full_like(wire, 7)
        kernels.ternary_encode(x, bounds, found, key, out, 0.0)
        assert torch.equal(found, kernels.absmax(x, bounds))
        assert torch.equal(out, kernels.ternary_encode(x, bounds, found, key))
        kernels.ternary_encode(x, bounds, clipped := torch.full_like(scales, 7.0), key, out, 1.5)
        assert torch.equal(clipped, clipped_scales(x, bounds, 1.5))  # of one backend: sums are its own
        assert torch.equal(out, kernels.ternary_encode(x, bounds, clipped, key))
        kernels.ternary_encode(x, bounds, found, key, out, 0.0)
        return [found, out]

    both(at_once)
    (levels,) = both(lambda: [kernels.ternary_levels(x, bounds, scales, key, 1)])
    out = torch.zeros(n)
    kernels.ternary_decode(wire, bounds, scales, out, 1.0)
    lengths = torch.tensor(bounds).diff()
    assert torch.equal(out, levels * scales.repeat_interleave(lengths))
    both(lambda: [kernels.ternary_levels(x, bounds, scales, key, 1 + seed % 127)])


@settings(deadline=None)
@given(
    n=st.sampled_from(SIZES),
    bits=st.integers(1, 8),
    bucket=st.sampled_from([1, 3, 64, 100, 512, 2560]),
    seed=st.integers(0, 2**20),
)
def test_quantise(n, bits, bucket, seed):
    x, start = values(n, seed), values(n, seed + 1)
    key = KEY[0] + seed, KEY[1]
    (norms,) = both(lambda: [kernels.bucket_norms(x, bucket, "max")])
    (wire,) = both(lambda: [kernels.quantise_encode(x, bits, bucket, norms, key)])

    def at_once():
        measured, out = torch.full_like(norms, 7.0), torch.full_like(wire, 7)
        kernels.quantise_encode(x, bits, bucket, measured, key, out, True)
        assert torch.equal(out, wire)
        assert torch.equal(measured, norms)
        return [measured, out]

    both(at_once)
    assert wire.numel() == kernels.quantise_bytes(n, bits)

    def decode():
        out = start.clone()
        kernels.quantise_decode(wire, bits, bucket, norms, out, 0.7)
        return [out]

    both(decode)
    both(lambda: [anew(lambda out: kernels.quantise_decode(wire, bits, bucket, norms, out), n)])
    out = torch.zeros(n)
    kernels.quantise_decode(wire, bits, bucket, norms, out, 1.0)
    top = max(2 ** (bits - 1) - 1, 1)
    spacing = norms.repeat_interleave(bucket)[:n] * (2 if bits == 1 else 1) / top
    assert bool(((out - x).abs() <= spacing * (1 + 1e-6)).all())


# What a kernel is compiled for: each form with bytes or floats for tops, a usual or another length, dice or none; and each
# pair of those (an orthogonal array). The codes of POWERS, E5M2, E2M1 and E3M0 differ in constants only.
COMPILED = [
    (form, bool(z), bool(z ^ x), KEY if z ^ y else None)
    for (form, x, y) in ((INT8, 0, 0), (E4M3, 0, 1), (E5M2, 1, 0), (POWERS, 1, 1), (E2M1, 0, 0), (E3M0, 1, 1))
    for z in (0, 1)
]


def test_no_two_kernels_have_one_name() -> None:
    """Of two that two processes have cached under one name, a third process may run one for the other: replicas differed so."""
    from gossamer.kernels import cpu

    modules = [import_module(f"{cpu.__name__}.{module.name}") for module in iter_modules(cpu.__path__)]
    made = {id(found): found for module in modules for found in vars(module).values() if hasattr(found, "py_func")}
    names = Counter((kernel.py_func.__module__, kernel.py_func.__qualname__) for kernel in made.values())
    assert len(names) > 50
    assert [name for name, count in names.items() if count > 1] == []


def one_more(x):
    return x + 1


@pytest.fixture
def cached_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], Any]:
    """A kernel as another process would have it, with a cache that is empty at first."""
    import numba

    from gossamer.kernels.cpu.compile import kernel

    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    return lambda: kernel(one_more)


def test_types_that_two_processes_compile_at_once_are_both_cached(
    cached_kernel: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second compiles for floats while the first is about to save what it has compiled for integers."""
    first, second, third = (cached_kernel() for _ in range(3))
    file = first._cache._cache_file
    dump = file._dump

    def late(what: Any) -> Any:
        second(1.5)
        return dump(what)

    monkeypatch.setattr(file, "_dump", late)
    first(1)
    assert (third(1), third(1.5)) == (2, 2.5)
    assert (sum(third.stats.cache_hits.values()), sum(third.stats.cache_misses.values())) == (2, 0)


def test_a_kernel_is_compiled_anew_after_a_change_of_any_source(
    cached_kernel: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may call what another file defines."""
    from gossamer.kernels.cpu import compile

    cached_kernel()(1)
    monkeypatch.setattr(compile, "_sources", lambda: "other sources")
    after = cached_kernel()
    after(1)
    assert sum(after.stats.cache_hits.values()) == 0


def test_variants_of_a_kernel_have_names_of_their_own_in_the_cache() -> None:
    """Numba's index of a name may be written by two processes at once, and then leads to the wrong code."""
    from gossamer.kernels.cpu import small

    forms, both_ways = (INT8, E4M3, E5M2, POWERS), (False, True)
    made: list[Any] = [small._encoder(*each) for each in product(forms, both_ways, (0, 128), both_ways)]
    made += [small._reader(*each) for each in product(forms, (0, 128), both_ways, both_ways)]
    files = {each._cache._impl.filename_base for each in made}
    assert len(files) == len(made) == 64


@settings(deadline=None)
@given(
    n=st.sampled_from(SIZES),
    compiled=st.sampled_from(COMPILED),
    steps=st.sampled_from([float32_tops, bfloat16_tops, power_tops, ocp_tops]),
    bucket=st.sampled_from([1, 3, 32, 200]),
    seed=st.integers(0, 2**20),
)
def test_small_numbers(n, compiled, steps, bucket, seed):
    form, byte, usual, key = compiled
    if byte and steps in (float32_tops, bfloat16_tops):
        steps = power_tops  # which a byte can hold
    width = torch.uint8 if byte and steps in (power_tops, ocp_tops) else torch.float32
    bucket = (4096 if form == POWERS else 128) if usual else bucket  # what is compiled for one length, and for any
    x, start, buckets = values(n, seed) * 10.0 ** (seed % 50 - 25), values(n, seed + 1), -(-n // bucket)
    if n > 5 and seed % 3 == 0:
        x[seed % n] = [float("nan"), float("inf"), -float("inf")][seed % 9 // 3]

    def encode():
        tops, wire = torch.full((buckets,), 7, dtype=width), torch.full((n,), 7, dtype=torch.uint8)
        kernels.small_encode(x, form, steps(form), bucket, key, tops, wire)
        fine = (stretched(tops, form) if width == torch.uint8 else tops).isfinite().repeat_interleave(bucket)[:n]
        return [tops, torch.where(fine, wire, 0)]  # of a bucket that is not finite the codes mean nothing

    tops, wire = both(encode)

    def decode():
        out, over = start.clone(), torch.full((n,), float("nan"))
        kernels.small_decode(wire, form, bucket, tops, out, 0.7)
        kernels.small_decode(wire, form, bucket, tops, over)
        added = torch.zeros(n)
        kernels.small_decode(wire, form, bucket, tops, added, 1.0)
        assert torch.equal(over.view(torch.int32), added.view(torch.int32))
        return [out, over]

    both(decode)


@settings(deadline=None)
@cases
def test_signs(n, parts, seed):
    bounds = cut(n, parts, seed)

    def written():
        results = []
        for power in (1, 2):
            wire = torch.empty(kernels.sign_bytes(n), dtype=torch.uint8)
            scales = kernels.sign_encode(values(n, seed), bounds, power, wire)
            kernels.sign_decode(wire, bounds, scales, out := torch.empty(n))
            kernels.sign_decode(wire, bounds, scales, added := values(n, seed + 9), 0.25)
            results += [wire, scales, added, out]
        return results

    decoded = both(written)[-1]
    x = values(n, seed).double()
    for a, b in pairwise(bounds):
        assert decoded[a:b].norm() == pytest.approx(float(x[a:b].norm()), rel=1e-5)


@settings(deadline=None)
@cases
def test_selection(n, parts, seed):
    x = values(n, seed)
    if seed % 2:
        x = (x * 2).round() / 2  # many ties
    if n > 5 and seed % 5 == 0:
        x[seed % n] = float("nan")
    both(lambda: [kernels.topk(x, n * (seed % 11) // 10)])


@settings(deadline=None)
@cases
def test_lanes(n, parts, seed):
    top, size = ((1, 8), (1, 1), (7, 3), (127, 100))[seed % 4]
    levels = (torch.arange(n) * 31 % (2 * top + 1) - top).to(torch.int8)
    (lanes,) = both(lambda: [kernels.lanes_pack(levels, top, size)])
    (total,) = both(lambda: [kernels.lanes_unpack(lanes * size, n, top, size)])
    assert torch.equal(total, levels.int() * size)


@settings(deadline=None)
@given(
    n=st.integers(1, 200_000),
    density=st.sampled_from([0.0, 0.001, 0.01, 0.1, 0.5, 1.0]),
    clustered=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_indices(n, density, clustered, seed):
    generator = torch.Generator().manual_seed(seed)
    chance = torch.full((n,), density)
    if clustered:
        chance *= (torch.arange(n) // 1000 % 10 == 0).float()
    indices = torch.bernoulli(chance, generator=generator).nonzero().view(-1).int()
    (wire,) = both(lambda: [kernels.index_encode(indices, n)])
    assert wire.numel() <= 1 + 4 * indices.numel()
    (back,) = both(lambda: [kernels.index_decode(wire, indices.numel(), n)])
    assert torch.equal(back, indices)


@settings(deadline=None)
@given(n=st.integers(1, 3000), count=st.integers(0, 500), seed=st.integers(0, 2**20))
def test_scatter_add(n, count, seed):
    indices = torch.randint(0, n, (count,), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)

    def add():
        out = torch.ones(n)
        kernels.scatter_add(out, indices, values(count, seed), 0.1)
        return [out]

    both(add)


@settings(deadline=None)
@cases
def test_topk_each(n, parts, seed):
    x, bounds = values(n, seed), cut(n, parts, seed)
    if seed % 2:
        x = (x * 2).round() / 2  # many ties
    counts = tuple((b - a) * (seed % 11) // 10 for a, b in pairwise(bounds))
    (found,) = both(lambda: [kernels.topk_each(x, bounds, counts)])
    each = [kernels.topk(x[a:b], k) + a for k, (a, b) in zip(counts, pairwise(bounds))]
    assert torch.equal(found, torch.cat(each))


@pytest.mark.parametrize("kind", ["normal", "sparse", "ties"])
def test_topk_each_of_long_segments(kind):
    """Long enough for a sample to be taken; where nearly all are zero it is no guide."""
    x = values(300_000, 3)
    if kind == "sparse":
        x[torch.arange(x.numel()) % 997 > 0] = 0.0
    if kind == "ties":
        x = x.sign()
    bounds, counts = (0, 70_000, 70_100, 300_000), (700, 10, 2300)
    both(lambda: [kernels.topk_each(x, bounds, counts)])


@settings(deadline=None)
@given(n=st.sampled_from([1, 5, 4096, 4097, 20_000]), by=st.integers(1, 9), seed=st.integers(0, 999))
def test_divide(n, by, seed):
    def divide():
        x = values(n, seed) * 10.0 ** (seed % 60 - 40)  # some are denormal
        if seed % 5 == 0:
            x[seed % n] = [float("nan"), float("inf")][seed % 2]
        return [kernels.divide(x, by), x]

    largest, x = both(divide)
    assert torch.equal(largest.isfinite().all(), x.isfinite().all())


@settings(deadline=None)
@given(
    n=st.sampled_from([1, 100, 2**17 + 3]),
    cut=st.sampled_from([77, 2**20]),
    told=st.booleans(),
    met=st.booleans(),
    seed=st.integers(0, 999),
)
@pytest.mark.parametrize("precision", [torch.float32, torch.float64], ids=["single", "double"])
def test_follow(precision, n, cut, told, met, seed):
    model, before, kept, came = (values(n, seed + i).to(precision) for i in range(4))
    if seed % 5 == 0:
        model[seed % n] = [float("nan"), float("inf")][seed % 2]
    w, was = (torch.tensor(least + seed / 7, dtype=precision) for least in (0.1, 0.3))  # of no power of two

    def step():
        z, x = model.clone(), torch.full_like(model, 7)
        kernels.follow(z.split(cut), before if told else float(was), kept, came if met else None, float(w), x)
        return [each.nan_to_num(0.0, 1.0, -1.0) for each in (x, z)]

    x, z = both(step)
    moved = (model - (before if told else kept / was)) + kept
    expected = moved + came if met else moved
    assert torch.equal(x, expected.nan_to_num(0.0, 1.0, -1.0))
    assert torch.equal(z, (expected / w).nan_to_num(0.0, 1.0, -1.0))


def test_follow_refuses_what_does_not_lie_beside_the_model():
    x = torch.zeros(4)
    with pytest.raises(ValueError, match="came must have 4 entries, got 3"):
        kernels.follow([x], x.clone(), x.clone(), x[:3], 1.0, x.clone())
    with pytest.raises(ValueError, match="before must have 8 entries, got 4"):
        kernels.follow([x, x], x.clone(), torch.zeros(8), None, 1.0, torch.zeros(8))
    with pytest.raises(TypeError, match=r"x must be a contiguous 1-D torch\.float32 tensor, got torch\.float64"):
        kernels.follow([x], x.clone(), x.clone(), None, 1.0, x.double())
    with pytest.raises(TypeError, match=r"model must be a contiguous 1-D torch\.float32 tensor, got torch\.float64"):
        kernels.follow([x.double()], x.clone(), x.clone(), None, 1.0, x.clone())


@settings(deadline=None)
@given(n=st.sampled_from([1, 100, 4096, 4097, 20_000]), wires=st.integers(1, 5), seed=st.integers(0, 999))
def test_sparse_mean(n, wires, seed):
    rng = torch.Generator().manual_seed(seed)
    indices = [torch.randint(0, n, (n // 7 + 1,), generator=rng, dtype=torch.int32) for _ in range(wires)]
    if seed % 3:
        indices = [i.sort().values for i in indices]  # repeated ones add up
    said = [values(i.numel(), seed + w) for w, i in enumerate(indices)]

    def mean():
        out = torch.full((n,), float("nan"))
        return [kernels.sparse_mean(indices, said, out), out.view(torch.int32)]

    both(mean)


@pytest.mark.parametrize("backend", ["torch", "numba"])
@pytest.mark.parametrize("wrong", [-1, 9])
def test_an_index_outside_is_refused_by_a_mean_too(backend, wrong):
    places = [torch.tensor([0, 3], dtype=torch.int32), torch.tensor([2, wrong], dtype=torch.int32)]
    with kernels.using(backend), pytest.raises(kernels.CorruptWire):
        kernels.sparse_mean(places, [torch.ones(2), torch.ones(2)], torch.zeros(9))


@settings(deadline=None)
@given(
    n=st.sampled_from([1, 2, 63, 64, 100, 4096]) | st.integers(1, 3000),
    rows=st.integers(0, 5),
    seed=st.integers(0, 2**20),
)
def test_places(n, rows, seed):
    rng = torch.Generator().manual_seed(seed)
    keep = int(torch.randint(1, n + 1, (1,), generator=rng)) if seed % 3 else min(n, 1 + n // 64)
    places = torch.rand(rows, n, generator=rng).topk(keep).indices.sort(1).values
    (wire,) = both(lambda: [kernels.places_encode(places, n)])
    assert wire.numel() == rows * kernels.place_bytes(keep, n)
    (back,) = both(lambda: [kernels.places_decode(wire, rows, keep, n)])
    assert torch.equal(back, places)
    form = Places(keep, n)
    if form.row_bytes and rows:  # and of what nobody wrote they say the same
        noise = torch.randint(0, 256, (wire.numel(),), generator=rng, dtype=torch.uint8)
        both(lambda: [twin("numbered" if form.number_bits else "places", "decode", noise.device)(noise, form)])


@settings(deadline=None)
@given(
    sizes=st.lists(st.sampled_from([0, 1, 5, 64, 700, 5000]), min_size=1, max_size=4),
    bits=st.integers(1, 8),
    bucket=st.sampled_from([7, 512, 1024]),
    seed=st.integers(0, 2**20),
)
def test_quantise_each(sizes, bits, bucket, seed):
    """Chunks in one call, and wires in one call, are as they are one by one."""
    edges = (0, *np.cumsum(sizes).tolist())
    x, keys = values(edges[-1], seed), np.array([(seed, 1 + j) for j in range(len(sizes))], np.uint32)
    heads = [4 * -(-n // bucket) for n in sizes]
    widths = [4 * -(-n // bucket) + kernels.quantise_bytes(n, bits) for n in sizes]

    def encode():
        rows = torch.zeros(len(sizes), -(-max(widths) // 4) * 4, dtype=torch.uint8)
        kernels.quantise_each(x, edges, bits, bucket, keys, rows)
        return [rows]

    (rows,) = both(encode)
    for j, key in enumerate(keys.tolist()):
        norms, codes = torch.zeros(heads[j] // 4), torch.zeros(widths[j] - heads[j], dtype=torch.uint8)
        kernels.quantise_encode(x[edges[j] : edges[j + 1]], bits, bucket, norms, tuple(key), codes, True)
        assert torch.equal(rows[j, : heads[j]], norms.view(torch.uint8))
        assert torch.equal(rows[j, heads[j] : widths[j]], codes)

    def add():
        out = values(sizes[0], seed + 1)
        kernels.quantise_accumulate_each(same, bits, bucket, out)
        return [out]

    same = rows[:1].repeat(3, 1)
    (out,) = both(add)
    one = values(sizes[0], seed + 1)
    for row in same:
        norms, codes = row[: heads[0]].clone().view(torch.float32), row[heads[0] : widths[0]]
        kernels.quantise_decode(codes, bits, bucket, norms, one, 1.0)
    assert torch.equal(out, one)


def test_rows_that_are_too_short_or_not_aligned_are_refused():
    x, keys = torch.ones(20), np.zeros((2, 2), np.uint32)
    for edges, width, reason in (
        ((0, 10, 20), 8, "2 contiguous rows of 9 bytes or more"),
        ((0, 10, 20), 10, "a multiple of 4"),
        ((0, 10, 21), 16, "edges rise from 0 to at most 20"),
        ((0, 12, 10), 16, "edges rise"),
        ((0, 20), 16, "every chunk needs a key"),
    ):
        with pytest.raises(ValueError, match=reason):
            kernels.quantise_each(x, edges, 4, 512, keys, torch.zeros(2, width, dtype=torch.uint8))
    with pytest.raises(ValueError, match="3 contiguous rows of 14 bytes or more"):
        kernels.quantise_accumulate_each(torch.zeros(3, 13, dtype=torch.uint8), 4, 512, x)
