"""Hand-over: one rank gives those that come all that is equal everywhere; what is a rank's own begins at zero."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gossamer.checkpoints import state as checkpoints
from gossamer.checkpoints.manifest import HEAD
from gossamer.core.hashes import hash_of
from gossamer.core.verbs import Program
from gossamer.integrations.broadcast import adopt, broadcast, description, parameters_of
from gossamer.integrations.handshake import tell
from gossamer.runtime import Worker, is_sharded, local_part


class Untrained:
    """A model's frozen parameters and its buffers: whoever comes back takes them from one who was at work."""

    def __init__(self, model: nn.Module, worker: Worker) -> None:
        self._model, self._worker = model, worker

    def tensors(self) -> dict[str, Tensor]:
        trained = {id(param.parameter) for param in self._worker.params.values()}
        frozen = {n: p for n, p in self._model.named_parameters() if id(p) not in trained}
        held: dict[str, Tensor] = frozen | dict(self._model.named_buffers())
        return {name: local_part(tensor.detach()) for name, tensor in held.items()}

    @torch.no_grad()
    def take(self, values: Mapping[str, Tensor], giver: int) -> None:
        """These differ from the giver's. That buffers do is no surprise, for they run; another base is one."""
        held, parameters = self.tensors(), dict(self._model.named_parameters())
        for name, value in values.items():
            held[name].copy_(value)
        if frozen := [name for name in values if name in parameters]:
            named = ", ".join(map(repr, frozen[:5])) + (f" and {len(frozen) - 5} more" if len(frozen) > 5 else "")
            warnings.warn(
                f"rank {self._worker.ranks.number} has come, and {len(frozen)} of its frozen parameters differ from those of the "
                f"others: {named}. It has taken rank {giver}'s; start it from the same base, so that they need not be sent",
                RuntimeWarning,
                stacklevel=2,
            )


def hand_over(optimizers: Sequence[Optimizer], worker: Worker, giver: int, takes: bool, keeps: bool) -> Program[None]:
    """Give parameters, what differs of frozen ones and buffers, the state that is equal everywhere, and the step.

    The giver's place is that among those present. A rank that `takes` may keep its own state, or begins with none.
    """
    gives = worker.rank == giver
    equal = _alike(optimizers, worker)
    mine = checkpoints.entries(worker) if gives else {}
    shared = {key: value for key, value in mine.items() if key.startswith("equal/")}
    untrained = {} if worker.untrained is None else worker.untrained.tensors()
    told = yield from tell(
        {
            "head": {key: mine[key] for key in HEAD} if gives else {},
            "shared": description(shared),
            "optimizers": [[description(o.state.get(p, {})) for p in parameters_of(o)] for o in equal] if gives else [],
            "hashes": {n: hash_of(t) for n, t in untrained.items()} if gives or takes else {},
        },
        worker.device,
    )
    given, other = told[giver], _other([each["hashes"] for each in told], giver)
    frozen = {name: torch.empty_like(t) if takes else t for name, t in untrained.items() if name in other}
    device = worker.device if takes else torch.device("meta")  # who only passes on needs no memory for it
    got = shared if gives else {key: _empty(entry, entry["shape"], device) for key, entry in given["shared"].items()}
    tensors = [param.values for param in worker.params.values()] + [*frozen.values()]
    tensors += [*_states(equal, given["optimizers"], gives, takes), *got.values()]
    yield from broadcast(tensors, worker.device, gives, takes)
    if not takes:
        return
    theirs, own = given["hashes"], told[worker.rank]["hashes"]
    if worker.untrained is not None and (new := {n: t for n, t in frozen.items() if own.get(n) != theirs[n]}):
        worker.untrained.take(new, worker.ranks.present.ranks[giver])
    checkpoints.take_over(worker, given["head"] | got, keeps)


def _alike(optimizers: Sequence[Optimizer], worker: Worker) -> list[Optimizer]:
    """The optimizers whose state is equal on all ranks: all, where all take the same steps."""
    same = worker.recipe.schedule.shape.averages_gradients and not worker.recipe.memory.parts_models
    return [*optimizers] if same else []


def _other(hashes: Sequence[Mapping[str, int]], giver: int) -> set[str]:
    """Frozen parameters and buffers that are other ones at some rank that takes."""
    theirs = hashes[giver]
    takers = [each for i, each in enumerate(hashes) if each and i != giver]
    return {name for name in theirs if any(each.get(name) != theirs[name] for each in takers)}


def _states(
    optimizers: Sequence[Optimizer], given: Sequence[Sequence[Mapping[str, Any]]], gives: bool, takes: bool
) -> Iterator[Tensor]:
    """The tensors of the optimizers' states, as the giver has described them."""
    for optimizer, described in zip(optimizers, given):
        for parameter, entries in zip(parameters_of(optimizer), described, strict=True):
            tensors = {key: entry for key, entry in entries.items() if "dtype" in entry}
            if takes:
                yield from adopt(optimizer, parameter, entries)
            elif gives:
                yield from (local_part(optimizer.state[parameter][key]) for key in tensors)
            else:
                yield from (
                    _empty(entry, _shape_here(parameter, entry["shape"]), torch.device("meta"))
                    for entry in tensors.values()
                )


def _empty(entry: Mapping[str, Any], shape: Sequence[int], device: torch.device) -> Tensor:
    return torch.empty(tuple(shape), dtype=getattr(torch, entry["dtype"]), device=device)


def _shape_here(parameter: Tensor, shape: Sequence[int]) -> Sequence[int]:
    """The shape of this rank's part of an entry of the optimizer's state, which is cut as its parameter is."""
    cut = is_sharded(parameter) and list(parameter.shape) == [*shape]
    return tuple(local_part(parameter).shape) if cut else shape
