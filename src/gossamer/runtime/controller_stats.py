"""Controller statistics: sums each rank's numbers about its own gradients in one small message a step."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gossamer.core.bucket import Bucket
from gossamer.core.contracts import Controller, Exchange
from gossamer.core.errors import GossamerError
from gossamer.core.verbs import Program, Start, all_reduce

LABEL = "numbers"


def numbers(controller: Controller, block: Bucket, exchange: Exchange) -> Tensor:
    """The controller's statistics of one bucket."""
    own = controller.local(block, exchange).detach().reshape(-1).double()
    wanted = controller.counts * (len(block.layout.segments) if controller.counts_each else 1)
    if own.numel() != wanted:
        raise GossamerError(
            f"{controller} declares {wanted} number(s) for a bucket, and its `local` returned {own.numel()} for "
            f"{block.name!r}"
        )
    return own


def summed(own: Sequence[Tensor], step: int) -> Start:
    """The request that sums the statistics over all ranks: one row for each bucket."""
    return Start(_sum([*own]), LABEL, step)


def _sum(rows: list[Tensor]) -> Program[tuple[Tensor, ...]]:
    lengths = [row.numel() for row in rows]
    return tuple((yield from all_reduce(torch.cat(rows))).split(lengths))
