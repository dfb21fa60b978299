"""What auto concludes from made-up numbers: all branches, and numbers that are none."""

from itertools import product
from math import inf, isfinite, isnan, nan

import pytest

from gossamer.controllers.auto_choice import (
    Timing,
    WindowMedian,
    beyond_bytes,
    costs_of,
    differs,
    holds,
    is_clear,
    mean_losses,
    median_of,
    order,
    predicted,
    rises,
    timing_of,
)
from gossamer.core.contracts import CandidateCost, RankTimes

COST = CandidateCost(0.01, 0.25, 2.0)
STRANGE = [nan, inf, -1.0, 0.0, 1e6]


def times(
    step: float = 0.4, wait: float = 0.3, rows: int = 8, sending: float = 0.3, latency: float = 0.001
) -> RankTimes:
    return RankTimes([step] * rows, [wait] * rows, [nan] * rows, [0.1], [sending], [COST], latency, nan, 1.0)


def test_a_window_of_equal_ranks_is_that_of_each() -> None:
    found = timing_of([times()] * 3)
    assert found.steps == WindowMedian(0.4, 0.4, 0.4)
    assert found.computing == pytest.approx(0.1)
    assert (found.waiting, list(found.ready), list(found.sending), found.slow) == (0.3, [0.1], [0.3], "")


def test_the_slowest_rank_counts_and_the_network_is_what_the_last_one_waits_for() -> None:
    found = timing_of([times(0.4, 0.3, sending=0.5), times(0.41, 0.01, sending=0.2), times(0.4, 0.3, sending=0.5)])
    assert found.steps.middle == 0.41
    assert (found.waiting, list(found.sending)) == (0.01, [0.2])
    assert found.slow == "rank 1 computes 400 ms a step, the others 100 ms"


@pytest.mark.parametrize("lie", STRANGE)
@pytest.mark.parametrize("field", ["steps", "waits", "ready", "sending", "costs", "latency", "losses"])
def test_strange_numbers_of_one_rank_never_end_in_an_error_nor_in_a_candidate_that_is_none(
    field: str, lie: float
) -> None:
    true = times()
    old = getattr(true, field)
    new = lie if field == "latency" else [CandidateCost(lie, lie, lie)] if field == "costs" else [lie] * len(old)
    ranks = [true, true._replace(**{field: new}), true]
    seen = timing_of(ranks)
    guesses = predicted(seen, [100], costs_of(ranks))
    assert len(guesses) == 2
    assert all(isfinite(g) or g != g for g in guesses)
    if not isfinite(lie) or lie < 0:
        spoils = field in {"steps", "waits"}
        assert seen.steps.known != spoils
        assert (order(guesses, 0.1, [False]) == []) == (
            field not in {"losses", "sending", "latency"}
        )  # the others tell those two
    assert all(isfinite(x) or x != x or x == inf for x in mean_losses(ranks))


def test_some_unknown_steps_leave_a_median_and_too_many_none() -> None:
    few = times()._replace(steps=[nan, 0.4, nan, 0.4, 0.4, nan, 0.4, -1.0])
    assert timing_of([times(), few]).steps.known
    assert not timing_of([times(), few._replace(steps=[nan] * 5 + [0.4] * 3)]).steps.known


@pytest.mark.parametrize(("count", "outside"), [(4, 0), (6, 0), (8, 1), (12, 2), (50, 18)])
def test_the_interval_of_a_median_is_that_of_the_sign_test(count: int, outside: int) -> None:
    values = [float(i) for i in range(count)]
    assert median_of(values) == WindowMedian(values[outside], (count - 1) / 2, values[-1 - outside])
    assert not median_of(values[:3]).known


def seen(step: float, computing: float, ready: list[float], sending: list[float], latency: float = 0.0) -> Timing:
    return Timing(WindowMedian(step, step, step), computing, step - computing, ready, sending, latency, "")


def test_one_block_that_waits_takes_the_candidates_work_latencies_and_share_of_bytes() -> None:
    dense, other = predicted(seen(0.5, 0.1, [0.1], [0.39], 0.01), [100], [CandidateCost(0.02, 0.25, 2.0)])
    assert dense == pytest.approx(0.5)
    assert other == pytest.approx(0.1 + 0.02 + 2 * 0.01 + 0.25 * 0.38 + 0.01)  # and .01 that dense's step took besides


@pytest.mark.parametrize("took", [0.2, 0.05])
def test_an_average_that_all_ranks_tried_is_predicted_to_take_as_long_again(took: float) -> None:
    now, tried = seen(0.5, 0.1, [0.1], [0.39], 0.01), CandidateCost(took, 0.25, 2.0)
    (cost,) = beyond_bytes([tried], now, [100])
    dense, other = predicted(now, [100], [cost])
    assert (dense, other) == pytest.approx((0.5, 0.5 - 0.39 + took))
    in_force = now._replace(sending=[took])  # and dense again from its steps
    assert predicted(in_force, [100], [cost], cost)[0] == pytest.approx(0.5 - took + 0.39)


def test_a_candidate_that_cuts_more_blocks_hides_all_but_the_last() -> None:
    """Gradients come from .1 to .3; two halves of .1 each leave at .2 and .3, one block of .2 at .3."""
    now = seen(0.5, 0.3, [0.3], [0.2])
    same = CandidateCost(0.0, 1.0, 1.0)
    dense, whole, halves = predicted(now, [100], [same, same], cuts=[[100], [100], [50, 50]])
    assert (dense, whole, halves) == pytest.approx((0.5, 0.5, 0.4))
    under = seen(0.4, 0.3, [0.2, 0.3], [0.1, 0.1])  # and back, once it is in force
    assert predicted(under, [50, 50], [same], same, cuts=[[100], [50, 50]]) == pytest.approx([0.5, 0.4])


def test_of_blocks_that_do_not_fit_a_tried_average_tells_nothing() -> None:
    (cost,) = beyond_bytes([COST], seen(0.5, 0.1, [0.1], [0.39]), [100, 200])
    assert isnan(cost.work)


def test_what_hides_behind_computing_cannot_be_gained() -> None:
    dense, other = predicted(seen(0.5, 0.5, [0.1, 0.2], [0.1, 0.1]), [100, 100], [COST])
    assert dense == other == pytest.approx(0.5)
    assert order([dense, other], 0.1, [False]) == []


def test_blocks_follow_one_another_and_small_ones_take_their_share_of_work() -> None:
    dense, other = predicted(seen(0.8, 0.2, [0.1, 0.2], [0.4, 0.2]), [400, 200], [CandidateCost(0.08, 0.5, 1.0)])
    assert dense == pytest.approx(0.8)
    assert other == pytest.approx(0.1 + (0.08 + 0.2) + (0.04 + 0.1) + 0.1)


def test_from_numbers_under_a_candidate_follow_those_under_dense_and_back() -> None:
    cost = CandidateCost(0.02, 0.25, 2.0)
    dense, other = predicted(seen(0.5, 0.1, [0.1], [0.4], 0.01), [100], [cost])
    under = seen(other, 0.1, [0.1], [0.02 + 0.02 + 0.25 * 0.39], 0.01)
    again = predicted(under, [100], [cost], now=cost)
    assert again == pytest.approx([dense, other])


def test_a_slow_ranks_computing_is_left_out() -> None:
    bare = predicted(seen(0.5, 0.1, [0.1], [0.4]), [100], [COST])
    late = predicted(seen(2.5, 2.1, [2.1], [0.4]), [100], [COST], late=2.0)
    assert late == pytest.approx(bare)


def test_blocks_that_do_not_fit_or_none_at_all_predict_nothing() -> None:
    assert all(x != x for x in predicted(seen(0.5, 0.1, [0.1], [0.4]), [100, 5], [COST]))
    assert all(x != x for x in predicted(seen(0.5, 0.1, [], []), [], [COST]))
    assert all(x != x for x in predicted(seen(nan, 0.1, [0.1], [0.4]), [100], [COST]))


def test_the_order_leaves_out_what_gains_too_little_is_barred_or_unknown() -> None:
    guesses = [1.0, 0.5, 0.91, 0.4, nan, 0.9]
    assert order(guesses, 0.1, [False] * 5) == [2, 0, 4]
    assert order(guesses, 0.1, [False, False, True, False, False]) == [0, 4]
    assert order([nan, 0.5], 0.1, [False]) == order([1.0], 0.1, []) == []


def test_a_candidate_holds_if_it_gains_enough_and_the_intervals_part() -> None:
    dense = WindowMedian(0.95, 1.0, 1.05)
    assert holds(WindowMedian(0.85, 0.9, 0.94), dense, 0.1)
    assert not holds(WindowMedian(0.85, 0.9, 0.95), dense, 0.1)
    assert not holds(WindowMedian(0.9, 0.91, 0.92), dense, 0.1)
    assert not any(holds(a, b, 0.1) for a, b in product([WindowMedian(), dense], repeat=2))


def test_more_than_a_quarter_is_a_difference() -> None:
    assert [differs(x, 1.0) for x in (0.7, 0.8, 1.0, 1.25, 1.3, nan)] == [True, False, False, False, True, False]
    assert not differs(1.0, nan)


def test_a_loss_rises_if_it_lies_above_its_trend_by_twice_its_noise() -> None:
    before = [1.0 - 0.01 * i + 0.02 * (-1) ** i for i in range(44)]  # ends at .57
    assert not rises(before, [0.6] * 50)
    assert rises(before, [0.65] * 50)
    assert not rises(before, [0.3] * 50)
    assert rises(before, [0.3] * 49 + [inf])
    assert not rises(before, [nan] * 50)
    assert not rises([nan] * 44, [9.0] * 50)
    assert not rises([], [])


def test_a_loss_that_rose_already_under_trials_is_judged_by_its_mean() -> None:
    before = [1.0 + 0.01 * i + 0.02 * (-1) ** i for i in range(20)]  # ends at 1.19; its mean is 1.095
    assert rises(before, [1.19] * 50)
    assert not rises(before, [1.1] * 50)


def test_a_trial_is_clear_if_its_slowest_step_is_far_below_denses_fastest() -> None:
    dense = WindowMedian(3.0, 3.5, 4.0)
    assert is_clear(WindowMedian(1.0, 1.5, 1.9), dense)
    assert not is_clear(WindowMedian(1.0, 1.5, 2.0), dense)
    assert not is_clear(WindowMedian(), dense)
    assert not is_clear(WindowMedian(1.0, 1.0, 1.0), WindowMedian())


def test_few_steps_have_a_median_only_where_few_are_asked_for() -> None:
    assert not timing_of([times(rows=3)]).steps.known
    assert timing_of([times(rows=3)], least=3).steps == WindowMedian(0.4, 0.4, 0.4)


def test_steps_with_an_evaluation_before_them_are_left_out() -> None:
    paused = times()._replace(steps=[0.4, 9.0, 0.4, 0.4, 0.4, 0.4, 9.0, 0.4])
    assert timing_of([times(), paused]).steps == WindowMedian(0.4, 0.4, 0.4)
