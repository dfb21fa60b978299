"""NoLoCo: DiLoCo in random pairs: after each round a rank averages with one other rank, and none waits for all."""

from collections.abc import Sequence
from functools import cached_property, partial
from typing import Annotated, final

import torch
from torch import Tensor

from gossamer.core.bucket import Bucket, State
from gossamer.core.constraints import Constraint, those
from gossamer.core.contracts import Context, Peers, Policy
from gossamer.core.loop import Loop
from gossamer.core.parts import part, require
from gossamer.core.ranges import Choice, LogRange, Range
from gossamer.core.schedule import Schedule, Shape
from gossamer.core.verbs import OptimizerStep, Program
from gossamer.core.wire import expect, take
from gossamer.mixers.healing import is_finite, pick
from gossamer.mixers.push_sum import deliver
from gossamer.schedules import mixing
from gossamer.schedules.rounds import OuterStep, remember_anchor, return_to_anchor


@final
@part("noloco", sample="noloco(8)")
class NoLoCo(Schedule):
    """Takes `every` local steps, averages models with one random rank, then takes a momentum step of its own.

    a_i: the anchor of rank i.  In each round all ranks draw the same random pairs. For the pair (i, j)
    D = a_i - (x_i + x_j) / 2;  v_i = momentum v_i + D;  a_i -= rate v_i;  x_i = a_i.
    D is the pair's mean difference plus the difference of a_i from the pair's mean anchor, which pulls the two anchors
    together; so one model each way is enough. The paper sends the two apart, so that they could have rates of their own.

    Anchors differ. Their mean moves as under an average of all ranks, and without local steps their spread falls from round to
    round. With two ranks it is `slowmo(every, momentum, rate, by_lr=False)`, bit for bit. Of an odd number of ranks three form
    a circle in each round, where a rank's j is the one before it. One rank alone averages with nobody. A model that is not
    finite is replaced by the other of the pair, or by the anchor. Evaluate under `comm.consensus()`, which is the mean of all models.

    Use: among many ranks, where a round of `diloco` would wait for the slowest of them.

    Not for: few ranks, where an average of all costs little more than a pair's, and models that differ cost quality.

    Wire: 4 d bytes each way per pair and round (8 d in double precision).

    >>> NoLoCo(50)
    noloco(50)

    Paper: Kolehmainen, Blagoev, Donaghy, Ersoy, Nies, NoLoCo: No-all-reduce Low Communication Training Method for Large Models,
    2025.
    """

    every: Annotated[int, Choice(4, 8, 12, 24, 48)]
    rate: Annotated[float, LogRange(0.2, 1.0)] = 0.7
    momentum: Annotated[float, Range(0.0, 0.9)] = 0.9

    def __post_init__(self) -> None:
        require(self.every >= 1, f"noloco: every must be at least 1 step, got {self.every}; 50 is usual")
        require(0 <= self.momentum < 1, f"noloco: momentum must lie in [0, 1), got {self.momentum}; 0.9 is usual")
        require(self.rate > 0, f"noloco: rate must be positive, got {self.rate}; 0 would freeze the model")
        stable = 2 * (1 + self.momentum)
        require(
            self.rate <= stable,
            f"noloco: a rate of {self.rate} with momentum={self.momentum} drives anchors apart; the rate must be at most {stable:.3g}",
        )

    @cached_property
    def shape(self) -> Shape:
        return Shape(period=self.every, works_alone=True, counts_alike=True)

    @property
    def traits(self) -> frozenset[str]:
        return super().traits | those(rank_to_rank=True)

    @property
    def constraints(self) -> tuple[Constraint, ...]:
        return mixing.whole_models(
            "partners change, so a residual would go to another partner than it was left out for; drop the memory",
            "whole models are averaged; drop the {rules}",
            "rank to rank, uncompressed; use 'allreduce(fp32()) + {schedule}', or '{exchange} + slowmo(48)' to compress",
        )

    def policy(self, key: str) -> Policy:
        return "mean" if key in ("anchor", "velocity") else "equal"

    def step(self, loop: Loop) -> Program[None]:
        remember_anchor(loop, loop.parameters)
        yield OptimizerStep()
        if loop.step % self.every:
            return
        models, arrived = loop.parameters(), list[Sequence[Tensor]]()
        pair = pair_of(loop.ranks.context(loop.step))
        if loop.ranks.size > 1:
            yield from loop.messages.post(partial(_swap, pair), models)
            arrived = yield from loop.messages.collect()
        outer, source = OuterStep(self.momentum, self.rate, by_lr=False), pair.source
        for i, lr in enumerate(loop.optimizer.lrs):
            one = loop.part([i])
            # Both models are let go before the outer step, which needs memory of its own.
            moved = _moved(one, models.pop(0), source, arrived.pop(0) if arrived else ())
            outer.take(one.buckets[0], moved, lr)
        return_to_anchor(loop)


def pair_of(context: Context) -> Peers:
    """To whom this rank sends at this step, and from whom it receives: pairs in a random order that all ranks draw alike.

    Of an odd number of ranks the last three form a circle, so that every rank sends and receives one model.
    """
    size = context.size
    if size == 1:
        return Peers((), (), 0.0)
    order = context.rng.shared_normal("noloco/pairs", size).argsort().tolist()
    place = order.index(context.rank)
    first = size - 3 if size % 2 and place >= size - 3 else place // 2 * 2
    circle = order[first : first + 3] if first == size - 3 else order[first : first + 2]
    own = place - first
    return Peers((circle[(own + 1) % len(circle)],), (circle[own - 1],), 0.5)


def _swap(pair: Peers, block: Bucket, state: State, context: Context) -> Program[list[Tensor]]:
    """Send the model to one rank, and receive that of one; shards of a model to and from shards of the same models."""
    wire = block.flat.view(torch.uint8)
    return deliver([wire], pair, wire.numel())


def _moved(one: Loop, own: Tensor, source: Sequence[int], wires: Sequence[Tensor]) -> Tensor:
    """Return the anchor of one bucket minus the pair's mean."""
    own, other = _finite_pair(one, own, source, wires)
    anchor, buffers = one.states[0]["anchor"], one.buckets[0].layout.buffers
    moved = torch.sub(anchor, own, out=buffers.like(anchor))
    return moved.add_(torch.sub(anchor, other, out=buffers.like(anchor))).div_(2)


def _finite_pair(one: Loop, own: Tensor, source: Sequence[int], wires: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return one bucket's models of the pair; what is not finite is replaced by the other, or by the anchor if both are not."""
    other = own
    for wire in wires:
        expect(wire, own.numel() * own.element_size(), "noloco")
        other = take(wire, own.dtype, own.numel())[0]
    own_fine = one.record.finite(None, is_finite(own))
    other_fine = one.record.finite(source[0], is_finite(other)) if wires else own_fine
    anchor = one.states[0]["anchor"]
    own = pick(own_fine, own, pick(other_fine, other, anchor))
    return own, pick(other_fine, other, own)
