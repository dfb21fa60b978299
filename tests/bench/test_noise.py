"""Noise of recipes, on gradients of which it is known what it must be."""

import pytest
import torch

from gossamer.bench.noise import gradients, measure
from gossamer.bench.workloads import get
from gossamer.core.bucket import Bucket


def test_errors_are_those_of_the_formulas() -> None:
    """Of equal gradients a mean over four ranks has a quarter of a message's error, or of three where a chunk's owner has its own
    in full; the answer adds another message's.
    """
    x = torch.randn(2**18, generator=torch.Generator().manual_seed(0))
    rows = measure(["scatter(eden(2))", "allreduce", "gather(eden(1))", "drive", "powersgd"], [Bucket.of({"w": x})] * 4)
    found = {row.recipe: row for row in rows}
    assert [row.bits for row in rows] == sorted(row.bits for row in rows)
    assert found["powersgd"].message is None
    assert found["allreduce"].mean < 1e-12
    assert found["allreduce"].bits == pytest.approx(32)
    assert found["scatter(eden(2))"].message == pytest.approx(0.1331, rel=0.02)
    assert found["scatter(eden(2))"].mean == pytest.approx(1.1331 * (1 + 0.1331 * 3 / 16) - 1, rel=0.02)
    assert found["gather(eden(1))"].mean == pytest.approx(0.5708 / 4, rel=0.02)
    assert found["gather(eden(1))"].bits == pytest.approx(2 * 1.03, rel=0.01)  # of the two phases that dense takes
    assert found["drive"].bits == pytest.approx((1.03 + 2.03) / 2, rel=0.01)


def test_gradients_are_the_ranks_own_after_some_steps() -> None:
    ridge = get("ridge", seed=0)
    first, later = gradients(ridge, 3, 0, 0), gradients(ridge, 3, 2, 0)
    assert len(first) == len(later) == 3
    assert not torch.equal(first[0].flat, first[1].flat)
    assert not torch.equal(first[0].flat, later[0].flat)
