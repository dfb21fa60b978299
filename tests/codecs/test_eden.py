"""EDEN's own tests: Lloyd and Max's levels, the error they leave, unbiasedness, means over ranks, the wire, backends.

Keys are fixed. Of every statistic the confidence is said: beyond z standard errors a correct codec lies with a chance of 6e-5 for
z = 4, and of 6e-7 for z = 5.
"""

import math
from itertools import pairwise

import pytest
import torch
from tests.laws.blocks import bits, block, context, roundtrip, vector
from tests.laws.crew import Crew
from torch import Tensor

from gossamer import kernels
from gossamer.codecs import EDEN
from gossamer.core.bucket import Bucket, Layout
from gossamer.core.contracts import Codec
from gossamer.core.errors import RecipeError, WireError
from gossamer.kernels.gaussian import LEVELS
from gossamer.kernels.layout import Rotated, Rotation, plane_bytes
from gossamer.recipe import Recipe

CPU = [b for b in kernels.backends() if b != "triton"]
LEAST = {1: 0.363380, 2: 0.117482, 3: 0.034548, 4: 0.009501, 5: 0.002505, 6: 0.000644}  # Lloyd and Max's errors
UNBIASED = {1: 0.570796, 2: 0.133121, 3: 0.035784, 4: 0.009592, 5: 0.002511, 6: 0.000645}
SIZE = 256 * 1024
NORMAL = torch.randn(SIZE, generator=torch.Generator().manual_seed(3))


def error(decoded: Tensor, x: Tensor) -> float:
    """The squared error over the square of x."""
    return float((decoded.double() - x.double()).square().sum() / x.double().square().sum())


# -- levels and errors -------------------------------------------------------------------------------------------------


def density(t: float) -> float:
    return math.exp(-t * t / 2) / math.sqrt(2 * math.pi)


def mass(a: float, b: float) -> float:
    return (math.erf(b / math.sqrt(2)) - math.erf(a / math.sqrt(2))) / 2


@pytest.mark.parametrize("levels", LEVELS, ids=len)
def test_each_level_is_the_mean_of_the_gaussian_between_its_limits(levels: tuple[float, ...]) -> None:
    """So the table is a fixed point of Lloyd's iteration, of which there is one for a Gaussian; to its six digits."""
    limits = [0.0, *((a + b) / 2 for a, b in pairwise(levels)), 40.0]
    means = [(density(a) - density(b)) / mass(a, b) for a, b in pairwise(limits)]
    assert levels == pytest.approx(means, abs=2e-6)


@pytest.mark.parametrize("width", range(1, 7))
def test_the_error_of_the_nearest_levels_is_lloyd_and_max_s(width: int) -> None:
    """The biased form: of all multiples of what is decoded, the one nearest to each block."""
    x = NORMAL.view(-1, 1024).double()
    decoded = roundtrip(EDEN(width), vector(NORMAL)).view(-1, 1024).double()
    factor = (decoded * x).sum(1) / decoded.square().sum(1)
    assert error(factor[:, None] * decoded, x) <= 1.05 * LEAST[width]
    assert error(decoded, x) == pytest.approx(UNBIASED[width], rel=0.03)


@pytest.mark.parametrize("power", [1, 3, 5])
def test_the_error_does_not_depend_on_the_distribution(power: int) -> None:
    assert error(roundtrip(EDEN(2), vector(NORMAL**power)), NORMAL**power) == pytest.approx(UNBIASED[2], rel=0.05)


@pytest.mark.parametrize("width", range(1, 7))
def test_what_is_decoded_is_as_long_along_the_gradient_as_the_gradient_at_every_draw(width: int) -> None:
    x = NORMAL[:8192].view(-1, 1024) ** 5
    decoded = roundtrip(EDEN(width), vector(x.view(-1))).view(-1, 1024)
    along = (decoded.double() * x.double()).sum(1) / x.double().square().sum(1)
    torch.testing.assert_close(along, torch.ones_like(along), rtol=1e-5, atol=0)


# -- unbiased ----------------------------------------------------------------------------------------------------------

DRAWS, TOGETHER = 20_000, 2_000
HARD = {
    "two spikes": torch.tensor([1.0, 0.9] + [0.0] * 1022),
    "a spike": torch.tensor([0.0] * 100 + [3.0] + [0.0] * 923),
    "a constant": torch.full((1024,), 0.7),
}


def moments(codec: Codec, x: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of many draws, and the variance of one, of each element: x beside itself is drawn anew in each block."""
    many, total, squares = vector(x.repeat(TOGETHER)), torch.zeros_like(x).double(), torch.zeros_like(x).double()
    for step in range(DRAWS // TOGETHER):
        errors = (roundtrip(codec, many, context(step=step)) - many.flat).view(TOGETHER, -1)
        total += errors.sum(0, dtype=torch.float64)
        squares += errors.square_().sum(0, dtype=torch.float64)
    return total / DRAWS + x.double(), squares / DRAWS - (total / DRAWS).square()


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("shape", HARD)
def test_the_mean_of_many_draws_is_right(shape: str, width: int) -> None:
    """As a vector within four standard errors: its squared distance is a sum of 1024 squares with a mean of the variance over the
    number of draws, and a standard deviation of sqrt(2 / 1024) of that. So is nearly every element; all are within five, where
    those of an unbiased codec would be with 99.94 %.
    """
    x = HARD[shape].double()
    mean, variance = moments(EDEN(width), HARD[shape])
    off = (mean - x).square()
    assert float(off.sum()) <= float(variance.sum()) / DRAWS * (1 + 4 * (2 / 1024) ** 0.5)
    z = (off / (variance / DRAWS + 1e-12 * x.abs().max())).sqrt()  # a spike is decoded to itself, but for rounding
    assert float(z.max()) < 5
    assert float((z < 4).double().mean()) > 0.995


@pytest.mark.parametrize(("size", "bias"), [(64, 0.0085), (256, 0.0004)])
def test_shorter_blocks_have_the_bias_that_the_codec_states(size: int, bias: float) -> None:
    """Two spikes of nearly one size, in one bit: the worst that is known."""
    x = HARD["two spikes"][:size]
    assert error(moments(EDEN(1, size), x)[0], x) == pytest.approx(bias, rel=0.2)


def test_one_rotation_would_be_biased() -> None:
    """A test of the tests above: without the second signs two spikes are decoded to the same wrong vector at every draw."""
    x = HARD["two spikes"][:256]
    hadamard = torch.ones(1, 1)
    while hadamard.shape[0] < 256:
        hadamard = torch.cat([torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)])
    signs = torch.randint(0, 2, (50, 256), generator=torch.Generator().manual_seed(1)).float() * 2 - 1
    z = (x * signs) @ hadamard / 16
    q = torch.where(z < 0, -1.0, 1.0)
    decoded = (q @ hadamard / 16) * signs * (z.square().sum(1) / (z * q).sum(1))[:, None]
    assert float((decoded.mean(0) - x).square().sum()) > 0.5 * float((decoded - x).square().sum(1).mean())


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_the_error_of_a_mean_falls_as_the_number_of_ranks(ranks: int) -> None:
    """Within 3 %: 256 blocks of 1024 have a standard error of about .5 %, so that is z = 5 or more."""
    total = torch.zeros(SIZE, dtype=torch.float64)
    for rank in range(ranks):
        total += roundtrip(EDEN(2), vector(NORMAL), context(rank=rank, size=ranks)).double()
    assert error(total / ranks, NORMAL) * ranks == pytest.approx(UNBIASED[2], rel=0.03)


# -- wires -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("numel", "length"), [(0, 0), (1, 12), (63, 260), (64, 28), (1000, 424), (1024, 268), (1283, 348), (5000, 1316)]
)
def test_wires_are_key_scales_rest_and_codes(numel: int, length: int) -> None:
    x = NORMAL[:numel].clone()
    codec, layout = EDEN(2), Layout.of({"x": (numel,)})
    wire = codec.encode(Bucket(x, layout), {}, context())
    assert codec.wire_bytes(layout) == wire.numel() == length
    rest = numel % 64
    assert bits(codec.decode(wire, Bucket(x, layout))[numel - rest :]) == bits(x[numel - rest :])


@pytest.mark.parametrize("numel", [64, 100, 1023, 1984, 5000])
@pytest.mark.parametrize("size", [64, 256, 4096])
def test_shorter_blocks_at_the_end_are_as_exact(numel: int, size: int) -> None:
    x = NORMAL[:numel].clone()
    assert error(roundtrip(EDEN(4, size), vector(x)), x) < 1.4 * UNBIASED[4]


@pytest.mark.parametrize("scale", [1e-42, 1e-38, 1e-20, 1e20, 1e36])
def test_tiny_and_huge_gradients_are_as_exact(scale: float) -> None:
    x = NORMAL[:4096] * scale
    assert error(roundtrip(EDEN(2), vector(x)), x) == pytest.approx(UNBIASED[2], rel=0.1)


def test_a_block_s_zeros_are_zeros_and_what_is_not_finite_spoils_its_block_alone() -> None:
    x = NORMAL[: 4 * 1024 + 10].clone()
    x[1024:2048] = 0.0
    x[2050], x[-1] = math.nan, math.inf
    decoded = roundtrip(EDEN(2), vector(x))
    assert not decoded[1024:2048].any()
    assert decoded[2048:3072].isnan().all()
    assert decoded[:2048].isfinite().all()
    assert decoded[3072:-1].isfinite().all()
    assert decoded[-1] == math.inf


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions_are_written_as_their_single_precision_twin(dtype: torch.dtype) -> None:
    other = NORMAL[:5000].to(dtype)
    given, single = vector(other), vector(other.float())
    wire = EDEN(3).encode(given, {}, context())
    assert bits(wire) == bits(EDEN(3).encode(single, {}, context()))
    decoded = EDEN(3).decode(wire, given)
    assert decoded.dtype == dtype
    torch.testing.assert_close(decoded.float(), EDEN(3).decode(wire, single), rtol=1e-2, atol=1e-2)


def test_the_scales_bound_every_element() -> None:
    x = vector(NORMAL[:5000] ** 5)
    for width in range(1, 7):
        wire = EDEN(width).encode(x, {}, context())
        scales = EDEN(width).scales(wire, x.layout)
        assert scales is not None
        assert float(EDEN(width).decode(wire, x).abs().max()) <= float(scales.max())


def test_a_wire_with_another_key_is_read_as_numbers() -> None:
    x = vector(NORMAL[:2048].clone())
    wire = EDEN(2).encode(x, {}, context())
    wire[3] ^= 17
    decoded = EDEN(2).decode(wire, x)
    assert decoded.isfinite().all()
    assert error(decoded, x.flat) > 1
    with pytest.raises(WireError, match="eden: expected"):
        EDEN(2).decode(wire[:-1], x)


@pytest.mark.skipif("numba" not in kernels.backends(), reason="numba is not installed")
@pytest.mark.parametrize("width", range(1, 7))
def test_backends_write_and_read_the_same_bits(width: int) -> None:
    key = (0xFFFFFFF0, 0x12345678)
    words = torch.tensor([key[0] - 2**32, key[1]], dtype=torch.int32)
    for numel, size in ((0, 1024), (64, 64), (192, 128), (5056, 1024), (8128, 256), (12_032, 4096)):
        x = NORMAL[:numel] ** 3
        if numel > 5000:
            x[7], x[1024:2048] = math.inf, 0.0
        found = list[list[Tensor]]()
        for backend in CPU:
            with kernels.using(backend):
                scales = torch.zeros(Rotated(numel, size).blocks)
                wire = torch.zeros(plane_bytes(numel, width), dtype=torch.uint8)
                kernels.eden_encode(x, Rotation(width, size), key, scales, wire)
                added, anew = x.clone(), x.clone()
                kernels.eden_decode(wire, Rotation(width, size), words, scales, added, 0.3)
                kernels.eden_decode(wire, Rotation(width, size), words, scales, anew)
                found.append([wire, scales, added, anew])
        for a, b in zip(*found, strict=True):
            assert torch.equal(a.isnan() if a.is_floating_point() else a, b.isnan() if b.is_floating_point() else b)
            assert bits(a.nan_to_num()) == bits(b.nan_to_num()), (numel, size)


# -- recipes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("eden(bits=0)", "bits must be between 1 and 6, got 0; for more use int8"),
        ("eden(bits=7)", "bits must be between 1 and 6, got 7; for more use int8"),
        ("eden(block=1000)", "block must be a power of two from 64 to 4096, got 1000; use 1024"),
        ("eden(block=32)", "block must be a power of two from 64 to 4096, got 32; use 1024"),
        ("eden(block=0)", "block must be a power of two from 64 to 4096, got 0; use 1024"),
        ("eden(block=-1024)", "block must be a power of two from 64 to 4096, got -1024; use 1024"),
        ("eden(block=8192)", "block must be a power of two from 64 to 4096, got 8192; use 1024"),
    ],
)
def test_other_bits_and_blocks_are_refused(text: str, why: str) -> None:
    with pytest.raises(RecipeError, match=why):
        Recipe.of(f"scatter({text})")


def test_messages_that_cannot_be_summed_are_refused_in_an_all_reduce() -> None:
    with pytest.raises(RecipeError, match="allreduce"):
        Recipe.of("allreduce(eden())")


@pytest.mark.parametrize(
    "text",
    [
        "scatter(eden(2))",
        "gather(eden(2))",
        "scatter(eden(1), answer=eden(2))",
        "scatter(eden(2)) + error_feedback()",
        "gather(eden(1)) + error_feedback()",
        "scatter(eden(2)) + diana()",
        "scatter(topk(ratio=0.3), answer=eden(4)) + error_feedback()",
        "nodes(scatter(eden(2)), 2)",
    ],
)
def test_the_mean_of_several_steps_nears_the_mean_of_the_gradients(text: str) -> None:
    """Where errors average, thirty steps of one gradient leave less than half of what a step leaves."""
    crew = Crew(Recipe.of(text), 4)
    x = [block("matrices", seed=rank) for rank in range(4)]
    exact = torch.stack([b.flat for b in x]).double().mean(0)
    means = torch.stack([crew.step([b.like(b.flat.clone()) for b in x]).double() for _ in range(30)])
    assert error(means.mean(0), exact) < 0.5 * float(torch.stack([torch.tensor(error(m, exact)) for m in means]).mean())
