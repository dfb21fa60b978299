"""SlowMo: rounds of a base schedule, then an average and a slow momentum step."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Annotated, Literal, final

from torch import Tensor

from gossamer.core.binding import Binding
from gossamer.core.constraints import Constraint, excludes, those
from gossamer.core.contracts import Mixer, Policy
from gossamer.core.errors import AttachError
from gossamer.core.loop import Loop
from gossamer.core.parts import part, require
from gossamer.core.ranges import Choice, LogRange, Range
from gossamer.core.schedule import BetweenNodes, Schedule, Shape, Share, together
from gossamer.core.step_phases import after_optimizer_step, until_optimizer_step
from gossamer.core.verbs import OptimizerStep, Program
from gossamer.schedules import mixing, shards
from gossamer.schedules.divergence_bound import divergence_rate
from gossamer.schedules.gossip import Gossip
from gossamer.schedules.guard import EDiTGuard
from gossamer.schedules.rounds import LocalSteps, OuterStep, differences, remember_anchor, return_to_anchor

GUARDED = (
    excludes(
        "memory",
        because="{memory} under {schedule}: what is left of a rank that a guard leaves out would be sent in the next round; leave "
        "the memory or guard out",
    ),
    excludes(
        "votes", because="{exchange} under {schedule}: weighting a message does not change its vote; leave guard out"
    ),
)
STABLE = 0.999  # largest allowed growth of ranks' distance per round, with average=False


@final
@part("slowmo", sample="slowmo(8)")
class SlowMo(Schedule, BetweenNodes):
    """Takes `every` steps of a base algorithm, averages models exactly, then takes a momentum step over the round.

    a: the anchor, equal on all ranks.  D = mean_i (a - x_i);  v = beta (lr_t / lr_(t-1)) v + D;  a -= alpha v;  x_i = a.
    The velocity form of the paper's u = v / lr: no division by a small rate. lr_t is the rate of the round's last step.
    `by_lr=False` leaves the ratio out (block momentum). `nesterov`: a -= alpha (D + beta v), as in DiLoCo.

    The base is `inner`. None: local steps of any optimizer. A mixer: it mixes parameters after each local step.
    `gossip(...)`, also overlapped: all its messages are absorbed before the average. `every_step()`: models are equal anyway,
    and the average sends nothing. `buffers` sets what happens to the optimizer's state at the end of a round: "maintain" keeps
    it, "reset" clears it (counters too, as in a new optimizer), "average" averages it. With `average=False` ("noaverage" in the paper) every rank
    steps from its own anchor, D_i = a_i - x_i, and does not wait for all others: then the mixing alone must keep models close,
    which is checked when the number of ranks is known.

    The difference D passes through the recipe's memory and exchange, so it can be quantised like a gradient. If an average is
    not finite, the round is dropped: every rank returns to the anchor.

    With `sharded` each rank keeps 1/N of a and v, and results equal those of scatter(fp32()), bit for bit: ranks send models
    to the owners of the chunks, which take the outer step and send a back. It needs an exact exchange, because ranks send
    models and not differences. A checkpoint holds each rank's shard; to load it with other ranks or buckets, all are needed.

    On one rank the outer step is taken too, without codec and memory, and mixers do nothing. Such a run shows which part of an
    improvement comes from rounds, and which from more ranks.

    A `guard` weighs the ranks of a round by the length of their difference, and leaves out unusual ones (EDiT).

    Use: on slow links and across sites; around gossip, for an exact average now and then.

    Not for: machines short of memory, because it keeps two more copies of the model, unless `sharded`.

    Wire: the exchange's bytes once per `every` steps, and those of the base; with `sharded` the bytes of scatter(fp32()), or
    half of them if models are equal anyway. With buffers="average" 4 d bytes more in an all-reduce, for each tensor of d
    numbers in the optimizer's state, and 16 in another.

    >>> SlowMo(every=12)
    slowmo(12)
    >>> SlowMo(48, inner=Gossip(overlap=True))
    slowmo(48, inner=gossip(overlap=True))

    Paper: Wang, Tantia, Ballas, Rabbat, SlowMo: Improving Communication-Efficient Distributed SGD with Slow Momentum,
    ICLR 2020.
    """

    every: Annotated[int, Choice(4, 8, 12, 24, 48)]
    beta: Annotated[float, Range(0.0, 0.8)] = 0.7
    alpha: Annotated[float, LogRange(0.5, 2.0)] = 1.0
    by_lr: bool = True
    # The tuner does not try "average": it also sends the optimizer's state.
    buffers: Annotated[Literal["maintain", "reset", "average"], Choice("maintain", "reset")] = "maintain"
    inner: Mixer | Schedule | None = None
    nesterov: bool = False
    average: bool = True
    sharded: bool = False
    guard: EDiTGuard | None = None

    def __post_init__(self) -> None:
        require(self.every >= 1, f"slowmo: every must be at least 1 step, got {self.every}; the paper uses 12")
        require(0 <= self.beta < 1, f"slowmo: beta must lie in [0, 1), got {self.beta}; the paper uses 0.4 to 0.8")
        require(self.alpha > 0, f"slowmo: alpha must be positive, got {self.alpha}; 0 would freeze the model")
        require(
            self.base.shape.nests,
            f"slowmo: inner={self.inner} keeps its own anchor or comm thread, and cannot run inside a round; use a mixer, "
            "gossip(...) or every_step(), or leave inner out. To average models more often than slow momentum steps, use "
            f"hierarchical(2, N, slowmo({self.every})) on N ranks",
        )
        require(
            self.every % self.base.shape.period == 0,
            f"slowmo: a round of {self.every} steps is not a multiple of the period of {self.inner}, {self.base.shape.period} steps; "
            f"use every={self.base.shape.period * -(-self.every // self.base.shape.period)}",
        )
        if not self.average:
            self._check_without_average()
        require(
            self.guard is None or (self.average and self.inner is None and not self.sharded),
            f"slowmo: guard={self.guard} weighs ranks by their own differences after local steps; leave inner, average and sharded out",
        )

    def _check_without_average(self) -> None:
        mixer = self.base.shape.mixer
        require(
            mixer is not None,
            "slowmo: average=False without a mixer: ranks would never meet; use inner=push_sum() or gossip(...)",
        )
        require(
            mixer is None or not mixer.begins,
            f"slowmo: average=False over {self.inner}: compressed gossip mixes slower than its graph says, so it is "
            "not known if models stay close; use push_sum() or symmetric(), or leave average as it is",
        )
        require(
            not self.sharded,
            "slowmo: sharded=True with average=False: every rank needs its own whole anchor; leave one of them out",
        )

    @property
    def base(self) -> Schedule:
        """Return the schedule of the steps within a round."""
        if isinstance(self.inner, Mixer):
            return Gossip(self.inner)
        return self.inner or LocalSteps()

    @cached_property
    def shape(self) -> Shape:
        base, moves = self.base.shape, self.beta > 0 or self.alpha != 1 or self.buffers == "reset"
        plain = self.inner is None and self.guard is None and self.average and not self.sharded
        return replace(
            base,
            period=self.every,
            syncs=self.average,
            works_alone=moves or base.works_alone,
            steps_alike=False,
            mixes=False,
            nests=False,
            outlasts="round" if plain and self.buffers != "average" else "",
        )

    # -- properties of the base, and of the rounds ---------------------------------------------------------------------

    @property
    def traits(self) -> frozenset[str]:
        # Over every_step() only its outer steps tell it from plain averaging; a hook that averages gradients takes none.
        own = self.base.shape.averages_gradients
        return super().traits | those(rounds=self.average and self.inner is None, own_step=own)

    @property
    def constraints(self) -> tuple[Constraint, ...]:
        terms = self.base.constraints if self.base.shape.averages_gradients or not self.average else ()
        if self.guard is not None:
            return GUARDED
        return (*terms, *shards.TERMS) if self.sharded else terms

    def averages(self, step: int) -> bool:
        return self.base.averages(step)

    def together(self, rank: int, size: int) -> tuple[int, ...]:
        return together(self.base, rank, size)

    def between_nodes(self, per_node: int) -> "SlowMo":
        base = self.base
        return replace(self, inner=base.between_nodes(per_node)) if isinstance(base, BetweenNodes) else self

    @property
    def follows_rate(self) -> bool:
        return (self.by_lr and self.beta > 0) or self.base.follows_rate

    def policy(self, key: str) -> Policy:
        if key not in ("anchor", "velocity"):
            return "drop" if key == "guard" else "equal"  # one row for each of the old ranks
        return "shard" if self.sharded else "equal" if self.average else "mean"

    def ends_round(self, step: int) -> bool:
        return step % self.every == 0 or (self.inner is not None and self.base.ends_round(step))

    def is_synced(self, step: int) -> bool:
        return self.base.is_synced(step) or (self.average and step % self.every == 0)

    def consensus_share(self, loop: Loop) -> list[Share] | None:
        return self.base.consensus_share(loop)

    # -- a step ----------------------------------------------------------------------------------------------------------

    def ready(self, loop: Loop, index: int, flat: Tensor) -> Program[None]:
        yield from self.base.ready(loop, index, flat)

    def step(self, loop: Loop) -> Program[None]:
        remember = shards.remember if self.sharded and loop.ranks.size > 1 else remember_anchor
        remember(loop, lambda: self._held(loop))
        base = self._base_of(loop)
        steps = base.step(loop)
        yield from until_optimizer_step(steps)
        stepped = yield OptimizerStep()
        yield from after_optimizer_step(steps, stepped)
        if loop.step % self.every or (base.shape.averages_gradients and not stepped):
            return  # a step that all ranks skipped changes nothing; the round goes on
        if isinstance(base, Gossip):
            yield from base.close(loop)
        if not (yield from self._close_round(loop)):
            return
        if self.buffers == "reset":
            loop.optimizer.reset()
        elif self.buffers == "average" and loop.ranks.size > 1:
            yield from loop.optimizer.average()

    def _base_of(self, loop: Loop) -> Schedule:
        """Return the base; on one rank without its mixer."""
        alone = loop.ranks.size == 1 and not self.base.shape.averages_gradients
        return LocalSteps() if alone else self.base

    def _close_round(self, loop: Loop) -> Program[bool]:
        """Take the outer step; returns False, with all ranks back at the anchor, if the average is not finite."""
        if self.sharded and loop.ranks.size > 1:
            return (yield from shards.close_round(loop, self._held(loop), self._outer, self.base.is_synced(loop.step)))
        means = yield from self._moved(loop)
        for bucket, mean, lr in zip(loop.buckets, means or [], loop.optimizer.lrs):
            self._outer.take(bucket, mean, lr)
        return_to_anchor(loop)
        return means is not None

    @property
    def _outer(self) -> OuterStep:
        return OuterStep(self.beta, self.alpha, self.by_lr, self.nesterov)

    def _moved(self, loop: Loop) -> Program[list[Tensor] | None]:
        """Return the mean move away from the anchor; this rank's own if models are equal, or with average=False."""
        moved = differences(loop, self._held(loop))
        if not self.average or self.base.is_synced(loop.step):
            return moved
        if self.guard is not None and loop.ranks.size > 1:
            return (yield from self.guard.average(loop, moved))
        return (yield from loop.averages.of(moved))

    def _held(self, loop: Loop) -> Sequence[Tensor]:
        """Return the values whose mean over all ranks is the model: a mixer's numerators, or the parameters."""
        mixer = self._base_of(loop).shape.mixer
        return loop.parameters() if mixer is None else mixing.numerators(loop, mixer)

    def fits(self, binding: Binding) -> None:
        super().fits(binding)
        nodes = max(binding.size // self.ranks_per_node, 1)
        if self.average or nodes == 1:
            return
        largest = divergence_rate(self._outer, self.between_nodes(1).base, self.every, nodes)
        if largest > STABLE:
            raise AttachError(
                f"{self} on {nodes} {'ranks' if nodes == binding.size else 'nodes'}: without an average the distance between models grows {largest:.3g} times with every "
                f"round; use more steps a round, a topology of more peers, a smaller beta, or average=True"
            )
