"""Average gradients at every step, and models now and then, since a memory may let models differ."""

from functools import cached_property
from typing import Annotated, Literal, final

from gossamer.codecs import FP32
from gossamer.core.binding import Binding
from gossamer.core.constraints import Constraint, requires
from gossamer.core.errors import AttachError
from gossamer.core.loop import Loop
from gossamer.core.parts import part, require
from gossamer.core.ranges import LogRange
from gossamer.core.schedule import Schedule, Shape, Share
from gossamer.core.verbs import OptimizerStep, Program
from gossamer.exchanges import AllReduced

_DENSE = AllReduced(FP32())


@final
@part("resync", sample="resync(3)")
class Resync(Schedule):
    """Averages gradients at every step, and models every `every` steps, densely, without codec and memory.

    `sync="average"` sets x_i = mean x_j. 1/N of each residual is in this mean already, and the residual is still sent later.

    `sync="flush"` sets x_i = x_i - (F - E_i) / N and then E_i = 0, where E_i is rank i's residual in units of steps, and F the
    sum of all residuals. This is exact: it loses nothing and counts nothing twice. It is computed as one average of
    x_i - (1 - 1/N) E_i, so all ranks get equal bits.

    `buffers` sets what happens to the optimizer's state, which differs between ranks too: "maintain" keeps each rank's own,
    "average" averages it densely. An average that is not finite is dropped: models and residuals stay unchanged.

    Use: with `own_gradient()`, under which models differ between ranks.

    Not for: other memories, under which models are equal anyway. "flush" needs torch.optim.SGD without momentum or weight
    decay, and a memory with residuals in units of steps.

    Wire: the exchange's bytes at every step, and 4 d bytes in an all-reduce every `every` steps; with buffers="average" 4 d
    more for each tensor of d numbers in the optimizer's state, and 16.

    >>> Resync(500, sync="flush")
    resync(sync='flush')

    Paper: Aji, Heafield, Bogoychev, Combining Global Sparse Gradients with Local Gradients in Distributed Neural Network
    Training, EMNLP 2019; the exact flush is ours.
    """

    every: Annotated[int, LogRange(10, 1000)] = 500
    sync: Literal["average", "flush"] = "average"
    buffers: Literal["maintain", "average"] = "maintain"

    def __post_init__(self) -> None:
        require(self.every >= 1, f"resync: every must be at least 1 step, got {self.every}; the authors take 500")

    @property
    def constraints(self) -> tuple[Constraint, ...]:
        if self.sync == "average":
            return ()
        because = (
            "{schedule} applies residuals as a step of plain SGD, and {memory} does not keep them in such units; use "
            "own_gradient(units='update'), or sync='average'"
        )
        return (requires("owes steps", because=because),)

    @cached_property
    def shape(self) -> Shape:
        return Shape(period=self.every, averages_gradients=True, resyncs=True, works_alone=True)

    def consensus_share(self, loop: Loop) -> list[Share] | None:
        return Share.each(loop.parameters())

    def step(self, loop: Loop) -> Program[None]:
        yield from loop.averages.wait_gradients()
        yield OptimizerStep()
        if loop.step % self.every or loop.ranks.size == 1:
            return
        values = loop.parameters()
        if self.sync == "flush":
            for x, owed in zip(values, loop.averages.residuals(), strict=True):
                x.sub_(owed, alpha=1 - 1 / loop.ranks.size)
        means = yield from loop.averages.of(values, over=_DENSE)
        if means is None:
            return
        loop.assign(means)
        if self.sync == "flush":
            loop.averages.clear_residuals()
        if self.buffers == "average":
            yield from loop.optimizer.average()

    def fits(self, binding: Binding) -> None:
        not_plain = "momentum", "weight_decay", "maximize"
        other = binding.other_than_sgd(lambda group: not any(group.get(key) for key in not_plain))
        if self.sync == "flush" and other is not None:
            raise AttachError(
                f"{self} with {type(other).__name__}: a flush is exact only for x - lr g, which is torch.optim.SGD "
                "without momentum and weight decay; use that, or sync='average'"
            )
