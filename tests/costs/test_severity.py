"""Severity against the arithmetic of whole steps, and what recipes bear."""

from math import inf

import pytest

from gossamer.costs import Bearable, busy, severity
from gossamer.planning import bytes_per_step

SQUARES = {f"w{i}": (1024, 1024) for i in range(8)}
MODEL = 4 * sum(rows * columns for rows, columns in SQUARES.values())


def test_it_is_the_seconds_of_the_model_over_those_of_a_step() -> None:
    assert severity(72 * 10**9, 500e6 / 8, 40.0) == pytest.approx(115.2)
    assert severity(10**6, inf, 1.0) == 0
    assert severity(10**6, 4e6, 2.0) == 0.5


@pytest.mark.parametrize(("models", "degree"), [(1.5, 10), (0.095, 10), (0.0032, 115), (0.00095, 500)])
def test_shares_are_those_of_a_step_that_computes_and_sends(models: float, degree: float) -> None:
    computing, sending = 0.12, 0.12 * degree * models
    assert busy(degree, models, overlap=False) == pytest.approx(computing / (computing + sending))
    assert busy(degree, models, overlap=True) == pytest.approx(computing / max(computing, sending))


@pytest.mark.parametrize("models", [1.5, 0.1, 0.00046])
def test_up_to_what_a_recipe_bears_machines_are_busy_and_beyond_not(models: float) -> None:
    bears = Bearable.of(models)
    assert bears is not None
    for limit, overlap in ((bears.plain, False), (bears.overlapped, True)):
        assert busy(limit, models, overlap) == pytest.approx(0.95)
        assert busy(1.01 * limit, models, overlap) < 0.95 < busy(0.99 * limit, models, overlap)
    assert Bearable.of(0.0) is None


@pytest.mark.parametrize(
    ("recipe", "plain", "overlapped"),
    [
        ("allreduce", 0.035, 0.70),
        ("scatter(qsgd(4, bucket=512))", 0.28, 5.5),
        ("eden", 0.55, 11),
        ("drive", 0.73, 15),
        ("diloco(30) + allreduce(fp32())", 1.05, 21),
        ("diloco(30) + scatter(eden(2))", 17, 332),
        ("diloco(100) + scatter(eden(2))", 55, 1106),
        ("diloco(500) + allreduce(fp32())", 18, 351),
    ],
)
def test_recipes_bear_what_their_bits_say(recipe: str, plain: float, overlapped: float) -> None:
    """By hand: 2 (N - 1) / N bits / 32 models a step of N ranks, divided by the steps of a round; four ranks."""
    bears = Bearable.of(bytes_per_step(recipe, SQUARES, 4) / MODEL)
    assert bears is not None
    assert bears.plain == pytest.approx(plain, rel=0.05)
    assert bears.overlapped == pytest.approx(overlapped, rel=0.05)
