"""`benchmarks/severe.py` and `severe_virtual.py`: a model is as good as DDP's by the workload's own metric."""

from benchmarks.severe import as_good

from gossamer.bench.workloads import get


def test_a_lower_loss_is_as_good_and_a_lower_accuracy_is_not() -> None:
    loss, accuracy = get("lm"), get("digits")
    assert [as_good(loss, quality, 4.5) for quality in (4.4, 4.5, 4.6)] == [True, True, False]
    assert [as_good(accuracy, quality, 0.9) for quality in (0.89, 0.9, 0.91)] == [False, True, True]
