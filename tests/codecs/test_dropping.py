"""Gradient dropping: how much travels at which step."""

import pytest
import torch
from tests.laws.blocks import context, roundtrip, vector

from gossamer.codecs import Dropping, TopK
from gossamer.core.bucket import Bucket
from gossamer.exchanges import Gather
from gossamer.recipe import Recipe

VALUES = torch.randn(5000, generator=torch.Generator().manual_seed(1))


def test_the_drop_rate_is_that_of_the_authors_code() -> None:
    """R^(1000 / (1 + t)) for R = 0.99, t counted from 0."""
    codec = Dropping(0.01, 1000)
    dropped = {t: 1 - codec.kept(t + 1) for t in (0, 99, 999, 1000, 10**6)}
    assert dropped == pytest.approx({0: 4.317e-5, 99: 0.90438, 999: 0.99, 1000: 0.99, 10**6: 0.99}, rel=1e-3)


def test_the_first_115_steps_travel_dense_and_exactly_k_after() -> None:
    codec, given = Dropping(0.01, 1000), vector(VALUES)
    lengths = {t: codec.encode(given, {}, context(step=t + 1)).numel() for t in (0, 114, 115, 400, 999, 5000)}
    assert lengths[0] == lengths[114] == 4 * 5000
    assert lengths[115] == 8 * 415  # 1 - .99^(1000 / 116) of 5000
    assert lengths[115] > lengths[400] > lengths[999] == lengths[5000] == 8 * 50


def test_what_travels_dense_travels_whole() -> None:
    given = vector(VALUES)
    assert torch.equal(roundtrip(Dropping(0.01, 1000), given, context(step=50)), VALUES)


def test_in_quarters_it_has_the_five_densities_of_deep_gradient_compression() -> None:
    """25, 6.25, 1.5625, .4 and then .1 percent, each for a quarter of the warm-up, and never dense."""
    codec, given = Dropping(0.001, 400, "quarters"), vector(VALUES)
    kept = {s: codec.kept(s) for s in (1, 100, 101, 201, 301, 399, 400, 10**6)}
    assert kept == pytest.approx(
        {1: 0.25, 100: 0.25, 101: 0.0625, 201: 0.015625, 301: 0.00390625, 399: 0.00390625, 400: 0.001, 10**6: 0.001}
    )
    lengths = [codec.encode(given, {}, context(step=s)).numel() for s in (1, 150, 250, 350, 500)]
    assert lengths == [8 * 1250, 8 * 313, 8 * 79, 8 * 20, 8 * 5]
    assert [Dropping(0.3, 100, "quarters").kept(s) for s in (1, 99, 100)] == [0.3] * 3


@pytest.mark.parametrize("ratio", [0.01, 0.3])
def test_without_a_warm_up_it_is_top_k(ratio: float) -> None:
    given = vector(VALUES)
    assert torch.equal(Dropping(ratio, 0).encode(given, {}, context()), TopK(ratio).encode(given, {}, context()))


@pytest.mark.parametrize("preset", ["dgc(0.05, momentum=0.9{})", "dgc(0.05{})", "local_gradients(0.05{})"])
def test_presets_choose_among_the_same_elements_with_a_warm_up_and_without(preset: str) -> None:
    """The largest of a block: of a tensor whose gradients are a thousand times smaller nothing travels, at any step."""
    rng = torch.Generator().manual_seed(1)
    large, small = torch.randn(20, 10, generator=rng), torch.randn(20, 10, generator=rng) / 1000
    given = Bucket.of({"large": large, "small": small})
    plain, warmed = (Recipe.of(preset.format(w)).exchange for w in ("", ", warmup=12"))
    assert isinstance(plain, Gather)
    assert isinstance(warmed, Gather)
    for step in (12, 50):
        sent = [e.codec.decode(e.codec.encode(given, {}, context(step=step)), given) for e in (plain, warmed)]
        assert torch.equal(*sent)
    early = warmed.codec.decode(warmed.codec.encode(given, {}, context(step=11)), given)
    assert 0 < int(early[:200].count_nonzero()) > 10 * int(early[200:].count_nonzero())


def test_a_scope_over_the_model_is_one_block() -> None:
    assert Dropping(scope="global").whole
    assert not Dropping(scope="block").whole
