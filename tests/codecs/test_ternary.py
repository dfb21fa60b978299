"""TernGrad's own tests (T1 to T7 of the method's notes). Keys are fixed; statistical bounds are z < 5."""

import pytest
import torch
from tests.laws.blocks import agree, bits, block, context, roundtrip, sent, vector
from torch import Tensor

from gossamer import kernels
from gossamer.codecs import Ternary
from gossamer.core.bucket import Bucket, Layout

NORMAL = torch.randn(1000, generator=torch.Generator().manual_seed(8))
EXACT = Ternary(clip=0.0)


def draws(codec: Ternary, given: Bucket, count: int) -> Tensor:
    return torch.stack([roundtrip(codec, given, context(step=k)).double() for k in range(count)])


def clipped(x: Tensor, clip: float) -> Tensor:
    limit = clip * float(x.double().square().mean().sqrt())
    return x.clamp(-limit, limit)


@pytest.mark.parametrize("levels", [1, 2, 7])
def test_t1_the_mean_of_many_draws_is_the_clipped_gradient(levels: int) -> None:
    target, count = clipped(NORMAL, 2.5).double(), 2000
    step = float(target.abs().max()) / levels
    errors = draws(Ternary(levels=levels), vector(NORMAL), count).mean(0) - target
    assert (
        float(errors.abs().max()) < 5 * step / 2 / count**0.5
    )  # a rounding between two levels spreads half a step at most


def test_t1_clipping_bounds_the_scale_and_touches_only_outliers() -> None:
    out = roundtrip(Ternary(), vector(NORMAL))
    limit = 2.5 * float(NORMAL.square().mean().sqrt())
    assert float(out.abs().max()) == pytest.approx(limit, rel=1e-6)
    assert float(roundtrip(EXACT, vector(NORMAL)).abs().max()) == float(NORMAL.abs().max())


def test_t1_the_papers_deviation_is_about_the_mean() -> None:
    shifted = NORMAL + 0.5
    out = roundtrip(Ternary(deviation="centred"), vector(shifted))
    assert float(out.abs().max()) == pytest.approx(2.5 * float(NORMAL.std(correction=0)), rel=1e-5)
    near = 1 + 0.01 * torch.rand(500, generator=torch.Generator().manual_seed(2))
    assert float(roundtrip(Ternary(deviation="centred"), vector(near)).abs().max()) < 0.01  # nothing is left of it
    assert float(roundtrip(Ternary(), vector(near)).mean()) == pytest.approx(1.005, rel=0.01)


HARD = {
    "normal": NORMAL,
    "shifted": NORMAL + 0.5,
    "sparse": NORMAL * (torch.arange(1000) % 100 == 0),
    "one": torch.eye(1, 1000).flatten(),
    "heavy": NORMAL**5,
    "one sign": NORMAL.abs().sqrt(),
}


@pytest.mark.parametrize("kind", HARD)
@pytest.mark.parametrize("clip", [1.5, 2.5, 4.0])
def test_what_clipping_takes_is_bounded(kind: str, clip: float) -> None:
    """The reason to train without error feedback: few elements, no sign, and a known least share along the gradient."""
    given = HARD[kind].double()
    scale = float(scales_of(vector(HARD[kind]), clip))
    kept = given.clamp(-scale, scale)
    assert int((given.abs() > scale).sum()) <= len(given) / clip**2
    assert torch.equal(kept.sign(), given.sign())
    least = min(1.0, clip * float(given.square().mean().sqrt()) / float(given.abs().max()))
    assert float(kept @ given) >= least * float(given @ given) * (1 - 1e-6)
    assert least >= clip / len(given) ** 0.5 * (1 - 1e-6)


def test_t1_a_scale_is_never_larger_than_the_largest_element() -> None:
    flat = torch.tensor([1.0, -1.0] * 50)  # 2.5 sigma would be 2.5
    assert torch.equal(roundtrip(Ternary(), vector(flat)), flat)


@pytest.mark.parametrize("levels", [1, 3])
def test_t2_the_variance_is_that_of_the_formula(levels: int) -> None:
    x = NORMAL.double()
    unit = float(x.abs().max()) / levels
    part = (x.abs() / unit).frac()
    expected = float((part * (1 - part)).sum()) * unit**2
    if levels == 1:
        assert expected == pytest.approx(unit * float(x.abs().sum()) - float(x.square().sum()), rel=1e-9)
    measured = (draws(Ternary(0.0, levels), vector(NORMAL), 1000) - x).square().sum(1).mean()
    assert float(measured) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("levels", [1, 7, 127])
@pytest.mark.parametrize("clip", [0.0, 2.5])
def test_t3_integers_in_lanes_are_the_float_computation_bit_for_bit(size: int, levels: int, clip: float) -> None:
    codec = Ternary(clip, levels)
    blocks = [block("several", seed=r) for r in range(size)]
    echoes, _ = agree([codec.average(b, {}, context(rank=r, size=size)) for r, b in enumerate(blocks)])
    layout = blocks[0].layout
    own = [scales_of(b, clip) for b in blocks]
    shared = torch.stack(own).amax(0)
    total = torch.zeros(layout.numel, dtype=torch.int32)
    for r, b in enumerate(blocks):
        key = context(rank=r, size=size).rng.key(f"{b.name}/ternary")
        total += kernels.ternary_levels(b.flat, layout.bounds, shared, key, levels)
    for (name, got), s in zip(blocks[0].like(echoes[0].mean).tensors(), layout.segments, strict=True):
        unit = shared[layout.segments.index(s)] / (levels * size)
        assert torch.equal(got.reshape(-1), total[s.offset : s.offset + s.numel].float() * unit), name
    assert len({bits(e.mean) for e in echoes}) == 1


def scales_of(given: Bucket, clip: float) -> Tensor:
    if clip == 0:
        return kernels.absmax(given.flat, given.layout.bounds)
    largest, rms = kernels.absmax_and_rms(given.flat, given.layout.bounds)
    return torch.where(rms > 0, torch.minimum(clip * rms, largest), largest)


def test_t3_the_scale_is_shared_so_a_small_rank_rounds_to_the_large_rank_s_levels() -> None:
    small, large = vector(torch.full((500,), 0.1)), vector(torch.ones(500))
    echoes, _ = agree([EXACT.average(b, {}, context(rank=r, size=2)) for r, b in enumerate((small, large))])
    through = sent(echoes[0], small)
    assert set(through.unique().tolist()) == {0.0, 1.0}
    assert torch.equal(sent(echoes[1], large), large.flat)
    assert float(through.mean()) == pytest.approx(0.1, abs=5 * 0.3 / 500**0.5)


def test_t4_the_variance_of_a_mean_over_ranks_is_the_sum_of_variances_over_n_squared() -> None:
    size, steps = 4, 300
    blocks = [vector(torch.randn(400, generator=torch.Generator().manual_seed(r)) * (r + 1)) for r in range(size)]
    scale = max(float(b.flat.abs().max()) for b in blocks)
    expected = sum(scale * float(b.flat.abs().sum()) - float(b.flat.square().sum()) for b in blocks) / size**2
    target = sum(b.flat.double() for b in blocks) / size
    total = 0.0
    for k in range(steps):
        echoes, _ = agree([EXACT.average(b, {}, context(rank=r, size=size, step=k)) for r, b in enumerate(blocks)])
        total += float((echoes[0].mean.double() - target).square().sum())
    assert total / steps == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("clip", [0.0, 2.5])
@pytest.mark.parametrize("numel", [1, 2, 3, 5, 318, 320, 321, 323])
def test_t5_what_has_one_magnitude_comes_back_exactly(clip: float, numel: int) -> None:
    for value in (0.0, 0.7, -3.0, 1e-20):
        given = vector(torch.full((numel,), value))
        assert torch.equal(roundtrip(Ternary(clip), given), given.flat)
        echoes, _ = agree([Ternary(clip).average(given, {}, context(rank=r, size=3)) for r in range(3)])
        torch.testing.assert_close(echoes[0].mean, given.flat, rtol=1e-6, atol=0)


@pytest.mark.parametrize("levels", [1, 5])
@pytest.mark.parametrize("shape", ["several", "matrices", "long"])
def test_t6_with_one_rank_the_wire_and_the_lanes_say_the_same(levels: int, shape: str) -> None:
    given, codec = block(shape), Ternary(2.5, levels)
    echoes, _ = agree([codec.average(given, {}, context())])
    assert torch.equal(echoes[0].mean, roundtrip(codec, given))
    assert torch.equal(sent(echoes[0], given), echoes[0].mean)


@pytest.mark.parametrize("numel", [*range(1, 22), *range(315, 326), 640, 961])
@pytest.mark.parametrize("levels", [1, 3])
def test_t7_every_residue_is_packed_and_unpacked_whole(numel: int, levels: int) -> None:
    given = vector(torch.randn(numel, generator=torch.Generator().manual_seed(numel)))
    key = context().rng.key("x/ternary")
    scales = kernels.absmax(given.flat, (0, numel))
    expected = kernels.ternary_levels(given.flat, (0, numel), scales, key, levels).float() * (scales / levels)
    assert torch.equal(roundtrip(Ternary(0.0, levels), given), expected)


def test_every_parameter_has_its_own_scale() -> None:
    given = Bucket.of({"small": torch.full((50,), 1e-3), "large": torch.full((50,), 1e3), "zero": torch.zeros(7)})
    assert torch.equal(roundtrip(EXACT, given), given.flat)


def test_one_long_tensor_sets_the_variance_bound() -> None:
    layout = Layout.of({"a": (100,), "b": (17, 17)})
    assert EXACT.omega(layout) == pytest.approx((17 - 1) / 2)  # 1/alpha - 1 with alpha = 2 / (1 + sqrt d)
    assert Ternary(0.0, 2).omega(layout) == pytest.approx(((1 + 288 / 4) ** 0.5 - 1) / 2)
    assert EXACT.omega(Layout.of({})) == 0
