"""This process's rank in a group, and the way its comm threads connect to the others."""

from collections import Counter
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist

from gossamer.core.errors import AttachError, PeerError
from gossamer.core.verbs import Among
from gossamer.fabrics.liveness import shutdown
from gossamer.fabrics.liveness.heartbeat import Patience
from gossamer.fabrics.liveness.members import Members
from gossamer.fabrics.liveness.store import SharedStore, default_store
from gossamer.fabrics.torch import nccl
from gossamer.fabrics.torch.connection import Connection
from gossamer.fabrics.torch.gloo import Gloo
from gossamer.fabrics.torch.rendezvous import Meet, gloo
from gossamer.fabrics.torch.staged import Staged

ONE_STORE = (
    "Set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before torchrun, and give it --standalone or --rdzv-backend c10d: then each attempt has "
    "a store of its own"
)

Path = Literal["alone", "gloo", "nccl", "staged"]
_DAY = 86_400.0  # seconds
_CONNECT = 10.0  # seconds that members may take to connect, at least
_made = Counter[str]()  # endpoints created so far in each group, to keep their keys in the store apart

Crowd = dist.ProcessGroup | Members | None
"""The ranks to connect to: a process group, elastic members, or None for this process alone."""


class Timeouts(NamedTuple):
    """How long a rank waits for the others."""

    deadline: float
    patience: Patience


@dataclass(frozen=True)
class Endpoint:
    """This process in a group: its rank, and the path of its tensors.

    `rank` and `size` are those of the start; `place` and `count` are among the present members. If tensors have no path,
    `refusal` is the error, which is raised after the other ranks have been told.
    """

    group: Crowd
    device: torch.device
    rank: int
    size: int
    place: int
    count: int
    path: Path
    refusal: AttachError | None

    @staticmethod
    def in_group(group: Crowd, device: torch.device) -> "Endpoint":
        if isinstance(group, Members):
            numbers = group.rank, group.size, group.place, len(group.present.ranks)
        else:
            rank, size = (0, 1) if group is None else (group.rank(), group.size())
            numbers = rank, size, rank, size
        try:
            return Endpoint(group, device, *numbers, path(group, numbers[-1], device), None)
        except AttachError as refusal:
            return Endpoint(group, device, *numbers, "alone", refusal)

    def way(self, served: bool) -> Path:
        """The path of a comm thread; a `served` one receives from any rank, which NCCL cannot, so it goes through the host."""
        return "staged" if served and self.path == "nccl" else self.path

    @property
    def hosts_the_store(self) -> bool:
        """True if the store ends with this process and others need it. The store of elastic members has its own process."""
        return self.size > 1 and self._theirs is not None and shutdown.hosts_the_store()

    @property
    def keeps_the_store(self) -> bool:
        return self._theirs is not None and 0 in dist.get_process_group_ranks(self._theirs)

    @property
    def _theirs(self) -> dist.ProcessGroup | None:
        return None if isinstance(self.group, Members) else self.group

    def make_store(self) -> SharedStore:
        """A new part of the store for this group."""
        if self.group is None:
            return SharedStore.alone()
        if isinstance(self.group, Members):
            return self.group.meeting
        ranks = dist.get_process_group_ranks(self.group)
        name = f"gossamer/{self.group.group_name}/{ranks[0]}"
        _made[name] += 1
        part = SharedStore(default_store(), self.rank, self.size).under(f"{name}/{_made[name]}")
        if self.size > 1 and part.flag_is_up(f"pulse/{self.rank}"):
            raise PeerError(
                f"rank {self.rank} was started again with the store of the ranks before, which still holds their addresses, so that "
                f"ranks would wait for dead processes. {ONE_STORE}"
            )
        return part

    def connect(self, way: Path, waits: Timeouts, meet: Meet, among: Among) -> Connection:
        """Connect a comm thread to these ranks; all of them call this together."""
        if self.refusal is not None:
            raise self.refusal
        ranks = range(self.count) if among is None else among
        rank, size = ranks.index(self.place), len(ranks)
        if self.group is None or way == "alone":
            return Gloo(None, rank, size)
        if way == "nccl" and not isinstance(self.group, Members):
            if among is None:
                where = nccl.card_of(self.device)
                nccl.refuse_shared({rank: where} | meet(where))
            # A rank that is alive is waited for beyond the deadline, but NCCL's watchdog does not know of it.
            deadline = waits.deadline if waits.patience == "work" else max(waits.deadline, _DAY)
            everyone = dist.get_process_group_ranks(self.group)
            group = nccl.new_group([everyone[r] for r in ranks], size, deadline, self.device)
            return nccl.Nccl(group, rank, size, self.device)
        patience = waits.deadline
        if isinstance(self.group, Members):  # one may have died since it posted its address
            patience = min(patience, max(self.group.silence, _CONNECT))
        group = gloo(meet, rank, size, patience)
        return Gloo(group, rank, size) if way == "gloo" else Staged(group, rank, size, self.device)


def path(group: dist.ProcessGroup | Members | None, size: int, device: torch.device) -> Path:
    """The path for a group's tensors on a device.

    The group's backend name does not suffice: a group may have several backends, and the name "undefined".
    """
    if group is None or size == 1:
        return "alone"
    if isinstance(group, Members):
        return "gloo" if device.type == "cpu" else "staged"
    has = backends(group)
    if device.type == "cpu" and has.get("cpu") == "gloo":
        return "gloo"
    if device.type == "cuda" and has.get("cuda") == "nccl":
        return "nccl"
    if device.type == "cuda" and "gloo" in has.values():
        return "staged"
    raise AttachError(
        f"the model is on {device}, and the process group has no backend that gossamer can use there (it has "
        f"{', '.join(f'{b} for {d}' for d, b in has.items()) or 'none'}): call torch.distributed.init_process_group"
        f"('{'cpu:gloo,cuda:nccl' if device.type == 'cuda' else 'gloo'}'), or give "
        "process_group=torch.distributed.new_group(backend='gloo')"
    )


def backends(group: dist.ProcessGroup) -> dict[str, str]:
    """The backend name of each device type.

    >>> _read("cpu:gloo,cuda:nccl")
    {'cpu': 'gloo', 'cuda': 'nccl'}
    """
    return _read(dist.get_backend_config(group))


def _read(configuration: str) -> dict[str, str]:
    pairs = (entry.partition(":") for entry in configuration.split(","))
    return {device: backend for device, _, backend in pairs if backend}
