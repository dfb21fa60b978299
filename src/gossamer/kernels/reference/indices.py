"""Rice coding of gaps: computes all positions at once."""

import torch
from torch import Tensor

from gossamer.kernels.layout import INDEX_BLOCK
from gossamer.kernels.reference.planes import to_bits, to_bytes

_PARAMETERS = 32


def encode(indices: Tensor, n: int) -> Tensor:
    count = indices.numel()
    gaps = indices.long().diff(prepend=indices.new_full((1,), -1).long()) - 1
    block = torch.arange(count, device=indices.device) // INDEX_BLOCK
    rice = parameters(gaps, block, -(-count // INDEX_BLOCK), _PARAMETERS)
    each = rice[block]
    ends = ((gaps >> each) + 1).cumsum(0) - 1  # where each unary quotient has its one
    starts = each.cumsum(0) - each
    low_bytes = -(-int(each.sum()) // 8)
    unary_bytes = -(-(int(ends[-1]) + 1) // 8) if count else 0
    if rice.numel() + low_bytes + unary_bytes >= 4 * count:
        return torch.cat([indices.new_zeros(1, dtype=torch.uint8), indices.view(torch.uint8)])
    low = torch.zeros(8 * low_bytes, dtype=torch.uint8, device=indices.device)
    for bit in range(int(each.max())):
        has = each > bit
        low[starts[has] + bit] = ((gaps[has] >> bit) & 1).to(torch.uint8)
    unary = torch.zeros(8 * unary_bytes, dtype=torch.uint8, device=indices.device)
    unary[ends] = 1
    mode = torch.ones(1, dtype=torch.uint8, device=indices.device)
    return torch.cat([mode, rice.to(torch.uint8), to_bytes(low), to_bytes(unary)])


def decode(wire: Tensor, count: int, n: int) -> Tensor | None:
    blocks = -(-count // INDEX_BLOCK)
    rice = wire[1 : 1 + blocks].long()
    if rice.numel() < blocks or bool((rice >= _PARAMETERS).any()):
        return None
    each = rice.repeat_interleave(INDEX_BLOCK)[:count]
    starts = each.cumsum(0) - each
    low_end = 1 + blocks + -(-int(each.sum()) // 8)
    if wire.numel() < low_end:
        return None
    low, ends = to_bits(wire[1 + blocks : low_end]), to_bits(wire[low_end:]).nonzero().view(-1)
    if ends.numel() != count or (wire.numel() - low_end) != (int(ends[-1]) // 8 + 1 if count else 0):
        return None
    quotients = ends.diff(prepend=ends.new_full((1,), -1)) - 1
    if bool((quotients > (n >> each)).any()):
        return None
    gaps = quotients << each
    for bit in range(int(each.max()) if count else 0):
        has = each > bit
        gaps[has] |= low[starts[has] + bit].long() << bit
    indices = (gaps + 1).cumsum(0) - 1
    return indices.int() if count == 0 or int(indices[-1]) < n else None


def parameters(numbers: Tensor, block: Tensor, blocks: int, count: int) -> Tensor:
    """The Rice parameter of each block, below `count`: the smallest one that gives the shortest code."""
    sizes, sums = block.bincount(minlength=blocks), numbers.new_zeros(count, blocks, dtype=torch.int64)
    for r in range(count):
        sums[r].index_add_(0, block, numbers.long() >> r).add_(sizes, alpha=r)
    # argmin does not promise the first of equals, so the parameter itself breaks the tie
    return (sums * count + torch.arange(count, device=numbers.device)[:, None]).argmin(0)
