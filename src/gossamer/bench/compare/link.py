"""Measure the link between ranks: alpha and beta, from all-reduces of growing size."""

import json
import os
import re
from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist

from gossamer.bench.compare.calibrate import all_reduce_seconds
from gossamer.bench.compare.local import run_here
from gossamer.bench.compare.parent_death import program
from gossamer.core.errors import PeerError

SIZES = [256 * 4**i for i in range(8)]  # float32 elements, up to 16 MB
LONG = 0.1  # seconds: stop at an all-reduce this long; on a slow link a larger one would take minutes
PATIENCE = 120.0  # seconds for two ranks on this machine, from start to end


class AlphaBeta(NamedTuple):
    """A ring all-reduce of B bytes takes about 2 (size - 1) alpha + 2 (size - 1) / size * B / rate seconds."""

    size: int
    alpha: float  # seconds per message
    rate: float  # bytes per second, each way


def alpha_beta() -> AlphaBeta:
    """Measure the link between all ranks that a launcher has started; its slowest part counts."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    try:
        size = dist.get_world_size()
        if size == 1:
            return AlphaBeta(1, 0.0, float("inf"))
        least, elements, most = all_reduce_seconds(1).value, 0, 0.0
        for elements in SIZES:
            most = all_reduce_seconds(elements).value
            if most >= LONG:
                break
        crossed = 2 * (size - 1) / size * 4 * elements
        dist.barrier()  # torch 2.6 hangs if a group is destroyed while its threads still hold the last tensor
        return AlphaBeta(size, least / (2 * (size - 1)), crossed / max(most - least, 1e-9))
    finally:
        dist.destroy_process_group()


def between_two_ranks() -> AlphaBeta:
    """Measure the link between two new ranks on this machine."""
    said = list[str]()
    try:
        run_here(
            2,
            program("gossamer.bench.compare.link"),
            lambda rank, line: said.append(line),
            PATIENCE,
        )
    except TimeoutError:
        raise PeerError(f"two ranks on this machine did not find each other within {PATIENCE:g} s") from None
    for line in said:
        if line.startswith("{"):
            return AlphaBeta(**json.loads(line))
    raise PeerError(f"two ranks on this machine could not exchange messages: {_last_word(said)}")


def _last_word(said: Sequence[str]) -> str:
    """The last error, or the last line, in the output of the ranks."""
    errors = re.findall(r"\b[\w.]+Error: .+", "\n".join(said))
    return (errors or list(said)[-1:] or ["they printed nothing"])[0][:300]


if __name__ == "__main__":
    found = alpha_beta()
    if os.environ.get("RANK") == "0":
        print(json.dumps(found._asdict()), flush=True)
