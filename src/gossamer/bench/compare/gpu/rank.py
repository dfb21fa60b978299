"""Run one rank of a GPU check: `gossamer.bench.compare.gpu.rank SPEC`, in JSON. It sends its findings to the launcher."""

import os
import sys
import threading
import traceback
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from gossamer.bench.compare.events import OnEvent, RankEvent, SubjectBegun, tell
from gossamer.bench.compare.gpu import devices, kernels, peers, recipes, streams
from gossamer.bench.compare.gpu.check_spec import CheckSpec, Placement
from gossamer.bench.compare.gpu.compile_ahead import compile_ahead, cores_of
from gossamer.bench.compare.gpu.findings import Finding
from gossamer.core.errors import GossamerError
from gossamer.core.text import cut
from gossamer.fabrics.torch.nccl import machine

BACKENDS = {"nccl": "cpu:gloo,cuda:nccl"}  # backend of the group; gloo otherwise
WORDS = 600  # characters of another library's error that are shown
MEET = timedelta(seconds=120)

CHECKS: dict[str, Callable[[CheckSpec, Placement, str], Finding]] = {
    "cards": devices.check,
    "kernels": kernels.check,
    "streams": streams.check,
    "recipes": recipes.check,
}


def take_part(spec: CheckSpec, placement: Placement, on_event: OnEvent) -> bool:
    """Try one subject after the other; stop and return False after an error, so that the rest runs in new processes."""
    torch.set_num_threads(1)
    if placement.device.type == "cuda":
        torch.cuda.set_device(placement.device)

    def found(finding: Finding) -> None:
        on_event(RankEvent(finding))

    for subject in spec.subjects:
        on_event(RankEvent(SubjectBegun(subject)))
        alarm = threading.Timer(spec.sizes.limit, _give_up, (spec, subject, found))
        alarm.daemon = True
        alarm.start()
        try:
            found(_tried(spec, placement, subject, found))
        except Exception as error:
            found(Finding(spec.title, subject, "failed", in_words(error)))
            return False
        finally:
            alarm.cancel()
    return spec.check != "peers"  # after a killed peer the group cannot be shut down


def _tried(spec: CheckSpec, placement: Placement, subject: str, found: Callable[[Finding], None]) -> Finding:
    if spec.check == "peers":
        return peers.check(spec, placement, subject, found)
    return CHECKS[spec.check](spec, placement, subject)


def _give_up(spec: CheckSpec, subject: str, found: Callable[[Finding], None]) -> None:
    """End this process: nothing else ends a kernel that hangs."""
    found(Finding(spec.title, subject, "failed", f"it was not done after {spec.sizes.limit:g} seconds"))
    sys.stdout.flush()
    os._exit(0)


def in_words(error: Exception) -> str:
    """
    >>> in_words(KeyError("x"))
    "KeyError: 'x'"
    """
    text = " ".join(str(error).split())
    if isinstance(error, GossamerError):
        return cut(text, WORDS)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "gossamer" in f.filename]
    where = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {cut(text, WORDS)}{where}"


def placement_of(spec: CheckSpec) -> Placement:
    """Rank, size and device from the launcher's environment."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    count = torch.cuda.device_count()
    if spec.path == "cpu" or not count:
        return Placement(rank, size, torch.device("cpu"))
    return Placement(rank, size, torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)) % count))


def keep_apart(rank: int) -> None:
    """Give this rank a machine of its own in NCCL's eyes: it refuses ranks of one machine that share a GPU."""
    os.environ["NCCL_HOSTID"] = f"{machine()} {rank}"


def meet(spec: CheckSpec, placement: Placement) -> None:
    """Join the process group of these ranks, through the launcher's store."""
    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = PrefixStore(f"gossamer-doctor/{spec.number}", TCPStore(*place, is_master=False, timeout=MEET))
    patience = timedelta(seconds=max(60.0, 2 * spec.sizes.deadline))
    backend = BACKENDS.get(spec.path, "gloo")
    dist.init_process_group(backend, store=store, rank=placement.rank, world_size=placement.size, timeout=patience)


def main(text: str) -> None:
    spec = CheckSpec.of_json(text)
    placement = placement_of(spec)
    if placement.rank not in spec.ranks:
        return
    if spec.shared:
        keep_apart(placement.rank)
    if spec.path:
        meet(spec, placement)
    if spec.check == "kernels" and placement.device.type == "cuda":
        compile_ahead(spec, cores_of(spec))
    if take_part(spec, placement, tell) and spec.path:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
