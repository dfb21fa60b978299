"""int8, fp8 and natural compression: their numbers, their errors, and what is refused.

Keys are fixed. With others, a correct codec would fail a comparison of z < 5 with a chance of 6e-7, times the elements.
"""

from typing import Any

import pytest
import torch
from tests.laws.blocks import block, context, roundtrip, vector
from tests.laws.crew import Crew, mean
from torch import Tensor

from gossamer import kernels
from gossamer.codecs import FP8, Int8, Natural
from gossamer.core.bucket import Bucket
from gossamer.core.contracts import Codec
from gossamer.core.errors import RecipeError
from gossamer.kernels.forms import E4M3, E5M2, INT8, POWERS, Form, bfloat16_tops, float32_tops, ocp_tops, power_tops
from gossamer.recipe import Recipe

NORMAL = torch.randn(128 * 256, generator=torch.Generator().manual_seed(9))
BOTH = pytest.mark.parametrize("codec", [Int8(), FP8(), FP8("e5m2", 32, "e8m0")], ids=repr)
DTYPES = {"e4m3": getattr(torch, "float8_e4m3fn", None), "e5m2": getattr(torch, "float8_e5m2", None)}


def error(codec: Codec, x: Tensor, draws: int = 3) -> float:
    """Relative, squared."""
    lost = [(roundtrip(codec, vector(x), context(step=k)) - x).square().sum() for k in range(draws)]
    return float(torch.stack(lost).mean() / x.square().sum())


def furthest_mean(codec: Codec) -> float:
    """The largest z of the means of 256 elements, each between its two neighbours and with its own variance."""
    given, draws = vector(NORMAL[:256] * 3e4), 1000
    said = torch.stack([roundtrip(codec, given, context(step=k)) for k in range(draws)]).double()
    x, low, high = given.flat.double(), said.amin(0), said.amax(0)
    assert all(len(column.unique()) <= 2 for column in said.T)
    deviation = ((high - x) * (x - low)).clamp(min=0).sqrt()
    return float(((said.mean(0) - x) / (deviation / draws**0.5).clamp(min=1e-5 * x.abs().mean())).abs().max())


@pytest.mark.parametrize(
    ("codec", "expected"),
    [
        (Int8(block=32), 5.7e-5),
        (Int8(block=128), 8.4e-5),
        (Int8(block=1024), 1.2e-4),
        (FP8(block=128), 1.3e-3),
        (FP8(block=128, scale="e8m0"), 1.4e-3),
        (FP8("e5m2", 128), 5.3e-3),
        (Natural(), 0.082),
        (Natural(bits=9), 0.082),
    ],
    ids=str,
)
def test_errors_are_those_of_the_table(codec: Codec, expected: float) -> None:
    """Of Gaussian numbers, one encoding; the table has two digits."""
    assert error(codec, NORMAL) == pytest.approx(expected, rel=0.07)


@pytest.mark.parametrize("make", [Int8, FP8])
def test_to_the_nearest_errs_half_as_much(make: Any) -> None:
    assert error(make(rounding="nearest"), NORMAL) / error(make(), NORMAL) == pytest.approx(0.5, abs=0.04)


@pytest.mark.skipif(None in DTYPES.values(), reason="this torch has no floats of eight bits to compare with")
@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_codes_are_the_bytes_of_torch_s_own_floats(name: str) -> None:
    """Of all sizes, ties and numbers below the least exponent among them; with a top that makes the gain one."""
    form: Form = {"e4m3": E4M3, "e5m2": E5M2}[name]
    x = NORMAL[:8192] * 2.0 ** torch.arange(-24, 8).repeat(256)
    x = torch.cat([x, torch.arange(-2048, 2048) * form.quantum / 4]).clamp(-form.top, form.top)
    for part in x.split(4095):
        given = torch.cat([torch.tensor([form.top]), part])
        tops, codes = torch.zeros(1), torch.zeros(given.numel(), dtype=torch.uint8)
        kernels.small_encode(given, form, power_tops(form), 4096, None, tops, codes)
        assert float(tops) == form.top
        assert torch.equal(codes, given.to(DTYPES[name]).view(torch.uint8))
        said = torch.zeros_like(given)
        kernels.small_decode(codes, form, 4096, tops, said)
        assert torch.equal(said, codes.view(DTYPES[name]).float() + 0.0)


@BOTH
def test_blocks_of_one_magnitude_come_back_exactly(codec: Codec) -> None:
    x = torch.where(NORMAL[:1000] > 0, 1.0, -1.0)
    for size in (1.75, 0.0, 1.75 * 2.0**-60):
        assert torch.equal(roundtrip(codec, vector(x * size)), x * size)


@pytest.mark.parametrize("make", [Int8, FP8])
def test_a_block_of_one_element_is_a_number_of_full_precision(make: Any) -> None:
    torch.testing.assert_close(roundtrip(make(block=1), vector(NORMAL)), NORMAL, rtol=3e-7, atol=0)


@pytest.mark.parametrize("steps", [float32_tops, bfloat16_tops, power_tops])
@pytest.mark.parametrize("form", [INT8, E4M3, E5M2, POWERS])
def test_tops_that_are_rounded_up_are_never_exceeded(form: Form, steps: Any) -> None:
    """A million blocks."""
    x = torch.randn(10**6, generator=torch.Generator().manual_seed(1)) * 2.0 ** (torch.arange(10**6) % 100 - 50)
    tops, codes = torch.zeros(10**6), torch.zeros(10**6, dtype=torch.uint8)
    kernels.small_encode(x, form, steps(form), 1, (1, 2), tops, codes)
    assert (tops >= x.abs()).all()
    assert (tops < 2 * x.abs()).all()


def test_the_rule_that_cuts_off_is_biased_and_the_one_that_rounds_up_is_not() -> None:
    """OCP's power of two: of a block of one element between 448 and 512 only 448 is left."""
    x = torch.full((4096,), 500.0)
    clipped = roundtrip(FP8(block=1, scale="ocp", rounding="nearest"), vector(x))
    assert torch.equal(clipped, torch.full_like(x, 448.0))
    errors = roundtrip(FP8(block=1, scale="e8m0"), vector(x)) - x
    assert abs(float(errors.mean())) < 5 * float(errors.std()) / 64
    tops = torch.zeros(1)
    kernels.small_encode(x[:1], E4M3, ocp_tops(E4M3), 1, None, tops, torch.zeros(1, dtype=torch.uint8))
    assert float(tops) == 448


@BOTH
def test_it_is_right_on_average_as_exactly_as_its_grid_says(codec: Codec) -> None:
    assert furthest_mean(codec) < 5


@pytest.mark.parametrize("bits", [8, 9])
def test_natural_compression_is_right_on_average_with_its_exact_variance(bits: Any) -> None:
    draws, x = 2000, NORMAL[:500].double()
    said = torch.stack([roundtrip(Natural(bits), vector(NORMAL[:500]), context(step=k)) for k in range(draws)]).double()
    low = 2.0 ** x.abs().log2().floor()
    deviation = ((2 * low - x.abs()) * (x.abs() - low)).sqrt()
    assert float(((said.mean(0) - x) / (deviation / draws**0.5).clamp(min=1e-9)).abs().max()) < 5
    assert float((said - x).square().sum(1).mean() / deviation.square().sum()) == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("bits", [8, 9])
def test_powers_of_two_and_zeros_come_back_exactly(bits: Any) -> None:
    x = torch.cat([2.0 ** torch.arange(-60, 60), torch.zeros(3)])
    for sign in (1, -1):
        assert torch.equal(roundtrip(Natural(bits), vector(sign * x)), sign * x)


def test_nine_bits_take_what_is_extreme() -> None:
    """What would carry into infinity is rounded down; what is denormal becomes nothing, or the smallest that is not."""
    x = torch.tensor([3.4e38, -3.4e38, 1e-45, 1e-39])
    said = torch.stack([roundtrip(Natural(bits=9), vector(x), context(step=k)) for k in range(200)])
    assert torch.equal(said[:, :2], torch.tensor([[2.0**127, -(2.0**127)]]).expand(200, 2))
    assert set(said[:, 2:].unique().tolist()) == {0.0, 2.0**-126}
    bad = roundtrip(Natural(bits=9), vector(torch.tensor([float("nan"), float("inf"), -float("inf"), 1.0])))
    assert bad.isfinite().tolist() == [False, False, False, True]


def mean_of(recipe: str, blocks: list[Bucket], steps: int = 1) -> Tensor:
    crew = Crew(recipe, len(blocks))
    return torch.stack([crew.step(blocks) for _ in range(steps)])


def test_two_phases_of_whole_numbers_are_near_the_mean_and_nearer_than_eight_ranks_noise() -> None:
    rng = torch.Generator().manual_seed(3)
    blocks = [vector(torch.randn(5000, generator=rng)) for _ in range(8)]
    true = mean(blocks)
    found = mean_of("scatter(int8(rounding='nearest')) + none(allow_biased=True)", blocks)[0]
    assert float((found - true).square().sum() / true.square().sum()) < 1e-4


def test_two_phases_of_powers_of_two_have_the_variance_of_both() -> None:
    rng = torch.Generator().manual_seed(3)
    blocks = [vector(torch.randn(20_000, generator=rng)) for _ in range(4)]
    true = mean(blocks)
    lost = (mean_of("natural", blocks, 3) - true).square().sum(1) / true.square().sum()
    assert float(lost.mean()) == pytest.approx(0.15, abs=0.02)  # .168 with every share encoded; the owner's is exact


@pytest.mark.parametrize("codec", ["int8(rounding='nearest')", "fp8(scale='ocp', rounding='nearest')", "fp8()"])
def test_error_feedback_may_stand_around_it_and_loses_nothing(codec: str) -> None:
    blocks = [block("several", seed=r) for r in range(3)]
    crew = Crew(f"gather({codec}) + error_feedback()", 3)
    total = sum(crew.step(blocks).double() for _ in range(20))
    torch.testing.assert_close(total + crew.mean_of("residual"), 20 * mean(blocks), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("text", "reason", "fix"),
    [
        ("scatter(fp8(format='e4m3fnuz'))", "fnuz dtypes, are not supported", "'e4m3' or 'e5m2'"),
        ("scatter(fp8(scale='ocp'))", "so that stochastic rounding is biased too", "scale='e8m0'"),
        ("scatter(fp8(scale='ocp', rounding='nearest'))", "biased", "error_feedback()"),
        ("scatter(fp8(scale='ocp', rounding='nearest')) + diana()", "unbiased", "qsgd()"),
        ("scatter(int8(rounding='nearest')) + diana()", "unbiased", "qsgd()"),
        ("scatter(int8(block=0))", "block must be between 1 and 4096", "128"),
        ("scatter(int8(scale='e8m0'))", "scale must be", "'fp32', 'bf16'"),
        ("scatter(natural(bits=7))", "bits must be", "8"),
        ("allreduce(int8())", "cannot be summed on their way", "scatter(int8())"),
        ("allreduce(fp8())", "cannot be summed on their way", "scatter(fp8())"),
        ("allreduce(natural())", "cannot be summed on their way", "scatter(natural())"),
    ],
)
def test_what_cannot_be_right_is_refused_with_the_reason_and_the_fix(text: str, reason: str, fix: str) -> None:
    with pytest.raises(RecipeError) as refused:
        Recipe.of(text)
    assert reason in str(refused.value)
    assert fix in str(refused.value)


def test_without_a_dtype_of_its_own_torch_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes are made and read as bytes."""
    before = roundtrip(FP8(), vector(NORMAL))
    for name in ("float8_e4m3fn", "float8_e5m2"):
        monkeypatch.delattr(torch, name, raising=False)
    assert torch.equal(roundtrip(FP8(), vector(NORMAL)), before)
