"""Accelerated minibatch SGD, and the lengths of its stages."""

from functools import cached_property
from math import ceil, sqrt
from typing import NamedTuple, final

import torch
from torch import Tensor

from gossamer.core.binding import Binding
from gossamer.core.bucket import State
from gossamer.core.constraints import Constraint, excludes, those
from gossamer.core.contracts import Policy
from gossamer.core.errors import AttachError
from gossamer.core.loop import BucketView, Loop
from gossamer.core.parts import part, require
from gossamer.core.schedule import Schedule, Shape, Share, TrainsElsewhere
from gossamer.core.verbs import OptimizerStep, Program


@final
@part("accelerated")
class Accelerated(Schedule, TrainsElsewhere):
    """Averages the gradients of `micro_batches` micro-batches over all ranks, then takes an accelerated SGD step (AC-SA).

    x_md = x / b + (1 - 1/b) x_ag, where the gradient g is taken.  x = x - lr (r + 1) / 2 g;  x_ag = x / b + (1 - 1/b) x_ag,
    b = (r + 1) / 2 in round r = 1, 2, ... With H the smoothness, lr <= 1 / (2 H). The module holds x_md; evaluate and
    save x_ag, which `comm.consensus()` swaps in. `stages` are lengths in rounds: at the end of each stage r starts again at
    1 from x_ag, and the last length is used for all later stages (for strongly convex problems, see `stages()`). A skipped
    step does not count as a round. A single rank runs the same method.

    Use: convex problems with few rounds, where ranks have very different data: the difference does not slow it down.

    Not for: deep networks, for which nothing is proved; optimizers other than plain SGD; memories, which deliver a gradient
    in a later round, where it gets a larger weight.

    Wire: the exchange's bytes once per `micro_batches` micro-batches.

    >>> Accelerated(4, stages=(20, 40))
    accelerated(micro_batches=4, stages=(20, 40))

    Paper: Woodworth, Patel, Srebro, Minibatch vs Local SGD for Heterogeneous Distributed Learning, NeurIPS 2020; AC-SA is
    Ghadimi and Lan's.
    """

    micro_batches: int = 1
    stages: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        require(self.micro_batches >= 1, f"accelerated: micro_batches must be at least 1, got {self.micro_batches}")
        require(
            all(n >= 1 for n in self.stages),
            f"accelerated: each length in stages must be at least 1 round, got {self.stages}; use () for one endless stage",
        )

    @property
    def traits(self) -> frozenset[str]:
        return super().traits | those(own_step=True)

    @property
    def constraints(self) -> tuple[Constraint, ...]:
        return (
            excludes(
                "memory",
                because="{memory} under {schedule}: a gradient's weight depends on its round, so what a memory sends "
                "later would get too much weight; leave the memory out",
            ),
            excludes(
                "directs",
                because="{update} under {schedule}: the three sequences are made of gradients, not of an update's directions; leave the update out",
            ),
        )

    @cached_property
    def shape(self) -> Shape:
        return Shape(averages_gradients=True, works_alone=True, micro_batches=self.micro_batches)

    def policy(self, key: str) -> Policy:
        # Other ranks than before start from x_ag, at the beginning of a stage.
        return "drop" if key in ("x", "round", "middle") else "equal"

    def consensus_share(self, loop: Loop) -> list[Share]:
        held = zip(loop.states, loop.parameters(), strict=True)
        return Share.each(state.get("aggregate", x) for state, x in held)

    def moves_in(self, loop: Loop) -> None:
        """Write x_ag to the parameters, whichever model was loaded: a stage begins there."""
        held = zip(loop.states, loop.parameters(), strict=True)
        loop.assign([state.get("aggregate", x) for state, x in held])

    def step(self, loop: Loop) -> Program[None]:
        yield from loop.averages.wait_gradients()
        if not (yield OptimizerStep()):
            return
        loop.assign([self._moved(*pair) for pair in zip(loop.buckets, loop.parameters(), strict=True)])
        for bucket in loop.buckets:
            if bucket.narrow:  # x_md as the parameters hold it, rounded
                bucket.states["schedule"]["middle"] = bucket.read()

    def _moved(self, bucket: BucketView, stepped: Tensor) -> Tensor:
        """Return the next x_md. `stepped` is x_md - lr g, and its memory is reused."""
        state, like = bucket.states["schedule"], bucket.layout.buffers.like
        round, stage = int(state.get("round", 1)), int(state.get("stage", 0))
        x = stepped
        if round > 1:  # in round 1 x_md is x, and the step is a plain one
            middle = state["middle"] if bucket.narrow else _between(state, round, like(x))
            step = torch.sub(middle, stepped, out=stepped)
            x = torch.sub(state["x"], step, alpha=(round + 1) / 2, out=step)
        state["x"], state["aggregate"] = x, torch.lerp(state.get("aggregate", x), x, 2 / (round + 1), out=like(x))
        round += 1
        if self.stages and round > self.stages[min(stage, len(self.stages) - 1)]:
            state["x"], round, stage = state["aggregate"], 1, stage + 1
        state["round"], state["stage"] = torch.tensor(round), torch.tensor(stage)
        return _between(state, round, like(x))

    def fits(self, binding: Binding) -> None:
        other = binding.other_than_sgd(lambda group: not group["momentum"])
        if other is not None:
            raise AttachError(
                f"{self} with {type(other).__name__}: it weights the steps of plain SGD and adds the momentum itself; "
                "use torch.optim.SGD with momentum=0"
            )


class Stage(NamedTuple):
    """The number of rounds of a stage, and its learning rate."""

    rounds: int
    lr: float


def stages(smoothness: float, convexity: float, distance: float, noise: float = 0.0, count: int = 10) -> list[Stage]:
    """Compute stages for `accelerated` that each at least halve the squared distance to the optimum.

    H and mu are the objective's smoothness and strong convexity, D the initial distance, and noise^2 the variance of an
    averaged gradient (the trace of its covariance). After R rounds at lr <= 1 / (2 H)

    E F(x_ag) - F* <= 2 D^2 / (lr R (R + 2)) + lr noise^2 (R + 3) / 3,

    and |x_ag - x*|^2 is at most 2 / mu times that. Each of the two terms is kept below mu D^2 / 8.

    >>> stages(smoothness=100.0, convexity=1.0, distance=3.0, count=2)
    [Stage(rounds=56, lr=0.005), Stage(rounds=56, lr=0.005)]
    """
    for name, value in ("smoothness", smoothness), ("convexity", convexity), ("distance", distance):
        require(value > 0, f"stages: {name} must be positive, got {value}")
    require(convexity <= smoothness, f"stages: convexity must be at most smoothness ({smoothness}), got {convexity}")
    require(noise >= 0 and count >= 1, f"stages: noise must be 0 or more and count at least 1, got {noise} and {count}")
    out = list[Stage]()
    for _ in range(count):
        lr = 1 / (2 * smoothness)
        while noise and lr * noise**2 * (_rounds(lr, convexity) + 3) / 3 > convexity * distance**2 / 8:
            lr *= 0.8
        out.append(Stage(_rounds(lr, convexity), lr))
        distance /= sqrt(2)
    return out


def _rounds(lr: float, convexity: float) -> int:
    """Return the least R with R (R + 2) >= 16 / (lr mu)."""
    return ceil(sqrt(1 + 16 / (lr * convexity)) - 1)


def _between(state: State, round: int, out: Tensor) -> Tensor:
    """Return x_md of a round: x / b + (1 - 1/b) x_ag, with b = (round + 1) / 2."""
    return torch.lerp(state["aggregate"], state["x"], 2 / (round + 1), out=out)
