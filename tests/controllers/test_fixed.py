"""No control: nobody is asked, and nothing is copied for him."""

import pytest
from tests.runtime.gym import bit_equal, make, parameters, pull, train

from gossamer.controllers import Fixed


@pytest.mark.parametrize("recipe", ["allreduce", "local_sgd(2)"])
def test_nothing_is_decided_where_there_is_nothing_to_decide(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*_: object) -> None:
        pytest.fail("means were made ready for a controller that controls nothing")

    monkeypatch.setattr(Fixed, "decide", asked)
    ranks = make(recipe, 2)
    for rank in ranks:
        rank.worker.scale = 1024.0  # as under a loss scaler: a copy of every mean
    train(ranks, pull, 4)
    assert bit_equal(parameters(ranks))
