"""Flows that share links, against answers worked out by hand."""

from math import inf

import pytest

from gossamer.costs.sharing import Flow, fair_rates

CARD = {"card": 1.0}


@pytest.mark.parametrize(
    ("limits", "capacity", "rates"),
    [
        ([5.0], 10.0, [5.0]),  # a flow alone has its limit
        ([5.0], 4.0, [4.0]),  # or the link
        ([10.0, 10.0], 10.0, [5.0, 5.0]),  # two alike have half each
        ([10.0, 2.0], 10.0, [8.0, 2.0]),  # what a small one leaves, the other has
        ([2.0, 3.0, 20.0], 12.0, [2.0, 3.0, 7.0]),  # three of unequal limits
        ([2.0, 8.0, 20.0], 12.0, [2.0, 5.0, 5.0]),
        ([9.0, 8.0, 20.0], 12.0, [4.0, 4.0, 4.0]),
        ([3.0, 4.0], 100.0, [3.0, 4.0]),  # a link that is not full
        ([inf, 4.0], 10.0, [6.0, 4.0]),
        ([0.0, 4.0], 10.0, [0.0, 4.0]),
        ([], 10.0, []),
    ],
)
def test_flows_share_one_link(limits: list[float], capacity: float, rates: list[float]) -> None:
    assert fair_rates([Flow(limit, CARD) for limit in limits], {"card": capacity}) == pytest.approx(rates)


def test_a_flow_through_two_links_is_held_by_the_fuller_one() -> None:
    """A and B share link 1 (capacity 10), B and C link 2 (capacity 6): B and C have 3 each, and A what is left of link 1."""
    flows = [Flow(inf, {1: 1.0}), Flow(inf, {1: 1.0, 2: 1.0}), Flow(inf, {2: 1.0})]
    assert fair_rates(flows, {1: 10.0, 2: 6.0}) == pytest.approx([7.0, 3.0, 3.0])


def test_a_flow_that_needs_twice_as_much_of_a_link_fills_it_twice_as_fast() -> None:
    assert fair_rates([Flow(inf, {1: 2.0}), Flow(inf, {1: 1.0})], {1: 9.0}) == pytest.approx([3.0, 3.0])


def test_links_without_a_capacity_hold_nobody() -> None:
    assert fair_rates([Flow(inf, {}), Flow(2.0, {"inside": 1.0})], {}) == [inf, 2.0]
