"""Average gradients at every step, while the next gradients are computed."""

from collections.abc import Sequence
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from gossamer.core.bucket import Bucket
from gossamer.core.constraints import Constraint, excludes, those
from gossamer.core.loop import BucketView, Loop
from gossamer.core.parts import part
from gossamer.core.schedule import Schedule, Shape
from gossamer.core.verbs import OptimizerStep, Program


@final
@part("delayed")
class Delayed(Schedule):
    """Applies the averaged gradients of the previous step, whose exchange runs while this step computes.

    x_(t+1) = x_t - lr mean_i g_i(x_(t-1)). The exchange launched after step t - 1 is waited for when the gradients of step t are
    ready; these are launched after the optimizer's step. So an exchange overlaps with all computing of one step. The mean is
    applied at a fixed step, however early it arrives, and passes through the recipe's memory and exchange; `.grad` holds it
    after `backward()`, and can be clipped as usual. At the first step there is no mean: `.grad` is None, and the optimizer
    changes nothing. The same holds after a mean that is not finite, which is dropped on all ranks. A skipped step discards its
    mean and sends nothing. The mean in flight at the end of training is not applied.

    Under plain SGD and a curvature c it is stable if lr c < 1, half of what plain SGD allows. On one rank it is
    plain training.

    Use: when an average takes as long as computing a step, with little momentum; replicas stay equal.

    Not for: an unchanged learning rate, or much momentum, which makes the delay worse; exchanges that take much longer than a
    step (send fewer bytes, or take local steps).

    48 steps of `lm` on two simulated ranks, one seed, the mean loss of the last 8: by SGD without momentum at rate .25 it was 5.63,
    and without the delay 5.52; at .5, 6.06 and 5.40. With momentum .9 at rate .025 5.93 and 5.65; at .05, 6.10 and 5.44; at .1,
    the workload's own rate, it diverged: 9.80 and 5.31. At .025 `qsgd` gave the same as the dense exchange.

    Wire: the exchange's bytes at every step, overlapped with computing.

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
        because = "{update} under {schedule}: it needs a mean at every step, and a step may have none; use every_step()"
        return (excludes("directs", because=because),)

    @cached_property
    def shape(self) -> Shape:
        return Shape(averages_gradients=True, hands_over=False, outlasts="flights")

    def ready(self, loop: Loop, index: int, flat: Tensor) -> Program[None]:
        """Keep the gradient: it is launched after the mean in flight has arrived, which updates the memory."""
        loop.live.setdefault("gradients", {})[index] = flat
        yield from ()

    def step(self, loop: Loop) -> Program[None]:
        gradients: dict[int, Tensor] = loop.live.pop("gradients")
        given = [Bucket(gradients[i], bucket.layout) for i, bucket in enumerate(loop.buckets)]
        loop.optimizer.give((yield from loop.averages.wait()) or [])
        if (yield OptimizerStep()):
            yield from loop.averages.launch(_copies(given, loop.buckets))


def _copies(given: Sequence[Bucket], buckets: Sequence[BucketView]) -> list[Tensor]:
    """Copy gradients, since the next ones overwrite them; in new buckets if a controller has changed the buckets."""
    if [block.layout.segments for block in given] == [bucket.layout.segments for bucket in buckets]:
        return [block.new().copy_(block.flat) for block in given]
    named = {name: tensor.reshape(-1) for block in given for name, tensor in block.tensors()}
    return [torch.cat([named[s.name] for s in bucket.layout.segments]) for bucket in buckets]
