"""Strom's threshold: one quantum a step, in a word of place and sign."""

import pytest
import torch
from tests.laws.blocks import context, roundtrip, vector
from tests.laws.crew import Crew

from gossamer.codecs import Strom
from gossamer.core.errors import RecipeError, WireError
from gossamer.recipe import Recipe


def test_it_is_the_paper_s_rule_step_by_step() -> None:
    """r += g; where |r| >= t a quantum leaves, and r moves by it."""
    crew, residual, t = Crew("gather(strom(0.8)) + error_feedback()", 1), torch.zeros(200), 0.8
    for step in range(10):
        g = torch.randn(200, generator=torch.Generator().manual_seed(step))
        residual = residual + g
        quantum = torch.where(residual.abs() >= t, residual.sign() * t, torch.zeros(()))
        residual = residual - quantum
        torch.testing.assert_close(crew.step([vector(g)]), quantum)
        torch.testing.assert_close(crew.kept[0]["residual"], residual)


def test_it_takes_four_bytes_an_element_and_eight_besides() -> None:
    x = torch.zeros(5000)
    x[[0, 17, 4999]] = torch.tensor([1.0, -3.0, 1.0])
    assert Strom(1.0).encode(vector(x), {}, context()).numel() == 8 + 3 * 4


def test_a_loss_scale_multiplies_the_threshold() -> None:
    x = vector(torch.randn(300, generator=torch.Generator().manual_seed(1)))
    plain, scaled = roundtrip(Strom(0.5), x), x.like(x.flat * 2.0**12)
    at = context()._replace(scale=2.0**12)
    assert torch.equal(roundtrip(Strom(0.5), scaled, at), plain * 2.0**12)


def test_a_loss_scale_that_a_user_s_scaler_sets_changes_no_bit() -> None:
    plain, scaled = (Crew("gather(strom(0.5)) + error_feedback()", 2) for _ in range(2))
    for step, scale in enumerate([1.0, 2.0**10, 2.0**5, 2.0**16]):
        blocks = [vector(torch.randn(100, generator=torch.Generator().manual_seed(2 * step + r))) for r in range(2)]
        expected = plain.step(blocks)
        assert torch.equal(scaled.step([b.like(b.flat * scale) for b in blocks], scale=scale) / scale, expected)


def test_a_place_outside_of_the_block_is_refused() -> None:
    words = torch.tensor([1, 0, 5], dtype=torch.int32)
    words[1] = torch.tensor(1.0).view(torch.int32)
    with pytest.raises(WireError, match="outside"):
        Strom(1.0).decode(words.view(torch.uint8), vector(torch.zeros(5)))


@pytest.mark.parametrize("threshold", [0.0, -1.0, float("inf"), float("nan")])
def test_a_threshold_that_is_none_is_refused(threshold: float) -> None:
    with pytest.raises(
        RecipeError, match=r"threshold must be above 0, got .*; try the size of the largest one percent"
    ):
        Strom(threshold)
    with pytest.raises(RecipeError, match="without error feedback"):
        Recipe.of("gather(strom(0.1))")
