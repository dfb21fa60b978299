"""The manifest of a checkpoint: its header and table of contents, their checks, and whether it fits this run.

Only the number of ranks, the devices and the cut into buckets may differ.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from gossamer.core.errors import CheckpointError, RecipeError
from gossamer.core.hashes import hash_of
from gossamer.core.version import __version__
from gossamer.recipe import Recipe
from gossamer.runtime import Worker
from gossamer.runtime.buckets import BucketState

FORMAT = 3
HEAD = {
    "format": int,
    "gossamer": str,  # the version that wrote it
    "recipe": str,
    "adopted": str,  # the controller's choice
    "due": str,
    "lost": bool,
    "step": int,
    "seed": int,
    "size": int,
    "unit": float,  # the loss scale of the memories' state
    "parameters": str,  # name, type and shape of each
    "cut": str,  # the parameters of each bucket
}
BY_BLOCK = ("pending", "lost")  # results in flight, which other buckets need not have
TABLE = re.compile(r"rank(\d{1,9})/contents")


class Manifest(NamedTuple):
    """A complete checkpoint: its header, the entries equal on all ranks, and each rank's own entries."""

    head: Mapping[str, Any]
    equal: dict[str, Tensor]
    own: dict[int, dict[str, Tensor]]


def seal(saved: dict[str, Any], rank: int) -> None:
    """Add a rank's table of contents: the type, shape and checksum of each entry."""
    saved[f"rank{rank}/contents"] = json.dumps({key: describe(value) for key, value in sorted(saved.items())})


def describe(value: Any) -> str:
    """An entry's type, shape and checksum, as text.

    >>> describe(torch.zeros(2, 3)), describe(7)
    ('float32 [2, 3] a3c1ca20', 'int 6abf4a82')
    """
    if not isinstance(value, Tensor):
        # Only these types are saved; others may have an unstable repr.
        plain = type(value) in (str, bool, float) or _is(value, int)
        return f"{type(value).__name__} {crc32(repr(value).encode()) if plain else 0:08x}"
    kind = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    try:
        return f"{kind} {hash_of(value):08x}"
    except RuntimeError:  # sparse, or without data: a worker saves no such tensor
        return f"{kind} {value.layout}"


def unseal(saved: Mapping[str, Any] | Sequence[Mapping[str, Any]], rank: int, size: int) -> Manifest:
    """Check saved dictionaries, and select the entries that one rank of a world of this size needs."""
    dictionaries = [_checked_head(d) for d in ([saved] if isinstance(saved, Mapping) else list(saved))]
    if not dictionaries:
        raise CheckpointError("load_state_dict got an empty list; pass the dictionaries that state_dict returned")
    head = {key: dictionaries[0][key] for key in HEAD}
    for d in dictionaries[1:]:
        _check_same_moment(head, d)
    present = sorted({int(m[1]) for d in dictionaries for key in d if (m := TABLE.fullmatch(key))})
    wanted = _wanted(present, head["size"], rank, size)
    tables = dict[str, str]()
    equal, own = dict[str, Tensor](), dict[int, dict[str, Tensor]]()
    for d in dictionaries:
        for r in wanted:
            if f"rank{r}/contents" in d:
                _check_table(d, r, tables)
                equal |= under(d, "equal/")
                own[r] = under(d, f"rank{r}/")
    return Manifest(head, equal, own)


def _wanted(present: Sequence[int], old: int, rank: int, size: int) -> Sequence[int]:
    if len(present) == old and present[-1] == old - 1:
        return present
    if old == size and rank in present:
        return [rank]
    raise CheckpointError(
        f"this checkpoint is of {old} ranks and holds rank(s) {present}; rank {rank} of {size} needs "
        + (
            "its own. Each rank saves its own: Accelerate's register_for_checkpointing() saves that of rank 0 only, and "
            "gossamer.trainers.accelerate.attach those of all ranks"
            if old == size
            else "those of all old ranks: load_state_dict([d0, d1, ...])"
        )
    )


def _checked_head(saved: Any) -> dict[str, Any]:
    if not isinstance(saved, Mapping) or not all(isinstance(key, str) for key in saved):
        raise CheckpointError(
            f"not a checkpoint: load_state_dict takes what state_dict returned, or a list of those, not a {type(saved).__name__}"
        )
    if not _is(saved.get("format"), int) or saved["format"] != FORMAT:
        raise CheckpointError(_other_format(saved))
    for key, kind in HEAD.items():
        if not _is(saved.get(key), kind):
            what = f"no such {kind.__name__} as was saved" if key in saved else "missing"
            raise CheckpointError(f"the checkpoint is damaged: its entry {key!r} is {what}")
    if saved["size"] < 1 or saved["step"] < 1 or not 0 < saved["unit"] < inf:
        raise CheckpointError(
            f"the checkpoint is damaged: step {saved['step']} of {saved['size']} ranks, loss scale {saved['unit']}"
        )
    return dict(saved)


def _other_format(saved: Mapping[str, Any]) -> str:
    version = saved.get("format")
    if not _is(version, int):
        held = ", ".join(map(repr, sorted(saved)[:5])) or "nothing"
        hint = "; give it the entry 'comm'" if isinstance(saved.get("comm"), Mapping) else ""
        return f"not a checkpoint of a communicator: it holds {held}, and no 'format'{hint}"
    writer = saved.get("gossamer")
    who = f"gossamer {writer}" if isinstance(writer, str) else "an early gossamer, which does not say its version,"
    return (
        f"the checkpoint was written by {who} in format {version}; gossamer {__version__} reads format {FORMAT}. "
        "Go on with the version that wrote it, or start the communicator anew (the model and the optimizer load as ever)"
    )


def _is(value: Any, kind: type) -> bool:
    """True if the value has exactly this type, and is no huge integer."""
    return type(value) is kind and (kind is not int or abs(value) < 2**63)


def _check_same_moment(head: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    for key, value in head.items():
        if other.get(key) != value:
            short = len(repr((value, other.get(key)))) < 200
            what = f"{value!r} in one and {other.get(key)!r} in another" if short else "not the same in all of them"
            raise CheckpointError(f"these dictionaries were not saved together: {key} is {what}")


def _check_table(saved: Mapping[str, Any], rank: int, seen: dict[str, str]) -> None:
    """Raise CheckpointError if a rank's entries differ from its table of contents, or ranks differ in shared entries."""
    table = _table(saved, rank)
    for key, said in table.items():
        if key not in saved:
            raise CheckpointError(f"the checkpoint is damaged: {key!r}, which rank {rank} saved, is missing")
        found = describe(saved[key])
        if found != said:
            raise CheckpointError(
                f"the checkpoint is damaged: {key!r} of rank {rank} was {said} and is {found} (type, shape and check sum)"
            )
        if seen.setdefault(key, said) != said:
            raise CheckpointError(f"these dictionaries were not saved together: they differ in {key!r}")
    own = [key for key in saved if key.startswith(("equal/", f"rank{rank}/")) and not TABLE.fullmatch(key)]
    for key in (*own, *HEAD):
        if key not in table:
            raise CheckpointError(f"the checkpoint is damaged: it has an entry {key!r} that rank {rank} did not save")


def _table(saved: Mapping[str, Any], rank: int) -> dict[str, str]:
    try:
        table = json.loads(saved[f"rank{rank}/contents"])
    except (TypeError, ValueError, RecursionError):
        table = None
    if not isinstance(table, dict):
        raise CheckpointError(f"the checkpoint is damaged: rank {rank}'s table of contents cannot be read")
    return table


def under(saved: Mapping[str, Any], prefix: str) -> dict[str, Tensor]:
    """The tensors whose keys begin with `prefix`, by the rest of their keys."""
    return {k.removeprefix(prefix): v for k, v in saved.items() if k.startswith(prefix) and isinstance(v, Tensor)}


# -- does it fit this run? --------------------------------------------------------------------------------------------


def parameters(worker: Worker) -> dict[str, str]:
    return {
        n: f"{str(param.dtype).removeprefix('torch.')} {list(param.whole_shape)}" for n, param in worker.params.items()
    }


def cut(buckets: Sequence[BucketState]) -> list[list[str]]:
    return [bucket.names for bucket in buckets]


def read_recipe(text: str, worker: Worker) -> Recipe:
    """Read a saved recipe, with the bucket size of this run: the cut may change, since memories are saved by parameter."""
    if text == repr(worker.origin):
        return worker.origin
    try:
        return replace(Recipe.of(text), bucket=worker.origin.bucket)
    except RecipeError as error:
        raise CheckpointError(f"the checkpoint's recipe cannot be read: {error}") from None


def check_recipe(worker: Worker, saved: str) -> None:
    if saved != repr(worker.origin) and read_recipe(saved, worker) != worker.origin:
        raise CheckpointError(
            f"the checkpoint was made with\n  {saved}\nbut this run uses\n  {worker.origin}\n"
            "Load it with the same recipe, or start the communicator anew (parameters and optimizer load as ever)."
        )


def check_model(worker: Worker, then: Mapping[str, str]) -> None:
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


def check_whole(worker: Worker, found: Manifest, buckets: Sequence[BucketState], states: Sequence[Any]) -> None:
    """Raise CheckpointError if an entry that cannot default to zero is missing, such as an anchor or a mass."""
    wires = [key for entries in found.own.values() for key, t in entries.items() if t.dtype == torch.uint8]
    if wires and found.head["size"] == worker.size and json.loads(found.head["cut"]) != cut(buckets):
        raise CheckpointError(
            "messages were in flight when the checkpoint was saved, and this run cuts the model into other buckets; load it "
            f"with the buckets and parameter groups of the saved recipe: {found.head['recipe']}"
        )
    entries = {**found.equal, **next(iter(found.own.values()))}
    fragments = {name: bucket.fragment for bucket in buckets for name in bucket.names}
    for bucket, state in zip(buckets, states, strict=True):
        together = [name for name in worker.params if fragments[name] == bucket.fragment]
        wanted = [("mixer", word, name) for word in state["mixer"] for name in bucket.names]
        for word in state["schedule"]:
            if worker.recipe.schedule.policy(word) != "shard":
                wanted += [("schedule", word, name) for name in (bucket.names if word in BY_BLOCK else together)]
        for role, word, name in wanted:
            if state[role][word].dtype != torch.uint8 and f"{role}/{word}/{name}" not in entries:
                raise CheckpointError(
                    f"the checkpoint has a {word} of other parameters and none of {name!r}, which was added just before it "
                    "was saved; take another checkpoint"
                )
