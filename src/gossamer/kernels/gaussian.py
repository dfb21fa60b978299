"""The levels with the least squared error for Gaussian numbers (Lloyd and Max), and the limits between them."""

from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

# fmt: off
LEVELS = (
    (0.797885,),
    (0.452780, 1.510418),
    (0.245094, 0.756005, 1.343909, 2.151946),
    (0.128395, 0.388048, 0.656759, 0.942340, 1.256231, 1.618046, 2.069017, 2.732590),
    (0.065890, 0.198052, 0.331378, 0.466700, 0.604934, 0.747136, 0.894565, 1.048783,
     1.211804, 1.386340, 1.576228, 1.787233, 2.028728, 2.317739, 2.691120, 3.260732),
    (0.033410, 0.100278, 0.167297, 0.234567, 0.302193, 0.370283, 0.438950, 0.508314,
     0.578503, 0.649656, 0.721922, 0.795468, 0.870477, 0.947155, 1.025736, 1.106488,
     1.189720, 1.275794, 1.365141, 1.458276, 1.555831, 1.658589, 1.767542, 1.883977,
     2.009611, 2.146810, 2.298981, 2.471305, 2.672274, 2.917407, 3.240437, 3.744101),
)
# fmt: on
"""The positive levels of 1 to 6 bits, sign included; those below zero are their negatives."""


def levels_of(bits: int) -> tuple[float, ...]:
    """The positive levels of a code of `bits` bits, ascending."""
    return LEVELS[bits - 1]


def limits_of(bits: int) -> tuple[float, ...]:
    """What lies above the i-th of them is nearer to level i + 1 than to level i.

    >>> limits_of(2)
    (0.981599,)
    """
    return tuple((a + b) / 2 for a, b in pairwise(levels_of(bits)))


@lru_cache(maxsize=256)
def tables_on(bits: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Levels and limits on a device: copied there once, since a copy waits for the host."""
    levels, limits = (torch.tensor(t, dtype=torch.float32, device=device) for t in (levels_of(bits), limits_of(bits)))
    return levels, limits
