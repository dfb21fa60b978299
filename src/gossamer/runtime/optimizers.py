"""Optimizers: the interface that a worker needs, and several optimizers combined into one."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch.optim import Optimizer


class Optimizing(Protocol):
    """The interface of an optimizer, or of several combined."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...


class Together:
    """Several optimizers for one model, combined into one; the order of their groups is fixed."""

    def __init__(self, members: Sequence[Optimizer]) -> None:
        self.members = tuple(members)
        self._places = dict[tuple[int, int], None]()  # of groups: the member, and the number there

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all members. One that is added later comes last, since buckets know theirs by its number."""
        self._places |= {(i, j): None for i, member in enumerate(self.members) for j in range(len(member.param_groups))}
        return [self.members[i].param_groups[j] for i, j in self._places]


def members(optimizer: Optimizing) -> tuple[Any, ...]:
    """The combined optimizers, or the single one."""
    return optimizer.members if isinstance(optimizer, Together) else (optimizer,)


def rate_of(group: Mapping[str, Any]) -> float:
    """A parameter group's learning rate; 1 where it is None, as of transformers' Adafactor, which finds its own."""
    return 1.0 if group["lr"] is None else float(group["lr"])
