"""fp4: its sixteen codes, its errors, its bytes, and what is refused.

Keys are fixed. With others, a correct codec would fail a comparison of z < 5 with a chance of 6e-7, times the elements.
"""

import pytest
import torch
from tests.codecs.test_eight_bits import NORMAL, error, furthest_mean, mean_of
from tests.laws.blocks import context, vector
from tests.laws.crew import mean

from gossamer.codecs import FP4
from gossamer.core.errors import RecipeError
from gossamer.recipe import Recipe

MAGNITUDES = {
    "e2m1": [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0],
    "e3m0": [0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0],
}
FORMATS = pytest.mark.parametrize("name", MAGNITUDES)


@FORMATS
@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
@pytest.mark.parametrize("scale", ["fp32", "bf16", "e8m0"])
def test_all_sixteen_codes_come_back(name: str, scale: str, rounding: str) -> None:
    """In an order in which every pair of codes shares a byte somewhere, and with one code too many for whole bytes."""
    x = torch.tensor(MAGNITUDES[name])
    x = torch.cat([x, -x])
    x = torch.cat([x.repeat_interleave(16), x.repeat(16), x[7:8]])
    codec = FP4(name, 128, scale, rounding)  # pyright: ignore[reportArgumentType]
    size = 2.0**-9 if scale == "e8m0" else 1.0
    given = vector(x * size)
    wire = codec.encode(given, {}, context())
    assert torch.equal(codec.decode(wire, given), given.flat + 0.0)
    assert len(wire) == codec.wire_bytes(given.layout)


@FORMATS
def test_every_byte_decodes_to_two_of_the_sixteen_numbers(name: str) -> None:
    like = vector(torch.zeros(512))
    codec = FP4(name, 512)
    tops = torch.tensor([max(MAGNITUDES[name])]).view(torch.uint8)
    said = codec.decode(torch.cat([tops, torch.arange(256, dtype=torch.uint8)]), like).view(2, 256)
    table = torch.tensor([*MAGNITUDES[name], *(-m for m in MAGNITUDES[name])])
    byte = torch.arange(256)
    assert torch.equal(said[0], table[byte % 16] + 0.0)
    assert torch.equal(said[1], table[byte // 16] + 0.0)


@pytest.mark.parametrize(
    ("codec", "expected"),
    [
        (FP4(), 0.0206),
        (FP4(scale="e8m0"), 0.0270),
        (FP4(rounding="nearest"), 0.0102),
        (FP4(scale="e8m0", rounding="nearest"), 0.0133),
        (FP4("e3m0"), 0.0670),
        (FP4("e3m0", scale="e8m0"), 0.0817),
        (FP4("e3m0", rounding="nearest"), 0.0326),
        (FP4("e3m0", scale="e8m0", rounding="nearest"), 0.0378),
        (FP4(block=16), 0.0179),
        (FP4(block=128), 0.0240),
    ],
    ids=str,
)
def test_errors_are_those_of_the_formats(codec: FP4, expected: float) -> None:
    """Of Gaussian numbers, one encoding; measured independently."""
    assert error(codec, NORMAL) == pytest.approx(expected, rel=0.03)


@FORMATS
def test_it_is_right_on_average(name: str) -> None:
    assert furthest_mean(FP4(name)) < 5


@pytest.mark.parametrize(("numel", "scale", "expected"), [(1024, "e8m0", 544), (1024, "fp32", 640), (33, "bf16", 21)])
def test_bytes_are_half_an_element_and_a_scale_a_block(numel: int, scale: str, expected: int) -> None:
    codec = FP4(scale=scale)  # pyright: ignore[reportArgumentType]
    assert len(codec.encode(vector(NORMAL[:numel]), {}, context())) == expected


def test_differences_in_e3m0_cross_the_wire_of_streaming_diloco() -> None:
    """The form of its paper: four bits a number at the end of a round; an exact answer is not needed."""
    recipe = Recipe.of("streaming_diloco(30) + scatter(fp4('e3m0'))")
    assert "scatter(fp4(format='e3m0'))" in repr(recipe)
    blocks = [vector(torch.randn(4096, generator=torch.Generator().manual_seed(r))) for r in range(4)]
    true = mean(blocks)
    lost = (mean_of("scatter(fp4('e3m0'))", blocks)[0] - true).square().sum() / true.square().sum()
    assert 0.06 < float(lost) < 0.16  # that of the messages, .067 of a share each, and of the answer


@pytest.mark.parametrize(
    ("text", "reason", "fix"),
    [
        ("scatter(fp4(scale='ocp'))", "so that stochastic rounding is biased too", "scale='e8m0'"),
        ("scatter(fp4(rounding='nearest'))", "biased", "error_feedback()"),
        ("scatter(fp4(rounding='nearest')) + diana()", "unbiased", "qsgd()"),
        ("scatter(fp4(format='e4m3'))", "format must be", "'e2m1' or 'e3m0'"),
        ("scatter(fp4(block=0))", "block must be between 1 and 4096", "128"),
        ("scatter(fp4(scale='fp16'))", "scale must be", "'e8m0'"),
        ("allreduce(fp4())", "cannot be summed on their way", "scatter(fp4())"),
    ],
)
def test_what_cannot_be_right_is_refused_with_the_reason_and_the_fix(text: str, reason: str, fix: str) -> None:
    with pytest.raises(RecipeError) as refused:
        Recipe.of(text)
    assert reason in str(refused.value)
    assert fix in str(refused.value)
