"""Ranks that believe in GPUs: forked for one run from a process that has loaded everything, and gone after it.

So a run may end as NCCL ends it, with the process; no run sees what another left; and a start costs milliseconds.
"""

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.gang import PRELOADED

LIMIT = 60.0  # seconds that a run may take


class RankError(Exception):
    """A rank raised, or its process ended."""


class Nursery:
    """Calls `fn(rank, size, *args)` on ranks of their own, and returns what they returned."""

    def __init__(self) -> None:
        self._pipe: Connection | None = None
        self._process: Any = None

    def run(self, size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
        pipe = self._pipe or self._begin()
        try:
            pipe.send_bytes(pickle.dumps((size, fn, args)))
            if not pipe.poll(LIMIT + 10):
                raise RankError("no answer")
            fine, answer = pickle.loads(pipe.recv_bytes())
        except BaseException:
            self.close()  # or the next run would get this one's answer, or none, as its process may be gone
            raise
        if not fine:
            raise RankError(answer)
        return answer

    def close(self) -> None:
        if self._pipe is not None:
            self._pipe.close()  # which ends it
            self._process.join(5)
            self._process.kill()
            self._pipe = None

    def _begin(self) -> Connection:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,))
        self._process.start()
        theirs.close()
        return self._pipe


def _serve(pipe: Connection) -> None:
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # runs that are cut short are nothing to warn of
    _load()
    while True:
        try:
            order = pickle.loads(pipe.recv_bytes())
        except EOFError:
            os._exit(0)
        pipe.send_bytes(pickle.dumps(_run(*order)))


def _load() -> None:
    """Everything that takes long, and nothing that starts a thread."""
    import gc
    import importlib
    import warnings

    import torch

    gc.disable()  # as in tests.loading
    torch.set_num_threads(1)
    for name in (
        "torch._dynamo",
        "torch.optim",
        "gossamer.integrations.attach",
        "gossamer.recipes",
        "gossamer.kernels.gpu",
        "gossamer.bench.compare.gpu.rank",
        "tests.gpu.orders",
    ):
        importlib.import_module(name)

    from tests.gpu import device, programs

    programs.load_all()

    device.install()
    gc.collect()
    gc.freeze()  # what all ranks begin with need not be looked through in each of them
    gc.set_threshold(10_000)  # as in the process of the tests
    warnings.simplefilter("error")


def _run(size: int, fn: Callable[..., Any], args: Any) -> tuple[bool, Any]:
    with tempfile.TemporaryDirectory(prefix="gossamer-ranks-") as folder:
        context = multiprocessing.get_context("fork")
        ranks = [context.Process(target=_rank, args=(r, size, folder, fn, args)) for r in range(size)]
        for rank in ranks:
            rank.start()
        wrong = _ended([rank.sentinel for rank in ranks])
        for rank in ranks:
            rank.kill()
            rank.join()
        answers = [_read(Path(folder) / f"{r}", ranks[r].exitcode) for r in range(size)]
    if wrong or not all(fine for fine, _ in answers):
        return False, "\n".join(
            [wrong, *(f"--- rank {r}: {text}" for r, (fine, text) in enumerate(answers) if not fine)]
        )
    return True, [answer for _, answer in answers]


def _ended(sentinels: list[int]) -> str:
    until = time.monotonic() + LIMIT
    while sentinels:
        gone = wait(sentinels, until - time.monotonic())
        if not gone:
            return f"not done after {LIMIT:g} seconds"
        sentinels = [s for s in sentinels if s not in gone]
    return ""


def _read(file: Path, code: int | None) -> tuple[bool, Any]:
    if file.exists():
        return pickle.loads(file.read_bytes())
    words = file.with_suffix(".words")
    return False, words.read_text() if words.exists() else f"the process ended with {code}"


def _rank(rank: int, size: int, folder: str, fn: Callable[..., Any], args: Any) -> None:
    import torch.distributed as dist
    from tests.gpu import nccl
    from tests.gpu.rules import Rules

    file = Path(folder) / f"{rank}"
    nccl.last_words = file.with_suffix(".words")
    Rules().__enter__()
    try:
        store = _store(Path(folder), rank, size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        answer = True, fn(rank, size, *args)
        dist.barrier()  # the store's host goes last
    except BaseException:
        answer = False, traceback.format_exc()
    try:
        file.with_suffix(".part").write_bytes(pickle.dumps(answer))
    except Exception:
        file.with_suffix(".part").write_bytes(pickle.dumps((False, traceback.format_exc())))
    file.with_suffix(".part").rename(file)
    if rank == 0:
        _outlast(Path(folder), size)
    os._exit(0)


def _store(folder: Path, rank: int, size: int) -> Any:
    """Where the ranks find one another, on a port that the system has chosen."""
    from datetime import timedelta

    import torch.distributed as dist

    patience, file = timedelta(seconds=LIMIT), folder / "port"
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, size, True, timeout=patience, wait_for_workers=False)
        file.with_suffix(".part").write_text(str(store.port))
        file.with_suffix(".part").rename(file)
        return store
    until = time.monotonic() + LIMIT
    while not file.exists() and time.monotonic() < until:
        time.sleep(0.001)
    return dist.TCPStore("127.0.0.1", int(file.read_text()), size, False, timeout=patience)


def _outlast(folder: Path, size: int) -> None:
    """The host of the store goes last: the others' lanes may still be saying goodbye."""
    until = time.monotonic() + 3.0
    while time.monotonic() < until and len({file.stem for file in folder.iterdir()}) <= size:  # and the port
        time.sleep(0.001)
