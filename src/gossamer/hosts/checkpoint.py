"""Distributed checkpoints: load what `torch.distributed.checkpoint` saved, also into a world of another size."""

import warnings
from pathlib import Path
from typing import Any, Protocol

import torch

from gossamer.core.errors import CheckpointError


class Loads(Protocol):
    def load_state_dict(self, saved: Any) -> None: ...


def load(comm: Loads, path: "str | Path", key: str = "comm") -> None:
    """Load a communicator saved by `dcp.save({"comm": comm, ...}, checkpoint_id=path)`.

    DCP only fills entries that exist already, and a fresh communicator has none yet, so they are made after the
    checkpoint's own table. All old ranks' entries are read; the world may have another size now.
    """
    # Here, since torch takes half a second to import them, and every command would wait for it.
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load as load_entries

    table = FileSystemReader(path).read_metadata().state_dict_metadata
    prefix = f"{key}."
    wanted = dict[str, Any]()
    for name, entry in table.items():
        if not name.startswith(prefix):
            continue
        if isinstance(entry, TensorStorageMetadata):
            wanted[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
        elif isinstance(entry, BytesStorageMetadata):  # pyright: ignore[reportUnnecessaryIsInstance]
            wanted[name] = None
    if not wanted:
        raise CheckpointError(
            f"{path} holds nothing under {key!r}; it was saved under {sorted({n.split('.')[0] for n in table})}"
        )
    with warnings.catch_warnings():  # it is the intent indeed
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        load_entries(wanted, checkpoint_id=path, no_dist=True)
    comm.load_state_dict({name.removeprefix(prefix): value for name, value in wanted.items()})
