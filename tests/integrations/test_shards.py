"""Sharded slow state on real processes: as on the simulator, and as the whole state; a run goes on from its folder."""

from pathlib import Path

import pytest
from tests.gang import Gang
from tests.integrations.loops import SMALL, attached, flat, same, small_step
from torch import Tensor

from gossamer.integrations import checkpoint

pytestmark = pytest.mark.gang

WHOLE, SHARDED = "scatter(fp32()) + slowmo(3)" + SMALL, "scatter(fp32()) + slowmo(3, sharded=True)" + SMALL


def trained(rank: int, size: int, recipe: str, path: str = "") -> tuple[list[Tensor], int]:
    """Parameters after each step, and the bytes of a round; saved in the middle of the second."""
    out, sent = list[Tensor](), list[int]()
    with attached(recipe) as (model, optimizer, comm):
        while comm.step < 9:
            if path and comm.step == 4:
                checkpoint.save(comm, path)
            small_step(model, optimizer, comm, rank)
            out.append(flat(model))
            sent.append(comm.ledger.sent)
        comm.check_sync()
        return out, sent[3] - sent[0]


def resumed(rank: int, size: int, recipe: str, path: str) -> list[Tensor]:
    out = list[Tensor]()
    with attached(recipe, seed=99) as (model, optimizer, comm):
        checkpoint.load(comm, path)
        while comm.step < 9:
            small_step(model, optimizer, comm, rank)
            out.append(flat(model))
        comm.check_sync()
    return out


def both(rank: int, size: int, path: str) -> tuple[bool, bool, bool]:
    (whole, sent), (ours, also) = trained(rank, size, WHOLE), trained(rank, size, SHARDED, path)
    again = resumed(rank, size, SHARDED, path)
    return all(map(same, whole, ours)), sent == also, all(map(same, ours[4:], again))


def test_processes_train_as_with_the_whole_state_and_go_on_from_their_shards(gang2: Gang, tmp_path: Path) -> None:
    for alike, as_many, goes_on in gang2.run(both, str(tmp_path / "run")):
        assert (alike, as_many, goes_on) == (True, True, True)


@pytest.mark.slow
def test_a_folder_of_shards_is_taken_up_by_other_ranks_and_in_other_blocks(
    gang2: Gang, gang4: Gang, tmp_path: Path
) -> None:
    path = str(tmp_path / "run")
    assert gang4.run(both, path) == [(True, True, True)] * 4
    for other in (gang4.run(resumed, SHARDED.replace(SMALL, ""), path), gang2.run(resumed, SHARDED, path)):
        assert all(t.isfinite().all() for run in other for t in run)
