"""Levels for everybody: as good as a solver that knows nothing of the formula, in both of the dual problems."""

import heapq

import numpy as np
import pytest

from gossamer.controllers.allocation import Demand, Numbers, levels, within_budget, within_noise

LEAST, MOST = 2.0, 8.0


def greedy(demand: Demand, budget: float, step: float = 0.01) -> Numbers:
    """The best allocation in small pieces: each goes to whoever's noise it lessens most, as is best where noises are convex."""
    bits = np.full(len(demand.sizes), LEAST)

    def gain(i: int) -> float:
        before, after = levels(np.array([bits[i], bits[i] + step]))
        return demand.noises[i] * (before**-2 - after**-2) / (demand.sizes[i] * step)

    queue = [(-gain(i), i) for i in range(len(bits))]
    heapq.heapify(queue)
    left = budget - demand.cost(bits)
    while queue and left > 0:
        _, i = heapq.heappop(queue)
        piece = min(step, MOST - bits[i], left / demand.sizes[i])
        bits[i] += piece
        left -= piece * demand.sizes[i]
        if bits[i] < MOST - 1e-9:
            heapq.heappush(queue, (-gain(i), i))
    return bits


def steps(count: int, wear: float, norms: Numbers) -> Demand:
    """One number a step, whose noise counts the more the later it comes."""
    return Demand(np.ones(count), wear ** (count - 1.0 - np.arange(count)) * norms**2)


def layers(seed: int) -> Demand:
    rng = np.random.default_rng(seed)
    return Demand(rng.integers(1, 2000, 24).astype(float), rng.lognormal(0, 4, 24))


PROFILES = {
    "a norm that stays": steps(120, 0.9025, np.ones(120)),
    "a norm that falls": steps(120, 0.95, np.exp(-np.arange(120) / 20)),
    "nothing worn off": steps(60, 1.0, np.linspace(3, 1, 60)),
    "layers": layers(0),
    "other layers": layers(1),
}


@pytest.mark.parametrize("mean", [2.5, 3.5, 5.0, 7.0])
@pytest.mark.parametrize("profile", PROFILES)
def test_before_rounding_the_noise_is_the_least_within_a_thousandth(profile: str, mean: float) -> None:
    demand = PROFILES[profile]
    budget = mean * float(demand.sizes.sum())
    bits, best = within_budget(demand, budget, LEAST, MOST), greedy(demand, budget)
    assert demand.cost(bits) == pytest.approx(budget, rel=1e-6)
    assert demand.noise(bits) <= demand.noise(best) * 1.001
    assert bits.min() >= LEAST
    assert bits.max() <= MOST


@pytest.mark.parametrize("profile", PROFILES)
def test_the_fewest_bits_for_a_noise_are_those_of_which_it_is_the_least_noise(profile: str) -> None:
    demand = PROFILES[profile]
    bits = within_budget(demand, 4.2 * float(demand.sizes.sum()), LEAST, MOST)
    again = within_noise(demand, demand.noise(bits), LEAST, MOST)
    np.testing.assert_allclose(again, bits, atol=1e-4)
    assert demand.noise(again) <= demand.noise(bits) * (1 + 1e-6)


def test_where_the_norm_stays_bits_grow_towards_the_end_and_leave_a_tenth_of_fixed_ones() -> None:
    demand = PROFILES["a norm that stays"]
    bits = within_budget(demand, 6.0 * 120, LEAST, 12.0)
    assert np.all(np.diff(bits) >= -1e-9)
    assert np.diff(bits)[-20:] == pytest.approx(0.5 * np.log2(1 / 0.9025), rel=0.02)  # half of log2(1 / a) a step
    assert demand.noise(bits) < demand.noise(np.full(120, 6.0)) / 10


def test_where_the_norm_wears_off_with_the_noise_bits_stay() -> None:
    bits = within_budget(steps(120, 0.95, 0.95 ** (np.arange(120) / 2)), 4.0 * 120, LEAST, MOST)
    np.testing.assert_allclose(bits, 4.0, atol=1e-6)


def test_what_cannot_be_had_is_as_near_as_can_be_and_who_has_no_noise_gets_least() -> None:
    demand = Demand(np.ones(3), np.array([1.0, 0.0, 1.0]))
    assert within_budget(demand, 3.0, LEAST, MOST).tolist() == pytest.approx([2, 2, 2], abs=1e-3)
    assert within_budget(demand, 99.0, LEAST, MOST).tolist() == pytest.approx([8, 2, 8], abs=1e-3)
    assert within_noise(demand, 0.0, LEAST, MOST).tolist() == pytest.approx([8, 2, 8], abs=1e-3)
    assert within_noise(demand, float("inf"), LEAST, MOST).tolist() == pytest.approx([2, 2, 2], abs=1e-3)
    assert within_budget(Demand(np.ones(2), np.zeros(2)), 99.0, LEAST, MOST).tolist() == [2, 2]
