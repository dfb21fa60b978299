"""Checkpoint reader: verifies check sums, and never runs code from a file."""

import io
import pickle
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any

import torch

from gossamer.core.errors import CheckpointError, plainly

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
        try:
            metadata = _Metadata(io.BytesIO(table.read_bytes())).load()
            for index, place in metadata.field("storage_data").items():
                self._places.setdefault(str(index.field("fqn")), []).append(place)
        except Exception as error:
            raise CheckpointError(f"{table} cannot be read: {_why(error)}") from None

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def read(self, name: str) -> Any:
        """Read one entry into CPU memory."""
        if len(self._places[name]) > 1:
            raise CheckpointError(f"{self.path}: {name!r} is stored in several pieces; gossamer stores entries whole")
        try:
            with io.BytesIO(self._bytes(self._places[name][0])) as file:
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


class _Metadata(pickle._Unpickler):
    """Unpickles DCP's metadata without running any class or function that it names.

    Every class of torch that the pickle names becomes a `_Record`, which does nothing; any other name raises an error. It
    uses the unpickler written in Python, since a few bytes can make the one in C allocate all memory.
    """

    def find_class(self, module: str, name: str) -> type[_Record]:
        number = module == "torch" and isinstance(vars(torch).get(name), torch.dtype)
        if module.split(".", maxsplit=1)[0] not in ("torch", "pathlib") or not (number or name in KNOWN):
            raise ValueError(f"it names {module}.{name}, which no checkpoint contains; none of its code was run")
        return type(name, (_Record,), {})
