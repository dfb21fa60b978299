"""Optimizers: the interface that a worker needs, and several optimizers combined into one."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch.optim import Optimizer


class Optimizing(Protocol):
    """The interface of an optimizer, or of several combined."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...
    @property
    def state(self) -> Mapping[Any, Any]: ...


class Together:
    """Several optimizers for one model, combined into one; the order of their groups is fixed."""

    def __init__(self, members: Sequence[Optimizer]) -> None:
        self.members = tuple(members)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for member in self.members for group in member.param_groups]

    @property
    def state(self) -> Mapping[Any, Any]:
        return {parameter: kept for member in self.members for parameter, kept in member.state.items()}


def members(optimizer: Optimizing) -> tuple[Any, ...]:
    """The combined optimizers, or the single one."""
    return optimizer.members if isinstance(optimizer, Together) else (optimizer,)
