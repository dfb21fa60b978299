"""Answers to requests as if every other rank sent the same as this one."""

from typing import Any

import torch

from gossamer.core.verbs import (
    AllGather,
    AllReduce,
    AllToAll,
    Compute,
    Now,
    Receive,
    TakeTicket,
    TicketHolders,
    Verb,
    WaitQuorum,
)
from gossamer.core.wire import kept, receive_order, send_order


def answer_of(verb: Verb, size: int) -> Any:
    match verb:
        case AllReduce(tensor):
            return tensor
        case AllGather(wire):
            return [wire] * size
        case AllToAll(wires, lengths):
            made = [kept(w) for w in wires]
            return [w if w.numel() == n else w.new_zeros(n) for w, n in zip(made, lengths, strict=True)]
        case Receive(source, length):
            wire = torch.zeros(length, dtype=torch.uint8, device="cpu")
            return (0, wire) if source is None else wire
        case TakeTicket():
            return 1
        case Compute(work):
            return work()
        case Now():
            return 0.0
        case WaitQuorum(_, count):
            return TicketHolders.seen(range(count), [0.0] * count)
        case _:
            return None


def answer_with_wires(verb: Verb, size: int) -> Any:
    """Answer as if others sent the same; make lazy wires and read what came, as a fabric does."""
    match verb:
        case AllGather(wire, read) if read is not None:
            for j in receive_order(0, size):
                read(j, wire)
            return []
        case AllToAll(wires, lengths, read) if read is not None:
            made = {j: kept(wires[j]) for j in send_order(0, size)}
            for j in receive_order(0, size):
                fits = made[0] if made[0].numel() == lengths[j] else made[j]
                read(j, fits if fits.numel() == lengths[j] else fits.new_zeros(lengths[j]))
            return []
        case _:
            return answer_of(verb, size)
