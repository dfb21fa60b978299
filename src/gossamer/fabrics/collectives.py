"""Runs a collective in one process: compares the requests of all ranks, and answers them together."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from gossamer.core.groups import named
from gossamer.core.verbs import AllGather, AllReduce, AllToAll, Verb
from gossamer.core.wire import EqualReader, GatheredWires, Reader, WireRows, kept, receive_order, send_order

Collective = AllReduce | AllGather | AllToAll
TOGETHER = 16  # ranks whose wires from all others are put together at once


def describe(verb: Verb) -> str:
    match verb:
        case AllReduce(tensor, op):
            text = f"AllReduce({tensor.numel()} x {str(tensor.dtype).removeprefix('torch.')}, {op})"
        case AllGather(wire):
            text = f"AllGather({wire.numel()} bytes)"
        case AllToAll():
            text = f"AllToAll({[*verb.sent]} bytes)"
        case _:
            return type(verb).__name__
    return text + named(verb.among)


def mismatch(verbs: list[Collective], ranks: Sequence[int]) -> str:
    """Why these requests cannot be one collective of these ranks; empty if they can."""
    pairs = [verb for verb in verbs if isinstance(verb, AllToAll)]
    if len(pairs) == len(verbs):
        return _unexpected(pairs, ranks)
    first = describe(verbs[0])
    for rank, verb in zip(ranks, verbs, strict=True):
        if describe(verb) != first:
            return f"rank {ranks[0]} asks {first} while rank {rank} asks {describe(verb)}"
    return ""


def _unexpected(verbs: Sequence[AllToAll], ranks: Sequence[int]) -> str:
    """The first wire of another length than its receiver expects; empty if there is none."""
    for i, (verb, expected) in enumerate(zip(verbs, zip(*(v.lengths for v in verbs), strict=True), strict=True)):
        if tuple(verb.sent) != expected:
            j = next(j for j, (n, m) in enumerate(zip(verb.sent, expected, strict=True)) if n != m)
            return f"rank {ranks[i]} sends {verb.sent[j]} bytes to rank {ranks[j]}, which expects {expected[j]}"
    return ""


class Refused(Exception):
    """A rank failed to make or to read one of its wires."""

    def __init__(self, rank: int, reason: Exception) -> None:
        self.rank, self.reason = rank, reason


def answers(verbs: Sequence[Any]) -> list[Any]:
    """The answer for each rank; raises `Refused` if a rank fails to make or read a wire."""
    match verbs[0]:
        case AllReduce(_, op):
            total = _reduce([v.tensor for v in verbs], op)
            return [total, *(total.clone() for _ in verbs[1:])]
        case AllGather():
            wires = [v.wire.clone() for v in verbs]  # a program may still write to the tensor that it passed
            known, first = dict[Any, tuple[Tensor, Any]](), verbs[0].read
            read = [_read(0, verbs[0], GatheredWires(wires, known, _copied))]
            for rank, verb in enumerate(verbs[1:], 1):
                copied = isinstance(verb.read, EqualReader) and verb.read.copy(first)
                read.append([] if copied else _read(rank, verb, GatheredWires(wires, known, _copied)))
            return read
        case _:
            came = _exchanged([_made(rank, v) for rank, v in enumerate(verbs)], [v.lengths for v in verbs])
            return [_read(rank, v, wires) for rank, (v, wires) in enumerate(zip(verbs, came, strict=True))]


def _exchanged(sent: Sequence[Sequence[Tensor]], lengths: Sequence[Sequence[int]]) -> Iterator[Sequence[Tensor]]:
    """For each rank the wires from all ranks; rows of one width are put together for many ranks in one pass."""
    rows = [wires.rows for wires in sent if isinstance(wires, WireRows)]
    if len(rows) < len(sent) or len({each.shape for each in rows}) > 1:
        yield from ([wires[rank] for wires in sent] for rank in range(len(sent)))
        return
    for first in range(0, len(sent), TOGETHER):
        for rank, came in enumerate(torch.stack([each[first : first + TOGETHER] for each in rows], 1), first):
            yield WireRows(came, lengths[rank])


def _copied(tensor: Tensor) -> Tensor:
    return tensor.clone()


def _made(rank: int, verb: AllToAll) -> Sequence[Tensor]:
    """Make the wires of a rank, in the same order as on a real network where they are made one by one."""
    try:
        if verb.make_all is not None:
            return verb.make_all()
        made = {j: kept(verb.wires[j]).clone() for j in send_order(rank, len(verb.wires))}
        return [made[j] for j in range(len(made))]
    except Exception as reason:
        raise Refused(rank, reason) from reason


def _read(rank: int, verb: AllGather | AllToAll, wires: Sequence[Tensor]) -> Sequence[Tensor]:
    if verb.read is None:
        return wires
    try:
        order = receive_order(rank, len(wires))
        if isinstance(verb.read, Reader):
            verb.read.all(order, wires)
            return []
        for j in order:
            verb.read(j, wires[j])
    except Exception as reason:
        raise Refused(rank, reason) from reason
    return []


def _reduce(tensors: list[Tensor], op: str) -> Tensor:
    """Reduce in rank order, so that the result does not depend on the order of arrival."""
    combine = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}[op]
    total = tensors[0].clone()
    for t in tensors[1:]:
        combine(total, t, out=total)
    return total
