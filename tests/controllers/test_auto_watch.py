"""What auto does once it has chosen: it follows another network, and goes back to dense after an accident."""

from typing import Any

import pytest
from tests.controllers.test_auto import (
    CHOSEN,
    COMPUTING,
    FAST,
    SLOW,
    alike,
    equal,
    exchange,
    gone_on,
    make,
    pulled,
    resumed,
    words,
)
from torch import Tensor, nn

from gossamer.controllers import auto_search, auto_watch
from gossamer.controllers.auto_choice import predicted
from gossamer.core.bucket import Bucket, State
from gossamer.core.contracts import Context
from gossamer.fabrics.links import Network
from gossamer.simulate import train

FASTER = Network(1e-4, 1e5)  # dense takes .06 s


def test_it_chooses_again_when_the_network_changes_and_never_too_soon() -> None:
    ranks = make()
    train(ranks, pulled, 300, FAST, alike)
    assert exchange(ranks) == "allreduce(fp32())"
    first = train(ranks, pulled, 250, SLOW, alike)
    assert exchange(ranks) == "scatter(qsgd(bucket=128))"
    assert equal(ranks)
    assert "auto measures again: other times" in words(first)
    train(ranks, pulled, 100, SLOW, alike)
    train(ranks, pulled, 250, FAST, alike)
    assert exchange(ranks) == "allreduce(fp32())"


def test_what_was_in_force_is_tried_by_what_its_steps_took_and_not_by_a_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = make()
    train(ranks, pulled, 300, SLOW, alike)

    def too_much(*args: Any, **kwargs: Any) -> list[float]:
        dense, *candidates = predicted(*args, **kwargs)
        return [dense, *(2 * seconds for seconds in candidates)]

    for module in (auto_search, auto_watch):
        monkeypatch.setattr(module, "predicted", too_much)
    run = train(ranks, pulled, 250, FASTER, alike)
    assert "auto measures again: other times" in words(run)
    assert "qsgd from step" in words(run)[-1]
    assert exchange(ranks) == "scatter(qsgd(bucket=128))"


def test_a_network_that_flickers_is_not_followed() -> None:
    ranks, seen = make(), list[str]()
    for turn in range(20):
        run = train(ranks, pulled, 50, SLOW if turn % 2 else FAST, alike)
        seen += [w for w in words(run) if "measures again" in w]
    assert len(seen) <= 2


def test_a_slow_rank_is_named_and_changes_nothing() -> None:
    ranks = make()
    before = train(ranks, pulled, 100, SLOW, alike)
    run = train(ranks, pulled, 300, SLOW, lambda rank, step: COMPUTING + 2.0 * (rank == 2))
    assert "auto: qsgd" in words(before)[-1]
    said = words(run)
    assert len(said) == 1
    assert "nothing changes because rank 2 computes " in said[0]
    assert exchange(ranks) == "scatter(qsgd(bucket=128))"


def test_a_run_that_resumes_still_notices_another_network() -> None:
    """Latency was measured by the processes before it."""
    ranks = make()
    train(ranks, pulled, 100, FAST, alike)
    again = resumed(ranks)
    run = train(again, pulled, 250, SLOW, alike)
    assert "auto measures again: other times" in words(run)
    assert exchange(again) == "scatter(qsgd(bucket=128))"


def test_a_run_that_resumes_does_not_measure_again_because_computing_takes_longer() -> None:
    run = train(resumed(gone_on()), pulled, 300, SLOW, lambda rank, step: 1.5 * COMPUTING)
    assert words(run) == []


# -- guards ---------------------------------------------------------------------------------------------------------------


def test_what_spoils_averages_is_given_up_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    from gossamer.codecs import QSGD

    ranks = make()
    train(ranks, pulled, CHOSEN, SLOW, alike)
    whole = QSGD.encode

    def spoilt(self: QSGD, block: Bucket, state: State, context: Context) -> Tensor:
        return whole(self, block.like(block.flat * float("nan")), state, context)

    monkeypatch.setattr(QSGD, "encode", spoilt)
    with pytest.warns(
        RuntimeWarning, match="for good, after qsgd: averages were not finite more often than under dense"
    ):
        train(ranks, pulled, 4, SLOW, alike)
    monkeypatch.undo()
    run = train(ranks, pulled, 400, SLOW, alike)
    assert exchange(ranks) == "allreduce(fp32())"
    assert equal(ranks)
    assert words(run) == []


def test_a_larger_error_than_the_tables_is_an_accident(monkeypatch: pytest.MonkeyPatch) -> None:
    from gossamer.controllers import auto_table

    monkeypatch.setitem(auto_table.ERRORS, "qsgd", 1e-4)
    ranks = make()
    with pytest.warns(
        RuntimeWarning, match=r"its compression error is 0\.\d+, and over twice the 0\.0001 of the table"
    ):
        train(ranks, pulled, 90, SLOW, alike)
    assert exchange(ranks) == "allreduce(fp32())"


def test_an_error_that_a_batchs_noise_hides_is_none_however_small_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    from gossamer.controllers import auto_table

    monkeypatch.setitem(auto_table.ERRORS, "int8", 1e-4)
    ranks = make("auto(allow=('int8',))")
    train(ranks, pulled, 90, SLOW, alike)
    assert exchange(ranks) == "scatter(int8())"


def test_a_loss_that_rises_after_a_change_is_an_accident() -> None:
    def rising(model: nn.Module, rank: int, step: int) -> float:
        return pulled(model, rank, step) + (1.0 if step > 51 else 0.0)

    ranks = make()
    with pytest.warns(RuntimeWarning, match="the loss of 50 steps lies above its trend by more than its noise"):
        train(ranks, rising, 160, SLOW, alike)
    assert exchange(ranks) == "allreduce(fp32())"
