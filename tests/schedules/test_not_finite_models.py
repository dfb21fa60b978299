"""A parameter that becomes NaN on one rank: who is not finite neither gives nor is merged, and comes back."""

import math
import warnings
from typing import Any

import pytest
import torch
from tests.gang import Gang
from tests.integrations.loops import attached
from tests.runtime.gym import Odd, make, parameters, pull, train

from gossamer.core.errors import PeerError

RECIPES = (
    "sgp",
    "sgp(every=3)",
    "sgp(topology=complete())",
    "osgp",
    "osgp(every=3)",
    "d_psgd",
    "d_psgd(overlap=False)",
    "gossip_pga",
    "choco_sgd",
    "choco_sgd(gamma=0.5)",
    "slowmo_sgp",
    "sgp + per_node(2)",
)


def spoil(model: torch.nn.Module, value: float = math.nan) -> None:
    with torch.no_grad():
        model.get_parameter("matrix")[3, 1] = value


@pytest.mark.parametrize("at", [1, 5])
@pytest.mark.parametrize("recipe", RECIPES)
def test_one_rank_with_nan_takes_the_others_model(recipe: str, at: int) -> None:
    def backward(model: torch.nn.Module, rank: int, step: int) -> float:
        if (rank, step) == (2, at):
            spoil(model)
        return pull(model, rank, step)

    ranks = make(recipe, 4)
    train(ranks, backward, 20)
    assert all(bool(p.isfinite().all()) for p in parameters(ranks))
    assert ranks[2].worker.record.spoilers() == {2: 1}
    assert all(set(r.worker.record.spoilers()) <= {2} for r in ranks)


@pytest.mark.parametrize("recipe", ["sgp", "d_psgd(overlap=False)"])
def test_the_others_go_on_as_if_it_had_said_what_they_hold(recipe: str) -> None:
    """Of ranks that agree none moves, and the one that was spoilt is back at what they hold after one round."""
    ranks = make(recipe, 4)
    start = parameters(ranks)[0]
    spoil(ranks[1].model, math.inf)
    train(ranks, lambda model, rank, step: 0.0, 1)
    for held in parameters(ranks):
        torch.testing.assert_close(held, start, rtol=0, atol=1e-6)


def run(rank: int, size: int, recipe: str, ends: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    said = list[str]()
    with warnings.catch_warnings(record=True) as caught, attached(recipe, Odd()) as (model, optimizer, comm):
        warnings.simplefilter("always")
        for step in range(1, 9):
            optimizer.zero_grad()
            if (rank, step) == (1, 8 if ends else 3):
                spoil(model)
            sum((p - rank).square().sum() for p in model.parameters()).backward()
            if all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None) or ends:
                optimizer.step()
            else:
                comm.skip()
        try:
            comm.check_sync()
        except PeerError as error:
            said.append(str(error))
        spoilt = comm.spoilt
        comm.finish()
    finite = all(bool(p.isfinite().all()) for p in model.parameters())
    return {"finite": finite, "spoilt": spoilt, "said": said, "warned": [str(w.message) for w in caught]}


@pytest.mark.parametrize("recipe", ["sgp", "d_psgd(overlap=False)"])
def test_on_real_processes_it_is_left_out_and_named(gang2: Gang, recipe: str) -> None:
    outcomes = gang2.run(run, recipe, False)
    assert all(outcome["finite"] and not outcome["said"] for outcome in outcomes)
    assert [outcome["spoilt"] for outcome in outcomes] == [{1: 1}, {1: 1}]
    assert "the model of rank 1 was not finite at step 3" in " ".join(outcomes[0]["warned"])
    assert "this rank's model was not finite at step 3" in " ".join(outcomes[1]["warned"])


def test_the_consensus_leaves_out_who_is_not_finite_and_check_sync_names_it(gang2: Gang) -> None:
    outcomes = gang2.run(run, "decoupled_diloco", True)
    for outcome in outcomes:
        assert outcome["finite"]
        assert "the model of rank(s) [1] is not finite" in outcome["said"][0]
        assert "the model of rank(s) [1] is not finite, and is left out" in " ".join(outcome["warned"])
