"""Distributed checkpoints: load what `torch.distributed.checkpoint` saved, also into a world of another size."""

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
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata

    reader = FileSystemReader(path)
    metadata = reader.read_metadata()
    table = metadata.state_dict_metadata
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
    # Every rank reads alone. dcp.load has a flag for that, but torch 2.6 does not know it and would call all ranks.
    planner = DefaultLoadPlanner()
    planner.set_up_planner(wanted, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    reader.read_data(planner.create_local_plan(), planner).wait()
    comm.load_state_dict({name.removeprefix(prefix): value for name, value in wanted.items()})
