"""Uniform levels of any number per bucket, and their Rice code: computes all positions at once."""

from __future__ import annotations

import torch
from torch import Tensor

from gossamer.kernels.layout import LEVEL_BLOCK, LEVEL_MOST, LEVEL_RECORD, LEVEL_ZEROS, ONE, Coded, gains, units
from gossamer.kernels.reference.hashing import fractions
from gossamer.kernels.reference.quantise import max_norms
from gossamer.kernels.reference.rounding import fixed_point


def codes(x: Tensor, levels: int, bucket: int, gains: Tensor, key: tuple[int, int], offset: int) -> Tensor:
    n, top = x.numel(), levels * ONE
    fixed = fixed_point(x * gains.repeat_interleave(bucket)[:n], top)
    return ((fixed + top + fractions(n, key, offset, x.device)) >> 23).to(torch.uint8)


def encode(
    x: Tensor, levels: int, bucket: int, norms: Tensor, key: tuple[int, int], offset: int, measure: bool, wire: Tensor
) -> int:
    if measure:
        norms.copy_(max_norms(x, bucket))
    signed = codes(x, levels, bucket, gains(norms, levels), key, offset).int() - levels
    coded = _encode(torch.where(signed < 0, -2 * signed - 1, 2 * signed), Coded(x.numel(), levels))
    wire[: coded.numel()] = coded
    return coded.numel()


def read(wire: Tensor, levels: int, bucket: int, norms: Tensor, weight: float, out: Tensor, anew: bool) -> bool:
    folded = _decode(wire, Coded(out.numel(), levels))
    if folded is None or (out.numel() and int(folded.max()) > 2 * levels):
        return False
    signed = (folded >> 1) ^ -(folded & 1)
    said = signed * units(norms, weight, levels).repeat_interleave(bucket)[: out.numel()]
    torch.add(
        torch.zeros((), device=out.device, dtype=torch.float32) if anew else out, said, out=out
    )  # -0.0 becomes 0.0
    return True


def _encode(folded: Tensor, plan: Coded) -> Tensor:
    of_record = _cut(plan, LEVEL_RECORD, folded.device)
    rice = _parameters(folded, plan)
    each = rice[_cut(plan, LEVEL_BLOCK, folded.device)]
    wheres, planes = list[Tensor](), list[Tensor]()
    for bit in range(plan.bits - 1):
        has = (each > bit) & (each != LEVEL_ZEROS)
        wheres.append(of_record[has])
        planes.append(folded[has] >> bit & 1)
    alive, k, last = each != LEVEL_ZEROS, 0, 2 * plan.levels >> each.clamp(max=8)
    while bool(alive.any()):
        k += 1
        reached = folded >> each.clamp(max=8) >= k
        wheres.append(of_record[alive])
        planes.append(reached[alive].int())
        alive = alive & reached & (k < last)
    where, order = torch.cat(wheres).sort(stable=True)
    bits = where.bincount(minlength=plan.records)
    lengths = (bits + 7) // 8
    places = torch.arange(where.numel(), device=folded.device) + _shift(8 * lengths - bits)[where]
    said = torch.zeros(8 * int(lengths.sum()), dtype=torch.uint8, device=folded.device)
    said[places] = torch.cat(planes)[order].to(torch.uint8)
    heads = torch.stack([lengths & 255, lengths >> 8], 1).view(-1)
    shifts = torch.arange(8, dtype=torch.uint8, device=folded.device)
    body = (said.view(-1, 8) << shifts).sum(1, dtype=torch.uint8)
    return torch.cat([heads.to(torch.uint8), rice.to(torch.uint8), body])


def _decode(wire: Tensor, plan: Coded) -> Tensor | None:
    heads, rice = wire[: 2 * plan.records].int().view(-1, 2), wire[2 * plan.records : plan.first].int()
    lengths = heads[:, 0] + 256 * heads[:, 1]
    fine = (lengths <= LEVEL_MOST).all() & ((rice < plan.bits) | (rice == LEVEL_ZEROS)).all()
    if not fine or int(lengths.sum()) != wire.numel() - plan.first:
        return None
    shifts = torch.arange(8, dtype=torch.uint8, device=wire.device)
    reader = _Reader((wire[plan.first :, None] >> shifts & 1).view(-1), 8 * lengths, plan)
    each = rice[_cut(plan, LEVEL_BLOCK, wire.device)]
    folded, alive = torch.zeros_like(each), each != LEVEL_ZEROS
    for bit in range(plan.bits - 1):
        folded += reader.plane(alive & (each > bit)) << bit
    k, last = 0, 2 * plan.levels >> each.clamp(max=8)
    while bool(alive.any()) and not reader.beyond:
        k += 1
        reached = reader.plane(alive)
        folded += reached << each.clamp(max=8)
        alive = alive & (reached == 1) & (k < last)
    return folded if reader.ended else None


class _Reader:
    """Reads the bits of all records, and counts the bits read of each."""

    def __init__(self, bits: Tensor, most: Tensor, plan: Coded) -> None:
        self._bits, self._most, self._of_record = bits, most, _cut(plan, LEVEL_RECORD, bits.device)
        self._first, self._read = _shift(most), torch.zeros_like(most)

    @property
    def beyond(self) -> bool:
        return bool((self._read > self._most).any())

    @property
    def ended(self) -> bool:
        return bool(((self._read + 7) // 8 * 8 == self._most).all())

    def plane(self, has: Tensor) -> Tensor:
        """The next bit of each element that has one; zeros after the end of a record."""
        of_record = self._of_record[has]
        counts = of_record.bincount(minlength=self._read.numel())
        places = (
            torch.arange(of_record.numel(), device=has.device) + (self._first + self._read - _shift(counts))[of_record]
        )
        self._read = self._read + counts
        out = torch.zeros_like(has, dtype=torch.int32)
        if not self.beyond:
            out[has] = self._bits[places].int()
        return out


def _parameters(folded: Tensor, plan: Coded) -> Tensor:
    """The Rice parameter of each block: the smallest one that gives the shortest code."""
    block = _cut(plan, LEVEL_BLOCK, folded.device)
    sizes = block.bincount(minlength=plan.blocks)
    quotients = [_sums(folded >> r, block, plan) for r in range(plan.bits)]
    costs = torch.stack([q + (r + 1) * sizes for r, q in enumerate(quotients)])
    # argmin does not promise the first of equals, so the parameter itself breaks the tie
    chosen = (8 * costs + torch.arange(plan.bits, device=folded.device)[:, None]).argmin(0)
    return torch.where(quotients[0] == 0, LEVEL_ZEROS, chosen)


def _sums(numbers: Tensor, block: Tensor, plan: Coded) -> Tensor:
    return torch.zeros(plan.blocks, dtype=torch.int64, device=block.device).index_add_(0, block, numbers.long())


def _cut(plan: Coded, length: int, device: torch.device) -> Tensor:
    """The index of the run in which each element lies; elements that fill no word belong to the last one."""
    place = torch.arange(plan.n, device=device)
    whole = plan.n // 64 * 64
    return torch.where(place < whole, place // length, -(-whole // length))


def _shift(lengths: Tensor) -> Tensor:
    """The exclusive cumulative sum."""
    return lengths.cumsum(0) - lengths
