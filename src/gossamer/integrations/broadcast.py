"""Broadcast: copy rank 0's parameters, buffers and optimizer state to all ranks, bit for bit."""

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gossamer.checkpoints.tree import digest
from gossamer.core.verbs import Program, all_reduce
from gossamer.integrations.handshake import numbers_of_all, tell
from gossamer.integrations.held_model import parts_of
from gossamer.runtime import Worker, is_sharded, local_part

BUCKET = 25 * 2**20  # bytes sent at once; this much memory is needed beside the model


def make_equal(model: nn.Module, optimizers: Sequence[Optimizer], worker: Worker) -> Program[None]:
    """Copy rank 0's model and optimizer state to all ranks. Frozen parameters are sent only where they differ."""
    device = worker.device
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    yield from make_model_equal(model, worker, compared=frozen)
    whole = [o for o in optimizers if type(o).__name__ != "ZeroRedundancyOptimizer"]  # a shard is each rank's own
    mine = [[description(o.state.get(p, {})) for p in parameters_of(o)] for o in whole]
    everyone = yield from tell(mine, device)
    if not any(any(described) for states in everyone for described in states):
        return
    tensors = list[Tensor]()
    for optimizer, described in zip(whole, everyone[0], strict=True):
        for parameter, entries in zip(parameters_of(optimizer), described, strict=True):
            tensors += adopt(optimizer, parameter, entries)
    yield from broadcast(tensors, device, gives=worker.rank == 0)


def make_model_equal(model: nn.Module, worker: Worker, compared: Sequence[str]) -> Program[None]:
    """Copy rank 0's parameters and buffers to all ranks; those named in `compared` only if a hash differs on some rank."""
    parts = parts_of(model)
    if compared:
        hashes = [_hash(parts[name]) for name in compared]
        rows = yield from numbers_of_all(hashes, torch.int64, worker.device)
        for name, *found in zip(compared, *rows, strict=True):
            if len(set(found)) == 1:
                del parts[name]
    yield from broadcast([*parts.values()], worker.device, gives=worker.rank == 0)


def _hash(tensor: Tensor) -> int:
    """A hash of 56 bits, so that it is a positive int64."""
    return int.from_bytes(blake2b(digest(tensor).encode(), digest_size=7).digest())


def broadcast(tensors: Sequence[Tensor], device: torch.device, gives: bool, takes: bool = True) -> Program[None]:
    """Overwrite the tensors of all ranks that take with those of the one that gives, one bucket at a time.

    The bits of who gives are summed as integers with zeros from all others: exact for every type, and no rank stores N copies.
    """
    for bucket in _buckets(piece for tensor in tensors for piece in _pieces(tensor.detach())):
        places = [0, *accumulate(_room(piece) for piece in bucket)]
        wire = torch.zeros(places[-1], dtype=torch.uint8, device=device)
        if gives:
            for piece, at in zip(bucket, places):
                _as(piece, wire[at:]).copy_(piece)
        agreed = (yield from all_reduce(wire.view(torch.int32))).view(torch.uint8)
        for piece, at in zip(bucket, places) if takes else ():
            piece.copy_(_as(piece, agreed[at:]))


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Yield writable views, none longer than a bucket: the same ones on all ranks, whatever the layout in memory."""
    count = -(-tensor.nbytes // BUCKET)
    if count <= 1:
        yield tensor
        return
    longest = max(range(tensor.dim()), key=lambda dim: tensor.shape[dim])
    for piece in tensor.chunk(count, longest):
        yield from _pieces(piece)


def _buckets(pieces: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Group pieces into lists of at most `BUCKET` bytes."""
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
    """Size of a piece in bytes, rounded up to a multiple of 16, where every type is aligned."""
    return piece.nbytes + -piece.nbytes % 16


def _as(piece: Tensor, wire: Tensor) -> Tensor:
    """View the front of a wire with the type and shape of a piece."""
    return wire[: piece.nbytes].view(piece.dtype).view(piece.shape)


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def description(state: Mapping[str, Any]) -> dict[str, Any]:
    """Describe a parameter's state: tensors by type, shape and whether they are on the CPU, other values as they are."""
    return {key: _entry(value) for key, value in state.items()}


def _entry(value: Any) -> Any:
    if isinstance(value, Tensor):
        return {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape), "cpu": value.is_cpu}
    if value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value)):
        return {"value": value}
    return {"other": type(value).__name__}


def adopt(optimizer: Optimizer, parameter: Tensor, entries: Mapping[str, Any]) -> list[Tensor]:
    """Give a parameter's state the entries of rank 0's; return its tensors, whose values are still to be copied."""
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
                f"the optimizer keeps a {entry['other']} as {key!r}, which cannot be copied from rank 0 to the other ranks; "
                "attach before the optimizer's first step, or load the same checkpoint on all ranks",
                stacklevel=2,
            )
        else:
            dtype, shape = getattr(torch, entry["dtype"]), entry["shape"]
            held = mine.get(key)
            if not isinstance(held, Tensor) or held.dtype != dtype or list(held.shape) != shape:
                mine[key] = held = _empty_state(parameter, dtype, shape, entry["cpu"])
            tensors.append(local_part(held))
    return tensors


def _empty_state(parameter: Tensor, dtype: torch.dtype, shape: Sequence[int], on_cpu: bool) -> Tensor:
    """An entry of an optimizer's state, sharded as its parameter where it has the parameter's shape."""
    if is_sharded(parameter) and list(parameter.shape) == shape:
        return torch.zeros_like(parameter, dtype=dtype)
    return torch.zeros(shape, dtype=dtype, device=torch.device("cpu") if on_cpu else parameter.device)


def hyperparameters(optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """Return the hyperparameters that must be equal on all ranks, by name."""
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
