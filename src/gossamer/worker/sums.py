"""Sums: what a controller wants to know of all ranks' own blocks, in one small message a step."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gossamer.core.block import Block
from gossamer.core.contracts import Controller
from gossamer.core.errors import GossamerError
from gossamer.core.verbs import Program, Start, all_reduce

LABEL = "numbers"


def numbers(controller: Controller, block: Block) -> Tensor:
    """What the controller notes of one block."""
    own = controller.local(block).detach().reshape(-1).double()
    if own.numel() != controller.counts:
        raise GossamerError(
            f"{controller} says that it counts {controller.counts} number(s) of a block, and `local` gave {own.numel()} of "
            f"{block.name!r}"
        )
    return own


def summed(own: Sequence[Tensor], step: int) -> Start:
    """The request that sums them over all ranks: one row for each block."""
    return Start(_sum(torch.stack([*own])), LABEL, step)


def _sum(rows: Tensor) -> Program[tuple[Tensor, ...]]:
    return tuple((yield from all_reduce(rows)).unbind())
