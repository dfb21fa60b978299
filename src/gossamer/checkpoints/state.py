"""Saves a worker's state as plain tensors by parameter name, and loads it, also for another number of ranks."""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gossamer.checkpoints.manifest import (
    FORMAT,
    Manifest,
    check_model,
    check_recipe,
    check_whole,
    cut,
    parameters,
    read_recipe,
    seal,
    under,
    unseal,
)
from gossamer.core.bucket import Bucket, State, entry_name
from gossamer.core.contracts import Policy
from gossamer.core.errors import CheckpointError
from gossamer.core.schedule import TrainsElsewhere
from gossamer.core.version import __version__
from gossamer.memories import OwnGradient
from gossamer.runtime import Worker
from gossamer.runtime.buckets import ROLES, BucketState, build, settle_or_owe
from gossamer.runtime.succession import by_bucket, by_parameter, home


def save(worker: Worker) -> dict[str, Any]:
    """The worker's state without parameters and optimizer, in host memory.

    Tensors of one rank carry its number, so no two ranks' keys are equal.
    """
    out = entries(worker)
    seal(out, worker.rank)
    return out


def entries(worker: Worker) -> dict[str, Any]:
    """What `save` returns, without the table of contents."""
    out: dict[str, Any] = {
        "format": FORMAT,
        "gossamer": __version__,
        "recipe": repr(worker.origin),
        "adopted": repr(worker.recipe),
        "due": repr(worker.controller.due),
        "lost": bool(worker.in_flight.lost),
        "step": worker.step,
        "seed": worker.ranks.seed,
        "size": worker.size,
        "unit": worker.averaging.unit,
        "parameters": json.dumps(parameters(worker)),
        "cut": json.dumps(cut(worker.buckets)),
    }
    for key, value in worker.controller.state.items():
        out[f"equal/control/{key}"] = value.to("cpu", copy=True)
    for bucket, pending in zip(worker.buckets, _pending(worker), strict=True):
        for role in ROLES:
            states = {**bucket.states[role], **pending.get(role, {})}
            for key, tensor in _entries(states, bucket, role, worker).items():
                where = "equal" if _policy(bucket, role, key, worker) == "equal" else f"rank{worker.rank}"
                out[f"{where}/{role}/{key}"] = tensor.to("cpu", copy=True)
    return out


def take_over(worker: Worker, given: Mapping[str, Any], keeps: bool) -> None:
    """Take another rank's entries that are equal on all ranks; `keeps` this rank's own, which else begin at zero."""
    own = under(entries(worker), f"rank{worker.rank}/") if keeps else {}
    equal = under(given, "equal/")
    found = Manifest({**given, "size": worker.size}, equal, {worker.rank: own})
    states = [{role: _restore(bucket, role, found, worker) for role in ROLES} for bucket in worker.buckets]
    worker.step, worker.averaging.unit = given["step"], given["unit"]
    landing = {i: s["schedule"].pop("pending") for i, s in enumerate(states) if "pending" in s["schedule"]}
    for state in states:
        state["schedule"].pop("lost", None)  # which averages are lost, members tell one another
    worker.in_flight.restore(landing, [], {})
    for bucket, state in zip(worker.buckets, states, strict=True):
        if not keeps:
            state["memory"] = bucket.memory.join(state["memory"])
        bucket.states.update(state)
        if "anchor" in state["schedule"]:
            bucket.write(state["schedule"]["anchor"])


def load(worker: Worker, saved: "Mapping[str, Any] | Sequence[Mapping[str, Any]]") -> None:
    """Restore a checkpoint. In a world of another size, the dictionaries of all old ranks are needed."""
    prepare(worker, saved)()


def prepare(worker: Worker, saved: "Mapping[str, Any] | Sequence[Mapping[str, Any]]") -> Callable[[], None]:
    """Check a checkpoint and prepare its state; the returned function applies it and cannot fail.

    So an error leaves the worker as it was, and ranks can agree before any of them changes.
    """
    found = unseal(saved, worker.rank, worker.size)
    check_recipe(worker, found.head["recipe"])
    check_model(worker, json.loads(found.head["parameters"]))
    adopted, due = (read_recipe(found.head[key], worker) for key in ("adopted", "due"))
    same = adopted == worker.recipe
    buckets = worker.buckets if same else build(adopted, worker.params, worker.rate_groups(), worker.size)
    states = [{role: _restore(bucket, role, found, worker) for role in ROLES} for bucket in buckets]
    same_edges = json.loads(found.head["cut"]) == cut(buckets)
    if len(found.own) < found.head["size"] and not same_edges:
        for bucket, state in zip(buckets, states, strict=True):
            _move_edges(bucket, state, worker)
    check_whole(worker, found, buckets, states)
    if found.head["size"] != worker.size:
        for bucket, state in zip(buckets, states, strict=True):
            _keep_owed(bucket, state, found.head["size"], worker.size)
    landing = {i: s["schedule"].pop("pending") for i, s in enumerate(states) if "pending" in s["schedule"]}
    lost = [i for i, s in enumerate(states) if s["schedule"].pop("lost", None) is not None]
    if found.head["lost"] and not lost:
        lost = [*range(len(states))]
    arrived = {i: wires for i, s in enumerate(states) if (wires := _pop_wires(s["mixer"]))}
    control = {k: home(v, buckets[0]) for k, v in under(found.equal, "control/").items()}

    def put() -> None:
        worker.step, worker.ranks.seed = found.head["step"], found.head["seed"]
        worker.averaging.unit = found.head["unit"]
        worker.controller.restore(adopted, due, control)
        for bucket, state in zip(worker.buckets, states, strict=True):
            bucket.states.update(state)
        worker.in_flight.restore(landing, lost, arrived)
        schedule = worker.recipe.schedule
        if found.head["size"] != worker.size and isinstance(schedule, TrainsElsewhere):
            schedule.moves_in(worker.loop)

    return put


def _move_edges(bucket: BucketState, states: Mapping[str, State], worker: Worker) -> None:
    """Move this rank's residuals of elements that another rank owns now into its memory: chunks may have had other bounds."""
    for key in bucket.exchange.owned(states["exchange"]):
        owed = states["exchange"][key]
        mine = _my_chunk(owed, bucket, worker)
        others, states["exchange"][key] = owed - mine, mine
        if others.any() and not bucket.memory.inherit(states["memory"], others, worker.size):
            raise CheckpointError(
                f"rank {worker.rank} has residuals of elements that another rank owns now: the checkpoint is of other buckets or of an "
                f"older gossamer, and {bucket.memory} cannot take it over; give the dictionaries of all ranks: load_state_dict([d0, d1, ...])"
            )


def _keep_owed(bucket: BucketState, states: dict[str, State], before: int, size: int) -> None:
    """Let as much be owed among `size` ranks as among those before, where means of residuals are not all."""
    memory, state = bucket.memory, states["memory"]
    if 1 < bucket.exchange.ranks_per_node < size:  # chunks inside of several nodes have other owners than in one
        settle_or_owe(replace(bucket, states=states), size)
    if not isinstance(memory, OwnGradient) or memory.mode != "partial" or "residual" not in state:
        return
    if size > 1:  # 1 / N of each residual is in its rank's model already
        state["residual"] = state["residual"] * ((1 - 1 / before) / (1 - 1 / size))
    elif state["residual"].any():
        raise CheckpointError(
            f"what the checkpoint's {before} ranks had not sent to one another would be lost, since one rank alone sends nothing: load it on two "
            "ranks or more, or one that was saved just after a resync(sync='flush')"
        )


def _entries(state: State, bucket: BucketState, role: str, worker: Worker) -> dict[str, Tensor]:
    """A state's entries by parameter; those of shards by pieces of parameters."""
    own = {key: tensor for key, tensor in state.items() if _policy(bucket, role, key, worker) == "shard"}
    out = by_parameter({key: tensor for key, tensor in state.items() if key not in own}, bucket)
    for key, shard in own.items():
        out |= _pieces(key, shard, bucket, worker.rank, worker.size)
    return out


def _policy(bucket: BucketState, role: str, key: str, worker: Worker) -> Policy:
    """The policy that the part declares for an entry of its state."""
    schedule = worker.recipe.schedule
    keepers = {
        "memory": bucket.memory,
        "exchange": bucket.exchange,
        "schedule": schedule,
        "mixer": schedule.shape.mixer,
        "update": worker.recipe.update,
    }
    keeper = keepers[role]
    return "drop" if keeper is None else keeper.policy(entry_name(key))


def _restore(bucket: BucketState, role: str, found: Manifest, worker: Worker) -> State:
    place, same = f"{role}/", found.head["size"] == worker.size
    equal, own = under(found.equal, place), {rank: under(entries, place) for rank, entries in found.own.items()}
    combined = {**equal, **own[worker.rank]} if same else dict(equal)
    if len(own) > 1:
        combined |= _combined(bucket, role, list(own.values()), ("owner",) if same else ("owner", "mean"), worker)
    state = by_bucket(bucket, combined)
    if len(own) > 1:
        for key in (key for key in state if _policy(bucket, role, key, worker) == "owner"):
            state[key] = _my_chunk(state[key], bucket, worker)
    return state | _shards(bucket, role, own.values(), worker)


def _shards(bucket: BucketState, role: str, own: Iterable[Mapping[str, Tensor]], worker: Worker) -> State:
    """This rank's shards, assembled from the pieces of all given ranks."""
    entries = {key: tensor for kept in own for key, tensor in kept.items()}
    found: State = {}
    for key in dict.fromkeys(map(entry_name, entries)):
        if _policy(bucket, role, key, worker) == "shard":
            shard = _shard_of(key, entries, bucket, worker.rank, worker.size)
            found |= {} if shard is None else {key: shard}
    return found


def _combined(
    bucket: BucketState, role: str, own: Sequence[Mapping[str, Tensor]], policies: Sequence[Policy], worker: Worker
) -> dict[str, Tensor]:
    """Combine the entries of all ranks by their policies."""
    out = dict[str, Tensor]()
    for key in own[0]:
        policy = _policy(bucket, role, key, worker)
        if policy in policies:
            if any(key not in o or o[key].shape != own[0][key].shape for o in own):
                raise CheckpointError(f"the checkpoint's ranks do not all have a {role}/{key} of one shape")
            total = torch.stack([o[key].double() for o in own]).sum(0)
            out[key] = (total / len(own) if policy == "mean" else total).to(own[0][key].dtype)
    return out


def _my_chunk(flat: Tensor, bucket: BucketState, worker: Worker) -> Tensor:
    """A copy that is zero outside the chunk that this rank owns."""
    mine = torch.zeros_like(flat)
    source, target = (Bucket(t, bucket.layout).chunks(worker.size)[worker.rank].flat for t in (flat, mine))
    target.copy_(source)
    return mine


def _pending(worker: Worker) -> list[dict[str, State]]:
    """The results that have arrived but are not applied yet, per bucket."""
    out: list[dict[str, State]] = [{} for _ in worker.buckets]
    flights = worker.in_flight
    for i, mean in flights.landing().items():
        out[i]["schedule"] = {"pending": mean}
    for i in flights.lost if len(flights.lost) < len(worker.buckets) else []:
        out[i]["schedule"] = {"lost": torch.ones((), dtype=torch.float32)}
    for i, wires in enumerate(worker.loop.messages.arrived()):
        out[i]["mixer"] = {f"arrived{j}": w for j, w in enumerate(wires)}
    return out


def _pop_wires(state: State) -> list[Tensor]:
    keys = sorted((k for k in state if re.fullmatch(r"arrived\d+", k)), key=lambda k: int(k.removeprefix("arrived")))
    return [state.pop(k) for k in keys]


# -- shards: entries of which each rank keeps its own chunk only. A piece is named by its parameter and its first element,
# `anchor/layer.weight@128`, so that any chunk can be put together from the pieces of others.


def _pieces(key: str, shard: Tensor, bucket: BucketState, rank: int, size: int) -> dict[str, Tensor]:
    """Split a rank's shard into pieces by parameter."""
    layout = bucket.layout.chunks(size)[rank]
    if shard.numel() != layout.numel:
        raise CheckpointError(
            f"{key!r} of the bucket of {bucket.name!r} has {shard.numel()} elements, and rank {rank} owns {layout.numel} of it"
        )
    return {f"{key}/{name}": view for name, view in Bucket(shard, layout).tensors()}


def _shard_of(key: str, entries: Mapping[str, Tensor], bucket: BucketState, rank: int, size: int) -> Tensor | None:
    """Assemble a rank's shard from pieces, perhaps of another cut; None if there are no pieces."""
    found = _pieces_of(key, entries)
    if not found:
        return None
    layout, filled = bucket.layout.chunks(size)[rank], 0
    shard = torch.empty(layout.numel, dtype=layout.dtype, device=bucket.device)
    for segment in layout.segments:
        name, _, first = segment.name.rpartition("@")
        begin, end = int(first), int(first) + segment.numel
        for at, piece in found.get(name, []):
            low, high = max(begin, at), min(end, at + piece.numel())
            if low < high:
                place = segment.offset + low - begin
                shard[place : place + high - low] = piece.view(-1)[low - at : high - at]
                filled += high - low
    if filled != layout.numel:
        raise CheckpointError(
            f"the checkpoint's {key} is sharded, and the given dictionaries hold {filled} of the {layout.numel} elements that rank {rank} "
            f"owns of the bucket of {bucket.name!r}: give the dictionaries of all ranks, load_state_dict([d0, d1, ...]), or load "
            "it with the buckets and parameter groups of the saved run; if a parameter was added just before saving, use another checkpoint"
        )
    return shard


def _pieces_of(key: str, entries: Mapping[str, Tensor]) -> dict[str, list[tuple[int, Tensor]]]:
    """The pieces of each parameter, by their first element."""
    found = dict[str, list[tuple[int, Tensor]]]()
    for entry, piece in entries.items():
        if entry_name(entry) != key:
            continue
        name, _, first = entry.removeprefix(f"{key}/").rpartition("@")
        if not first.isdecimal():
            raise CheckpointError(f"the checkpoint is damaged: {entry!r} is not a piece of a parameter")
        found.setdefault(name, []).append((int(first), piece))
    return found
