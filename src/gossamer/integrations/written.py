"""What all ranks write to one folder together, in the format of `torch.distributed.checkpoint`.

DCP's own `save` asks what it must know in collectives of torch's, which wait for ever where a rank is frozen, and do not say
whose fault it is. So its planner and its writer are called here, and what the ranks tell one another goes over a lane.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gossamer.core.errors import CheckpointError, plainly

Facts = dict[str, Any]
Tell = Callable[[Facts], list[Facts]]  # what this rank has to say; returns what every rank has, in their order
Entries = Mapping[str, Mapping[str, Any]]  # tensors and plain values, by section and name


def write(path: str | Path, entries: Entries, rank: int, tell: Tell) -> None:
    """Write every entry once, whoever has it. The table of all of them comes last: a folder without it is no checkpoint."""
    job = _Job(path, entries, rank)
    described = _on_all(job.begin, path, tell)
    wrote = _on_all(partial(job.write, described), path, tell)
    _on_all(partial(job.end, wrote), path, tell)


def _on_all(do: Callable[[], Facts], path: str | Path, tell: Tell) -> list[Facts]:
    """What every rank's doing came to; what fails on one rank is an error on all."""
    done, failure = Facts(), None
    try:
        done = do()
    except Exception as error:
        failure = error
    everyone = tell({"problem": "" if failure is None else plainly(failure), "done": done})
    for rank, told in enumerate(everyone):
        if told["problem"]:
            raise CheckpointError(
                f"rank {rank} cannot write to {path}: {told['problem']}; there is no new checkpoint"
            ) from failure
    return [told["done"] for told in everyone]


class _Job:
    """DCP's planner and writer at work on one rank. All ranks plan for all, alike, so that no plan need travel."""

    def __init__(self, path: str | Path, entries: Entries, rank: int) -> None:
        # Here, since torch takes half a second to import them, and every command would wait for it.
        from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
        from torch.distributed.checkpoint.filesystem import FileSystemWriter

        self._entries, self._rank, self._made = entries, rank, DefaultSavePlanner
        self._planner, self._writer = DefaultSavePlanner(), FileSystemWriter(path)
        self._plans = list[Any]()
        self._table: Any = None

    def begin(self) -> Facts:
        """Make the folder; returns what this rank's entries look like."""
        self._planner.set_up_planner(dict(self._entries), is_coordinator=self._rank == 0)
        self._writer.set_up_storage_writer(self._rank == 0)
        self._writer.prepare_local_plan(self._planner.create_local_plan())
        return {section: {n: _look(v) for n, v in held.items()} for section, held in self._entries.items()}

    def write(self, described: list[Facts]) -> Facts:
        """Write this rank's share; returns where each of its entries lies."""
        plans = [self._plan(looks, rank) for rank, looks in enumerate(described)]
        plans, self._table = self._planner.create_global_plan(plans)
        self._plans = self._writer.prepare_global_plan(plans)
        written = self._writer.write_data(self._planner.finish_plan(self._plans[self._rank]), self._planner)
        written.wait()
        places = {w.index.fqn: (w.size_in_bytes, w.storage_data) for w in written.value()}
        return {name: [size, p.relative_path, p.offset, p.length] for name, (size, p) in places.items()}

    def end(self, wrote: list[Facts]) -> Facts:
        """Rank 0 writes the table."""
        if self._rank == 0:
            results = [_results(plan, places) for plan, places in zip(self._plans, wrote, strict=True)]
            self._writer.finish(self._table, results)
        return {}

    def _plan(self, looks: Facts, rank: int) -> Any:
        """What a rank would write if it were alone."""
        planner = self._made()
        alike = {section: {n: _alike(look) for n, look in held.items()} for section, held in looks.items()}
        planner.set_up_planner(alike, is_coordinator=rank == 0)
        return planner.create_local_plan()


def _look(value: Any) -> list[Any] | None:
    """A tensor's type and shape; nothing of any other value."""
    return [str(value.dtype).removeprefix("torch."), list(value.shape)] if isinstance(value, Tensor) else None


def _alike(look: list[Any] | None) -> Any:
    """Something that looks so, and holds nothing."""
    return None if look is None else torch.empty(look[1], dtype=getattr(torch, look[0]), device="meta")


def _results(plan: Any, places: Facts) -> list[Any]:
    from torch.distributed.checkpoint.filesystem import _StorageInfo  # pyright: ignore[reportPrivateUsage]
    from torch.distributed.checkpoint.storage import WriteResult

    planned = {item.index.fqn: item.index for item in plan.items}
    if planned.keys() != places.keys():
        raise CheckpointError("the ranks have planned differently: do all of them run the same version of torch?")
    return [WriteResult(planned[name], size, _StorageInfo(*place)) for name, (size, *place) in places.items()]
