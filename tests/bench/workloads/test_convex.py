"""The optimum is one, and is what training approaches."""

import pytest
import torch

from gossamer.bench import workloads
from gossamer.bench.workloads import Logistic, Ridge, WorkloadError
from gossamer.bench.workloads.convex import ROWS

both = pytest.mark.parametrize("kind", [Ridge, Logistic])
Convex = type[Ridge] | type[Logistic]


@both
@pytest.mark.parametrize("spread", [0.0, 1.0, 3.0])
def test_the_slope_is_zero_at_the_optimum(kind: Convex, spread: float) -> None:
    made = kind(spread=spread)
    model = made.model()
    with torch.no_grad():
        next(model.parameters()).copy_(made.optimum)
    made.loss(model, made.data.train).backward()
    (slope,) = (p.grad for p in model.parameters())
    assert slope is not None
    assert float(slope.abs().max()) < 1e-12
    assert made.evaluate(model) == pytest.approx(0, abs=1e-14)


@both
def test_full_batches_reach_it(kind: Convex) -> None:
    made = kind(batch_size=ROWS // 4)
    model = made.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 if kind is Ridge else 0.5)
    for step in range(400):
        optimizer.zero_grad()
        for rank in range(4):
            (made.loss(model, made.batch(step, rank, 4)) / 4).backward()
        optimizer.step()
    assert abs(made.evaluate(model)) < 1e-6


@both
def test_sources_pull_apart_only_when_they_differ(kind: Convex) -> None:
    """At the optimum the ranks' slopes cancel; how long they are is what heterogeneity means."""

    def pull(spread: float) -> float:
        made = kind(spread=spread, shards="source", batch_size=ROWS // 4)
        model = made.model()
        with torch.no_grad():
            next(model.parameters()).copy_(made.optimum)
        slopes = [
            torch.autograd.grad(made.loss(model, made.batch(0, rank, 4)), list(model.parameters()))[0]
            for rank in range(4)
        ]
        assert float(sum(slopes).abs().max()) < 1e-10
        return float(torch.stack(slopes).norm(dim=-1).max())

    assert pull(1.0) > 2 * pull(0.0)


@pytest.mark.parametrize("spread", [-1.0, float("nan"), float("inf")])
def test_spread_must_be_a_sensible_number(spread: float) -> None:
    with pytest.raises(WorkloadError, match="spread must be finite"):
        workloads.get("ridge", spread=spread)
