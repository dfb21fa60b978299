"""Bases for ATOMO: how a tensor is written as a sum of atoms. For shared bases indices and coefficients are sent."""

from abc import abstractmethod
from functools import lru_cache
from math import pi, prod
from typing import ClassVar, Protocol, final

import torch
from torch import Tensor

from gossamer import kernels
from gossamer.codecs.topk import add
from gossamer.core.binding import Binding
from gossamer.core.errors import AttachError
from gossamer.core.parts import Part, part, require
from gossamer.core.rng import CounterRng

Shape = tuple[int, ...]
_NEAR = 1e-5  # what a basis may lose on the way there and back, relative to what it was given
_TRIED = 3  # shapes, and blocks of each


class Atoms(Protocol):
    """Decomposition of tensors of one shape."""

    @property
    def weights(self) -> Tensor:
        """Weight of every atom of every tensor: |coefficient| |atom|."""
        ...

    def rows(self, which: slice, places: Tensor, gains: Tensor) -> Tensor:
        """Encode the chosen atoms of some tensors, the same number of each, multiplied by `gains`: in float32, tensor by tensor,
        one row per atom.
        """
        ...


class Basis(Part):
    """A basis: a way to write tensors as sums of atoms.

    Law: the sum of all atoms is the tensor. The sum of their squared weights is at most `stretch` times the tensor's square.
    """

    kind: ClassVar[str] = "basis"

    @property
    def stretch(self) -> float:
        """Upper bound of (sum of squared weights) / |tensor|^2; 1 for orthonormal atoms."""
        return 1.0

    def takes(self, shape: Shape) -> bool:
        """True if the basis applies to tensors of this shape."""
        return True

    @abstractmethod
    def count(self, shape: Shape) -> int:
        """Number of atoms of a tensor of this shape."""

    @abstractmethod
    def width(self, shape: Shape) -> int:
        """Number of 4-byte words sent per atom."""

    @abstractmethod
    def apart(self, tensors: Tensor, rng: CounterRng, name: str) -> Atoms:
        """Decompose tensors of one shape, stacked along the first dimension. All are finite, and none is much larger than 1."""

    @abstractmethod
    def add(self, rows: Tensor, shape: Shape, into: Tensor, weight: float) -> None:
        """Add `weight` times the atoms in some rows to a flat tensor."""


class SharedBasis(Basis):
    """A fixed basis, the same on all ranks: inherit from it and define `analysis` and `synthesis`.

    It may be any, also one of more atoms than the tensor has elements; it is tried when a recipe meets a model. Law:
    `synthesis(analysis(x))` is x to 1e-5; synthesis is linear, and the same on all ranks.
    """

    @abstractmethod
    def analysis(self, tensors: Tensor) -> Tensor:
        """The coefficients of some tensors of one shape, one row each; the first dimension says which tensor."""

    @abstractmethod
    def synthesis(self, coefficients: Tensor, shape: Shape) -> Tensor:
        """The tensor of this shape with these coefficients, in their precision."""

    def norms(self, shape: Shape) -> Tensor | None:
        """The norm of each atom, or None if all are 1."""
        return None

    def count(self, shape: Shape) -> int:
        return prod(shape)

    def width(self, shape: Shape) -> int:
        return 2

    def apart(self, tensors: Tensor, rng: CounterRng, name: str) -> Atoms:
        return _Coefficients(self.analysis(tensors), self.norms(tuple(tensors.shape[1:])))

    def add(self, rows: Tensor, shape: Shape, into: Tensor, weight: float) -> None:
        places, values = _read(rows)
        places, values = kernels.within(places, values, self.count(shape))
        coefficients = into.new_zeros(self.count(shape)).index_add_(0, places.long(), values.to(into.dtype))
        into.add_(self.synthesis(coefficients, shape).reshape(-1), alpha=weight)

    def fits(self, binding: Binding) -> None:
        shapes = {s.shape for layout in binding.layouts for s in layout.segments if s.numel and self.takes(s.shape)}
        rng = torch.Generator().manual_seed(0)
        for shape in sorted(shapes, key=prod)[:_TRIED]:
            given = torch.randn(_TRIED, *shape, generator=rng, device="cpu", dtype=torch.float32)
            back = torch.stack([self.synthesis(c, shape).reshape(shape) for c in self.analysis(given)])
            lost = float((back - given).norm() / given.norm())
            if not lost <= _NEAR:
                raise AttachError(
                    f"{self}: synthesis(analysis(x)) is not x for tensors of {shape}: the relative error is {lost:.1e}, the limit "
                    f"{_NEAR:.0e}. Gradients would be wrong; correct the basis, or let `takes` return False for such shapes."
                )


class _Coefficients:
    """Atoms of a shared basis: an index and a coefficient each."""

    def __init__(self, coefficients: Tensor, norms: Tensor | None) -> None:
        self.coefficients = coefficients
        self.weights = coefficients.abs() if norms is None else coefficients.abs() * norms.to(coefficients)

    def rows(self, which: slice, places: Tensor, gains: Tensor) -> Tensor:
        values = self.coefficients[which].gather(1, places) * gains
        return torch.stack([places.int().view(torch.float32), values], 2)


def _read(rows: Tensor) -> tuple[Tensor, Tensor]:
    return rows[:, 0].contiguous().view(torch.int32), rows[:, 1].contiguous()


@final
@part("entry")
class EntryAtom(Basis):
    """Entry-wise basis: every element is an atom.

    Use: where few elements hold most of a gradient, as in embeddings, and for vectors.

    Not for: gradients of full matrices, where a few directions hold more: see `svd`.

    Wire: 8 bytes per atom: an index and a value.

    >>> EntryAtom().count((3, 4)), EntryAtom().width((3, 4))
    (12, 2)

    Paper: Wang et al., ATOMO, NeurIPS 2018.
    """

    def count(self, shape: Shape) -> int:
        return prod(shape)

    def width(self, shape: Shape) -> int:
        return 2

    def apart(self, tensors: Tensor, rng: CounterRng, name: str) -> Atoms:
        return _Coefficients(tensors.reshape(tensors.shape[0], -1), None)

    def add(self, rows: Tensor, shape: Shape, into: Tensor, weight: float) -> None:
        add(*_read(rows), into, weight)


@final
@part("dct")
class DCT(SharedBasis):
    """Cosine basis: the orthonormal DCT-II of every `length` consecutive elements.

    Use: where neighbouring elements are similar, as in the kernels of a convolution.

    Not for: gradients without a meaningful order of elements, such as a linear layer's: `entry` had the same variance there, in
    every layer of a small Transformer, and `svd` a quarter of it or less.

    Wire: 8 bytes per atom: an index and a coefficient.

    >>> flat = DCT(length=4).analysis(torch.ones(1, 8))
    >>> [round(c, 3) for c in flat[0].tolist()]
    [2.0, 0.0, 0.0, 0.0, 2.0, 0.0, 0.0, 0.0]

    Paper: Wang et al., ATOMO, NeurIPS 2018.
    """

    length: int = 64

    def __post_init__(self) -> None:
        require(2 <= self.length <= 4096, f"dct: length must be between 2 and 4096, got {self.length}; 64 is usual")

    def analysis(self, tensors: Tensor) -> Tensor:
        flat = tensors.reshape(tensors.shape[0], -1)
        return self._turned(flat, turned_back=False)

    def synthesis(self, coefficients: Tensor, shape: Shape) -> Tensor:
        return self._turned(coefficients[None], turned_back=True).view(shape)

    def _turned(self, flat: Tensor, turned_back: bool) -> Tensor:
        """Runs of `length`, and the rest as a shorter one."""
        full = flat.shape[1] // self.length * self.length
        pieces = list[Tensor]()
        for piece, length in ((flat[:, :full], self.length), (flat[:, full:], flat.shape[1] - full)):
            if piece.shape[1]:
                rows = waves(length, flat.dtype, flat.device)
                turned = piece.reshape(-1, length) @ (rows if turned_back else rows.t())
                pieces.append(turned.view(flat.shape[0], -1))
        return torch.cat(pieces, 1) if pieces else flat


@lru_cache(maxsize=64)
def waves(length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """DCT basis vectors, one per row. Made on the host and copied synchronously, so that any stream may read them."""
    k = torch.arange(length, dtype=torch.float64, device="cpu")
    waves = torch.cos(pi / length * torch.outer(k, k + 0.5)) * (2 / length) ** 0.5
    waves[0] /= 2**0.5
    return waves.to(device, dtype)
