"""The start: all ranks begin with rank 0's parameters, buffers and optimizer state, bit for bit."""

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gossamer.core.verbs import Program, all_reduce
from gossamer.integrations.handshake import tell
from gossamer.runtime import Worker

BUCKET = 25 * 2**20  # bytes that travel at once, and for which there must be room beside the model


def make_equal(model: nn.Module, optimizers: Sequence[Optimizer], worker: Worker) -> Program[None]:
    """Rank 0's model and optimizer state, for everybody."""
    device = worker.device
    yield from broadcast([*model.parameters(), *model.buffers()], worker.rank, device)
    whole = [o for o in optimizers if type(o).__name__ != "ZeroRedundancyOptimizer"]  # a shard is each rank's own
    mine = [[_described(o.state.get(p, {})) for p in _parameters(o)] for o in whole]
    everyone = yield from tell(mine, device)
    if not any(any(described) for told in everyone for described in told):
        return
    tensors = list[Tensor]()
    for optimizer, described in zip(whole, everyone[0], strict=True):
        for parameter, entries in zip(_parameters(optimizer), described, strict=True):
            tensors += _adopt(optimizer, parameter, entries)
    yield from broadcast(tensors, worker.rank, device)


def broadcast(tensors: Sequence[Tensor], rank: int, device: torch.device) -> Program[None]:
    """Rank 0's bits, written over everybody's, a bucket at a time.

    Bits are summed as integers with everybody else's zeros: exact for every type, and no rank stores N copies.
    """
    for bucket in _buckets(_pieces(tensors)):
        places = [0, *accumulate(_room(piece) for piece in bucket)]
        wire = torch.zeros(places[-1], dtype=torch.uint8, device=device)
        if rank == 0:
            for piece, at in zip(bucket, places):
                _as(piece, wire[at:]).copy_(piece)
        agreed = (yield from all_reduce(wire.view(torch.int32))).view(torch.uint8)
        for piece, at in zip(bucket, places):
            piece.copy_(_as(piece, agreed[at:]))


def _pieces(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Views that can be written to, none longer than a bucket but of those that cannot be cut."""
    for tensor in tensors:
        whole = tensor.detach()
        if whole.is_contiguous():
            yield from whole.view(-1).split(BUCKET // whole.element_size())
        else:
            yield whole


def _buckets(pieces: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    bucket, held = list[Tensor](), 0
    for piece in pieces:
        if bucket and held + _room(piece) > BUCKET:
            yield bucket
            bucket, held = [], 0
        if piece.numel():
            bucket.append(piece)
            held += _room(piece)
    if bucket:
        yield bucket


def _room(piece: Tensor) -> int:
    """Its bytes, up to where a number of any type may begin."""
    size = piece.numel() * piece.element_size()
    return size + -size % 16


def _as(piece: Tensor, wire: Tensor) -> Tensor:
    """The front of a wire, as what it carries."""
    return wire[: piece.numel() * piece.element_size()].view(piece.dtype).view(piece.shape)


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _described(state: Mapping[str, Any]) -> dict[str, Any]:
    """What a parameter's state holds: tensors by type, shape and whether they lie on the CPU, other values as they are."""
    return {key: _entry(value) for key, value in state.items()}


def _entry(value: Any) -> Any:
    if isinstance(value, Tensor):
        return {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape), "cpu": value.is_cpu}
    if value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value)):
        return {"value": value}
    return {"other": type(value).__name__}


def _adopt(optimizer: Optimizer, parameter: Tensor, entries: Mapping[str, Any]) -> list[Tensor]:
    """Make a parameter's state hold what rank 0's does; returns its tensors, which still want their values."""
    if not entries:
        optimizer.state.pop(parameter, None)
        return []
    mine, tensors = optimizer.state[parameter], list[Tensor]()
    for key in [k for k in mine if k not in entries]:
        del mine[key]
    for key, entry in entries.items():
        if "value" in entry:
            mine[key] = entry["value"]
        elif "other" in entry:
            warnings.warn(
                f"the optimizer keeps a {entry['other']} as {key!r}, which cannot be made equal on all ranks; "
                "attach before its first step, or load the same checkpoint on all of them",
                stacklevel=2,
            )
        else:
            dtype, shape = getattr(torch, entry["dtype"]), entry["shape"]
            held = mine.get(key)
            if not isinstance(held, Tensor) or held.dtype != dtype or list(held.shape) != shape:
                device = torch.device("cpu") if entry["cpu"] else parameter.device
                mine[key] = held = torch.zeros(shape, dtype=dtype, device=device)
            tensors.append(held)
    return tensors


def hyperparameters(optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """What the ranks' optimizers must have in common, by name."""
    facts = dict[str, Any]()
    for i, optimizer in enumerate(optimizers):
        which = "the optimizer" if len(optimizers) == 1 else f"optimizer {i}"
        facts[which] = type(optimizer).__name__
        for j, group in enumerate(optimizer.param_groups):
            facts[f"{which}'s group {j}"] = {
                k: float(v) if isinstance(v, Tensor) and v.numel() == 1 else repr(v)
                for k, v in sorted(group.items())
                if k != "params" and not callable(v)
            } | {"parameters": len(group["params"])}
    return facts
