"""Lengths, corrupt bytes, non-finite scales and the edges of every kernel's domain, on both CPU backends."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer import kernels
from gossamer.kernels import CorruptWire

CPU = [b for b in kernels.backends() if b != "triton"]
KEY = (3, 5)
NAN, INF = math.nan, math.inf


@pytest.fixture(params=CPU)
def backend(request):
    with kernels.using(request.param):
        yield request.param


def test_byte_counts():
    d = 2**20
    assert kernels.ternary_bytes(d) == 209_716
    assert kernels.quantise_bytes(d, 4) == d // 2
    assert kernels.quantise_bytes(d, 8) == d
    assert kernels.sign_bytes(d) == 131_072
    assert kernels.quantise_bytes(1001, 4) == 501
    assert 4 * kernels.lanes_pack(torch.zeros(d, dtype=torch.int8), 1, 8).numel() == 699_052
    for bits in range(1, 9):
        assert kernels.quantise_bytes(512 * 7, bits) == 64 * 7 * bits


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("wrong", [-1, 1])
def test_a_wire_of_the_wrong_length_is_refused(wrong):
    out, one = torch.zeros(100), torch.ones(1)
    wires = {
        kernels.ternary_bytes(100): lambda w: kernels.ternary_decode(w, (0, 100), one, out, 1.0),
        kernels.quantise_bytes(100, 5): lambda w: kernels.quantise_decode(w, 5, 512, one, out, 1.0),
        kernels.sign_bytes(100): lambda w: kernels.sign_decode(w, (0, 100), one, out, 1.0),
    }
    for length, decode in wires.items():
        with pytest.raises(CorruptWire, match=f"expected {length} bytes, got {length + wrong}"):
            decode(torch.zeros(length + wrong, dtype=torch.uint8))
    assert not out.any()


@pytest.mark.parametrize("backend", CPU)
@settings(deadline=None)
@given(n=st.integers(0, 700), bits=st.integers(1, 8), data=st.randoms(use_true_random=False))
def test_any_bytes_of_the_right_length_decode_to_finite_values(backend, n, bits, data):
    def garbage(length: int) -> torch.Tensor:
        return torch.tensor([data.randrange(256) for _ in range(length)], dtype=torch.uint8)

    out, one = torch.zeros(n), torch.ones(1)
    with kernels.using(backend):
        kernels.ternary_decode(garbage(kernels.ternary_bytes(n)), (0, n), one, out, 1.0)
        kernels.sign_decode(garbage(kernels.sign_bytes(n)), (0, n), one, out, 1.0)
        norms = torch.ones(-(-n // 64))
        kernels.quantise_decode(garbage(kernels.quantise_bytes(n, bits)), bits, 64, norms, out, 1.0)
    assert bool(out.isfinite().all())


@pytest.mark.parametrize("backend", CPU)
@settings(deadline=None, max_examples=3 * settings.default.max_examples)
@given(wire=st.binary(max_size=120), count=st.integers(0, 60), n=st.integers(0, 5000), mode=st.integers(0, 1))
def test_index_decode_survives_arbitrary_bytes(backend, wire, count, n, mode):
    body = torch.tensor([mode, *wire], dtype=torch.uint8)
    with kernels.using(backend):
        try:
            indices = kernels.index_decode(body, count, n)
        except CorruptWire:
            return
    assert indices.numel() == count
    assert count == 0 or (int(indices[0]) >= 0 and int(indices[-1]) < n)
    assert bool((indices.diff() > 0).all())


@settings(deadline=None, max_examples=2 * settings.default.max_examples)
@given(seed=st.integers(0, 99), where=st.integers(0, 10**6), flip=st.integers(1, 255), cut=st.integers(0, 3))
def test_damaged_index_wires_are_read_alike_by_all_backends(seed, where, flip, cut):
    n = 20_000
    chosen = torch.bernoulli(torch.full((n,), 0.02), generator=torch.Generator().manual_seed(seed))
    indices = chosen.nonzero().view(-1).int()
    wire = kernels.index_encode(indices, n)
    wire[where % wire.numel()] ^= flip
    wire = wire[: wire.numel() - cut].contiguous()
    results = []
    for backend in CPU:
        with kernels.using(backend):
            try:
                results.append(kernels.index_decode(wire, indices.numel(), n).tolist())
            except CorruptWire:
                results.append(None)
    assert all(r == results[0] for r in results)


@pytest.mark.usefixtures("backend")
def test_index_wires_with_the_wrong_count_or_range_are_refused():
    indices = torch.arange(0, 3000, 3, dtype=torch.int32)
    wire = kernels.index_encode(indices, 3000)
    assert wire.numel() < 1000
    for count, n in ((999, 3000), (1001, 3000), (1000, 2997), (1000, 10)):
        with pytest.raises(CorruptWire):
            kernels.index_decode(wire, count, n)
    for bad in ([1, 1], [2, 1], [-1, 4], [1, 9]):
        raw = torch.cat([torch.zeros(1, dtype=torch.uint8), torch.tensor(bad, dtype=torch.int32).view(torch.uint8)])
        with pytest.raises(CorruptWire):
            kernels.index_decode(raw, 2, 9)
    with pytest.raises(CorruptWire):
        kernels.index_decode(torch.zeros(0, dtype=torch.uint8), 0, 9)
    with pytest.raises(CorruptWire):
        kernels.index_decode(torch.tensor([7], dtype=torch.uint8), 0, 9)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_scale_that_is_not_finite_spoils_its_whole_segment(bad):
    n, bounds = 1000, (0, 400, 1000)
    x, scales = torch.zeros(n), torch.tensor([1.0, bad])
    out = torch.zeros(n)
    kernels.ternary_decode(kernels.ternary_encode(x, bounds, scales, KEY), bounds, scales, out, 1.0)
    assert bool(out[:400].isfinite().all())
    assert bool(out[400:].isnan().all())
    out = torch.zeros(n)
    kernels.sign_decode(torch.zeros(125, dtype=torch.uint8), bounds, scales, out, 1.0)
    assert torch.equal(out.isnan(), torch.arange(n) >= 400)
    for bits in (1, 4, 5):
        out = torch.zeros(n)
        wire = kernels.quantise_encode(x, bits, 500, scales, KEY)
        kernels.quantise_decode(wire, bits, 500, scales, out, 1.0)
        assert torch.equal(out.isnan(), torch.arange(n) >= 500)


@pytest.mark.usefixtures("backend")
def test_inputs_that_are_not_finite_do_not_crash():
    x = torch.tensor([NAN, INF, -INF, 1.0, 0.0, 1e-45, 3e38] * 100)
    n = x.numel()
    for scale in (0.0, 1e-45, 1.0, INF, NAN):
        scales = torch.tensor([scale])
        kernels.ternary_encode(x, (0, n), scales, KEY)
        levels = kernels.ternary_levels(x, (0, n), scales, KEY, top=127)
        assert int(levels.int().abs().max()) <= 127
        for bits in range(1, 9):
            kernels.quantise_encode(x, bits, n, scales, KEY)
    assert bool(kernels.absmax(x, (0, n)).isnan())
    assert kernels.absmax(x[1:7], (0, 6, 6)).tolist() == [INF, 0.0]


@pytest.mark.usefixtures("backend")
def test_zeros_decode_to_exactly_zero_and_the_scale_itself_is_exact():
    x = torch.zeros(777)
    scales = kernels.absmax(x, (0, 777))
    out = torch.zeros(777)
    kernels.ternary_decode(kernels.ternary_encode(x, (0, 777), scales, KEY), (0, 777), scales, out, 1.0)
    for bits in range(1, 9):
        norms = kernels.bucket_norms(x, 100, "max")
        kernels.quantise_decode(kernels.quantise_encode(x, bits, 100, norms, KEY), bits, 100, norms, out, 1.0)
    assert torch.equal(out, x)
    for value in (0.1, -3.3, 1e-20, 1e30):
        x = torch.full((1,), value)
        for bits in (1, 2, 8):
            out = torch.zeros(1)
            wire = kernels.quantise_encode(x, bits, 1, x.abs(), KEY)
            kernels.quantise_decode(wire, bits, 1, x.abs(), out, 1.0)
            torch.testing.assert_close(out, x, rtol=2e-7, atol=0)


@pytest.mark.usefixtures("backend")
def test_a_constant_segment_has_no_deviation():
    top, std = kernels.absmax_and_std(torch.full((5000,), -1.7), (0, 5000))
    assert (float(top), float(std)) == (torch.tensor(1.7).item(), 0.0)
    assert bool(kernels.absmax_and_std(torch.tensor([1.0, NAN]), (0, 2))[1].isnan())


@pytest.mark.usefixtures("backend")
def test_a_constant_segment_is_its_own_deviation_about_zero():
    top, rms = kernels.absmax_and_rms(torch.cat([torch.full((5000,), -1.7), torch.zeros(3)]), (0, 5000, 5000, 5003))
    assert top.tolist() == [torch.tensor(1.7).item(), 0.0, 0.0]
    torch.testing.assert_close(rms, torch.tensor([1.7, 0.0, 0.0]), rtol=1e-6, atol=0)
    for hole in (NAN, INF):
        assert not kernels.absmax_and_rms(torch.tensor([1.0, hole]), (0, 2))[1].isfinite()


@pytest.mark.usefixtures("backend")
def test_topk_prefers_low_indices_and_nan():
    x = torch.tensor([1.0, -2.0, 2.0, NAN, 2.0, 0.5])
    assert kernels.topk(x, 1).tolist() == [3]
    assert kernels.topk(x, 3).tolist() == [1, 2, 3]
    assert kernels.topk(x, 6).tolist() == [0, 1, 2, 3, 4, 5]
    assert kernels.topk(torch.zeros(5), 2).tolist() == [0, 1]


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("shape", ["normal", "ties", "sparse", "periodic", "clustered"])
def test_topk_of_many_elements_is_exact(shape):
    n = 300_000
    x = torch.randn(n, generator=torch.Generator().manual_seed(5))
    if shape == "ties":
        x = x.round()
    elif shape == "sparse":
        x[torch.arange(n) % 1000 != 0] = 0.0
    elif shape == "periodic":
        x *= (torch.arange(n) % 64 == 0).float() * 100 + 1e-3
    elif shape == "clustered":
        x[:2000] *= 100
    for k in (1, 300, 3000, 30_000, 299_999):
        order = x.abs().sort(descending=True, stable=True).indices[:k]
        assert torch.equal(kernels.topk(x, k).long(), order.sort().values)


@pytest.mark.usefixtures("backend")
def test_scatter_add_checks_before_it_writes():
    for bad in ([0, 5], [-1, 2]):
        out = torch.zeros(5)
        with pytest.raises(CorruptWire):
            kernels.scatter_add(out, torch.tensor(bad, dtype=torch.int32), torch.ones(2))
        assert not out.any()


def test_lanes_that_cannot_hold_the_sum_are_refused():
    with pytest.raises(ValueError, match="31-bit"):
        kernels.lanes_pack(torch.zeros(3, dtype=torch.int8), 127, 2**24)


def test_arguments_are_checked():
    x = torch.zeros(10)
    with pytest.raises(ValueError, match="bounds"):
        kernels.absmax(x, (0, 5))
    with pytest.raises(ValueError, match="bounds"):
        kernels.absmax(x, (0, 7, 5, 10))
    with pytest.raises(TypeError, match="contiguous"):
        kernels.absmax(torch.zeros(20)[::2], (0, 10))
    with pytest.raises(TypeError, match="float32"):
        kernels.absmax(x.double(), (0, 10))
    with pytest.raises(ValueError, match="bits"):
        kernels.quantise_encode(x, 9, 10, torch.ones(1), KEY)
    with pytest.raises(ValueError, match="unknown kernel backend"), kernels.using("cuda"):
        pass
