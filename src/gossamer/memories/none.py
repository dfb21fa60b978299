"""No memory: what compression leaves out is lost."""

from typing import ClassVar, final

from torch import Tensor

from gossamer.core.bucket import Bucket, State
from gossamer.core.constraints import those
from gossamer.core.contracts import Context, Memory, Sender
from gossamer.core.parts import part
from gossamer.core.verbs import Program


@final
@part("none")
class NoMemory(Memory):
    """Keep nothing between steps: send the gradient, return the mean. For unbiased codecs.

    A biased codec (top-k, low rank) needs error feedback; `allow_biased=True` allows it without, for experiments.

    Use: with unbiased codecs; it is the default.

    >>> NoMemory(allow_biased=True)
    none(allow_biased=True)
    """

    hands_on: ClassVar[bool] = True

    allow_biased: bool = False

    @property
    def traits(self) -> frozenset[str]:
        return those(bias_allowed=self.allow_biased)

    def around(self, block: Bucket, state: State, send: Sender, context: Context) -> Program[Tensor]:
        result = yield from send(block, context)
        return result.mean
