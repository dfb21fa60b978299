"""A connection: what answers a lane's verbs on a connection of its own. There are three, of one shape.

`gloo` for tensors on the CPU, `nccl` for those on a GPU, and `staged` for those on a GPU whose ranks have gloo between them.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from gossamer.core.verbs import (
    AllGather,
    AllReduce,
    AllToAll,
    LazyWire,
    Read,
    Receive,
    ReduceOp,
    Send,
    Verb,
    receive_order,
)

OPS: dict[ReduceOp, Any] = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}

# What gloo and NCCL both add up; gloo takes bool too but leaves values in it that are not booleans.
_FLOATS = {torch.float32, torch.float64, torch.float16, torch.bfloat16}
_SUMMABLE = _FLOATS | {torch.int32, torch.int64, torch.uint8, torch.int8}

Crossing = AllReduce | AllGather | AllToAll | Send | Receive


class Connection(Protocol):
    """Answers requests one after the other, in the lane's thread."""

    rank: int
    size: int

    def answer(self, verb: Crossing) -> Any: ...

    def tear(self) -> None:
        """From any thread: end all that waits on this connection, with an error. It cannot be used any more."""
        ...

    def hang_up(self, patience: float) -> None:
        """Let go of it, where nothing is under way; peers that wait for us shall fail. `patience` in seconds, none after a failure."""
        ...


def read_all(wires: Sequence[Tensor], read: Read, rank: int) -> list[Tensor]:
    for j in receive_order(rank, len(wires)):
        read(j, wires[j])
    return []


def refuse(verb: Verb, size: int, rank: int, device: torch.device) -> None:
    """Find what a backend would answer by hanging, by aborting, or with wrong numbers."""
    match verb:
        case AllReduce(tensor) | AllGather(tensor) | Send(_, tensor) if tensor.device != device:
            raise ValueError(f"{type(verb).__name__} of a tensor on {tensor.device}, in a lane for tensors on {device}")
        case AllReduce(tensor, _) if tensor.dtype not in _SUMMABLE:
            raise TypeError(f"no backend reduces {tensor.dtype}; convert it, to int32 or float32 for instance")
        case AllGather(wire) | Send(_, wire):
            _expect_wire(wire)
        case AllToAll(wires, lengths):
            if not len(wires) == len(lengths) == size:
                raise ValueError(f"{len(wires)} wires and {len(lengths)} lengths given to {size} ranks")
            if wires[rank].numel() != lengths[rank]:
                raise ValueError(f"{lengths[rank]} bytes expected of a wire of {wires[rank].numel()} to oneself")
            for wire in wires:
                if isinstance(wire, Tensor):
                    _expect_wire(wire)
        case _:
            pass
    peer = verb.to if isinstance(verb, Send) else verb.source if isinstance(verb, Receive) else 0
    if peer is not None and peer >= size:
        raise ValueError(f"there is no rank {peer} among {size}")


def made(wire: Tensor | LazyWire) -> Tensor:
    if isinstance(wire, LazyWire):
        wire = wire.keep()
        _expect_wire(wire)
    return wire


def _expect_wire(wire: Tensor) -> None:
    if wire.dtype != torch.uint8 or wire.dim() != 1:
        raise TypeError(f"a wire is one row of uint8, not {wire.dtype} of shape {tuple(wire.shape)}")
