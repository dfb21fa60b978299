"""The communicator's state where FSDP2 shards the model: chunks by parameter, all else by shard, read for any number of shards.

A dictionary of `state.save` is that of one shard. A folder holds what is kept by parameter as chunks of whole tensors, under
`replica0/memory/residual/layer.weight`, so that other shards can be cut from them. All else stands under `replica0/shard1/...`.
"""

import json
import warnings
from collections.abc import Iterable, Mapping
from functools import partial
from math import prod
from typing import Any

from torch import Tensor

from gossamer.checkpoints.chunks import Box, Chunk, box_of
from gossamer.checkpoints.folder import Folder
from gossamer.checkpoints.manifest import HEAD, describe, seal
from gossamer.core.errors import CheckpointError
from gossamer.runtime import Worker
from gossamer.runtime.params import Param


def entries(state: Mapping[str, Any], worker: Worker) -> dict[str, Any]:
    """What this rank writes of a dictionary of `state.save`."""
    rank, shard, out = worker.rank, worker.replica.index, dict[str, Any]()
    if rank == shard == 0:
        out |= {key: state[key] for key in HEAD} | {"shards": worker.replica.size}
    for key, value in state.items():
        place, _, rest = key.partition("/")
        if not rest or (place == "equal" and rank):  # the first replica writes what is equal on all
            continue
        place = "equal" if place == "equal" else f"replica{rank}"
        param = _cut_by(rest, str(getattr(value, "dtype", "")).removeprefix("torch."), worker)
        box = None if param is None else box_of(param.parameter)
        if box is not None and tuple(value.shape) == box.sizes:
            out[f"{place}/{rest}"] = Chunk(value, box)
        else:
            out[f"{place}/shard{shard}/{rest}"] = value
    return out


def _cut_by(rest: str, kind: str, worker: Worker) -> Param | None:
    """The sharded parameter that an entry belongs to, if it is kept element by element."""
    role, _, named = rest.partition("/")
    word, _, name = named.partition("/")
    plain = role == "control" or ":" in word or kind.startswith("uint8")
    return None if plain else worker.params.get(name)


def shards_of(folder: Folder, prefix: str) -> int:
    """The number of shards of a replica that wrote the folder."""
    found = folder.read(f"{prefix}shards") if f"{prefix}shards" in folder else 1
    if not isinstance(found, int) or found < 1:
        raise CheckpointError(f"{folder.path} is damaged: it says that a replica had {found!r} shards")
    return found


def read(folder: Folder, prefix: str, worker: Worker, ranks: Iterable[int], strict: bool) -> list[dict[str, Any]]:
    """The dictionaries of old replicas, cut into the shards of this run; this rank's shard of each."""
    cutter = _Cutter(folder, prefix, worker)
    found = [cutter.dictionary(rank) for rank in ranks]
    if cutter.dropped:
        what = (
            f"the checkpoint is of {cutter.shards} shard(s) per replica, and this run has {worker.replica.size}: "
            f"{', '.join(sorted(cutter.dropped))} cannot be cut into other shards"
        )
        if strict:
            raise CheckpointError(f"{what}; load it with {cutter.shards} shard(s), or without strict=True")
        warnings.warn(f"{what}, and begins anew", stacklevel=7)
    return found


class _Cutter:
    """Reads entries of old shards, and cuts them into those of this run."""

    def __init__(self, folder: Folder, prefix: str, worker: Worker) -> None:
        self._folder, self._prefix, self._worker = folder, prefix, worker
        self.shards = shards_of(folder, prefix)
        self._same = self.shards == worker.replica.size
        self.dropped = set[str]()

    def dictionary(self, rank: int) -> dict[str, Any]:
        """What a rank of an old replica has saved, cut into this rank's shard."""
        tables = [self._table(rank, shard) for shard in range(self.shards)]
        out, pieces = dict[str, Any](), dict[str, list[tuple[int, Tensor]]]()
        for key in dict.fromkeys(key for table in tables for key in table):
            out |= self._entry(key, [table.get(key, "") for table in tables], pieces)
        out |= {f"{key}@{first}": piece for key, found in pieces.items() for first, piece in found}
        seal(out, rank)
        return out

    def _entry(self, key: str, said: list[str], pieces: dict[str, list[tuple[int, Tensor]]]) -> dict[str, Any]:
        """This rank's part of an entry, of which each old shard `said` what it saved; what is in pieces goes to `pieces`."""
        if key in HEAD:
            return {key: self._plain(key, said)}
        place, _, rest = key.partition("/")
        box, whole = self._box(place, rest, said)
        if box is not None:
            return {key: self._folder.part(whole, box, partial(self._check, whole, said))}
        if self._same:
            shard = self._worker.replica.index
            return {key: self._plain(self._by_shard(place, rest, shard), [said[shard]])} if said[shard] else {}
        if "@" not in rest:
            return self._kept(key, place, rest, said)
        for shard, one in enumerate(said):
            if one:
                piece = self._plain(self._by_shard(place, rest, shard), [one])
                self._cut_piece(key, shard, piece, pieces)
        return {}

    def _by_shard(self, place: str, rest: str, shard: int) -> str:
        if self.shards == 1:
            return f"{place}/{rest}"
        return f"{place.replace('rank', 'replica')}/shard{shard}/{rest}"

    def _table(self, rank: int, shard: int) -> dict[str, str]:
        name = self._prefix + self._by_shard(f"rank{rank}", "contents", shard)
        if name not in self._folder:
            raise CheckpointError(f"{self._folder.path} is damaged: it does not hold {name!r}")
        try:
            return dict(json.loads(self._folder.read(name)))
        except (TypeError, ValueError, RecursionError):
            raise CheckpointError(f"{self._folder.path} is damaged: {name!r} cannot be read") from None

    def _box(self, place: str, rest: str, said: list[str]) -> tuple[Box | None, str]:
        """This rank's part of an entry that is kept by parameter, and where the entry is."""
        name = f"{self._prefix}{place.replace('rank', 'replica') if self.shards > 1 else place}/{rest}"
        param = _cut_by(rest, next(filter(None, said)), self._worker)
        if param is None or name not in self._folder or self._folder.shape(name) != param.whole_shape:
            return None, name
        return box_of(param.parameter), name

    def _kept(self, key: str, place: str, rest: str, said: list[str]) -> dict[str, Any]:
        """A value that is not kept by parameter, where all old shards had the same."""
        word = "/".join(rest.split("/")[:2]).partition(":")[0]
        if word.startswith("mixer/arrived"):
            raise CheckpointError(
                f"messages were in flight when the checkpoint was saved, which cannot be cut into other shards: load it with "
                f"{self.shards} shard(s) per replica, train to a step without messages in flight, and save again"
            )
        value = self._plain(self._by_shard(place, rest, 0), said[:1]) if said[0] else None
        by_element = isinstance(value, Tensor) and value.dim() > 0 and not rest.startswith("control/")
        if value is None or by_element or len(set(said)) > 1:
            self.dropped.add(word)
            return {}
        return {key: value}

    def _plain(self, name: str, said: Iterable[str]) -> Any:
        if self._prefix + name not in self._folder:
            raise CheckpointError(f"{self._folder.path} is damaged: {self._prefix + name!r} is missing")
        value = self._folder.read(self._prefix + name)
        self._check(name, said, value)
        return value

    def _check(self, name: str, said: Iterable[str], value: Any) -> None:
        if describe(value) not in said:
            raise CheckpointError(f"{self._folder.path} is damaged: {name!r} is not what was saved")

    # -- pieces of parameters, of which each rank of a shard's group keeps its own (`anchor/layer.weight@128`) ------------

    def _cut_piece(self, key: str, shard: int, piece: Tensor, found: dict[str, list[tuple[int, Tensor]]]) -> None:
        """Add the elements of an old shard's piece that this shard holds; rows of both follow each other in the whole."""
        key, _, first = key.rpartition("@")
        param = self._worker.params.get(key.split("/", 3)[-1])
        if param is None or not first.isdecimal():
            raise CheckpointError(
                f"{self._folder.path} is damaged: {key!r} is not a piece of a parameter of this model"
            )
        mine, rows, row = box_of(param.parameter), param.whole_shape[0], prod(param.whole_shape[1:])
        if any(mine.offsets[1:]) or mine.sizes[1:] != mine.whole[1:]:
            raise CheckpointError(f"{key!r} cannot be cut into other shards, since FSDP2 does not cut it by rows")
        begin = min(shard * -(-rows // self.shards), rows) * row + int(first)
        low, high = mine.offsets[0] * row, (mine.offsets[0] + mine.sizes[0]) * row
        start, end = max(low, begin), min(high, begin + piece.numel())
        if start < end:
            found.setdefault(key, []).append((start - low, piece.view(-1)[start - begin : end - begin].clone()))
