"""Folders in the format of `torch.distributed.checkpoint`: all ranks write one together, and any rank reads entries of it.

DCP's own `save` uses collectives of torch, which wait forever for a frozen rank and do not name it. So `write` calls DCP's
planner and writer itself, and ranks exchange plans over gossamer's fabric. Reading verifies check sums, and never runs code
from a file.
"""

import io
import pickle
import zipfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor

from gossamer.checkpoints.chunks import Box, Chunk, ReadChunk, assemble, everything, overlaps, planner
from gossamer.core.errors import CheckpointError, plainly
from gossamer.core.verbs import Program

Facts = dict[str, Any]
Tell = Callable[[Facts], Program[list[Facts]]]  # sends this rank's facts; returns those of all ranks, in rank order
Entries = Mapping[str, Mapping[str, Any]]  # tensors and plain values, by section and name

# Classes in DCP's metadata, in any module of torch. Dtypes such as torch.float32 are allowed as well.
KNOWN = {
    "Metadata",
    "MetadataIndex",
    "TensorStorageMetadata",
    "TensorProperties",
    "ChunkStorageMetadata",
    "BytesStorageMetadata",
    "StorageMeta",
    "_StorageInfo",
    "_MEM_FORMAT_ENCODING",
    "MEM_FORMAT_ENCODING",
    "Size",
    "_get_layout",
    "PosixPath",
    "WindowsPath",
}


def read(path: str | Path, map_location: Any = None) -> Any:
    """Load a file that `torch.save` wrote, and verify its check sums; torch.load alone does not detect damaged numbers.

    >>> import os, tempfile
    >>> name = os.path.join(tempfile.mkdtemp(), "rank0.pt")
    >>> torch.save({"step": 3}, name)
    >>> read(name)
    {'step': 3}
    """
    path = Path(path)
    try:
        if not path.is_file():
            raise CheckpointError(
                f"{path} cannot be read: " + ("it is not a file" if path.exists() else "there is no such file")
            )
        with path.open("rb") as file:
            return _load(file, map_location)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read: {_why(error)}") from None


def _load(file: Any, map_location: Any) -> Any:
    with zipfile.ZipFile(file) as entries:
        damaged = entries.testzip()
    if damaged is not None:
        raise zipfile.BadZipFile(f"its part {damaged!r} does not match its check sum")
    file.seek(0)
    return torch.load(file, map_location=map_location, weights_only=True)


def _why(error: Exception) -> str:
    if isinstance(error, zipfile.BadZipFile):
        return f"it is damaged or cut short ({plainly(error)})"
    if isinstance(error, pickle.UnpicklingError):  # torch's message advises weights_only=False: leave that out
        return f"it is damaged, or not only tensors and plain values ({plainly(error).split('. ')[0]})"
    return error.strerror if isinstance(error, OSError) and error.strerror else plainly(error)


class Folder:
    """Reads a distributed checkpoint, one entry at a time."""

    def __init__(self, path: str | Path) -> None:
        self.path, table = Path(path), Path(path) / ".metadata"
        if not table.is_file():
            raise CheckpointError(
                f"{path} is not a finished distributed checkpoint: it has no .metadata, which is written last"
            )
        self._places = dict[str, list[_Record]]()
        self._chunks = dict[str, list[Any]]()  # where each of an entry's chunks begins
        try:
            metadata = _Metadata(io.BytesIO(table.read_bytes())).load()
            for index, place in metadata.field("storage_data").items():
                name = str(index.field("fqn"))
                self._places.setdefault(name, []).append(place)
                self._chunks.setdefault(name, []).append(index.fields.get("offset"))
            self._about = dict(metadata.field("state_dict_metadata"))
        except Exception as error:
            raise CheckpointError(f"{table} cannot be read: {_why(error)}") from None

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def read(self, name: str) -> Any:
        """Read one entry into CPU memory."""
        if len(self._places[name]) > 1:
            return self.part(name, everything(self.shape(name)))
        return self._read(name, self._places[name][0])

    def shape(self, name: str) -> tuple[int, ...]:
        try:
            return tuple(int(n) for n in self._about[name].field("size"))
        except (KeyError, ValueError, TypeError, AttributeError):
            raise CheckpointError(f"{self.path} is damaged: {name!r} is not described as a tensor") from None

    def part(self, name: str, box: Box, check: Callable[[Tensor], None] = lambda _: None) -> Tensor:
        """Read a part of a tensor from the chunks that hold it; `check` raises an error if a chunk is not what was saved."""
        try:
            return self._part(name, box, check)
        except (ValueError, TypeError, AttributeError, RuntimeError) as error:
            raise CheckpointError(f"{self.path} is damaged: {name!r} cannot be read: {plainly(error)}") from None

    def _part(self, name: str, box: Box, check: Callable[[Tensor], None]) -> Tensor:
        pieces = list[ReadChunk]()
        for offsets, place in zip(self._chunks[name], self._places[name], strict=True):
            offsets = (0,) * len(box.whole) if offsets is None else offsets
            sizes = self._sizes(name, offsets)
            if len(offsets) != len(box.whole) or not (overlaps(offsets, sizes, box) or len(self._places[name]) == 1):
                continue
            data = self._read(name, place)
            if not isinstance(data, Tensor) or tuple(data.shape) != sizes:
                raise CheckpointError(f"{self.path} is damaged: a part of {name!r} is not what its table says")
            check(data)
            pieces.append(ReadChunk(offsets, data))
        if not all(box.sizes) and not pieces:  # an empty part of what others hold
            pieces.append(ReadChunk(box.offsets, self._nothing(name, box)))
        found = assemble(pieces, box)
        if found is None:
            raise CheckpointError(f"{self.path} is damaged: parts of {name!r} are missing")
        return found

    def _nothing(self, name: str, box: Box) -> Tensor:
        like = self._read(name, self._places[name][0])
        return torch.empty(box.sizes, dtype=like.dtype, device="cpu")

    def _sizes(self, name: str, offsets: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the chunk that begins there."""
        for chunk in self._about[name].field("chunks"):
            if tuple(chunk.field("offsets")) == tuple(offsets):
                return tuple(chunk.field("sizes"))
        raise CheckpointError(f"{self.path} is damaged: it does not describe a part of {name!r}")

    def _read(self, name: str, place: "_Record") -> Any:
        try:
            with io.BytesIO(self._bytes(place)) as file:
                return _load(file, "cpu")
        except Exception as error:
            raise CheckpointError(f"{self.path}: {name!r} cannot be read: {_why(error)}") from None

    def _bytes(self, place: "_Record") -> bytes:
        name, begin, length = (place.field(key) for key in ("relative_path", "offset", "length"))
        file = self.path / name
        if PurePath(name).name != name or not file.is_file() or place.fields.get("transform_descriptors"):
            raise ValueError(f"it is not in a plain file of this folder, but in {name!r}")
        with file.open("rb") as stream:
            stream.seek(begin)
            return stream.read(min(length, file.stat().st_size))


class _Record:
    """Holds the pickled fields of an object of a torch class, without its methods."""

    fields: Mapping[str, Any] = {}

    def __init__(self, *values: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.fields = dict(state) if isinstance(state, dict) else {}

    def field(self, name: str) -> Any:
        if name not in self.fields:
            raise ValueError(f"it lacks {name}")
        return self.fields[name]


class _Numbers(tuple[Any, ...]):
    """In place of torch.Size."""


class _Metadata(pickle._Unpickler):
    """Unpickles DCP's metadata without running any class or function that it names.

    Every class of torch that the pickle names becomes a `_Record`, which does nothing; any other name raises an error. It
    uses the unpickler written in Python, since a few bytes can make the one in C allocate all memory.
    """

    def find_class(self, module: str, name: str) -> type[Any]:
        number = module == "torch" and isinstance(vars(torch).get(name), torch.dtype)
        if module.split(".", maxsplit=1)[0] not in ("torch", "pathlib") or not (number or name in KNOWN):
            raise ValueError(f"it names {module}.{name}, which no checkpoint contains; none of its code was run")
        return _Numbers if name == "Size" else type(name, (_Record,), {})


# -- writing -------------------------------------------------------------------------------------------------------------


def write(path: str | Path, entries: Entries, rank: int, tell: Tell) -> Program[None]:
    """Write every entry once, then the table of all entries: a folder without the table is no checkpoint."""
    job = _Job(path, entries, rank)
    described = yield from _on_all(job.begin, path, tell)
    wrote = yield from _on_all(partial(job.write, described), path, tell)
    yield from _on_all(partial(job.end, wrote), path, tell)


def _on_all(do: Callable[[], Facts], path: str | Path, tell: Tell) -> Program[list[Facts]]:
    """Run `do` on all ranks and return all results; if it fails on one rank, raise an error on all ranks."""
    done, failure = Facts(), None
    try:
        done = do()
    except Exception as error:
        failure = error
    everyone = yield from tell({"problem": "" if failure is None else plainly(failure), "done": done})
    for rank, reply in enumerate(everyone):
        if reply["problem"]:
            raise CheckpointError(
                f"rank {rank} cannot write to {path}: {reply['problem']}; no checkpoint was saved"
            ) from failure
    return [reply["done"] for reply in everyone]


class _Job:
    """Runs DCP's planner and writer on one rank. Every rank computes the plans of all ranks, so no plan is sent."""

    def __init__(self, path: str | Path, entries: Entries, rank: int) -> None:
        # Imported here, since it takes half a second, and every command would wait for it.
        from torch.distributed.checkpoint.filesystem import FileSystemWriter

        self._entries, self._rank = entries, rank
        self._planner, self._writer = planner(), FileSystemWriter(path)
        self._plans = list[Any]()
        self._table: Any = None

    def begin(self) -> Facts:
        """Make the folder; return the types and shapes of this rank's entries."""
        self._planner.set_up_planner(dict(self._entries), is_coordinator=self._rank == 0)
        self._writer.set_up_storage_writer(self._rank == 0)
        self._writer.prepare_local_plan(self._planner.create_local_plan())
        return {section: {n: _look(v) for n, v in held.items()} for section, held in self._entries.items()}

    def write(self, described: list[Facts]) -> Facts:
        """Write this rank's entries; return where each of them is stored."""
        plans = [self._plan(looks, rank) for rank, looks in enumerate(described)]
        plans, self._table = self._planner.create_global_plan(plans)
        self._plans = self._writer.prepare_global_plan(plans)
        written = self._writer.write_data(self._planner.finish_plan(self._plans[self._rank]), self._planner)
        written.wait()
        places = {w.index.fqn: (w.size_in_bytes, w.storage_data) for w in written.value()}
        return {name: [size, p.relative_path, p.offset, p.length] for name, (size, p) in places.items()}

    def end(self, wrote: list[Facts]) -> Facts:
        """Write the table, on rank 0."""
        if self._rank == 0:
            results = [_write_results(plan, places) for plan, places in zip(self._plans, wrote, strict=True)]
            self._writer.finish(self._table, results)
        return {}

    def _plan(self, looks: Facts, rank: int) -> Any:
        """Return DCP's local plan of a rank, from the types and shapes of its entries."""
        alike = {section: {n: _alike(look) for n, look in held.items()} for section, held in looks.items()}
        theirs = planner()
        theirs.set_up_planner(alike, is_coordinator=rank == 0)
        return theirs.create_local_plan()


def _look(value: Any) -> list[Any] | None:
    """Return a tensor's dtype and shape, and where a chunk lies; None for any other value."""
    data, box = (value.data, map(list, value.box)) if isinstance(value, Chunk) else (value, ())
    return [str(data.dtype).removeprefix("torch."), list(data.shape), *box] if isinstance(data, Tensor) else None


def _alike(look: list[Any] | None) -> Any:
    """Return a tensor of this dtype and shape on the meta device, or a chunk of it; None for any other value."""
    if look is None:
        return None
    data = torch.empty(look[1], dtype=getattr(torch, look[0]), device="meta")
    return Chunk(data, Box(*map(tuple, look[2:]))) if len(look) > 2 else data


def _write_results(plan: Any, places: Facts) -> list[Any]:
    """Return DCP's write results of a rank, from where its entries are stored."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo  # pyright: ignore[reportPrivateUsage]
    from torch.distributed.checkpoint.storage import WriteResult

    planned = {item.index.fqn: item.index for item in plan.items}
    if planned.keys() != places.keys():
        raise CheckpointError(
            "the ranks have made different plans of the checkpoint: run the same version of torch on all ranks"
        )
    return [WriteResult(planned[name], size, _StorageInfo(*place)) for name, (size, *place) in places.items()]
