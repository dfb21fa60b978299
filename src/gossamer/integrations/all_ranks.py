"""All ranks together: what each of them says, and an error on one of them is an error on all."""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from gossamer.core.errors import CheckpointError, PeerError
from gossamer.core.verbs import MembersChanged, Program
from gossamer.fabrics.torch.fabric import TorchFabric
from gossamer.integrations.handshake import CHECKPOINT, tell
from gossamer.runtime import Worker

LABEL = "checkpoint.save"
T = TypeVar("T")


class Attached(Protocol):
    """A communicator, or the hook of a DDP model."""

    worker: Worker
    fabric: TorchFabric

    def load_state_dict(self, saved: Any) -> None: ...


def gathered(comm: Attached, facts: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the facts of all ranks: replica by replica, and in each shard by shard."""
    return comm.fabric.run(facts_of_all(comm, facts, "comm", comm.worker.step - 1))


def facts_of_all(comm: Attached, facts: dict[str, Any], lane: str, step: int) -> Program[list[dict[str, Any]]]:
    """Ask those with the same shard over the network, and the other shards of this replica on their `lane`."""
    worker = comm.worker
    try:
        same_shard = yield from worker.jointly(_facts_of_same_shard(worker, facts))
    except MembersChanged:
        raise
    except PeerError:
        worker.replica.close()  # other shards wait for this one, which cannot answer any more
        raise
    by_shard = worker.replica.told(same_shard, LABEL, step, lane)
    return [shard[rank] for rank in range(len(same_shard)) for shard in by_shard]


def _facts_of_same_shard(worker: Worker, facts: dict[str, Any]) -> Program[list[dict[str, Any]]]:
    return [facts] if worker.size == 1 else (yield from tell(facts, worker.device, CHECKPOINT))


def on_all(comm: Attached, do: Callable[[], T]) -> T:
    """Return what `do` returns; if it fails on one rank, raise an error on all ranks."""
    answer, problem = None, ""
    try:
        answer = do()
    except CheckpointError as error:
        problem = str(error)
    for rank, other in enumerate(gathered(comm, {"problem": problem[:2000]})):
        if problem or other["problem"]:
            raise CheckpointError(problem or f"rank {rank} cannot go on: {other['problem']}")
    return answer  # pyright: ignore[reportReturnType]
