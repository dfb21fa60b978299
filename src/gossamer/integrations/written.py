"""Checkpoint writer: all ranks write one folder together, in the format of `torch.distributed.checkpoint`.

DCP's own `save` uses collectives of torch, which wait forever for a frozen rank and do not name it. So this module calls
DCP's planner and writer itself, and ranks exchange plans over gossamer's fabric.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gossamer.core.errors import CheckpointError, plainly

Facts = dict[str, Any]
Tell = Callable[[Facts], list[Facts]]  # sends this rank's facts; returns those of all ranks, in rank order
Entries = Mapping[str, Mapping[str, Any]]  # tensors and plain values, by section and name


def write(path: str | Path, entries: Entries, rank: int, tell: Tell) -> None:
    """Write every entry once, then the table of all entries: a folder without the table is no checkpoint."""
    job = _Job(path, entries, rank)
    described = _on_all(job.begin, path, tell)
    wrote = _on_all(partial(job.write, described), path, tell)
    _on_all(partial(job.end, wrote), path, tell)


def _on_all(do: Callable[[], Facts], path: str | Path, tell: Tell) -> list[Facts]:
    """Run `do` on all ranks and return all results; if it fails on one rank, raise an error on all ranks."""
    done, failure = Facts(), None
    try:
        done = do()
    except Exception as error:
        failure = error
    everyone = tell({"problem": "" if failure is None else plainly(failure), "done": done})
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
        from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
        from torch.distributed.checkpoint.filesystem import FileSystemWriter

        self._entries, self._rank, self._made = entries, rank, DefaultSavePlanner
        self._planner, self._writer = DefaultSavePlanner(), FileSystemWriter(path)
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
            results = [_results(plan, places) for plan, places in zip(self._plans, wrote, strict=True)]
            self._writer.finish(self._table, results)
        return {}

    def _plan(self, looks: Facts, rank: int) -> Any:
        """Return DCP's local plan of a rank, from the types and shapes of its entries."""
        planner = self._made()
        alike = {section: {n: _alike(look) for n, look in held.items()} for section, held in looks.items()}
        planner.set_up_planner(alike, is_coordinator=rank == 0)
        return planner.create_local_plan()


def _look(value: Any) -> list[Any] | None:
    """Return a tensor's dtype and shape; None for any other value."""
    return [str(value.dtype).removeprefix("torch."), list(value.shape)] if isinstance(value, Tensor) else None


def _alike(look: list[Any] | None) -> Any:
    """Return a tensor of this dtype and shape on the meta device; None for any other value."""
    return None if look is None else torch.empty(look[1], dtype=getattr(torch, look[0]), device="meta")


def _results(plan: Any, places: Facts) -> list[Any]:
    """Return DCP's write results of a rank, from where its entries are stored."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo  # pyright: ignore[reportPrivateUsage]
    from torch.distributed.checkpoint.storage import WriteResult

    planned = {item.index.fqn: item.index for item in plan.items}
    if planned.keys() != places.keys():
        raise CheckpointError(
            "the ranks have made different plans of the checkpoint: run the same version of torch on all ranks"
        )
    return [WriteResult(planned[name], size, _StorageInfo(*place)) for name, (size, *place) in places.items()]
