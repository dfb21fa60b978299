"""A step that is left out after its gradients have arrived, though they are finite, leaves every memory as it was."""

from typing import Any

import pytest
from tests.runtime import fleet
from tests.runtime.gym import Replica, bit_equal, make, parameters, pull, remembered, same_memory

from gossamer.core.verbs import Program
from gossamer.fabrics.sim import simulate
from gossamer.runtime.buckets import ROLES

SIZE = 3


def steps(replica: Replica, count: int, taken: bool) -> Program[None]:
    """Steps whose host decides at the very end, as a loss scaler does, whether the optimizer takes them."""
    worker, optimizer = replica.worker, replica.optimizer

    def descend() -> bool:
        worker.update_step.put()
        worker.update_step.enter(optimizer)
        worker.redirect()
        if taken:
            optimizer.step()
        return taken

    for _ in range(count):
        pull(replica.model, worker.rank, worker.step)
        yield from worker.begin()
        yield from worker.train_step([c.gradients() for c in worker.buckets], descend, optimizer.step)
        worker.update_step.leave(optimizer)


def known(replica: Replica) -> dict[str, Any]:
    """All that moves on with the gradients that were taken."""
    worker = replica.worker
    return remembered(worker, *ROLES) | {f"control/{k}": t.clone() for k, t in worker.controller.state.items()}


@pytest.mark.parametrize("recipe", fleet.each(fleet.PROMPT))
def test_a_step_that_is_left_out_late_leaves_no_trace(recipe: str) -> None:
    ranks = make(recipe, SIZE)
    simulate([steps(r, 3, taken=True) for r in ranks])
    memories, models, recipes = [known(r) for r in ranks], parameters(ranks), [r.worker.recipe for r in ranks]
    simulate([steps(r, 2, taken=False) for r in ranks])
    for r, memory, model, before in zip(ranks, memories, models, recipes, strict=True):
        assert r.worker.averaging.finite
        assert r.worker.record.skipped == 2
        assert same_memory(known(r), memory)
        assert r.worker.controller.due == before
        assert bit_equal([r.flat(), model])
    simulate([steps(r, 1, taken=True) for r in ranks])
    assert not bit_equal([ranks[0].flat(), models[0]])
