"""1-bit Adam beside itself with an exact mean: freezing is what costs, not signs."""

from functools import partial

import pytest
from torch import nn

from gossamer.simulate import replicas, train
from gossamer.workloads import get

RANKS, STEPS, WARMUP, LAST = 2, 80, 40, 20


def losses(workload: str, recipe: str) -> tuple[float, float]:
    """Mean loss of the last steps; and of bytes, a dense step's over a last step's."""
    job = get(workload)

    def backward(model: nn.Module, rank: int, step: int) -> float:
        loss = job.loss(model, job.batch(step, rank, RANKS))
        loss.backward()
        return float(loss.detach())

    ranks = replicas(recipe, job.model, partial(job.optimizer), RANKS)
    run = train(ranks, backward, STEPS)
    first, last = (sum(e.sent for e in run.ledger if e.step == s) for s in (1, STEPS))
    late = [loss for r in ranks for loss in r.losses[-LAST:]]
    return sum(late) / len(late), first / last


@pytest.mark.slow
@pytest.mark.parametrize("workload", ["lm-bytes", "translate"])
def test_signs_end_where_an_exact_mean_of_the_same_method_ends(workload: str) -> None:
    """Within one percent, with less than a twentieth of the bytes of those steps."""
    exact, _ = losses(workload, f"allreduce(fp32()) + onebit_adam_update({WARMUP})")
    signs, fewer = losses(workload, f"onebit_adam({WARMUP})")
    assert signs == pytest.approx(exact, rel=0.01)
    assert fewer > 20
