"""ATOMO: a gradient as a sum of atoms, a few of which are kept at random."""

from collections.abc import Iterator, Sequence
from math import ceil, prod
from typing import Annotated, Literal, NamedTuple, final

import torch
from torch import Tensor

from gossamer import kernels
from gossamer.codecs.atoms import Basis, EntryAtom, Shape
from gossamer.codecs.base import FewBytes, Unbiased
from gossamer.codecs.noise import uniform
from gossamer.codecs.waterfill import independent, probabilities, systematic
from gossamer.core.binding import Binding
from gossamer.core.bucket import Bucket, Layout, Segment, State
from gossamer.core.contracts import Codec, Context
from gossamer.core.errors import AttachError, WireError
from gossamer.core.parts import part, require
from gossamer.core.ranges import LogRange
from gossamer.core.wire import expect, pack, take


@final
@part("atomo", sample="atomo(entry(), share=0.25)")
class Atomo(Unbiased, FewBytes, Codec):
    """ATOMO: write a tensor as a sum of atoms and keep a random few, larger ones with higher probability.

    g = sum_k c_k a_k;  decoded sum over the kept of c_k / p_k a_k, atom k being kept with probability p_k. Unbiased whatever p
    is, with variance sum w_k^2 (1 / p_k - 1), w_k = |c_k| |a_k|. The p_k = min(1, theta w_k) make it least for a budget sum p_k,
    given as a number of `atoms` for every tensor, or as a `share` of the tensor's bytes.

    The way of drawing does not change the p_k, nor the variance where atoms are orthogonal. `draws="systematic"`: always the same
    number of atoms, so that the length of a message is known. `draws="independent"`: each atom independently, as in the paper:
    that number on average, possibly none. The length then costs one more small message, and on a GPU the host waits.

    Entry by entry, a budget of |g|_1 / |g|_inf is TernGrad, and one of |g|_1 / |g|_2 is QSGD of one level.
    Tensors that the atoms would not shorten are sent in full, and so are those that the basis does not take, such as vectors for
    `svd()`. A tensor whose share is less than one atom is sparsified entry by entry.

    Use: for very few bytes without a memory, in a basis of few large atoms: `svd()` for matrices. Take `share` under `scatter`,
    so that bytes do not grow with the number of ranks: a chunk of a matrix is a smaller matrix.

    Not for: training whose steps count: all that is left out adds noise, often several times the gradient itself.

    Wire: 4 bytes for each element that is sent in full; then the atoms: `svd()` 4 (n + m) bytes each, `entry()` and `dct()` 8.
    Independent draws begin with 4 bytes per tensor, the number of its atoms.

    >>> from gossamer.codecs import SVD
    >>> from gossamer.core.rng import CounterRng
    >>> block = Bucket.of({"w": torch.outer(torch.arange(8.0), torch.ones(8))})
    >>> codec = Atomo(SVD(), atoms=1)
    >>> wire = codec.encode(block, {}, Context(0, 1, 0, CounterRng(0, 0, 0)))
    >>> wire.numel(), torch.allclose(codec.decode(wire, block), block.flat, atol=1e-5)
    (64, True)

    Paper: Wang et al., ATOMO: Communication-efficient Learning via Atomic Sparsification, NeurIPS 2018.
    """

    basis: Basis
    atoms: int | float | None = None
    share: Annotated[float | None, LogRange(0.02, 0.3)] = None
    draws: Literal["systematic", "independent"] = "systematic"

    def __post_init__(self) -> None:
        require(
            (self.atoms is None) != (self.share is None),
            "atomo: pass a budget: either atoms (per tensor; the paper uses 1 to 4 of svd()) or share (of its bytes)",
        )
        require(
            self.atoms is None or 0 < self.atoms < float("inf"),
            f"atomo: atoms must be more than 0, got {self.atoms}: with none nothing would be learned; the paper uses 1 to 4 of svd()",
        )
        require(
            self.share is None or 0 < self.share < 1,
            f"atomo: share must lie between 0 and 1, got {self.share}; 0.05 sends a twentieth of the bytes, and fp32() all",
        )
        require(
            self.draws == "independent" or self.atoms is None or self.atoms == int(self.atoms),
            f"atomo: atoms must be a whole number with draws='systematic', got {self.atoms}; round it, or use draws='independent'",
        )

    @property
    def contracts(self) -> bool:
        return False  # its variance exceeds the gradient itself

    def omega(self, layout: Layout) -> float:
        """Upper bound, attained if all atoms are equally likely: count / budget - 1."""
        groups, _ = self._ways(layout)
        return max((g.basis.stretch * g.there / g.budget - 1 for g in groups), default=0.0)

    def fits(self, binding: Binding) -> None:
        super().fits(binding)
        filled = [s for layout in binding.layouts for s in layout.segments if s.numel > 1]
        if binding.trains_alone or not filled or any(self._kept(s.shape)[1] for s in filled):
            return
        largest = max(filled, key=lambda s: s.numel)
        raise AttachError(
            f"{self} would send every tensor of this model in full, and save nothing: {self._why(largest)}. "
            f"Use fewer atoms, another basis, such as entry(), or another codec, such as fp32()."
        )

    def _why(self, s: Segment) -> str:
        if not self.basis.takes(s.shape):
            return f"the largest, {s.name}, has the shape {s.shape}, which {self.basis} does not take"
        return (
            f"of the largest, {s.name} {s.shape}, each of {self.basis.count(s.shape)} atoms is {4 * self.basis.width(s.shape)} "
            f"bytes long, and all of it {4 * s.numel}"
        )

    def wire_bytes(self, layout: Layout) -> int | None:
        groups, plain = self._ways(layout)
        if self.draws == "independent" and groups:
            return None
        return 4 * sum(s.numel for s in plain) + sum(4 * g.width * ceil(g.budget) * len(g.segments) for g in groups)

    def wire_limit(self, layout: Layout) -> int:
        fixed = self.wire_bytes(layout)
        if fixed is not None:
            return fixed
        groups, plain = self._ways(layout)
        most = sum((g.width * g.there + 1) * len(g.segments) for g in groups)
        return 4 * (sum(s.numel for s in plain) + most)

    def encode(self, block: Bucket, state: State, context: Context) -> Tensor:
        flat, (groups, plain) = block.flat.float(), self._ways(block.layout)
        scales = _scales(flat, block.layout)
        rows = [r for g in groups for r in self._drawn(g, flat, scales, block.name, context)]
        said = list[Tensor]()
        if self.draws == "independent":
            said.append(torch.tensor([r.shape[0] for r in rows], dtype=torch.int32, device=flat.device))
        return pack(*said, *(flat[s.offset : s.offset + s.numel] for s in plain), *rows, flat[:0])

    def accumulate(self, wire: Tensor, layout: Layout, into: Tensor, weight: float) -> None:
        groups, plain = self._ways(layout)
        dense, rows = self._open(wire, layout, groups, sum(s.numel for s in plain))
        for s, values in zip(plain, dense.split([s.numel for s in plain]), strict=True):
            into[s.offset : s.offset + s.numel].add_(values, alpha=weight)
        members = [(g, s) for g in groups for s in g.segments]
        for (g, s), atoms in zip(members, rows, strict=True):
            g.basis.add(atoms, g.shape, into[s.offset : s.offset + s.numel], weight)

    def _drawn(
        self, group: "_SameShape", flat: Tensor, scales: dict[str, Tensor], block: str, context: Context
    ) -> Iterator[Tensor]:
        """The rows of these tensors, tensor by tensor where each has another number of them.

        Of a tensor that is not finite there is at least one row, and it is not finite.
        """
        name = f"{block}/{group.segments[0].name}/atomo"
        scale = torch.stack([scales[s.name] for s in group.segments])
        atoms = group.basis.apart(_sized(group, flat, scale), context.rng, name)
        first = torch.where(scale.isfinite(), atoms.weights[:, 0], 1.0)
        weights = torch.cat([first[:, None], atoms.weights[:, 1:]], 1)
        p = probabilities(weights, group.budget)
        if self.draws == "systematic":
            places, there = systematic(p, ceil(group.budget), uniform(p.shape[0], context.rng.key(name), p.device))
            gains = torch.where(there, scale[:, None] / p.gather(1, places), scale[:, None] * 0.0)
            yield atoms.rows(slice(0, p.shape[0]), places, gains.float()).flatten(0, 1)
            return
        kept = independent(p, context.rng.uniform(name, *p.shape).to(p.device))
        for i, places in enumerate(kept):
            yield atoms.rows(slice(i, i + 1), places[None], (scale[i] / p[i][places])[None].float())[0]

    def _open(
        self, wire: Tensor, layout: Layout, groups: "Sequence[_SameShape]", dense: int
    ) -> tuple[Tensor, list[Tensor]]:
        """Split a message: the elements sent in full, and the rows of each other tensor."""
        members = [g for g in groups for _ in g.segments]
        if self.draws == "systematic" or not groups:
            expect(wire, self.wire_bytes(layout) or 0, "atomo")
            counts = [ceil(g.budget) for g in members]
            head, rest = take(wire, torch.float32, dense)
        else:
            said, rest = take(wire, torch.int32, len(members))
            head, rest = take(rest, torch.float32, dense)
            counts: list[int] = said.tolist()
            if any(not 0 <= n <= g.there for n, g in zip(counts, members, strict=True)):
                raise WireError(
                    f"atomo: {max(counts)} atoms are announced, or fewer than none, of tensors that have fewer"
                )
            expect(rest, sum(4 * n * g.width for n, g in zip(counts, members, strict=True)), "atomo")
        rows = list[Tensor]()
        for n, g in zip(counts, members, strict=True):
            one, rest = take(rest, torch.float32, n, g.width)
            rows.append(one)
        return head, rows

    def _kept(self, shape: Shape) -> tuple[Basis, float]:
        """Basis and number of kept atoms for a tensor of this shape; 0 atoms if it is sent in full."""
        if not self.basis.takes(shape):
            return self.basis, 0.0
        numel, basis, budget = prod(shape), self.basis, self.atoms
        if self.share is not None:
            if basis.width(shape) > self.share * numel:
                basis = EntryAtom()
            budget = max(1.0, self.share * numel // basis.width(shape))
        return basis, budget if budget is not None and ceil(budget) * basis.width(shape) < numel else 0.0

    def _ways(self, layout: Layout) -> "tuple[list[_SameShape], list[Segment]]":
        """Tensors grouped by shape, and the segments that are sent in full."""
        by_shape, plain = dict[Shape, list[Segment]](), list[Segment]()
        for s in layout.segments:
            if s.numel and self._kept(s.shape)[1]:
                by_shape.setdefault(s.shape, []).append(s)
            elif s.numel:
                plain.append(s)
        groups = [_SameShape(shape, *self._kept(shape), tuple(ss)) for shape, ss in by_shape.items()]
        return groups, plain


class _SameShape(NamedTuple):
    """Tensors of one shape, their basis, and the number of atoms kept of each."""

    shape: Shape
    basis: Basis
    budget: float
    segments: tuple[Segment, ...]

    @property
    def width(self) -> int:
        """Number of 4-byte words sent per atom."""
        return self.basis.width(self.shape)

    @property
    def there(self) -> int:
        """Number of atoms of each tensor."""
        return self.basis.count(self.shape)


def _scales(flat: Tensor, layout: Layout) -> dict[str, Tensor]:
    """Scale of every tensor: the largest power of two not above its largest element; NaN if some element is not finite.

    A power of two takes no digit away: an atom that is certain arrives as it was.
    """
    largest = kernels.absmax(flat, layout.bounds)
    powers = torch.ldexp(torch.ones_like(largest), torch.frexp(largest)[1] - 1)
    scales = torch.where(largest.isfinite(), torch.where(largest > 0, powers, 1.0), torch.nan)
    return {s.name: scale for s, scale in zip(layout.segments, scales, strict=True)}


def _sized(group: _SameShape, flat: Tensor, scale: Tensor) -> Tensor:
    """The tensors divided by their scales, concatenated; zeros for a tensor with an element that is not finite."""
    views = [flat[s.offset : s.offset + s.numel].view(1, *group.shape) for s in group.segments]
    tensors = views[0] if len(views) == 1 else torch.cat(views)
    sized = tensors / scale.view(-1, *[1] * len(group.shape))
    return sized.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
