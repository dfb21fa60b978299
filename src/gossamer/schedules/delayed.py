"""Average gradients at every step, while the next ones are computed."""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from gossamer.core.bucket import Bucket
from gossamer.core.constraints import Constraint, excludes, those
from gossamer.core.loop import BucketView, Loop
from gossamer.core.parts import part
from gossamer.core.schedule import Schedule
from gossamer.core.verbs import OptimizerStep, Program


@final
@part("delayed")
class Delayed(Schedule):
    """Double buffering: a step takes the mean of the gradients of the step before, which has travelled meanwhile.

    x_(t+1) = x_t - lr mean_i g_i(x_(t-1)). The mean that was launched after step t - 1 lands when the gradients of step t are
    there, and these leave when the optimizer has stepped. So an exchange has all of a step's computing to hide behind. It lands
    by schedule, never by arrival, and goes through the recipe's memory and exchange; `.grad` holds it after `backward()`, to be
    clipped as ever. The first step has no mean, and parameters no gradient: the optimizer leaves them alone. So it is after a
    mean that is not finite, which is dropped on all ranks. A step that is skipped throws its mean away and sends nothing. What
    is on its way at the end of training is not taken.

    Under plain SGD and a curvature c it is stable if lr c < 1, half of what a gradient of this step allows. A rank alone has
    nothing to wait for, and trains plainly.

    Use: where averages take as long as computing, with little momentum: replicas stay equal, and the wait is hidden.

    Not for: a learning rate left as it was, nor much momentum, which makes a delay count for more. Nor exchanges that take much
    longer than a step: fewer bytes, or local steps, are what helps then.

    48 steps of `lm` on two simulated ranks, one seed, the mean loss of the last 8: by SGD without momentum at rate .25 it was 5.63,
    and without the delay 5.52; at .5, 6.06 and 5.40. With momentum .9 at rate .025 5.93 and 5.65; at .05, 6.10 and 5.44; at .1,
    the workload's own, it ran away: 9.80 and 5.31. `qsgd` was at .025 as the dense one.

    Wire: the exchange's bytes at every step, hidden behind computing.

    >>> Delayed()
    delayed()

    Papers: Seide, Fu, Droppo, Li, Yu, 1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed Training
    of Speech DNNs, Interspeech 2014; Li, Yu, Li, Avestimehr, Kim, Schwing, Pipe-SGD: A Decentralized Pipelined SGD Framework for
    Distributed Deep Net Training, NeurIPS 2018.
    """

    @property
    def traits(self) -> frozenset[str]:
        return super().traits | those(lags=True)

    @property
    def constraints(self) -> tuple[Constraint, ...]:
        because = "{update} under {schedule}: it makes a direction of every step's mean, and a step may have none; use every_step()"
        return (excludes("directs", because=because),)

    @property
    def averages_gradients(self) -> bool:
        return True

    @property
    def works_alone(self) -> bool:
        return False

    def ready(self, loop: Loop, index: int, flat: Tensor) -> Program[None]:
        """It leaves when what is on its way has landed: a memory goes on from what became of that."""
        loop.live.setdefault("gradients", {})[index] = flat
        yield from ()

    def step(self, loop: Loop) -> Program[None]:
        gradients: dict[int, Tensor] = loop.live.pop("gradients")
        given = [Bucket(gradients[i], place.layout) for i, place in enumerate(loop.places)]
        loop.hand_over((yield from loop.land()))
        if (yield OptimizerStep()):
            yield from loop.launch(_copies(given, loop.places))


def _copies(given: Sequence[Bucket], places: Sequence[BucketView]) -> list[Tensor]:
    """The next gradients come while these are on their way. A controller may have cut the model anew when the mean landed."""
    if [block.layout.segments for block in given] == [place.layout.segments for place in places]:
        return [block.new().copy_(block.flat) for block in given]
    named = {name: tensor.reshape(-1) for block in given for name, tensor in block.tensors()}
    return [torch.cat([named[s.name] for s in place.layout.segments]) for place in places]
