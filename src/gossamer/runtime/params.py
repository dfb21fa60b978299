"""Leaves: what trains, as this rank holds it. A whole parameter, or its own part of one that other ranks hold the rest of."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor


class Param(ABC):
    """A tensor that trains: how it is read, written, and given a gradient.

    `parameter` is what autograd and the optimizer know it by. Where a rank holds a part of it only, it holds a part of
    whatever is laid out as it is: of its gradient, of its momenta. `local` is that part.

    Law: what `local` gives is never kept. Who loads, moves or shards a model may put other storage behind the same
    parameter, between any two steps.
    """

    def __init__(self, parameter: Tensor) -> None:
        self.parameter = parameter

    @abstractmethod
    def local(self, tensor: Tensor) -> Tensor:
        """This rank's part of a tensor that is laid out as the parameter is; to be written to as well."""

    @abstractmethod
    def hand(self, part: Tensor) -> None:
        """The optimizer shall find this as this rank's part of the gradient: the very tensor, where that can be."""

    @property
    def values(self) -> Tensor:
        return self.local(self.parameter.detach())

    @property
    def gradient(self) -> Tensor | None:
        grad = self.parameter.grad
        return None if grad is None else self.local(grad)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.parameter.dtype

    @property
    def device(self) -> torch.device:
        return self.parameter.device

    @property
    def trains(self) -> bool:
        """False if it has been frozen since."""
        return self.parameter.requires_grad

    def write(self, values: Tensor) -> None:
        """Copied, never bound anew: others hold views."""
        self.values.copy_(values)

    def takes(self, view: Tensor) -> bool:
        """Whether a part of a block can be its gradient as it is; else the parameter is narrower, or laid out otherwise."""
        return view.dtype == self.dtype and self.local(self.parameter).is_contiguous()

    def put_gradient(self, mean: Tensor) -> None:
        self.hand(mean if self.takes(mean) else torch.empty_like(self.values).copy_(mean))

    def forget_gradient(self) -> None:
        self.parameter.grad = None


@final
class Plain(Param):
    """A parameter that this rank holds all of."""

    def local(self, tensor: Tensor) -> Tensor:
        return tensor

    def hand(self, part: Tensor) -> None:
        self.parameter.grad = part


def params_of(parameters: Mapping[str, Tensor]) -> dict[str, Param]:
    return {name: Plain(p) for name, p in parameters.items()}
