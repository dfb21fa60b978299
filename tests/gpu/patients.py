"""The doctor's ranks on the pretended device: processes of the nursery, in the place of those that a launcher starts."""

import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from tests.gpu.loops import Plan
from tests.gpu.nursery import Nursery, RankError

from gossamer.bench.compare.events import RankEvent, line_of
from gossamer.bench.compare.gpu.check_spec import CheckSpec, Placement, Sizes
from gossamer.bench.compare.gpu.launch import Reply

Harm = Callable[[int, CheckSpec], None]  # done to a rank before it takes part
SMALL = Sizes((0, 321), 2000, side=4, products=2, copied=1000, steps=6, width=16, deadline=3.0, limit=30.0)
BACKENDS = {"nccl": "undefined", "cpu": "gloo", "staged": "gloo", "": "nccl"}


class Patients:
    """Stands for `launch.LocalRanks`."""

    def __init__(self, nursery: Nursery, size: int, harm: Harm | None = None, shared: bool = False) -> None:
        self.size = size
        self._nursery, self._harm, self._shared = nursery, harm, shared

    def run(self, order: CheckSpec) -> list[Reply]:
        with tempfile.TemporaryDirectory(prefix="gossamer-doctor-") as folder:
            endings = dict[int, str]()
            for first, size in [(0, self.size)] if order.path else [(r, 1) for r in order.ranks]:
                try:
                    self._nursery.run(size, take_part, first, order, folder, self._harm, self._shared)
                except RankError as error:
                    found = re.findall(r"--- rank (\d+): the process ended with ([-1-9]\S*)", str(error))
                    endings |= {first + int(rank): f"ended with code {code}" for rank, code in found}
            files = [Path(folder) / f"{rank}" for rank in range(self.size)]
            said = [file.read_text().splitlines() if file.exists() else [] for file in files]
        return [Reply(lines, endings.get(rank, "")) for rank, lines in enumerate(said)]


def take_part(rank: int, size: int, first: int, order: CheckSpec, folder: str, harm: Harm | None, shared: bool) -> None:
    """A rank of the nursery; what it says is kept in a file, so that it is heard whatever becomes of it."""
    from tests.gpu import programs, users

    from gossamer.bench.compare.gpu import rank as ranks

    programs.backends.backends = lambda: ("torch", "triton")  # Numba would compile for longer than all else takes
    users.begin(Plan("", backends=BACKENDS[order.path]))
    number = first + rank
    device = torch.device("cpu") if order.path == "cpu" else torch.device("cuda", 0 if shared else number + 1)
    if harm is not None:
        harm(number, order)
    with (Path(folder) / f"{number}").open("w") as file:

        def hear(event: RankEvent) -> None:
            file.write(line_of(event))
            file.flush()

        if order.shared:
            ranks.keep_apart(number)
        try:
            ranks.take_part(order, Placement(rank, size, device), hear)
        finally:
            os.environ.pop("NCCL_HOSTID", None)  # this process serves other tests too
