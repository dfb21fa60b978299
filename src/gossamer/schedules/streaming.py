"""Streaming DiLoCo: fragments of the model are averaged one after the other, and applied some steps later."""

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Literal, final

import torch

from gossamer.core.constraints import Constraint, excludes
from gossamer.core.loop import Loop
from gossamer.core.parts import part, require
from gossamer.core.ranges import Choice, LogRange, Range
from gossamer.core.schedule import Schedule, Shape
from gossamer.core.verbs import OptimizerStep, Program
from gossamer.schedules import fragments as pieces
from gossamer.schedules.rounds import (
    OuterStep,
    differences,
    just_before_landing,
    lands,
    refuse_delay,
    remember_anchor,
    return_to_anchor,
)


@final
@part("streaming", sample="streaming(8)")
class Streaming(Schedule):
    """Averages each fragment of the model every `every` steps, at its own step, and applies it `delay` steps later.

    D = mean_i (a - x_i) of a fragment, launched;  v = momentum v + D;  a -= rate (D + momentum v);  `delay` steps after the
    launch, x_i = mixing x_i + (1 - mixing) a. So no step sends more than one fragment. Every fragment has its own anchor and velocity. With one fragment, no delay and no mixing it is `diloco`, bit for bit.

    `fragments`: their number; or patterns of parameter names, of which the first match counts: ("embed*", "blocks.?.*", "*").
    By default one per layer, at most 8. `cut="strided"` assigns layers in turn, as in the paper; "balanced" assigns tensors so
    that all fragments have about the same size.

    In the long run a local step counts g (1 - (1 - mixing) delay / every) / (1 - mixing + mixing g) times, with g = rate /
    (1 - momentum), which `gain` computes: choose mixing and momentum together. Averages are applied at fixed steps, however
    early they arrive, and pass through the recipe's memory and exchange. If one is not finite, all ranks return to that
    fragment's anchor.

    On one rank fragments take their outer steps too, and nothing is sent.

    Use: across sites: averages overlap with the next steps, and no step sends a whole model.

    Not for: networks on which one fragment takes longer than `delay` steps, because then training waits for it.

    Wire: the exchange's bytes once per `every` steps, overlapped with computing, one fragment at a time.

    >>> Streaming(100, fragments=4, delay=5)
    streaming(100, fragments=4, delay=5)
    >>> round(Streaming(100, delay=5).gain, 2)
    1.56

    Paper: Douillard et al., Streaming DiLoCo with Overlapping Communication: Towards a Distributed Free Lunch, 2025.
    """

    every: Annotated[int, Choice(4, 8, 12, 24, 48)]
    fragments: int | tuple[str, ...] | None = None
    delay: int = 1
    mixing: Annotated[float, Range(0.1, 0.9)] = 0.5
    rate: Annotated[float, LogRange(0.2, 1.0)] = 0.4
    momentum: Annotated[float, Range(0.0, 0.9)] = 0.9
    cut: Annotated[Literal["strided", "balanced"], Choice("strided", "balanced")] = "strided"

    def __post_init__(self) -> None:
        require(self.every >= 1, f"streaming: every must be at least 1 step, got {self.every}; the paper uses 100")
        refuse_delay("streaming", self.delay, self.every)
        require(
            0 <= self.mixing < 1,
            f"streaming: mixing must lie in [0, 1), got {self.mixing}: 1 keeps each rank's own model and never synchronises; the "
            "paper uses 0.5",
        )
        require(
            self.mixing > 0 or self.delay == 0,
            f"streaming: mixing=0.0 with delay={self.delay} discards the {self.delay} local steps taken meanwhile; use mixing=0.5, or "
            "delay=0",
        )
        require(0 <= self.momentum < 1, f"streaming: momentum must lie in [0, 1), got {self.momentum}; 0.9 is usual")
        require(self.rate > 0, f"streaming: rate must be positive, got {self.rate}; 0 would freeze the model")
        require(
            self.rate < self.stable,
            f"streaming: a rate of {self.rate} with mixing={self.mixing} and momentum={self.momentum} diverges; the rate must "
            f"be below {self.stable:.3g}",
        )
        count = len(self.fragments) if isinstance(self.fragments, tuple) else self.fragments
        if count is not None:
            pieces.refuse_slots("streaming", self.fragments, count, self.every)

    @property
    def stable(self) -> float:
        """Return the outer rate from which on training diverges."""
        if not self.mixing:
            return float("inf")
        return (1 + self.momentum) * (1 + 1 / self.mixing) / (1 + 2 * self.momentum)

    @property
    def gain(self) -> float:
        """Return how many times a local step counts in the long run."""
        g = self.rate / (1 - self.momentum)
        return g * (1 - (1 - self.mixing) * self.delay / self.every) / (1 - self.mixing + self.mixing * g)

    @property
    def constraints(self) -> tuple[Constraint, ...]:
        if self._is_whole:
            return ()
        because = (
            "{controller} under {schedule}: it needs means of whole models, and here one fragment is averaged at a time; drop it, or "
            "use diloco"
        )
        return (excludes("control", because=because),)

    @property
    def _is_whole(self) -> bool:
        return self.fragments == 1 or (isinstance(self.fragments, tuple) and len(self.fragments) == 1)

    @cached_property
    def shape(self) -> Shape:
        syncs = self._is_whole and self.delay == 0 and self.mixing == 0
        return Shape(period=self.every, syncs=syncs, works_alone=True, outlasts="flights")

    def ends_round(self, step: int) -> bool:
        return just_before_landing(step, self.every, self.delay)

    def fragment_of(self, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, int]:
        if isinstance(self.fragments, tuple):
            of, called = pieces.matched(shapes, self.fragments), [repr(pattern) for pattern in self.fragments]
        else:
            count = self.fragments or pieces.usual(shapes, self.every)
            of = (pieces.strided if self.cut == "strided" else pieces.balanced)(shapes, count)
            called = [f"the {p + 1}." for p in range(count)]
        pieces.refuse_empty(self, shapes, of, called)
        return of

    # -- a step ----------------------------------------------------------------------------------------------------------

    def step(self, loop: Loop) -> Program[None]:
        remember_anchor(loop, loop.parameters)
        yield OptimizerStep()
        parts = fragments_of(loop)
        since = [loop.step - self.every * (p + 1) // len(parts) for p in range(len(parts))]
        for fragment, steps in zip(parts, since):
            if self.delay and lands(steps, self.every, self.delay) and fragment.averages.in_flight():
                yield from self._land(fragment)
        for fragment, steps in zip(parts, since):
            if steps % self.every:
                continue
            if not fragment.averages.in_flight():  # else this rank has come while the others waited for it
                yield from fragment.averages.launch(differences(fragment, fragment.parameters()))
            if self.delay == 0:
                yield from self._land(fragment)

    def _land(self, fragment: Loop) -> Program[None]:
        """Move the fragment's anchor, and the model towards it; all the way if the average was not finite."""
        means = yield from fragment.averages.wait()
        outer = OuterStep(self.momentum, self.rate, by_lr=False, nesterov=True)
        for bucket, mean, lr in zip(fragment.buckets, means or [], fragment.optimizer.lrs):
            outer.take(bucket, mean, lr)
        if means is None or not self.mixing:
            return_to_anchor(fragment)
            return
        held = zip(fragment.parameters(), fragment.states)
        fragment.assign([torch.lerp(x, s["anchor"], 1 - self.mixing, out=x) for x, s in held])


def fragments_of(loop: Loop) -> list[Loop]:
    """Return one loop per fragment of the model."""
    numbers = [bucket.fragment for bucket in loop.buckets]
    return [loop.part([i for i, n in enumerate(numbers) if n == p]) for p in range(max(numbers) + 1)]
