"""Accelerated SGD on real processes: gradients are taken at one model, and another is judged, kept and published."""

from pathlib import Path

import pytest
import torch
from tests.gang import Gang
from tests.integrations.loops import attached, flat, same, small_step
from torch import Tensor
from torch.distributed import checkpoint as dcp

import gossamer

pytestmark = pytest.mark.gang
RECIPE = "allreduce(fp32()) + accelerated(2, stages=(3,))"


def trained(rank: int, size: int, folder: str) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """Held and judged at the end, of a run and of one that was cut in two; and what was published on the way."""
    with attached(RECIPE) as (model, optimizer, comm):
        for step in range(5):
            small_step(model, optimizer, comm, rank)
            if step == 2:
                gossamer.checkpoint.save(comm, folder)
        comm.check_sync()
        held = flat(model)
        with comm.consensus():
            judged = flat(model)
    with attached(RECIPE) as (model, optimizer, comm):
        gossamer.checkpoint.load(comm, folder)
        with comm.consensus():
            published = {n: p.detach().clone() for n, p in model.named_parameters()}
        for _ in range(2):
            small_step(model, optimizer, comm, rank)
        with comm.consensus():
            again = flat(model)
        resumed = flat(model)
    return held, resumed, judged, again, published


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_aggregate_is_judged_and_a_run_goes_on_bit_for_bit(gang2: Gang, tmp_path: Path) -> None:
    folder = str(tmp_path / "step3")
    outcomes = gang2.run(trained, folder)
    for held, resumed, judged, again, published in outcomes:
        assert same(held, resumed)
        assert same(judged, again)
        assert not same(held, judged)
        assert all(same(a, b) for a, b in zip(published.values(), outcomes[0][-1].values(), strict=True))
    stored = {name: torch.empty_like(p) for name, p in outcomes[0][-1].items()}
    dcp.load({"model": stored}, checkpoint_id=folder, no_dist=True)
    assert all(same(stored[name], p) for name, p in outcomes[0][-1].items())


def test_alone_the_aggregate_is_judged_too() -> None:
    with attached(RECIPE) as (model, optimizer, comm):
        for _ in range(2):
            small_step(model, optimizer, comm, 0)
        held = flat(model)
        with comm.consensus():
            assert not same(held, flat(model))
        assert same(held, flat(model))
