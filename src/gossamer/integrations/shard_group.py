"""The shard group: the ranks that hold one replica together ask each other, where one would else decide by its own shard."""

from collections.abc import Sequence
from secrets import token_hex
from typing import Any, cast, final

import torch
import torch.distributed as dist

from gossamer.core.errors import PeerError
from gossamer.core.verbs import MembersChanged, all_reduce
from gossamer.fabrics.liveness.heartbeat import Patience
from gossamer.fabrics.liveness.notice import Notice
from gossamer.fabrics.liveness.store import SharedStore, default_store
from gossamer.fabrics.torch.endpoint import backends
from gossamer.fabrics.torch.fabric import TorchFabric
from gossamer.integrations.handshake import CHECKPOINT, WORDS, differences, tell

CPU = torch.device("cpu")
QUESTION, NOTICE = "asking the other shards", "comm.leaving_at"


@final
class ShardGroup:
    """A `ReplicaRanks` over a group of its own: a few numbers at a time, through the hosts' memory."""

    def __init__(self, ranks: dist.ProcessGroup, deadline: float, patience: Patience) -> None:
        ranks = over_gloo(ranks)
        self.index, self.size, self.asked = ranks.rank(), ranks.size(), 0
        self._fabric = TorchFabric(ranks, deadline=deadline, patience=patience)

    def least(self, values: Sequence[float]) -> list[float]:
        return [-value for value in self._reduce([-float(value) for value in values], "max")]

    def total(self, values: Sequence[float]) -> list[float]:
        return self._reduce(values, "sum")

    def all(self, holds: bool) -> bool:
        return bool(self.least([holds])[0])

    def agreed(self, refusal: Exception | None, facts: dict[str, Any]) -> Exception | None:
        """This rank's refusal, or another rank's of the replica, or that these facts differ between its ranks."""
        mine = {"refusal": "" if refusal is None else str(refusal)[:WORDS], "facts": facts}
        everyone = self._fabric.run(tell(mine, CPU), "attach")
        refusals = [
            f"rank {i} of its replica cannot go on: {one['refusal']}"
            for i, one in enumerate(everyone)
            if one["refusal"]
        ]
        if refusal is not None or refusals:
            return refusal or PeerError("; ".join(refusals))
        lines = differences([one["facts"] for one in everyone])
        return PeerError("the shards of a replica are not set up alike:\n  " + "\n  ".join(lines)) if lines else None

    def told(self, facts: Any, label: str, step: int, lane: str = "comm") -> list[Any]:
        return self._fabric.join(self._fabric.start(tell(facts, CPU, CHECKPOINT), label, step, lane))

    def outlive(self, lost: MembersChanged | None) -> None:
        if lost is not None:
            raise lost

    def open_lane(self, name: str) -> None:
        if not self._fabric.has_lane(name):
            self._fabric.open_lane(name)

    def close(self) -> None:
        self._fabric.close()

    def watch_for_notice(self, between: TorchFabric, device: torch.device, step: int) -> Notice:
        """One notice for all shards of all replicas: they meet in a part of the store that the first of them names.

        `between` joins the ranks of this shard in all replicas. All ranks call it together.
        """
        names = [token_hex(8)]
        if between.size > 1:
            names = between.run(tell(names[0], device), NOTICE, step)
        name = self.told(names[0], NOTICE, step)[0]
        number, ranks = between.rank * self.size + self.index, between.size * self.size
        everyone = SharedStore(default_store(), number, ranks).under(f"gossamer/notice/{name}")
        return self._fabric.watch_for_notice(everyone)

    def _reduce(self, values: Sequence[float], how: str) -> list[float]:
        self.asked += 1
        own = torch.tensor([*values], dtype=torch.float64, device=CPU)
        return self._fabric.run(all_reduce(own, how), QUESTION, self.asked).tolist()  # pyright: ignore[reportArgumentType]


def over_gloo(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group of the same ranks over gloo alone, on whatever device; only they call it."""
    if {*backends(group).values()} == {"gloo"}:  # with NCCL besides, a GPU's tensors would go over that
        return group
    ranks = dist.get_process_group_ranks(group)
    return cast(dist.ProcessGroup, dist.new_group(ranks, backend="gloo", use_local_synchronization=True))
