"""One contender: a model under one recipe (or a yardstick), with its own clock and its own bytes."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from gossamer.core.errors import RecipeError
from gossamer.core.parts import nearest
from gossamer.hosts import Communicator, attach
from gossamer.lab import in_lab, own_counters
from gossamer.record import Step
from gossamer.workloads import Workload

YARDSTICKS = ("compute", "ddp", "ddp-fp16", "ddp-powersgd")


@dataclass
class Clock:
    """Seconds and bytes of this contender's own turns."""

    seconds: float = 0.0
    nic: int = 0


class Contender:
    """Trains in turns; what happens between them does not count."""

    def __init__(
        self, name: str, kind: str, workload: Workload, seed: int, deadline: float, measure_every: int
    ) -> None:
        self.name, self.kind, self.workload = name, kind, workload
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.model = workload.model()
        self.optimizer = workload.optimizer(self.model)
        self.clock, self.done = Clock(), 0
        self.comm: Communicator | None = None
        self.forward: nn.Module = self.model
        if kind in YARDSTICKS:
            self.forward = _yardstick(kind, self.model)
        else:
            self.comm = attach(
                self.model,
                self.optimizer,
                kind,
                seed=seed,
                deadline=deadline,
                buffers="average",
                measure_every=measure_every,
            )
        # The handshake and the first broadcast are not training.
        self._before = (self.comm.ledger.sent, self.comm.ledger.handed) if self.comm else (0, 0)

    @property
    def recipe(self) -> str:
        return repr(self.comm.recipe) if self.comm else self.kind

    @property
    def steps_done(self) -> int:
        """Backup workers skip steps they missed, so the communicator counts."""
        return self.comm.step if self.comm else self.done

    def turn(self, steps: int, told: Callable[[Step], None]) -> None:
        """Train some steps; all ranks begin and end together."""
        dist.barrier()
        began, nic = perf_counter(), _nic()
        before, target = self.clock.seconds, self.steps_done + steps
        while self.steps_done < target:
            told(self._step(before, began))
        dist.barrier()
        self.clock.seconds = before + perf_counter() - began
        self.clock.nic += _nic() - nic

    def _step(self, before: float, began: float) -> Step:
        start, waited, coded = perf_counter(), self._waited(), self._coded()
        step = self.steps_done
        self.optimizer.zero_grad()
        loss = self.workload.loss(self.forward, self.workload.batch(step, self.rank, self.size))
        loss.backward()
        self.optimizer.step()
        self.done += 1
        wait = self._waited() - waited
        return Step(
            step=step + 1,
            seconds=before + perf_counter() - began,
            loss=float(loss.detach()),
            sent=self.sent(),
            compute=perf_counter() - start - wait,
            codec=self._coded() - coded,
            wait=wait,
        )

    def _waited(self) -> float:
        return self.comm.exposed_seconds if self.comm else 0.0

    def _coded(self) -> float:
        return self.comm.ledger.busy_seconds if self.comm else 0.0

    def sent(self) -> int:
        """Bytes over this rank's link so far; DDP keeps no ledger, so its ring all-reduce is computed."""
        if self.comm is not None:
            return self.comm.ledger.sent - self._before[0]
        dense = sum(p.numel() * p.element_size() for p in self.model.parameters() if p.requires_grad)
        share = {"ddp": 1.0, "ddp-fp16": 0.5}.get(self.kind, 0.0)
        return int(2 * (self.size - 1) * dense * share // self.size) * self.done

    def handed(self) -> int:
        if self.comm is not None:
            return self.comm.ledger.handed - self._before[1]
        return self.sent() * self.size // max(2 * (self.size - 1), 1)

    def quality(self) -> float:
        """Held-out quality of the model all ranks agree on; all ranks call this together."""
        with self._agreed():
            value = self.workload.evaluate(self.model) if self.rank == 0 else 0.0
        table = torch.tensor([value], dtype=torch.float64)
        dist.broadcast(table, 0)
        return float(table)

    @contextmanager
    def _agreed(self) -> Generator[None, None, None]:
        if self.comm is None:
            yield
            return
        ledger = self.comm.ledger
        sent, handed, received = ledger.sent, ledger.handed, ledger.received
        with self.comm.consensus():
            yield
        ledger.sent, ledger.handed, ledger.received = sent, handed, received  # evaluation is not training

    def state_dict(self) -> dict[str, Any]:
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "done": self.done}
        state |= {"seconds": self.clock.seconds, "nic": self.clock.nic}
        return state | ({"comm": self.comm.state_dict()} if self.comm else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.done, self.clock.seconds, self.clock.nic = state["done"], state["seconds"], state["nic"]
        if self.comm is not None:
            self.comm.load_state_dict(state["comm"])

    def close(self) -> None:
        if self.comm is not None:
            self.comm.detach()


def check(kind: str) -> None:
    """Say early, in one process, that a contender cannot be read."""
    from gossamer.recipe import Recipe
    from gossamer.recipes import presets

    if kind in YARDSTICKS:
        return
    try:
        Recipe.of(kind)
    except RecipeError as error:
        if kind.isidentifier() and kind not in presets():
            raise RecipeError(f"there is no recipe {kind!r}. {nearest(kind, [*presets(), *YARDSTICKS])}") from None
        raise error


def _yardstick(kind: str, model: nn.Module) -> nn.Module:
    if kind == "compute":
        return model
    one_bucket = {"bucket_cap_mb": 4096} if kind == "ddp-powersgd" else {}  # upstream's hook fails on several
    wrapped = DistributedDataParallel(model, **one_bucket)
    if kind == "ddp-fp16":
        wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif kind == "ddp-powersgd":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return wrapped


def _nic() -> int:
    return own_counters().sent_bytes if in_lab() else 0


def mean_over_ranks(*values: float) -> list[float]:
    table: Tensor = torch.tensor(values, dtype=torch.float64)
    if values:
        dist.all_reduce(table)
    return (table / dist.get_world_size()).tolist()
