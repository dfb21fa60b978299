"""Block momentum (BMUF): momentum over rounds of local steps."""

from functools import cached_property
from typing import Annotated, Literal, final

from gossamer.core.constraints import Constraint
from gossamer.core.contracts import Policy
from gossamer.core.loop import Loop
from gossamer.core.parts import part, require
from gossamer.core.ranges import Choice, Range
from gossamer.core.schedule import Schedule, Shape, Share
from gossamer.core.verbs import Program
from gossamer.schedules import shards
from gossamer.schedules.slowmo import SlowMo


@final
@part("bmuf", sample="bmuf(8)")
class BMUF(Schedule):
    """Takes `every` local steps, averages models, then takes a momentum step that ignores the learning rate.

    G = mean_i (x_i - a);  v = momentum v + rate G;  a += v;  x_i = a.  With `nesterov`: W += v, and the next round starts at
    a = W + momentum v; W is the model to evaluate. In the long run a round counts rate / (1 - momentum) times. With
    momentum None, which is 1 - 1/N on N ranks, the mean of N ranks' progress counts N times. It is `slowmo` with by_lr=False,
    bit for bit with a rate of 1, and with `nesterov` it is DiLoCo's outer step.

    `buffers` sets what happens to the optimizer's own momentum at the end of a round, as in `slowmo`; "reset" is usual.
    G passes through the recipe's memory and exchange. With `sharded` each rank keeps 1/N of a and v, as under `slowmo`.

    On one rank the momentum step is taken too; there momentum None is 0. Under `members()` give a momentum: N changes there.

    Use: on slow links, with a learning rate that is constant or seldom cut.

    Not for: learning rates that decay fast, because v does not follow them (use `slowmo`); machines short of memory, because
    it keeps two more copies of the model, unless `sharded`.

    Wire: the exchange's bytes once per `every` steps; buffers="average" as in `slowmo`.

    >>> BMUF(every=16, nesterov=True)
    bmuf(16, nesterov=True)

    Paper: Chen, Huo, Scalable Training of Deep Learning Machines by Incremental Block Training with Intra-block Parallel
    Optimization and Blockwise Model-Update Filtering, ICASSP 2016.
    """

    every: Annotated[int, Choice(4, 8, 16, 32, 64)]
    momentum: Annotated[float | None, Range(0.0, 0.8)] = None
    rate: float = 1.0
    nesterov: bool = False
    buffers: Annotated[Literal["maintain", "reset", "average"], Choice("maintain", "reset")] = "reset"
    sharded: bool = False

    def __post_init__(self) -> None:
        require(self.every >= 1, f"bmuf: every must be at least 1 step, got {self.every}")
        require(
            self.momentum is None or 0 <= self.momentum < 1,
            f"bmuf: momentum must lie in [0, 1), got {self.momentum}; None is 1 - 1/N on N ranks",
        )
        require(self.rate > 0, f"bmuf: rate must be positive, got {self.rate}; 1 is usual, 0 would freeze the model")

    @property
    def constraints(self) -> tuple[Constraint, ...]:
        return self._slow(0.0).constraints

    @cached_property
    def shape(self) -> Shape:
        slow = self._slow(self._momentum(1)).shape
        # Ranks learn at different steps that others were lost, so a momentum that counts them would differ for a round.
        outlasts = "" if self.momentum is None else slow.outlasts
        return Shape(
            period=self.every,
            works_alone=slow.works_alone,
            syncs=True,
            evaluates_another=self.nesterov,
            outlasts=outlasts,
        )

    def policy(self, key: str) -> Policy:
        return self._slow(0.0).policy(key)

    def consensus_share(self, loop: Loop) -> list[Share]:
        """Return the models without the look-ahead of `nesterov`."""
        models = loop.parameters()
        if self.nesterov:
            ahead = self.rate * self._momentum(loop.ranks.size)
            for bucket, x in zip(loop.buckets, models):
                velocity = bucket.states["schedule"].get("velocity")
                if velocity is not None and self.sharded:
                    shards.own_chunk(x, loop, bucket).add_(velocity, alpha=ahead * loop.ranks.size)
                elif velocity is not None:
                    x.add_(velocity, alpha=ahead)
        return Share.each(models)

    def step(self, loop: Loop) -> Program[None]:
        yield from self._slow(self._momentum(loop.ranks.size)).step(loop)

    def _slow(self, momentum: float) -> SlowMo:
        """Return the equivalent SlowMo."""
        return SlowMo(
            self.every,
            momentum,
            self.rate,
            by_lr=False,
            buffers=self.buffers,
            nesterov=self.nesterov,
            sharded=self.sharded,
        )

    def _momentum(self, size: int) -> float:
        return 1 - 1 / size if self.momentum is None else self.momentum
