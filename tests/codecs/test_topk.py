"""Top-k's own tests: exactly k elements, the largest; ties go to the lowest index; two index codes, one meaning."""

from math import ceil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.laws.blocks import SHAPES, block, context, roundtrip, vector

from gossamer.codecs import TopK
from gossamer.core.bucket import Bucket, Layout
from gossamer.core.errors import WireError

NUMBERS = st.lists(st.integers(-4, 4).map(float), min_size=1, max_size=60)  # many ties


@given(NUMBERS, st.sampled_from([0.01, 0.1, 0.34, 0.5, 1.0]))
def test_exactly_the_k_largest_travel_and_ties_go_to_the_lowest_index(values: list[float], ratio: float) -> None:
    x = torch.tensor(values)
    k = ceil(ratio * len(values))
    order = sorted(range(len(values)), key=lambda i: (-abs(values[i]), i))[:k]
    expected = torch.zeros_like(x)
    expected[order] = x[order]
    assert torch.equal(roundtrip(TopK(ratio), vector(x)), expected)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("ratio", [0.01, 0.3, 1.0])
def test_per_tensor_every_parameter_keeps_its_own_share(shape: str, ratio: float) -> None:
    x = block(shape)
    out = x.like(roundtrip(TopK(ratio), x))
    for (name, kept), (_, all_of_it) in zip(out.tensors(), x.tensors(), strict=True):
        if name != "zero":
            assert int((kept != 0).sum()) == ceil(ratio * all_of_it.numel())
        floor = kept[kept != 0].abs().min() if kept.any() else 0.0
        assert (all_of_it[kept == 0].abs() <= floor).all() or name == "zero"


def test_globally_the_largest_of_all_parameters_are_kept() -> None:
    x = Bucket.of({"small": torch.full((10,), 0.1), "large": torch.arange(1.0, 11.0)})
    everywhere = roundtrip(TopK(0.25, scope="global"), x)
    assert everywhere.nonzero().view(-1).tolist() == [15, 16, 17, 18, 19]
    each = roundtrip(TopK(0.25), x)
    assert each.nonzero().view(-1).tolist() == [0, 1, 2, 17, 18, 19]


def test_of_a_block_the_largest_are_kept_and_a_model_may_have_several() -> None:
    x = Bucket.of({"small": torch.full((10,), 0.1), "large": torch.arange(1.0, 11.0)})
    codec = TopK(0.25, scope="block")
    assert torch.equal(roundtrip(codec, x), roundtrip(TopK(0.25, scope="global"), x))
    halves = torch.cat([roundtrip(codec, chunk) for chunk in x.chunks(2)])  # as a model of two buckets is cut
    assert halves.nonzero().view(-1).tolist() == [0, 1, 2, 17, 18, 19]
    assert not codec.whole
    assert TopK(scope="global").whole


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scope", ["tensor", "block", "global"])
@pytest.mark.parametrize("ratio", [0.01, 0.1, 0.9, 1.0])
def test_all_index_codes_mean_the_same(shape: str, scope, ratio: float) -> None:
    x = block(shape)
    plain, rice, fixed = TopK(ratio, scope), TopK(ratio, scope, "rice"), TopK(ratio, scope, "elias_fano")
    assert torch.equal(roundtrip(plain, x), roundtrip(rice, x))
    assert torch.equal(roundtrip(plain, x), roundtrip(fixed, x))
    assert len(rice.encode(x, {}, context())) <= plain.wire_limit(x.layout)
    assert len(fixed.encode(x, {}, context())) == fixed.wire_bytes(x.layout) <= plain.wire_bytes(x.layout)


def test_the_index_code_is_shorter_on_a_real_size() -> None:
    x = vector(torch.randn(100_000, generator=torch.Generator().manual_seed(1)))
    codes = ("int32", "rice", "elias_fano")
    plain, rice, fixed = (TopK(0.01, index=i).encode(x, {}, context()).numel() for i in codes)
    assert plain == 8000
    assert (rice - 4000) * 8 / 1000 < 9  # bits an index
    assert fixed == 4000 + (1000 * 6 + 1000 + 99_999 // 64 + 7) // 8  # whatever the data


@settings(max_examples=50)
@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=80), st.floats(0.01, 1.0))
def test_it_loses_at_most_the_share_it_leaves_out(values: list[float], ratio: float) -> None:
    x = vector(torch.tensor(values))
    k = TopK(ratio).wire_bytes(x.layout) // 8
    lost = float((x.flat - roundtrip(TopK(ratio), x)).double().square().sum())
    assert lost <= (1 - k / len(values)) * float(x.flat.double().square().sum()) * (1 + 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("index", [-1, 5, 2**31 - 1, -(2**31)])
def test_an_index_outside_the_block_is_refused_before_anything_is_written(index: int, dtype: torch.dtype) -> None:
    layout = Layout.of({"x": (5,)}, dtype)
    values, places = torch.ones(2), torch.tensor([0, index], dtype=torch.int32)
    wire = torch.cat([values.view(torch.uint8), places.view(torch.uint8)])
    into = torch.zeros(5, dtype=dtype)
    with pytest.raises(WireError, match="outside"):
        TopK(0.4).accumulate(wire, layout, into, 1.0)
    assert (into == 0).all()


@pytest.mark.parametrize("ratio", [0.1, 0.29, 0.57, 0.07])
def test_a_share_that_is_a_whole_number_of_elements_is_that_number(ratio: float) -> None:
    assert TopK(ratio).wire_bytes(Layout.of({"x": (100,)})) == 8 * round(100 * ratio)
