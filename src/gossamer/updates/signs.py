"""The sign of a mean: every element moves as far as every other."""

from typing import final

import torch
from torch import Tensor

from gossamer.core.block import Block, State
from gossamer.core.contracts import Context, Update
from gossamer.core.parts import part


@final
@part("signs")
class Signs(Update):
    """The optimizer is given the signs of the agreed gradient: x -= lr sign(mean g), zero where the mean is zero.

    Elements of a gradient differ by powers of ten; here all move equally far, as under Adam without its second moment. A
    learning rate of SGD's is far too large: a tenth to a thousandth of it is usual. Weight decay, momentum and all else that
    the optimizer does come after it, as ever.

    Use: with plain SGD where gradients of layers differ by orders of magnitude, and under exchanges that keep directions
    better than lengths.

    Not for: adaptive optimizers, which divide by the gradient's size themselves; nor gradients that are noise in most
    elements: a small mean of large numbers of both signs moves the model the wrong way at full length.

    Wire: nothing: the exchange sends the gradients as they are.

    >>> import torch
    >>> from gossamer.core.dice import Dice
    >>> mean = Block.of({"w": torch.tensor([0.5, -2.0, 0.0])})
    >>> Signs().direction(mean, mean, {}, Context(0, 1, 1, Dice(0, 1, 0))).tolist()
    [1.0, -1.0, 0.0]

    Paper: Bernstein, Wang, Azizzadenesheli, Anandkumar, signSGD: Compressed Optimisation for Non-Convex Problems, ICML 2018.
    """

    def direction(self, mean: Block, model: Block, state: State, context: Context) -> Tensor:
        return torch.sign(mean.flat, out=mean.new())
