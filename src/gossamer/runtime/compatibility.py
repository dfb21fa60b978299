"""Checks that a checkpoint fits this run. Only the number of ranks, the devices and the cut into buckets may differ."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from gossamer.core.errors import CheckpointError, RecipeError
from gossamer.recipe import Recipe
from gossamer.runtime.buckets import BucketState
from gossamer.runtime.manifest import Manifest

if TYPE_CHECKING:
    from gossamer.runtime.worker import Worker


BY_BLOCK = ("pending", "lost")  # results in flight, which other buckets need not have


def parameters(worker: "Worker") -> dict[str, str]:
    return {n: f"{str(param.dtype).removeprefix('torch.')} {list(param.shape)}" for n, param in worker.params.items()}


def cut(buckets: Sequence[BucketState]) -> list[list[str]]:
    return [[s.name for s in c.layout.segments] for c in buckets]


def read_recipe(text: str, worker: "Worker") -> Recipe:
    """Read a saved recipe, with the bucket size of this run: the cut may change, since memories are saved by parameter."""
    if text == repr(worker.origin):
        return worker.origin
    try:
        return replace(Recipe.of(text), bucket=worker.origin.bucket)
    except RecipeError as error:
        raise CheckpointError(f"the checkpoint's recipe cannot be read: {error}") from None


def check_recipe(worker: "Worker", saved: str) -> None:
    if saved != repr(worker.origin) and read_recipe(saved, worker) != worker.origin:
        raise CheckpointError(
            f"the checkpoint was made with\n  {saved}\nbut this run uses\n  {worker.origin}\n"
            "Load it with the same recipe, or start the communicator anew (parameters and optimizer load as ever)."
        )


def check_model(worker: "Worker", then: Mapping[str, str]) -> None:
    now = parameters(worker)
    for name in {**now, **then}:
        if now.get(name) == then.get(name):
            continue
        if name in now and name in then:
            what = f"{name!r} was {then[name]} and is now {now[name]}"
        elif name in now:
            what = f"it has no {name!r}; a layer that was frozen when it was saved must be frozen until it is loaded"
        else:
            what = f"{name!r} is missing in this model, or frozen"
        raise CheckpointError(f"the checkpoint is of another model: {what}")


def check_whole(worker: "Worker", found: Manifest, buckets: Sequence[BucketState], states: Sequence[Any]) -> None:
    """Raise CheckpointError if an entry that cannot default to zero is missing, such as an anchor or a mass."""
    wires = [key for entries in found.own.values() for key, t in entries.items() if t.dtype == torch.uint8]
    if wires and found.head["size"] == worker.size and json.loads(found.head["cut"]) != cut(buckets):
        raise CheckpointError(
            "messages were in flight when the checkpoint was saved, and this run cuts the model into other buckets; load it "
            f"with the buckets and parameter groups of the saved recipe: {found.head['recipe']}"
        )
    entries = {**found.equal, **next(iter(found.own.values()))}
    fragments = {name: c.fragment for c in buckets for name in c.names}
    for bucket, state in zip(buckets, states, strict=True):
        together = [name for name in worker.params if fragments[name] == bucket.fragment]
        for role, names in ("schedule", together), ("mixer", [s.name for s in bucket.layout.segments]):
            words = [key for key, tensor in state[role].items() if tensor.dtype != torch.uint8]
            if role == "schedule":
                words = [key for key in words if worker.recipe.schedule.policy(key) != "shard"]
            inside = [s.name for s in bucket.layout.segments]
            for word, name in ((w, n) for w in words for n in (inside if w in BY_BLOCK else names)):
                if f"{role}/{word}/{name}" not in entries:
                    raise CheckpointError(
                        f"the checkpoint has a {word} of other parameters and none of {name!r}, which was added just before it "
                        "was saved; take another checkpoint"
                    )
