"""What `auto` remembers: trials of candidates and of dense, in turn."""

from gossamer.controllers.auto_choice import WindowMedian
from gossamer.controllers.auto_state import ON_DENSE, AutoState, Trials


def trials_of(turns: list[int], ended: int) -> Trials:
    """Trials whose medians are 0, 1, 2 ..., after dense steps of 9."""
    kept = AutoState({})
    kept.write_all("dense", [8.0, 9.0, 10.0, 0.5])
    kept.write_all("turns", turns)
    kept.write_all("found", [float(i) for i in range(ended) for _ in range(3)])
    return Trials(kept)


def test_dense_stands_beside_the_trial_before_it() -> None:
    trials = trials_of([1, ON_DENSE, 0, ON_DENSE, 1], ended=5)
    assert [trials.dense_beside(place).middle for place in (0, 2, 4)] == [1, 3, 3]
    assert trials.last_dense.middle == 3


def test_where_dense_had_no_turn_its_steps_before_all_trials_count() -> None:
    trials = trials_of([1, 0], ended=2)
    assert trials.dense_beside(0) == trials.last_dense == WindowMedian(8.0, 9.0, 10.0)


def test_a_trial_that_has_only_begun_tells_nothing() -> None:
    trials = trials_of([0, 1, ON_DENSE], ended=2)
    assert trials.of(ON_DENSE) == []
    assert trials.last_dense.middle == 9
    assert trials.tried == [0, 1]
    assert [trials.fastest_beside(number) for number in (0, 1, 2)] == [1, 0, 0]
    assert trials.last_of(1) == WindowMedian(1.0, 1.0, 1.0)


def test_who_is_slower_than_one_that_is_clearly_faster_than_dense_is_beaten() -> None:
    trials = trials_of([1, 0], ended=2)
    assert [trials.is_beaten(number) for number in (0, 1)] == [True, False]
    hardly_faster = trials_of([ON_DENSE] * 6 + [1, 0], ended=8)  # 6 and 7, and dense is 9
    assert not hardly_faster.is_beaten(0)


def test_what_is_forgotten_counts_from_nothing() -> None:
    kept = AutoState({})
    assert [kept.count("lost"), kept.count("lost", 0), kept.count("lost")] == [1, 1, 2]
    kept.forget("lost", "never")
    assert "lost" not in kept
    assert kept.whole("lost") == 0
