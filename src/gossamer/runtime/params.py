"""Params: the trained parameters as this rank holds them, whole or sharded."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from math import prod
from typing import Any, final

import torch
from torch import Tensor


class Param(ABC):
    """A trained parameter: how to read it, write it, and set its gradient.

    `parameter` is the tensor that autograd and the optimizer use. Where a rank holds only a part of it, it holds a part of
    every tensor with the same layout: its gradient and its momenta. `local` is that part.

    Law: the result of `local` is never kept. Loading, moving or sharding a model may put other storage behind the same
    parameter, between any two steps.
    """

    def __init__(self, parameter: Tensor) -> None:
        self.parameter = parameter

    @abstractmethod
    def local(self, tensor: Tensor) -> Tensor:
        """This rank's part of a tensor with the parameter's layout, as a writable view."""

    @abstractmethod
    def hand(self, part: Tensor) -> None:
        """Set this rank's part of the gradient for the optimizer, without a copy where possible."""

    @property
    def values(self) -> Tensor:
        return self.local(self.parameter.detach())

    @property
    def gradient(self) -> Tensor | None:
        """This rank's part of the gradient. It is dense: a sparse one can neither be flattened nor searched for its largest value."""
        grad = self.parameter.grad
        if grad is None:
            return None
        return self.local(grad.to_dense() if grad.is_sparse else grad)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of this rank's part."""
        return tuple(self.values.shape)

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The shape of the whole parameter, equal on all ranks."""
        return tuple(self.parameter.shape)

    @property
    def extent(self) -> int:
        """Elements of a part, on average over all parts; equal on all ranks, as all must cut a model into the same buckets."""
        return prod(self.whole_shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.parameter.dtype

    @property
    def device(self) -> torch.device:
        return self.parameter.device

    @property
    def trains(self) -> bool:
        """False if the parameter was frozen later."""
        return self.parameter.requires_grad

    def write(self, values: Tensor) -> None:
        """Copy values into the parameter in place, since other code may hold views of it."""
        self.values.copy_(values)

    def takes(self, view: Tensor) -> bool:
        """True if a view of a bucket can be the gradient without a copy: same dtype and memory layout."""
        return view.dtype == self.dtype and self.local(self.parameter).is_contiguous()

    def put_gradient(self, mean: Tensor) -> None:
        self.hand(mean if self.takes(mean) else torch.empty_like(self.values).copy_(mean))

    def forget_gradient(self) -> None:
        self.parameter.grad = None


@final
class Plain(Param):
    """A parameter that this rank holds whole."""

    def local(self, tensor: Tensor) -> Tensor:
        return tensor

    def hand(self, part: Tensor) -> None:
        self.parameter.grad = part


@final
class Sharded(Param):
    """A parameter that FSDP2 cuts: a DTensor, of which this rank holds a shard."""

    def local(self, tensor: Tensor) -> Tensor:
        with torch.no_grad():
            return local_part(tensor)

    def hand(self, part: Tensor) -> None:
        self.parameter.grad = whole_of(part, self.parameter)

    @property
    def extent(self) -> int:
        p: Any = self.parameter
        shards = prod(p.device_mesh.size(i) for i, place in enumerate(p.placements) if not place.is_replicate())
        return -(-prod(self.whole_shape) // shards)


def local_part(tensor: Tensor) -> Tensor:
    """The shard of a DTensor that this rank holds; other tensors as they are."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # pyright: ignore[reportAttributeAccessIssue]


def whole_of(part: Tensor, like: Any) -> Tensor:
    """The DTensor of which this rank holds a part; it is cut like another one."""
    return type(like).from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def is_sharded(tensor: Tensor) -> bool:
    """True for a DTensor. The class is compared by name: importing it takes time that dense models need not spend."""
    return any(kind.__name__ == "DTensor" for kind in type(tensor).__mro__)


def params_of(parameters: Mapping[str, Tensor]) -> dict[str, Param]:
    return {name: Sharded(p) if is_sharded(p) else Plain(p) for name, p in parameters.items()}
