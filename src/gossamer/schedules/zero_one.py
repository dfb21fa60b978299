"""The schedule of 0/1 Adam: which averages are exact, and when local steps are averaged."""

from functools import cached_property
from typing import Annotated, final

import torch
from torch import Tensor

from gossamer.codecs import FP32
from gossamer.core.constraints import Constraint, excludes, those
from gossamer.core.contracts import Policy, StepsApart
from gossamer.core.loop import Loop
from gossamer.core.parts import part, require
from gossamer.core.ranges import Choice
from gossamer.core.schedule import CompressesSome, Schedule, Shape
from gossamer.core.stream_events import copied_to
from gossamer.core.verbs import OptimizerStep, Program, all_reduce, join, start
from gossamer.exchanges import AllReduced
from gossamer.schedules.rounds import differences, remember_anchor

_DENSE = AllReduced(FP32())


@final
@part("zero_one", sample="zero_one(3, kappa=1, scaler=2, clipper=4)")
class ZeroOne(Schedule, CompressesSome):
    """Averages gradients until step `freeze`, few of them exactly; then takes local steps in longer and longer rounds.

    Up to step `freeze` gradients are averaged at every step: densely at the steps of T_v, without codec and memory; at the
    others with the recipe's codec and memory. T_v begins with `kappa` consecutive steps; after every `kappa` of its steps the
    interval between them doubles. With kappa 16 T_v has 96 of the first 1000 steps, and 148 of 10 000.

    After that every rank takes local steps on its own gradients, and ranks average at the steps of T_u: at first every step,
    then after every `scaler` steps half as often, down to every `clipper`-th step. They average the sum of steps that an update
    such as zero_one_adam_update() reports, and go on from the last common model; under another update, or none, they average
    the differences of models. Weight decay is applied to the last common model, as each rank applied it: skipped steps count
    neither for it nor for the momentum. Residuals of a memory are dropped at the freeze: they are residuals of gradients.

    Use: with zero_one_adam_update(), over signs with error feedback, as the preset `zero_one_adam` does. Set `freeze` to the end
    of the learning rate's warm-up, and `scaler` to the steps in which the rate halves.

    Not for: short runs, which send gradients at most of their steps, before the freeze.

    Wire: up to the freeze 4 d bytes in an all-reduce at the steps of T_v, the exchange's bytes at the others; then the
    exchange's bytes once a round, and 16 a bucket for what ranks have counted. Memory: one copy of the model, from the freeze on.

    >>> few = ZeroOne(1000)
    >>> [step for step in range(1, 60) if not few.is_compressed(step)][14:]
    [15, 16, 18, 20, 22, 24, 26, 28, 30, 32, 34, 36, 38, 40, 42, 44, 46, 48, 52, 56]
    >>> sum(not few.is_compressed(step) for step in range(1, 1001))
    96

    Paper: Lu, Li, Zhang, De Sa, He, Maximizing Communication Efficiency for Large-scale Training via 0/1 Adam, ICLR 2023.
    """

    freeze: int
    kappa: int = 16
    scaler: int = 32678
    clipper: Annotated[int, Choice(4, 8, 16)] = 16

    def __post_init__(self) -> None:
        require(
            self.freeze >= 1,
            f"zero_one: freeze must be at least 1 step, got {self.freeze}: the second moment needs averaged gradients first; the end "
            "of the learning rate's warm-up is usual",
        )
        require(self.kappa >= 1, f"zero_one: kappa must be at least 1, got {self.kappa}; 16 is usual")
        require(
            self.scaler >= 1,
            f"zero_one: scaler must be at least 1 step, got {self.scaler}; set it to the steps in which the rate halves",
        )
        require(
            self.clipper >= 1,
            f"zero_one: clipper must be at least 1 step, got {self.clipper}; it is the longest round, and 16 is usual",
        )

    @property
    def traits(self) -> frozenset[str]:
        return super().traits | those(meets=True)

    @property
    def constraints(self) -> tuple[Constraint, ...]:
        because = "{controller} under {schedule} would compare gradients with models; leave it out"
        return (excludes("control", because=because),)

    @cached_property
    def shape(self) -> Shape:
        return Shape(
            period=self.clipper,
            prelude=self.freeze + self.scaler * (self.clipper - 1).bit_length(),
            syncs=True,
            works_alone=True,
        )

    def policy(self, key: str) -> Policy:
        return "mean" if key in ("rate", "kept") else "equal"

    @property
    def follows_rate(self) -> bool:
        return True

    def averages(self, step: int) -> bool:
        return step <= self.freeze

    def is_compressed(self, step: int) -> bool:
        return self.averages(step) and not _is_of_growing_intervals(step, self.kappa)

    def ends_round(self, step: int) -> bool:
        if self.averages(step):
            return True
        doublings = min((step - self.freeze - 1) // self.scaler, self.clipper.bit_length())
        return step % min(2**doublings, self.clipper) == 0

    def ready(self, loop: Loop, index: int, flat: Tensor) -> Program[None]:
        yield from loop.averages.send(index, flat, None if self.is_compressed(loop.step) else _DENSE)

    def step(self, loop: Loop) -> Program[None]:
        if self.averages(loop.step):
            yield from loop.averages.wait_gradients()
            yield OptimizerStep()
            return
        _set_out(loop)
        rates, one = loop.optimizer.lrs, torch.ones((), dtype=torch.float64, device="cpu")
        stepped = yield OptimizerStep()
        for state, lr, decay in zip(loop.states, rates, loop.optimizer.decays, strict=True):
            state["rate"] = state.get("rate", 0 * one) + stepped * lr
            state["kept"] = state.get("kept", one) * (1 - stepped * lr * decay)
        if self.ends_round(loop.step):
            yield from _meet(loop)


def _is_of_growing_intervals(step: int, count: int) -> bool:
    """True if `step` is in T: `count` steps at interval 1, then `count` at interval 2, at 4, and so on."""
    interval, last = 1, 0
    while last < step:
        last = last // interval * interval + count * interval
        if step <= last:
            return step % interval == 0
        interval *= 2
    return False


def _set_out(loop: Loop) -> None:
    """Set the anchor at the first local step, and drop the residuals, which are of gradients."""
    if not any("anchor" in s for s in loop.states):
        for bucket in loop.buckets:
            bucket.states["memory"].clear()
            bucket.states["exchange"].clear()
    remember_anchor(loop, loop.parameters)


def _meet(loop: Loop) -> Program[None]:
    update = loop.optimizer.update if isinstance(loop.optimizer.update, StepsApart) else None
    moves = differences(loop, loop.parameters()) if update is None else _gone(loop, update)
    means = (yield from loop.averages.of(moves)) if loop.ranks.size > 1 else moves
    if means is None:  # not finite: all go on from the last common model
        starts = [s["anchor"] for s in loop.states]
        if update is not None:
            for state in loop.optimizer.update_states:
                update.forget(state)
    elif update is None:
        starts = [torch.sub(s["anchor"], d, out=d) for s, d in zip(loop.states, means, strict=True)]
    else:
        counts = yield from _mean_counts(loop)
        known = zip(loop.states, counts, means, loop.optimizer.update_states, strict=True)
        starts = [update.meet(s["anchor"] * kept, mean, rate, state) for s, (rate, kept), mean, state in known]
    for state, x in zip(loop.states, starts, strict=True):
        state["anchor"] = x
        del state["rate"], state["kept"]
    loop.assign(starts)


def _gone(loop: Loop, update: StepsApart) -> list[Tensor]:
    gone = [update.gone(state) for state in loop.optimizer.update_states]
    return [bucket.empty() if u is None else u for bucket, u in zip(loop.buckets, gone, strict=True)]


def _mean_counts(loop: Loop) -> Program[list[list[float]]]:
    """Each bucket's rate and weight decay, on average over ranks: one that has skipped a step has counted neither for it."""
    counts = torch.stack([torch.stack([s["rate"], s["kept"]]) for s in loop.states])
    if loop.ranks.size > 1:
        sent = copied_to(counts * (loop.ranks.weight / loop.ranks.size), loop.buckets[0].device)
        counts = yield from join((yield from start(all_reduce(sent), "steps taken", loop.step)))
    return counts.tolist()
