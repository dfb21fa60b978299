"""Cases of the strategy for Fabric, run on two ranks; each rank saves what it saw.

torchrun --nproc-per-node 2 fabric_cases.py FOLDER CASE...
"""

import os
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.loggers import TensorBoardLogger
from lightning.fabric.strategies import DDPStrategy
from torch import Tensor, nn
from wrappers import WRAPPERS

from gossamer.trainers.fabric import Strategy

RANK = int(os.environ["RANK"])


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


def rows(batch: int) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(1000 * RANK + batch)
    return torch.randn(4, 6, generator=rng), torch.randn(4, 2, generator=rng)


def model_of() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


class Loop:
    """A loop of Fabric with 2 micro-batches a step and clipping."""

    def __init__(self, strategy: Any, **options: Any) -> None:
        self.fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, **options)
        self.fabric.launch()
        self.plain = model_of()
        self.model, self.optimizer = self.fabric.setup(self.plain, optimizer_of(self.plain))
        self.state = {"model": self.model, "optimizer": self.optimizer, "step": 0}

    def train(self, steps: int) -> None:
        for _ in range(steps):
            for micro in range(2):
                x, y = rows(2 * self.state["step"] + micro)
                with self.fabric.no_backward_sync(self.model, enabled=micro == 0):
                    self.fabric.backward((self.model(x) - y).square().mean())
            self.fabric.clip_gradients(self.model, self.optimizer, max_norm=0.5)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.state["step"] += 1


def error_of(call: Any, *args: Any, **options: Any) -> str:
    try:
        call(*args, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def strategy(folder: Path) -> dict[str, Any]:
    """`allreduce` beside stock DDP."""
    out = dict[str, Any]()
    for name, each in {"ddp": DDPStrategy(), "allreduce": Strategy("allreduce")}.items():
        loop = Loop(each)
        loop.train(10)
        out[name] = flat(loop.plain)
    out["steps"] = loop.fabric.strategy.comm.step
    loop.fabric.strategy.comm.finish()
    return out


def resumed(folder: Path) -> dict[str, Any]:
    """Saved in the middle of a round, inside an evaluation; resumed by `fabric.load`; ended by `finish`."""
    out = dict[str, Any]()
    for recipe in ("topk", "local_sgd(4)"):
        unbroken, path = Loop(Strategy(recipe)), folder / f"{recipe}.ckpt"
        unbroken.train(6)
        own = flat(unbroken.plain)
        with unbroken.fabric.strategy.consensus():
            judged = flat(unbroken.plain)
            unbroken.fabric.save(path, unbroken.state)
        back = flat(unbroken.plain)
        unbroken.train(4)
        unbroken.fabric.strategy.comm.finish()

        again = Loop(Strategy(recipe))
        rest = again.fabric.load(path, again.state)
        again.train(4)
        again.fabric.strategy.comm.finish()
        out[recipe] = {
            "own": own, "judged": judged, "back": back, "saved": torch.load(path, weights_only=True)["model"], "rest": rest,
            "unbroken": flat(unbroken.plain), "again": flat(again.plain), "step": again.state["step"],
        }  # fmt: skip
    return out


def public(folder: Path) -> dict[str, Any]:
    path, out = folder / "saved.ckpt", dict[str, Any]()
    first = Loop(Strategy("topk"))
    first.train(3)
    first.fabric.save(path, {"model": first.model})
    out["weights only"] = (folder / "saved.ckpt.gossamer").exists()
    first.fabric.save(path, first.state)
    out["whole"] = sorted(p.name for p in (folder / "saved.ckpt.gossamer").iterdir())
    first.fabric.strategy.comm.finish()
    dist.barrier()
    if RANK == 0:
        (folder / "saved.ckpt.gossamer" / "gossamer-rank1-of-2.pt").unlink()
    dist.barrier()
    again = Loop(Strategy("topk"))
    out["partial"] = error_of(again.fabric.load, path, again.state)
    again.fabric.strategy.comm.detach()
    purposely = Loop(Strategy("topk", public_only=True))
    purposely.fabric.load(path, purposely.state)
    out["on purpose"] = purposely.state["step"]
    purposely.fabric.strategy.comm.finish()
    purposely.fabric.save(path, purposely.state)
    out["after the end"] = (folder / "saved.ckpt.gossamer").exists()
    return out


def several(folder: Path) -> dict[str, Any]:
    """A model with two optimizers, and what is refused."""
    fabric = Fabric(accelerator="cpu", devices=2, strategy=Strategy("allreduce"))
    fabric.launch()
    plain, out = model_of(), dict[str, Any]()
    out["early"] = error_of(fabric.strategy.metrics)
    model, *optimizers = fabric.setup(plain, *(torch.optim.SGD(plain[i].parameters(), lr=0.1) for i in (0, 2)))
    for batch in range(3):
        x, y = rows(batch)
        fabric.backward((model(x) - y).square().mean())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    out["steps"], out["final"] = fabric.strategy.comm.step, flat(plain)
    out["second"] = error_of(fabric.setup, other := model_of(), optimizer_of(other))
    out["apart"] = error_of(fabric.setup_optimizers, optimizer_of(other))
    fabric.strategy.comm.finish()
    out["search"] = error_of(fabric.setup, other, torch.optim.LBFGS(other.parameters()))
    out["hook"] = error_of(Strategy, "topk", ddp_comm_hook=print)
    return out


def logged(folder: Path) -> dict[str, Any]:
    """The loop logs the metrics of gossamer with its own; it ends without a word to the communicator."""
    loop = Loop(Strategy("topk"), loggers=TensorBoardLogger(folder, name="", version=""))
    for _ in range(3):
        loop.train(2)
        loop.fabric.log_dict(loop.fabric.strategy.metrics(), step=loop.state["step"])
    return {"step": loop.fabric.strategy.comm.step}


def told(folder: Path) -> dict[str, Any]:
    """Rank 1 is told to stop after step 2: all save after the same step, and go on from there as if unbroken."""
    before = signal.getsignal(signal.SIGTERM)
    path, unbroken, loop = folder / "saved.ckpt", Loop(Strategy("topk")), Loop(Strategy("topk", notice=60))
    comm, during = loop.fabric.strategy.comm, signal.getsignal(signal.SIGTERM)
    while not comm.stopping:
        loop.train(1)
        if comm.step == 2 and RANK == 1:
            os.kill(os.getpid(), signal.SIGTERM)
    loop.fabric.save(path, loop.state)
    stopped = comm.step
    comm.finish()
    put_back = signal.getsignal(signal.SIGTERM) is before is not during
    unbroken.train(stopped + 3)
    unbroken.fabric.strategy.comm.finish()
    again = Loop(Strategy("topk"))
    again.fabric.load(path, again.state)
    again.train(3)
    again.fabric.strategy.comm.finish()
    return {
        "stopped": stopped,
        "put back": put_back,
        "unbroken": flat(unbroken.plain),
        "again": flat(again.plain),
    }


def counted(folder: Path) -> dict[str, Any]:
    """`local_sgd(8)`: what the loop of Fabric sends in each step, and what the recipe does."""
    names = (
        "all_reduce",
        "broadcast",
        "all_gather",
        "all_gather_into_tensor",
        "barrier",
        "broadcast_object_list",
        "reduce",
    )
    was, calls, steps, sent = {name: getattr(dist, name) for name in names}, Counter[str](), list[dict[str, int]](), []
    loop = Loop(Strategy("local_sgd(8)"))

    def counting(name: str) -> Any:
        def call(*args: Any, group: Any = None, **given: Any) -> Any:
            calls[name] += group is None or group is dist.group.WORLD
            return was[name](*args, group=group, **given)

        return call

    for name in names:
        setattr(dist, name, counting(name))
    for _ in range(9):
        loop.train(1)
        steps.append({name: count for name, count in calls.items() if count})
        sent.append(loop.fabric.strategy.comm.ledger.sent)
        calls.clear()
    loop.fabric.barrier()
    asked = dict(calls)
    for name, call in was.items():
        setattr(dist, name, call)
    loop.fabric.strategy.comm.finish()
    return {"steps": steps, "sent": sent, "asked for": asked}


def wrapped(folder: Path) -> dict[str, str]:
    """Models that something else averages or shards."""

    def refused(kind: Any) -> str:
        fabric = Fabric(accelerator="cpu", devices=2, strategy=Strategy("topk"))
        fabric.launch()
        model = kind(model_of())
        return error_of(fabric.setup, model, optimizer_of(model))

    return {name: refused(kind) for name, kind in WRAPPERS.items()}


CASES = {f.__name__: f for f in (strategy, resumed, public, several, logged, told, counted, wrapped)}

if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, wanted = Path(sys.argv[1]), sys.argv[2:]
    for name in wanted:
        (folder / name).mkdir(parents=True, exist_ok=True)
        torch.save(CASES[name](folder / name), folder / f"{name}-rank{RANK}.pt")
