"""Sums: what a controller wants to know of all ranks' own blocks, in one small message a step."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gossamer.core.bucket import Bucket
from gossamer.core.contracts import Controller, Exchange
from gossamer.core.errors import GossamerError
from gossamer.core.verbs import Program, Start, all_reduce

LABEL = "numbers"


def numbers(controller: Controller, block: Bucket, exchange: Exchange) -> Tensor:
    """What the controller notes of one block."""
    own = controller.local(block, exchange).detach().reshape(-1).double()
    wanted = controller.counts * (len(block.layout.segments) if controller.counts_each else 1)
    if own.numel() != wanted:
        raise GossamerError(
            f"{controller} says that it counts {wanted} number(s) of a block, and `local` gave {own.numel()} of "
            f"{block.name!r}"
        )
    return own


def summed(own: Sequence[Tensor], step: int) -> Start:
    """The request that sums them over all ranks: one row for each block."""
    return Start(_sum([*own]), LABEL, step)


def _sum(rows: list[Tensor]) -> Program[tuple[Tensor, ...]]:
    lengths = [row.numel() for row in rows]
    return tuple((yield from all_reduce(torch.cat(rows))).split(lengths))
