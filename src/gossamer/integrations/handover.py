"""Hand-over: one rank gives those that come all that is equal everywhere; what is a rank's own begins at zero."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gossamer.checkpoints import state as checkpoints
from gossamer.checkpoints.manifest import HEAD
from gossamer.core.hashes import hash_of
from gossamer.core.verbs import Program, all_reduce
from gossamer.integrations.broadcast import adopt, description, parameters_of
from gossamer.integrations.handshake import tell
from gossamer.runtime import Worker, is_sharded, local_part


class Handover(NamedTuple):
    """Who gives, and whether this rank takes, and keeps its own state then. Ranks are numbered among those present."""

    giver: int
    takes: bool
    keeps: bool


def hand_over(model: nn.Module, optimizers: Sequence[Optimizer], worker: Worker, how: Handover) -> Program[None]:
    """Give parameters, what differs of frozen ones and buffers, the state that is equal everywhere, and the step."""
    gives = worker.rank == how.giver
    equal = _alike(optimizers, worker)
    mine = checkpoints.entries(worker) if gives else {}
    shared = {key: value for key, value in mine.items() if key.startswith("equal/")}
    untrained = {} if worker.untrained is None else worker.untrained.tensors()
    told = yield from tell(
        {
            "head": {key: mine[key] for key in HEAD} if gives else {},
            "shared": {key: _form(value) for key, value in shared.items()},
            "optimizers": [[description(o.state.get(p, {})) for p in parameters_of(o)] for o in equal] if gives else [],
            "hashes": {n: hash_of(t) for n, t in untrained.items()} if gives or how.takes else {},
        },
        worker.device,
    )
    yield from _parameters(worker, how)
    yield from _untrained(worker, untrained, [each["hashes"] for each in told], how)
    yield from _optimizers(equal, told[how.giver]["optimizers"], worker, how)
    got = dict[str, Any](told[how.giver]["head"])
    for key, (kind, shape) in told[how.giver]["shared"].items():
        got[key] = yield from _give(shared.get(key), getattr(torch, kind), shape, worker.device, gives)
    if how.takes:
        checkpoints.take_over(worker, got, how.keeps)


def _alike(optimizers: Sequence[Optimizer], worker: Worker) -> list[Optimizer]:
    """The optimizers whose state is equal on all ranks: all, where all take the same steps."""
    same = worker.recipe.schedule.shape.averages_gradients and not worker.recipe.memory.parts_models
    return [*optimizers] if same else []


def _form(tensor: Tensor) -> tuple[str, list[int]]:
    return str(tensor.dtype).removeprefix("torch."), list(tensor.shape)


def _give(
    mine: Tensor | None, dtype: torch.dtype, shape: Sequence[int], device: torch.device, gives: bool
) -> Program[Tensor]:
    """One rank's tensor, as a sum of bytes in which all other ranks have zeros: exact for every type."""
    like = torch.empty(tuple(shape), dtype=dtype, device="meta")
    if gives and mine is not None:
        bits = mine.detach().to(device).contiguous().reshape(-1).view(torch.uint8).clone()
    else:
        bits = torch.zeros(like.numel() * like.element_size(), dtype=torch.uint8, device=device)
    return (yield from all_reduce(bits)).view(dtype).view(like.shape)


def _parameters(worker: Worker, how: Handover) -> Program[None]:
    for param in worker.params.values():
        held = param.values
        value = yield from _give(held, held.dtype, held.shape, worker.device, worker.rank == how.giver)
        if how.takes:
            held.copy_(value)


def _untrained(
    worker: Worker, held: Mapping[str, Tensor], hashes: Sequence[Mapping[str, int]], how: Handover
) -> Program[None]:
    """Frozen parameters and buffers that are other ones at some rank that takes."""
    theirs = hashes[how.giver]
    takers = [each for i, each in enumerate(hashes) if each and i != how.giver]
    got = dict[str, Tensor]()
    for name in [n for n in theirs if any(each.get(n) != theirs[n] for each in takers)]:
        gives = worker.rank == how.giver
        value = yield from _give(held[name], held[name].dtype, held[name].shape, worker.device, gives)
        if how.takes and hashes[worker.rank].get(name) != theirs[name]:
            got[name] = value
    if got and worker.untrained is not None:
        worker.untrained.take(got, worker.ranks.present.ranks[how.giver])


def _optimizers(
    optimizers: Sequence[Optimizer], given: Sequence[Sequence[Mapping[str, Any]]], worker: Worker, how: Handover
) -> Program[None]:
    for optimizer, entries in zip(optimizers, given):
        for parameter, kept in zip(parameters_of(optimizer), entries, strict=True):
            held = optimizer.state.get(parameter, {})
            targets = adopt(optimizer, parameter, kept) if how.takes else []
            for key, entry in kept.items():
                if "dtype" not in entry:
                    continue
                mine = local_part(held[key]) if worker.rank == how.giver else None
                kind, shape = getattr(torch, entry["dtype"]), _shape_here(parameter, entry["shape"])
                value = yield from _give(mine, kind, shape, worker.device, mine is not None)
                if targets:
                    targets.pop(0).copy_(value)


def _shape_here(parameter: Tensor, shape: Sequence[int]) -> Sequence[int]:
    """The shape of this rank's part of an entry of the optimizer's state, which is cut as its parameter is."""
    cut = is_sharded(parameter) and list(parameter.shape) == [*shape]
    return tuple(local_part(parameter).shape) if cut else shape
