"""No memory: what did not get through is forgotten."""

from typing import final

from torch import Tensor

from gossamer.core.bucket import Bucket, State
from gossamer.core.constraints import those
from gossamer.core.contracts import Context, Memory, Sender
from gossamer.core.parts import part
from gossamer.core.verbs import Program


@final
@part("none")
class NoMemory(Memory):
    """Hand the block on and take the mean as it comes. Right for unbiased codecs.

    A biased codec (top-k, low rank) needs error feedback; `allow_biased=True` lets it through without, for experiments.

    Use: with codecs that are right on average; it is there unless a recipe says otherwise.

    >>> NoMemory(allow_biased=True)
    none(allow_biased=True)
    """

    allow_biased: bool = False

    @property
    def hands_on(self) -> bool:
        return True

    @property
    def traits(self) -> frozenset[str]:
        return those(bias_allowed=self.allow_biased)

    def around(self, block: Bucket, state: State, send: Sender, context: Context) -> Program[Tensor]:
        result = yield from send(block, context)
        return result.mean
