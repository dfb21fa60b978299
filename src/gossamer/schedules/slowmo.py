"""SlowMo: rounds of any schedule, then an average, and slow momentum over the rounds."""

from collections.abc import Sequence
from typing import Annotated, Literal, final

from torch import Tensor

from gossamer.core.binding import Binding
from gossamer.core.constraints import Constraint, those
from gossamer.core.contracts import Mixer, Policy
from gossamer.core.errors import AttachError
from gossamer.core.loop import Loop
from gossamer.core.parts import part, require
from gossamer.core.ranges import Choice, LogRange, Range
from gossamer.core.schedule import Schedule, Share
from gossamer.core.step_phases import after_optimizer_step, until_optimizer_step
from gossamer.core.verbs import OptimizerStep, Program
from gossamer.schedules import mixing, shards
from gossamer.schedules.divergence_bound import divergence_rate
from gossamer.schedules.gossip import Gossip
from gossamer.schedules.rounds import LocalSteps, OuterStep, differences, remember_anchor, return_to_anchor

STABLE = 0.999  # the largest factor by which ranks may part from round to round, where nobody averages


@final
@part("slowmo", sample="slowmo(8)")
class SlowMo(Schedule):
    """`every` steps of a base algorithm, an exact average, and a momentum step over the round.

    a: the anchor, equal on all ranks.  D = mean_i (a - x_i);  v = beta (lr_t / lr_(t-1)) v + D;  a -= alpha v;  x_i = a.
    The velocity form of the paper's u = v / lr: no division by a small rate. The rate is that of the round's last step.
    `by_lr=False` leaves the ratio out (block momentum). `nesterov`: a -= alpha (D + beta v), as DiLoCo has it.

    The base is `inner`: local steps of the optimizer, whichever it is; a mixer, which mixes parameters after each of them, or
    `gossip(...)`, overlapped as well, whose messages are all absorbed before the average; or `every_step()`, under which
    ranks are equal anyway and the average costs nothing. `buffers` says what becomes of the optimizer's state at a round:
    "maintain"; "reset", counters too, as a new optimizer has it; "average". With `average=False` ("noaverage") every rank
    steps from its own anchor, D_i = a_i - x_i, and nobody waits for all others: the mixing must keep ranks together, which is
    looked at when the number of ranks is known.

    The difference D passes through the recipe's memory and exchange, so it can be quantised like a gradient. A round whose
    average is not finite is dropped: every rank returns to the anchor.

    With `sharded` each rank keeps 1/N of a and v, and the round ends as scatter(fp32()) does it, to the bit: models go to the
    owners of their chunks, who make the outer step, and a comes back. For exact exchanges, since models travel and no
    differences. A checkpoint then holds each rank's shard, and is cut anew for other ranks or blocks if all are given.

    Use: on slow links and across sites; around gossip, to agree exactly now and then.

    Not for: machines short of memory, unless `sharded`: it keeps two more copies of the model.

    Wire: the exchange's bytes once per `every` steps, and those of the base; `sharded`, of scatter(fp32()), and over ranks that
    are equal anyway half of those.

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
    # Not "average", whose bytes nobody counts.
    buffers: Annotated[Literal["maintain", "reset", "average"], Choice("maintain", "reset")] = "maintain"
    inner: Mixer | Schedule | None = None
    nesterov: bool = False
    average: bool = True
    sharded: bool = False

    def __post_init__(self) -> None:
        require(self.every >= 1, f"slowmo: every must be at least 1 step, got {self.every}; the paper uses 12")
        require(0 <= self.beta < 1, f"slowmo: beta must lie in [0, 1), got {self.beta}; the paper uses 0.4 to 0.8")
        require(self.alpha > 0, f"slowmo: alpha must be positive, got {self.alpha}; 0 would freeze the model")
        require(
            self.base.nests,
            f"slowmo: inner={self.inner} keeps an anchor or a lane of its own, and cannot go on inside of a round; use a mixer, "
            "gossip(...) or every_step(), or leave inner out. To average models more often than slow momentum steps, say "
            f"hierarchical(2, N, slowmo({self.every})) on N ranks",
        )
        require(
            self.every % self.base.period == 0,
            f"slowmo: a round of {self.every} steps is no multiple of the {self.base.period} after which {self.inner} repeats, and "
            f"would end in its midst; use every={self.base.period * -(-self.every // self.base.period)}",
        )
        require(
            self.average or self.base.drives is not None,
            "slowmo: average=False without a mixer: ranks would never meet; use inner=push_sum() or gossip(...)",
        )
        require(
            self.average or self.base.drives is None or not self.base.drives.begins,
            f"slowmo: average=False over {self.inner}: compressed models come together slower than their graph says, so that "
            "nobody knows whether ranks stay together; use push_sum() or symmetric(), or leave average as it is",
        )
        require(
            self.average or not self.sharded,
            "slowmo: sharded=True without an average: every rank has an anchor of its own, all of which it needs; leave one out",
        )

    @property
    def base(self) -> Schedule:
        """What a round is made of."""
        if isinstance(self.inner, Mixer):
            return Gossip(self.inner)
        return self.inner or LocalSteps()

    # -- what the base says, and what is said besides ------------------------------------------------------------------

    @property
    def traits(self) -> frozenset[str]:
        return super().traits | those(rounds=self.average and self.inner is None)

    @property
    def constraints(self) -> tuple[Constraint, ...]:
        terms = self.base.constraints if self.base.averages_gradients or not self.average else ()
        return (*terms, *shards.TERMS) if self.sharded else terms

    @property
    def averages_gradients(self) -> bool:
        return self.base.averages_gradients

    @property
    def accumulate(self) -> int:
        return self.base.accumulate

    @property
    def lr_factor(self) -> float:
        return self.base.lr_factor

    @property
    def follows_rate(self) -> bool:
        return (self.by_lr and self.beta > 0) or self.base.follows_rate

    @property
    def drives(self) -> Mixer | None:
        return self.base.drives

    @property
    def period(self) -> int:
        return self.every

    @property
    def prelude(self) -> int:
        return self.base.prelude

    def policy(self, key: str) -> Policy:
        if key not in ("anchor", "velocity"):
            return "equal"
        return "shard" if self.sharded else "equal" if self.average else "mean"

    def ends_round(self, step: int) -> bool:
        return step % self.every == 0 or (self.inner is not None and self.base.ends_round(step))

    def is_synced(self, step: int) -> bool:
        return self.base.is_synced(step) or (self.average and step % self.every == 0)

    def consensus_share(self, loop: Loop) -> list[Share] | None:
        return self.base.consensus_share(loop)

    # -- a step ----------------------------------------------------------------------------------------------------------

    def step(self, loop: Loop) -> Program[None]:
        self._remember(loop)
        steps = self.base.step(loop)
        yield from until_optimizer_step(steps)
        descended = yield OptimizerStep()
        yield from after_optimizer_step(steps, descended)
        if loop.step % self.every or (self.base.averages_gradients and not descended):
            return  # what all ranks left out leaves no trace, and the round goes on
        yield from self.base.close(loop)
        if not (yield from self._close_round(loop)):
            return
        if self.buffers == "reset":
            loop.reset_optimizer()
        elif self.buffers == "average" and loop.size > 1:
            yield from loop.average_optimizer()

    def _remember(self, loop: Loop) -> None:
        remember = shards.remember if self.sharded else remember_anchor
        remember(loop, lambda: self._held(loop))

    def _close_round(self, loop: Loop) -> Program[bool]:
        """The outer step; False where the average is not finite, and all are back at the anchor."""
        if self.sharded and loop.size > 1:
            return (yield from shards.close_round(loop, self._held(loop), self._outer, self.base.is_synced(loop.step)))
        means = yield from self._moved(loop)
        for place, mean, lr in zip(loop.places, means or [], loop.lrs):
            self._outer.take(place, mean, lr)
        return_to_anchor(loop)
        return means is not None

    @property
    def _outer(self) -> OuterStep:
        return OuterStep(self.beta, self.alpha, self.by_lr, self.nesterov)

    def _moved(self, loop: Loop) -> Program[list[Tensor] | None]:
        """How far ranks have moved away from the anchor on average; or this one, where all are equal or for themselves."""
        moved = differences(loop, self._held(loop))
        if not self.average or loop.size == 1 or self.base.is_synced(loop.step):
            return moved
        return (yield from loop.average(moved))

    def _held(self, loop: Loop) -> Sequence[Tensor]:
        """What sums to the model over all ranks."""
        mixer = self.base.drives
        return loop.parameters() if mixer is None else mixing.numerators(loop, mixer)

    def fits(self, binding: Binding) -> None:
        super().fits(binding)
        if self.average or binding.size == 1:
            return
        largest = divergence_rate(self._outer, self.base, self.every, binding.size)
        if largest > STABLE:
            raise AttachError(
                f"{self} on {binding.size} ranks: without an average ranks part from each other {largest:.3g} times as far at every "
                f"round as at the one before; use more steps a round, a topology of more peers, a smaller beta, or average=True"
            )
