"""EDiT's guard of rounds: a rank whose difference is much longer than usual is left out, and others count by their length."""

from collections.abc import Sequence
from math import exp, inf, isfinite
from statistics import median
from typing import ClassVar, final

import torch
from torch import Tensor

from gossamer.core.bucket import State
from gossamer.core.loop import Loop
from gossamer.core.parts import Part, part, require
from gossamer.core.stream_events import read_numbers
from gossamer.core.verbs import Program, all_gather, join, start

FLOOR = 0.01  # the least deviation, as a part of the running mean: lengths that never differ have none


@final
@part("edit_guard")
class EDiTGuard(Part):
    """Weighs the ranks of a round by the length of their difference, leaves out unusual ones, and clips the mean.

    G_i = |a - x_i| over the whole model, with running mean mu_i and deviation s_i (of all rounds at first, later of the last
    1 / decay or so).  G_i > mu_i + z s_i: rank i is left out.
    w_i = exp(-G_i / median G);  D = sum w_i (a - x_i) / sum w_i;  D *= min(1, clip / |D|). The paper weighs by exp(-G_i), which
    depends on the units of the model; here lengths are divided by their median. It does so layer by layer; here one length
    counts for the model, so that buckets do not change the result.

    In the first `warmup` rounds nobody is left out, but a rank whose model is not finite always is. If no rank is left, all
    return to the anchor. With equal lengths, and z and clip never reached, rounds are the plain ones, bit for bit.

    Use: in `slowmo(100, guard=edit_guard())`, where now and then a rank goes astray: bad data, a spike of its loss.

    Not for: ranks whose data differ in kind: the one that has most to learn counts least. Nor ranks that deceive, whose message
    may be short; `gather(qsgd(), mean=median())` bears those.

    Wire: 8 bytes per rank and round.

    >>> EDiTGuard(z=4.0)
    edit_guard(z=4.0)

    Paper: Cheng et al., EDiT: A Local-SGD-Based Efficient Distributed Training Method for Large Language Models, ICLR 2025.
    """

    kind: ClassVar[str] = "guard"

    z: float = 3.0
    clip: float = 10.0
    decay: float = 0.02
    warmup: int = 10

    def __post_init__(self) -> None:
        require(self.z > 0, f"edit_guard: z must be positive, got {self.z}; 3 is usual")
        require(self.clip > 0, f"edit_guard: clip must be positive, got {self.clip}; it is the longest step of a round")
        require(0 < self.decay < 1, f"edit_guard: decay must lie in (0, 1), got {self.decay}; 0.02 is usual")
        require(self.warmup >= 0, f"edit_guard: warmup must be 0 rounds or more, got {self.warmup}")

    def average(self, loop: Loop, moved: Sequence[Tensor]) -> Program[list[Tensor] | None]:
        """Return the guarded mean of all ranks' differences; None if no rank is left."""
        lengths = yield from self._tell(loop, moved)
        own, state, size = loop.ranks.rank, loop.states[0], loop.ranks.size
        weights = self.weights(lengths, state)
        loop.record.finite(None, isfinite(lengths[own]))
        counted = [w * k for w, k in zip(weights, loop.ranks.weights or [1.0] * size, strict=True)]
        if not any(counted):
            loop.record.round_dropped()
            return None
        if not weights[own]:
            moved = [bucket.empty() for bucket in loop.buckets]
        means = yield from loop.counting(size * weights[own] / sum(counted)).averages.of(moved)
        return None if means is None else self._clipped(loop, means)

    def _clipped(self, loop: Loop, means: Sequence[Tensor]) -> list[Tensor]:
        """The mean, no longer than `clip`; the host need not know its length."""
        length = loop.ranks.whole_length(_length(means))
        scale = torch.full_like(length, self.clip).div_(length).clamp_(max=1.0)
        return [mean.mul_(scale.to(mean.dtype)) for mean in means]

    def weights(self, lengths: Sequence[float], state: State) -> list[float]:
        """Return the weight of each rank, the largest 1, and follow the running means in `state`."""
        past = state.get("guard")
        means, squares, rounds = [0.0] * len(lengths), [0.0] * len(lengths), 0
        if past is not None:
            means, squares, counted = past.cpu().clone().view(torch.float64).view(3, -1).tolist()
            rounds = int(counted[0])
        limits = [inf] * len(lengths)  # in the warm-up, so that means follow lengths that grow as the rate does
        if rounds >= max(self.warmup, 1):
            spreads = [max(s**0.5, FLOOR * m) for m, s in zip(means, squares, strict=True)]
            # Of a rank whose mean is 0 nothing is known yet: its models were not finite, or did not move.
            limits = [m + self.z * s if m else inf for m, s in zip(means, spreads, strict=True)]
        kept = [isfinite(g) and g <= limit for g, limit in zip(lengths, limits, strict=True)]
        for i, (length, limit) in enumerate(zip(lengths, limits, strict=True)):
            if isfinite(length):
                # One that is left out moves the mean as far as it may, so that a lasting change is followed.
                apart, rate = min(length, limit) - means[i], max(self.decay, 1 / (rounds + 1))
                means[i] += rate * apart
                squares[i] = (1 - rate) * (squares[i] + rate * apart * apart)
        counted = [float(rounds + 1)] * len(lengths)
        state["guard"] = torch.tensor([*means, *squares, *counted], dtype=torch.float64).view(torch.uint8)
        left = [g for g, stays in zip(lengths, kept, strict=True) if stays]
        if not left:
            return [0.0] * len(lengths)
        unit, least = median(left) or 1.0, min(left)
        return [exp((least - g) / unit) if stays else 0.0 for g, stays in zip(lengths, kept, strict=True)]

    def _tell(self, loop: Loop, moved: Sequence[Tensor]) -> Program[list[float]]:
        """Return the lengths of all ranks' differences; infinite where one is not finite."""
        wire = loop.ranks.whole_length(_length(moved)).view(1).view(torch.uint8)
        answers = yield from join((yield from start(all_gather(wire), "guard", loop.step)))
        lengths = read_numbers(*(a.clone().view(torch.float64) for a in answers))
        return [g if isfinite(g) else inf for g in lengths]


def _length(tensors: Sequence[Tensor]) -> Tensor:
    """The length of several tensors as one, on their device: a host that asked for it would wait."""
    each = [torch.linalg.vector_norm(t, dtype=torch.float64) for t in tensors]
    return each[0] if len(each) == 1 else torch.linalg.vector_norm(torch.stack(each))
