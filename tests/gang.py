"""A gang of real processes joined by gloo, started once and used by many tests."""

import atexit
import gc
import multiprocessing
import os
import pickle
import socket
import sys
import traceback
from collections.abc import Callable, Collection, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import cache
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple, TypeVar

from tests.marked import PATIENCE

Key = TypeVar("Key")

HERE = "127.0.0.1"


# Loaded once, and not by every rank: an optimizer's first step alone would take each of them two seconds.
PRELOADED = [
    "tests.loading",
    "pytest",
    "torch.distributed",
    "torch._dynamo",
    "gossamer.integrations.attach",
    "gossamer.recipes",
    "tests.gang",
    "tests.integrations.loops",  # and with it the simulator, which most modules of tests load
]


class GangError(Exception):
    """A function raised on some rank, a rank died, or did not answer in time."""


class Gang:
    """Runs `fn(rank, size, *args)` of a test module on all ranks at once, and returns what they returned.

    After anything went wrong the processes are replaced: the ranks may no longer be in step.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def run(
        self, fn: Callable[..., Any], *args: Any, timeout: float = PATIENCE, lost: Collection[int] = ()
    ) -> list[Any]:
        """Call on all ranks. The ranks in `lost` are expected to die; None stands for their result."""
        if not self._processes:
            self._begin()
        order = pickle.dumps((fn, args))
        try:
            for pipe in self._pipes:
                pipe.send_bytes(order)
            answers = self._collect(timeout)
        except BaseException:
            self.close()  # a rank that has got this order would answer it when the next one is given
            raise
        wrong = {
            r: text
            for r, (fine, text) in answers.items()
            if not fine and not (r in lost and text == "the process died")
        }
        wrong |= {r: f"it was to die, and returned {answers[r][1]!r}" for r in lost if answers[r][0]}
        if wrong or lost:
            self.close()
        if wrong:
            raise GangError("\n".join(f"--- rank {r} of {self.size}:\n{text}" for r, text in wrong.items()))
        return [None if r in lost else answers[r][1] for r in range(self.size)]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []

    def _begin(self) -> None:
        _compile()
        port = free_port()
        # Forked from a process that has loaded torch but started nothing: there far sooner than when spawned.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*PRELOADED, "tests.warm"])
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.size, port, theirs), daemon=True)
            process.start()
            theirs.close()  # so that the pipe ends with the process
            self._processes.append(process)
            self._pipes.append(ours)

    def _collect(self, timeout: float) -> dict[int, tuple[bool, Any]]:
        answers = dict[int, tuple[bool, Any]]()
        while len(answers) < self.size:
            pending = {p: r for r, p in enumerate(self._pipes) if r not in answers}
            ready = wait(list(pending), timeout)
            if not ready:
                answers |= dict.fromkeys(pending.values(), (False, f"no answer within {timeout:g} seconds"))
            for pipe in ready:
                try:
                    answers[pending[pipe]] = pickle.loads(pipe.recv_bytes())
                except (EOFError, OSError):
                    answers[pending[pipe]] = False, "the process died"
        return answers


class Call(NamedTuple):
    """What a gang of its own is to do, some of whose ranks will be lost."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    lost: tuple[int, ...] = ()


@contextmanager
def at_once(size: int, calls: Mapping[Key, Call], gangs: int = 3) -> Generator[Callable[[Key], list[Any]]]:
    """Some gangs at a time: those whose ranks die or freeze wait for deadlines more than they compute.

    Gives what tells the outcome of one of the calls, or raises what came of it.
    """
    _compile()

    def do(call: Call) -> list[Any]:
        gang = Gang(size)
        try:
            return gang.run(call.fn, *call.args, lost=call.lost)
        finally:
            gang.close()

    with ThreadPoolExecutor(gangs) as pool:
        outcomes = {key: pool.submit(do, call) for key, call in calls.items()}
        yield lambda key: outcomes[key].result()


@cache
def _compile() -> None:
    """Fill the kernels' cache on disk: or all ranks would compile at once, in the midst of a step with a deadline."""
    from gossamer import kernels

    kernels.warmup()


_taken = ExitStack()
atexit.register(_taken.close)


def free_port() -> int:
    """A port that nobody else takes before we listen there.

    It is below those that the system gives to whoever connects, and as long as this process lives, its twin of UDP keeps
    it from whoever else runs tests on this machine.
    """
    for port in range(20_000, 29_000):
        twin = socket.socket(type=socket.SOCK_DGRAM)
        try:
            twin.bind((HERE, port))
            with socket.socket() as door:
                door.bind((HERE, port))
        except OSError:
            twin.close()
            continue
        _taken.enter_context(twin)
        return port
    raise GangError("no port below 29000 is free")


def _serve(rank: int, size: int, port: int, pipe: Connection) -> None:
    import warnings
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": HERE, "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(size)}
    dist.init_process_group("gloo", rank=rank, world_size=size, timeout=timedelta(seconds=60))
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "TypedStorage is deprecated")  # by torch 2.6 itself, in dcp.save
    warnings.filterwarnings("ignore", "rank .* busy elsewhere")  # so it is, where others compute on the same cores
    loaded = 0
    while True:
        try:
            fn, args = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            answer = True, fn(rank, size, *args)
        except BaseException:
            answer = False, traceback.format_exc()
        pipe.send_bytes(pickle.dumps(answer))
        _let_go()
        if len(sys.modules) > loaded:
            loaded = len(sys.modules)
            gc.collect()
            gc.freeze()  # what has been loaded stays, and is not looked through for garbage, nor for wrappers of a model


def _let_go() -> None:
    """Of the groups that a test has left: each has threads that wake a hundred times a second, while others compute."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _world

    # Those of a mesh stay: DTensor remembers the first of several equal meshes, and would use its groups.
    left = [g for g in _world.pg_map if g is not dist.group.WORLD and not g.group_desc.startswith("mesh_")]
    for group in left:
        dist.destroy_process_group(group)
    if left:
        gc.collect()
