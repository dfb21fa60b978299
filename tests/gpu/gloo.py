"""gloo beside the pretended device: it reads and writes pinned memory behind torch's back, and takes no CUDA tensors."""

from typing import Any

import torch.distributed as dist
from tests.gpu.diary import diary, lock, place
from tests.gpu.tensors import Cuda, Host, tensors_in

GIVES = {"send": True, "recv": False, "allreduce": True, "_allgather_base": True, "alltoall_base": True}


class Work:
    """What gloo has begun. Until it has been waited for, it may write to what it was given."""

    def __init__(self, work: Any, filled: list[Host]) -> None:
        self._work, self._filled = work, filled

    def wait(self, *patience: Any) -> Any:
        done = self._work.wait(*patience)
        with lock:
            for tensor in self._filled:
                tensor.memory.host_writes()
        return done

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def watch() -> None:
    """Have gloo's calls looked at, in this process."""
    for name, reads in GIVES.items():
        setattr(dist.ProcessGroupGloo, name, _watched(getattr(dist.ProcessGroupGloo, name), name, reads))


def _watched(real: Any, name: str, reads: bool) -> Any:
    def call(group: Any, *args: Any, **kwargs: Any) -> Any:
        params = [*tensors_in((args, kwargs))]
        if any(isinstance(x, Cuda) for x in params):
            raise RuntimeError(f"ProcessGroupGloo::{name}: unsupported device type cuda (at {place(3)})")
        pinned = [x for x in params if isinstance(x, Host)]
        with lock:
            diary.crossings += bool(pinned)
            for tensor in pinned:
                tensor.memory.host_reads() if reads else tensor.memory.host_writes()
        work = real(group, *args, **kwargs)
        return Work(work, pinned if name != "send" else []) if pinned else work

    return call
