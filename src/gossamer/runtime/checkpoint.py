"""Saves a worker's state as plain tensors by parameter name, and loads it, also for another number of ranks."""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gossamer.core.bucket import Bucket, State
from gossamer.core.contracts import Policy
from gossamer.core.errors import CheckpointError
from gossamer.core.schedule import TrainsElsewhere
from gossamer.core.stream_events import record_stream_use
from gossamer.core.version import __version__
from gossamer.runtime import shards
from gossamer.runtime.buckets import ROLES, BucketState, build, owners, settle, word
from gossamer.runtime.compatibility import check_model, check_recipe, check_whole, cut, parameters, read_recipe
from gossamer.runtime.manifest import FORMAT, Manifest, seal, unseal

if TYPE_CHECKING:
    from gossamer.runtime.worker import Worker


def save(worker: "Worker") -> dict[str, Any]:
    """The worker's state without parameters and optimizer, in host memory.

    Tensors of one rank carry its number, so no two ranks' keys are equal.
    """
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
    seal(out, worker.rank)
    return out


def load(worker: "Worker", saved: "Mapping[str, Any] | Sequence[Mapping[str, Any]]") -> None:
    """Restore a checkpoint. In a world of another size, the dictionaries of all old ranks are needed."""
    prepare(worker, saved)()


def prepare(worker: "Worker", saved: "Mapping[str, Any] | Sequence[Mapping[str, Any]]") -> Callable[[], None]:
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
    landing = {i: s["schedule"].pop("pending") for i, s in enumerate(states) if "pending" in s["schedule"]}
    lost = [i for i, s in enumerate(states) if s["schedule"].pop("lost", None) is not None]
    if found.head["lost"] and not lost:
        lost = [*range(len(states))]
    arrived = {i: wires for i, s in enumerate(states) if (wires := _pop_wires(s["mixer"]))}
    control = {k: _home(v, buckets[0]) for k, v in _role(found.equal, "control").items()}

    def put() -> None:
        worker.step, worker.ranks.seed = found.head["step"], found.head["seed"]
        worker.averaging.unit = found.head["unit"]
        worker.controller.restore(adopted, due, control)
        for bucket, state in zip(worker.buckets, states, strict=True):
            bucket.states.update(state)
        worker.in_flight.restore(landing, lost, arrived)
        if found.head["size"] != worker.size:
            _move_in(worker)

    return put


def _move_in(worker: "Worker") -> None:
    if isinstance(worker.recipe.schedule, TrainsElsewhere):
        worker.recipe.schedule.moves_in(worker.loop)


def carry_over(old: Sequence[BucketState], new: Sequence[BucketState], size: int) -> None:
    """Move each parameter's memory to its new bucket after a controller's change."""
    everything = dict[str, Tensor]()
    for bucket in old:
        settle(bucket, size)
        for role in ROLES:
            for key, tensor in _split(bucket.states[role], bucket).items():
                everything[f"{role}/{key}"] = tensor
    record_stream_use(everything.values())  # a comm thread made them, and they are released here
    for bucket in new:
        for role in ROLES:
            bucket.states[role] = _join(
                bucket,
                {k.removeprefix(f"{role}/"): v for k, v in everything.items() if k.startswith(f"{role}/")},
            )


def turn(buckets: Sequence[BucketState], others: Sequence[BucketState], size: int) -> None:
    """Give the same buckets other exchanges and memories after a controller's change that keeps the cut; nothing is copied.

    An exchange of the same kind keeps the residual of the one before it.
    """
    for bucket, other in zip(buckets, others, strict=True):
        if type(bucket.exchange) is not type(other.exchange):
            settle(bucket, size)
        bucket.exchange, bucket.memory, bucket.shift = other.exchange, other.memory, other.shift
        bucket.group, bucket.fragment = other.group, other.fragment


def _move_edges(bucket: BucketState, states: Mapping[str, State], worker: "Worker") -> None:
    """Move this rank's residuals of elements that another rank owns now into its memory: chunks may have had other bounds."""
    for key in owners(bucket, states["exchange"]):
        owed = states["exchange"][key]
        mine = _my_chunk(owed, bucket, worker)
        others, states["exchange"][key] = owed - mine, mine
        if others.any() and not bucket.memory.inherit(states["memory"], others, worker.size):
            raise CheckpointError(
                f"rank {worker.rank} has residuals of elements that another rank owns now: the checkpoint is of other buckets or of an "
                f"older gossamer, and {bucket.memory} cannot take it over; give the dictionaries of all ranks: "
                "load_state_dict([d0, d1, ...])"
            )


def _entries(state: State, bucket: BucketState, role: str, worker: "Worker") -> dict[str, Tensor]:
    """A state's entries by parameter; those of shards by pieces of parameters."""
    own = {key: tensor for key, tensor in state.items() if _policy(bucket, role, key, worker) == "shard"}
    out = _split({key: tensor for key, tensor in state.items() if key not in own}, bucket)
    for key, shard in own.items():
        out |= shards.pieces(key, shard, bucket, worker.rank, worker.size)
    return out


def _split(state: State, bucket: BucketState) -> dict[str, Tensor]:
    """Flat tensors by parameter; scalars for each parameter; keys with a colon name their parameter themselves."""
    out = dict[str, Tensor]()
    for key, tensor in state.items():
        if ":" in key:
            out[key] = tensor
        elif tensor.dtype == torch.uint8:
            out[f"{key}/{bucket.name}"] = tensor
        elif tensor.dim() == 0:
            out |= {f"{key}/{s.name}": tensor for s in bucket.layout.segments}
        elif tensor.numel() != bucket.layout.numel:
            raise CheckpointError(
                f"{key!r} of the bucket of {bucket.name!r} has {tensor.numel()} elements, and the bucket {bucket.layout.numel}: a "
                f"part may keep scalars, tensors as long as its bucket, and tensors of one parameter under '{key}:NAME'"
            )
        else:
            # at least one dimension: a tensor without is a scalar that all parameters share
            out |= {f"{key}/{n}": torch.atleast_1d(view) for n, view in Bucket(tensor, bucket.layout).tensors()}
    return out


def _join(bucket: BucketState, entries: Mapping[str, Tensor]) -> State:
    """The inverse of `_split`; missing parameters are zero."""
    state: State = {}
    for key in dict.fromkeys(word(k) for k in entries):
        if ":" in key:
            continue
        found = {s.name: entries[f"{key}/{s.name}"] for s in bucket.layout.segments if f"{key}/{s.name}" in entries}
        if not found:
            continue
        sample = next(iter(found.values()))
        if sample.dim() == 0 or sample.dtype == torch.uint8:
            state[key] = _home(sample, bucket)
        else:
            flat = bucket.empty().to(sample.dtype)
            for name, view in Bucket(flat, bucket.layout).tensors():
                if name in found and found[name].numel() != view.numel():
                    raise CheckpointError(
                        f"{key} of {name!r} has {found[name].numel()} elements, and {name!r} has {view.numel()}"
                    )
                if name in found:
                    view.copy_(found[name].view(view.shape))
            state[key] = flat
    names = {s.name for s in bucket.layout.segments}
    named = {k: v for k, v in entries.items() if ":" in word(k) and k.partition(":")[2] in names}
    return state | {k: _home(v, bucket) for k, v in named.items()}


def _home(tensor: Tensor, bucket: BucketState) -> Tensor:
    """Copy a loaded tensor to where it is read: scalars to the host, others to the parameters' device."""
    return tensor.to(bucket.device if tensor.dim() else "cpu", copy=True)


def _policy(bucket: BucketState, role: str, key: str, worker: "Worker") -> Policy:
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
    return "drop" if keeper is None else keeper.policy(word(key))


def _restore(bucket: BucketState, role: str, found: Manifest, worker: "Worker") -> State:
    equal, own = _role(found.equal, role), {rank: _role(entries, role) for rank, entries in found.own.items()}
    same = found.head["size"] == worker.size
    combined = {**equal, **own[worker.rank]} if same else dict(equal)
    if len(own) > 1:
        combined |= _combined(bucket, role, list(own.values()), ("owner",) if same else ("owner", "mean"), worker)
    state = _join(bucket, combined)
    if len(own) > 1:
        for key in (key for key in state if _policy(bucket, role, key, worker) == "owner"):
            state[key] = _my_chunk(state[key], bucket, worker)
    return state | _shards(bucket, role, own.values(), worker)


def _shards(bucket: BucketState, role: str, own: Iterable[Mapping[str, Tensor]], worker: "Worker") -> State:
    """This rank's shards, assembled from the pieces of all given ranks."""
    entries = {key: tensor for kept in own for key, tensor in kept.items()}
    found: State = {}
    for key in dict.fromkeys(map(word, entries)):
        if _policy(bucket, role, key, worker) == "shard":
            shard = shards.put_together(key, entries, bucket, worker.rank, worker.size)
            found |= {} if shard is None else {key: shard}
    return found


def _combined(
    bucket: BucketState, role: str, own: Sequence[Mapping[str, Tensor]], policies: Sequence[Policy], worker: "Worker"
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


def _my_chunk(flat: Tensor, bucket: BucketState, worker: "Worker") -> Tensor:
    """A copy that is zero outside the chunk that this rank owns."""
    mine = torch.zeros_like(flat)
    source, target = (Bucket(t, bucket.layout).chunks(worker.size)[worker.rank].flat for t in (flat, mine))
    target.copy_(source)
    return mine


def _role(entries: Mapping[str, Tensor], role: str) -> dict[str, Tensor]:
    return {k.removeprefix(f"{role}/"): v for k, v in entries.items() if k.startswith(f"{role}/")}


def _pending(worker: "Worker") -> list[dict[str, State]]:
    """The results that have arrived but are not applied yet, per bucket."""
    out: list[dict[str, State]] = [{} for _ in worker.buckets]
    flights, everything = worker.in_flight, range(len(worker.buckets))
    for i, mean in flights.landing().items():
        out[i]["schedule"] = {"pending": mean}
    for i in flights.lost if len(flights.lost) < len(worker.buckets) else []:
        out[i]["schedule"] = {"lost": torch.ones((), dtype=torch.float32)}
    for i, wires in zip(everything, flights.arrived(everything)):
        out[i]["mixer"] = {f"arrived{j}": w for j, w in enumerate(wires)}
    return out


def _pop_wires(state: State) -> list[Tensor]:
    keys = sorted((k for k in state if re.fullmatch(r"arrived\d+", k)), key=lambda k: int(k.removeprefix("arrived")))
    return [state.pop(k) for k in keys]
