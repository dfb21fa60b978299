"""QSGD's own tests: exact variances, tight bounds, buckets. Keys are fixed; 2 % is far beyond z = 5 at these counts."""

import pytest
import torch
from tests.laws.blocks import bits, block, context, roundtrip, vector
from torch import Tensor

from gossamer.codecs import QSGD, Ternary
from gossamer.core.bucket import Bucket, Layout

NORMAL = torch.randn(1024, generator=torch.Generator().manual_seed(9))


def levels(bits: int) -> int:
    return max(2 ** (bits - 1) - 1, 1)


def variance(x: Tensor, bits: int, bucket: int, kind: str) -> float:
    """(norm / s)^2 sum f (1 - f) over all buckets; with one bit, norm^2 - x^2."""
    total, s = 0.0, levels(bits)
    for part in x.double().split(bucket):
        norm = part.abs().max() if kind == "max" else part.norm()
        f = (s * part.abs() / norm).frac()
        total += float((norm**2 - part**2).sum() if bits == 1 else (norm / s) ** 2 * (f * (1 - f)).sum())
    return total


def measured(codec: QSGD, x: Tensor, draws: int) -> float:
    errors = [roundtrip(codec, vector(x), context(step=k)).double() - x.double() for k in range(draws)]
    return float(torch.stack(errors).square().sum(1).mean())


@pytest.mark.parametrize("norm", ["max", "l2"])
@pytest.mark.parametrize(("bits", "bucket"), [(1, 128), (2, 128), (3, 64), (4, 512), (5, 1000), (8, 512)])
def test_the_variance_is_that_of_the_formula(bits: int, bucket: int, norm) -> None:
    codec = QSGD(bits, bucket, norm)
    assert measured(codec, NORMAL, 500) == pytest.approx(variance(NORMAL, bits, bucket, norm), rel=0.02)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("norm", ["max", "l2"])
@pytest.mark.parametrize("bucket", [2, 16, 512])
def test_omega_is_the_least_upper_bound(bits: int, norm, bucket: int) -> None:
    omega = QSGD(bits, bucket, norm).omega(Layout.of({"x": (bucket,)}))
    worst = 0.0
    for height in torch.linspace(0, 1, 1001):
        x = torch.full((bucket,), float(height))
        x[0] = 1.0
        worst = max(worst, variance(x, bits, bucket, norm) / float(x.double().square().sum()))
    assert worst <= omega * (1 + 1e-6)
    if norm == "max" or bucket >= 4 * levels(bits) ** 2:
        assert worst >= 0.95 * omega


@pytest.mark.parametrize("norm", ["max", "l2"])
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_no_vector_has_more_variance_than_omega(bits: int, norm) -> None:
    rng = torch.Generator().manual_seed(1)
    for power in (1, 2, 3, 5, 9):
        x = torch.randn(64, generator=rng) ** power
        codec = QSGD(bits, 64, norm)
        bound = codec.omega(Layout.of({"x": (64,)})) * float(x.double().square().sum())
        assert variance(x, bits, 64, norm) <= bound * (1 + 1e-9)


def test_two_bits_and_own_scales_are_terngrad_s_variance() -> None:
    layout = Layout.of({"x": (512,)})
    assert QSGD(2, 512).omega(layout) == Ternary(clip=0.0).omega(layout) == pytest.approx((512**0.5 - 1) / 2)
    assert QSGD(2, 512, "l2").omega(layout) == pytest.approx(512**0.5 - 1)


def test_feedback_is_allowed_only_where_the_bound_is_below_one() -> None:
    for width in range(1, 9):
        for bucket in (1, 4, 64, 512, 4096):
            codec = QSGD(width, bucket)
            assert codec.contracts == (codec.omega(Layout.of({"x": (bucket,)})) < 1)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("norm", ["max", "l2"])
def test_a_bucket_of_one_element_is_exact(bits: int, norm) -> None:
    torch.testing.assert_close(roundtrip(QSGD(bits, 1, norm), vector(NORMAL)), NORMAL, rtol=1e-6, atol=0)


@pytest.mark.parametrize("bits", range(1, 9))
def test_the_largest_element_never_leaves_its_level(bits: int) -> None:
    for k in range(200):
        x = torch.tensor([1.0, -1.0, 0.9999999, 0.3]) * (1 + k / 7)
        out = roundtrip(QSGD(bits, 4), vector(x), context(step=k))
        torch.testing.assert_close(out[:2], x[:2], rtol=1e-6, atol=0)
        assert float(out.abs().max()) <= float(x.abs().max()) * (1 + 1e-6)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_multiples_of_a_level_come_back_exactly(bits: int) -> None:
    s = levels(bits)
    x = torch.arange(-s, s + 1).float()
    assert torch.equal(roundtrip(QSGD(bits, 2 * s + 1), vector(x)), x)


def test_buckets_cross_parameters_and_each_has_its_own_norm() -> None:
    flat = torch.cat([torch.full((8,), 100.0), torch.full((8,), 0.01)])
    given = Bucket(flat, Layout.of({"a": (5,), "b": (11,)}))
    assert torch.equal(roundtrip(QSGD(2, 8), given), flat)


@pytest.mark.parametrize("numel", [1, 7, 8, 511, 512, 513, 1025])
@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("bucket", [1, 100, 512])
def test_wires_are_the_bits_and_the_norms(numel: int, bits: int, bucket: int) -> None:
    layout = Layout.of({"x": (numel,)})
    payload = QSGD(bits, bucket).wire_bytes(layout) - 4 * -(-numel // bucket)
    planes = bin(bits).count("1")  # each plane of a last, shorter run is rounded up to a byte
    assert -(-numel * bits // 8) <= payload < numel * bits / 8 + planes


def test_a_double_precision_gradient_is_quantised_as_its_single_precision_twin() -> None:
    double = block("several", torch.float64)
    single = block("several").like(double.flat.float())
    codec = QSGD(4, 16)
    assert bits(codec.encode(double, {}, context())) == bits(codec.encode(single, {}, context()))
