"""Consensus: average parameters and buffers over all ranks, and check that replicas are equal."""

import warnings
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from gossamer.core.bucket import Bucket
from gossamer.core.errors import PeerError
from gossamer.core.hashes import hash_of
from gossamer.core.schedule import together
from gossamer.core.stream_events import read_numbers
from gossamer.core.verbs import Program, all_reduce
from gossamer.integrations.handshake import numbers_of_all
from gossamer.integrations.held_model import parts_of, parts_of_parameters
from gossamer.integrations.shared import SharedBuffers
from gossamer.kernels.finite import all_finite
from gossamer.runtime import Worker

TOUCHED = -1  # in place of the hash of a buffer that has changed since the last averaging


def remember(model: nn.Module) -> dict[str, Tensor]:
    """Copy all parameters and buffers of a model."""
    return {name: t.clone() for name, t in parts_of(model).items()}


def restore(model: nn.Module, own: dict[str, Tensor]) -> None:
    """Write the copies of `remember` back into the model.

    Buffers that were made or have grown meanwhile, such as caches of an evaluation on longer samples, stay as they are.
    """
    with torch.no_grad():
        for name, t in parts_of(model).items():
            if name in own and own[name].shape == t.shape:
                t.copy_(own[name])


def swap_in(worker: Worker, buffers: SharedBuffers) -> Program[None]:
    """Set parameters to sum x / sum w over all ranks, including messages in flight, and float buffers to their mean."""
    yield from worker.quiesce()
    judged = worker.recipe.schedule.consensus_share(worker.loop)
    finite = [True]
    if judged:
        mine = worker.replica.all(all_finite([share.value for share in judged]))
        if worker.size == 1:
            finite = [mine]
        else:
            finite = [bool(said) for (said,) in (yield from numbers_of_all([mine], torch.uint8, worker.device))]
        _say_who_is_left_out(worker, finite)
    for bucket, share in zip(worker.buckets, judged or []):
        given = share.flat() if finite[worker.rank] else share.flat().zero_()
        total = yield from all_reduce(given if worker.ranks.weight == 1 else given.mul_(worker.ranks.weight))
        bucket.write(total[:-1] / total[-1])
    yield from buffers.average()


def is_held(worker: Worker) -> bool:
    """True if this rank's model is what it says of the consensus. A model that is not finite is compared as it is."""
    shares = worker.recipe.schedule.consensus_share(worker.loop)
    pairs = zip(worker.buckets, shares or [])
    held = ((share.value, bucket.read() * share.weight) for bucket, share in pairs)
    return all(torch.allclose(*each, rtol=0.0, atol=0.0, equal_nan=True) for each in held)


def _say_who_is_left_out(worker: Worker, finite: Sequence[bool]) -> None:
    left_out = [worker.ranks.present.ranks[i] for i, fine in enumerate(finite) if not fine]
    if len(left_out) == len(finite):
        raise PeerError(
            f"at step {worker.step}, no rank's model is finite, so there is nothing that all could agree on: load the last "
            "checkpoint, and look at the learning rate and the loss scale"
        )
    if left_out:
        warnings.warn(
            f"rank {worker.ranks.number}, step {worker.step}: the model of rank(s) {left_out} is not finite, and is left out of what "
            "all ranks agree on",
            stacklevel=2,
        )


def check(
    worker: Worker, model: nn.Module, shared: Mapping[str, Tensor], ignored: Collection[str] = ()
) -> Program[None]:
    """Compare hashes of everything that must be equal on all ranks, and raise an error that names what differs.

    These are: parameters under synchronous recipes (under gossip between nodes, those of one node), anchors of local
    recipes, frozen parameters that are not `ignored`, and `shared` buffers that no forward has changed since they were shared.
    """
    yield from worker.quiesce()
    frozen = {n: p for n, p in parts_of_parameters(model).items() if n not in worker.params and n not in ignored}
    everywhere = _hashes(worker) | {n: hash_of(p) for n, p in frozen.items()}
    now = dict(model.named_buffers())
    for name, agreed in shared.items():
        as_agreed = name in now and torch.equal(now[name], agreed)
        everywhere[name] = hash_of(agreed) if as_agreed else TOUCHED
    everybody, nodes = [tuple(range(worker.size))], _nodes(worker)
    apart = len(nodes) > 1 and not worker.recipe.is_synced(worker.step - 1)
    inside = {n: hash_of(param.values) for n, param in worker.params.items()} if apart else {}
    hashed = everywhere | inside
    spoilt = _not_finite(model)
    counted = 0 if worker.recipe.schedule.shape.is_async else worker.step
    rows = yield from numbers_of_all([not spoilt, counted, *hashed.values()], torch.int64, worker.device)
    _refuse_not_finite(worker, spoilt, [not fine for fine, *_ in rows])
    for i, name in enumerate(["the step count", *hashed]):
        for ranks in nodes if name in inside else everybody:
            values = {rank: rows[rank][i + 1] for rank in ranks}
            if len(set(values.values())) > 1 and TOUCHED not in values.values():
                raise PeerError(
                    f"at step {worker.step}, {name} differs {_strays(values)}: the replicas are no longer equal. "
                    "Check what was changed on one rank only, such as a parameter, a clipped gradient or the learning rate"
                )


def _not_finite(model: nn.Module) -> list[str]:
    """The names of parameters that hold inf or NaN, and of buffers that hold NaN: inf may be meant, as in a mask."""
    spoilt = {n: ~p.isfinite().all() for n, p in parts_of_parameters(model).items()}
    spoilt |= {n: b.isnan().any() for n, b in model.named_buffers()}
    return [name for name, answer in zip(spoilt, read_numbers(*spoilt.values()), strict=True) if answer]


def _refuse_not_finite(worker: Worker, own: Sequence[str], spoilt: Sequence[bool]) -> None:
    ranks = [worker.ranks.present.ranks[i] for i, bad in enumerate(spoilt) if bad]
    if ranks:
        here = f" (here: {', '.join(own[:4])})" if own else ""
        raise PeerError(
            f"at step {worker.step}, the model of rank(s) {ranks} is not finite{here}: look at that rank's data, learning rate "
            "and loss scale, or load the last checkpoint"
        )


def _strays(values: Mapping[int, int]) -> str:
    """Name the ranks that differ from the majority, or all groups of equal ranks if there is no majority."""
    holders = dict[int, list[int]]()
    for rank, value in values.items():
        holders.setdefault(value, []).append(rank)
    groups = sorted(holders.values(), key=len)
    if 2 * len(groups[-1]) > len(values):
        return f"on rank(s) {sorted(r for g in groups[:-1] for r in g)} from the other ranks"
    return "between ranks " + " and ".join(map(str, sorted(groups)))


def _hashes(worker: Worker) -> dict[str, int]:
    """Hash the parameters and anchors that must be equal on all ranks after the last step."""
    equal = worker.recipe.is_synced(worker.step - 1)
    out = {n: hash_of(param.values) for n, param in worker.params.items()} if equal else {}
    shared = worker.recipe.schedule.policy("anchor") == "equal"
    for bucket in worker.buckets if shared else ():
        if "anchor" in bucket.states["schedule"]:
            block = Bucket(bucket.states["schedule"]["anchor"], bucket.layout)
            out |= {f"the anchor of {n}": hash_of(t) for n, t in block.tensors()}
    return out


def _nodes(worker: Worker) -> list[tuple[int, ...]]:
    """Group the ranks that average their gradients together and hold equal models."""
    schedule = worker.recipe.schedule
    return [*dict.fromkeys(together(schedule, rank, worker.size) for rank in range(worker.size))]
