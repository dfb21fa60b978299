"""Uniform levels of any number per bucket, and their Rice code: computes all positions at once."""

import torch
from torch import Tensor

from gossamer.core.rng import Key
from gossamer.kernels.layout import LEVEL_BLOCK, LEVEL_MOST, LEVEL_RECORD, LEVEL_ZEROS, Coded, units
from gossamer.kernels.reference.indices import parameters
from gossamer.kernels.reference.planes import put, to_bits, to_bytes
from gossamer.kernels.reference.quantise import codes, max_norms


def encode(x: Tensor, levels: int, bucket: int, norms: Tensor, key: Key, measure: bool, wire: Tensor) -> int:
    if measure:
        norms.copy_(max_norms(x, bucket))
    signed = codes(x, levels, bucket, norms, key).int() - levels
    coded = _encode(torch.where(signed < 0, -2 * signed - 1, 2 * signed), Coded(x.numel(), levels))
    wire[: coded.numel()] = coded
    return coded.numel()


def read(wire: Tensor, levels: int, bucket: int, norms: Tensor, weight: float, out: Tensor, anew: bool) -> bool:
    folded = _decode(wire, Coded(out.numel(), levels))
    if folded is None or (out.numel() and int(folded.max()) > 2 * levels):
        return False
    signed = (folded >> 1) ^ -(folded & 1)
    said = signed * units(norms, weight, levels).repeat_interleave(bucket)[: out.numel()]
    put(said, out, anew)
    return True


def _encode(folded: Tensor, plan: Coded) -> Tensor:
    of_record = _cut(plan, LEVEL_RECORD, folded.device)
    block = _cut(plan, LEVEL_BLOCK, folded.device)
    nothing = torch.zeros(plan.blocks, dtype=folded.dtype, device=folded.device).index_add_(0, block, folded) == 0
    rice = parameters(folded, block, plan.blocks, plan.bits).masked_fill_(nothing, LEVEL_ZEROS)
    each = rice[block]
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
    return torch.cat([heads.to(torch.uint8), rice.to(torch.uint8), to_bytes(said)])


def _decode(wire: Tensor, plan: Coded) -> Tensor | None:
    heads, rice = wire[: 2 * plan.records].int().view(-1, 2), wire[2 * plan.records : plan.first].int()
    lengths = heads[:, 0] + 256 * heads[:, 1]
    fine = (lengths <= LEVEL_MOST).all() & ((rice < plan.bits) | (rice == LEVEL_ZEROS)).all()
    if not fine or int(lengths.sum()) != wire.numel() - plan.first:
        return None
    reader = _Reader(to_bits(wire[plan.first :]), 8 * lengths, plan)
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
        begins = self._first + self._read - _shift(counts)
        places = torch.arange(of_record.numel(), device=has.device) + begins[of_record]
        self._read = self._read + counts
        out = torch.zeros_like(has, dtype=torch.int32)
        if not self.beyond:
            out[has] = self._bits[places].int()
        return out


def _cut(plan: Coded, length: int, device: torch.device) -> Tensor:
    """The index of the run in which each element lies; elements that fill no word belong to the last one."""
    place = torch.arange(plan.n, device=device)
    whole = plan.n // 64 * 64
    return torch.where(place < whole, place // length, -(-whole // length))


def _shift(lengths: Tensor) -> Tensor:
    """The exclusive cumulative sum."""
    return lengths.cumsum(0) - lengths
