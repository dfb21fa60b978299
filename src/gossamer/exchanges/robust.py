"""Robust means: what is made of all ranks' messages where some of them may be wrong."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar, final

import torch
from torch import Tensor

from gossamer.core.bucket import State
from gossamer.core.parts import Part, part, require


class RobustMean(Part):
    """Makes one tensor of the decoded messages of all ranks, on each rank alike.

    Law: messages of fewer than the ranks it bears move the result no further than the others' own values reach; equal
    messages are returned exactly. It uses only messages that are finite; if too few are, its result is not finite.
    """

    kind: ClassVar[str] = "mean"

    @property
    def plain(self) -> bool:
        """True if it is the plain mean."""
        return False

    @property
    @abstractmethod
    def least(self) -> int:
        """The least number of ranks that it makes sense for."""

    @abstractmethod
    def of(self, rows: Tensor, fine: Tensor, state: State) -> Tensor:
        """Return the result for one row per message; `fine` is true for those that are finite, and only they count."""


@final
@part("median")
class Median(RobustMean):
    """The median of each element; of an even number of ranks the mean of the two in the middle.

    Use: where up to half of the ranks may send anything.

    Not for: ranks whose data differ: what only a minority of ranks wants is never learned. Among four honest ranks it gained
    nothing: after 60 steps of `fashion` training losses were .796 and .894 at seeds 0 and 1, under the mean .733 and .873.

    Wire: nothing of its own. The mean of all messages takes N log N operations an element, and N decoded messages of memory.

    >>> rows = torch.tensor([[1.0, 5.0], [2.0, 1e9], [3.0, 7.0]], dtype=torch.float32)
    >>> Median().of(rows, rows.isfinite().all(1), {})
    tensor([2., 7.])

    Paper: Yin, Chen, Ramchandran, Bartlett, Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates,
    ICML 2018.
    """

    @property
    def least(self) -> int:
        return 3

    def of(self, rows: Tensor, fine: Tensor, state: State) -> Tensor:
        return _middle(rows, fine, (fine.sum() - 1) // 2)


@final
@part("trimmed", sample="trimmed(1)")
class Trimmed(RobustMean):
    """The mean of each element without its `count` smallest and its `count` largest values; trimmed(0) is the plain mean.

    Use: where at most `count` ranks may send anything.

    Not for: ranks whose data differ much: the values left out are those that only few ranks have.

    Wire: nothing of its own. The mean of all messages takes N log N operations an element, and N decoded messages of memory.

    >>> rows = torch.tensor([[1.0], [2.0], [4.0], [1e9]], dtype=torch.float32)
    >>> Trimmed(1).of(rows, rows.isfinite().all(1), {})
    tensor([3.])

    Paper: Yin, Chen, Ramchandran, Bartlett, Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates,
    ICML 2018.
    """

    count: int

    def __post_init__(self) -> None:
        require(
            self.count >= 0, f"trimmed: count must be 0 ranks or more, got {self.count}; 1 leaves out one on each side"
        )

    @property
    def plain(self) -> bool:
        return self.count == 0

    @property
    def least(self) -> int:
        return 2 * self.count + 1

    def of(self, rows: Tensor, fine: Tensor, state: State) -> Tensor:
        most = (fine.sum() - 1) // 2  # of ranks too few, as on a small node, one or two are left
        return _middle(rows, fine, most.clamp(max=self.count))


@final
@part("clipped", sample="clipped(1.0)")
class Clipped(RobustMean):
    """Centred clipping: v += mean_i (x_i - v) min(1, tau / |x_i - v|), `times` times, from the last step's v (0 at first).

    A rank moves the result by tau / N at most, whatever it sends. With a tau that no length reaches it is
    the plain mean, to rounding. Lengths are those of a bucket, without the loss scale.

    Use: where ranks' gradients have a known length, so that a longer one is suspect; it costs no sorting.

    Not for: a tau far below the gradients' length, with which v follows slowly. With four honest ranks on `digits` it lost a
    little: held-out losses of .141 and .168 at two seeds, .113 and .163 without; with one that sent -4 times its gradient .51 and
    .57, where the plain mean did not train.

    Wire: nothing of its own. The mean of all messages takes N decoded messages of memory, and v is another copy.

    >>> rows = torch.tensor([[0.5], [-0.5], [1e9]], dtype=torch.float32)
    >>> Clipped(1.0).of(rows, rows.isfinite().all(1), {})
    tensor([0.3333])

    Paper: Karimireddy, He, Jaggi, Learning from History for Byzantine Robust Optimization, ICML 2021.
    """

    tau: float
    times: int = 1

    def __post_init__(self) -> None:
        require(
            self.tau > 0,
            f"clipped: tau must be positive, got {self.tau}; it is the length beyond which a message is clipped",
        )
        require(self.times >= 1, f"clipped: times must be at least 1, got {self.times}; 1 to 3 are usual")

    @property
    def least(self) -> int:
        return 3

    def of(self, rows: Tensor, fine: Tensor, state: State) -> Tensor:
        centre, count = state.get("centre"), fine.sum().clamp_min(1)
        if centre is None:
            centre = torch.zeros_like(rows[0])
        for _ in range(self.times):
            apart = torch.where(fine.unsqueeze(1), rows - centre, 0.0)
            lengths = torch.linalg.vector_norm(apart, dim=1, dtype=torch.float64)
            shares = (self.tau / lengths.clamp_min(self.tau)).to(rows.dtype)
            centre = centre + _summed([row * share for row, share in zip(apart, shares, strict=True)]) / count
        state["centre"] = centre
        return centre


def robust_mean(mean: RobustMean, decoded: Sequence[Tensor], state: State) -> Tensor:
    """Return the robust mean of the messages that are finite; not a number where too few of them are."""
    rows = torch.stack([*decoded])
    fine = rows.isfinite().all(1)
    enough = fine.sum() >= min(mean.least, len(decoded))
    return torch.where(enough, mean.of(rows, fine, state), torch.nan)


def _middle(rows: Tensor, fine: Tensor, cut: Tensor | int) -> Tensor:
    """Return each element's mean without its `cut` smallest and largest values, added in double precision."""
    count, places = fine.sum(), torch.arange(len(rows), device=rows.device)
    kept = (places >= cut) & (places < count - cut)  # rows that are not finite are the largest
    ordered = torch.where(fine.unsqueeze(1), rows, torch.inf).sort(0).values
    total = _summed([torch.where(keeps, row.double(), 0.0) for row, keeps in zip(ordered, kept, strict=True)])
    return (total / (count - 2 * cut)).to(rows.dtype)


def _summed(rows: Sequence[Tensor]) -> Tensor:
    """Add row after row, so that all ranks round alike."""
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total
