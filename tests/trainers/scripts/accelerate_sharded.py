"""A loop of Accelerate whose model FSDP2 shards: two replicas of half as many ranks, saved and resumed by Accelerate's own calls.

torchrun --nproc-per-node 4 accelerate_sharded.py FOLDER CASE...
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from accelerate_cases import text_of
from accelerate_model import BATCH, MICRO, STEPS, fresh, net, rows, save
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from gossamer.trainers.accelerate import attach

SAVED = 5  # inside a round of four steps


class ShardedLoop:
    """One training; `own=True` as if Accelerate itself had been told to shard, which it refuses on processors."""

    def __init__(self, recipe: str, own: bool = False, public_only: bool = False) -> None:
        self.accelerator = accelerator = fresh()
        mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
        model: nn.Module = net()
        fully_shard(model[0], mesh=mesh)  # type: ignore[index]
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
        loader = DataLoader(rows(), batch_size=BATCH // 2)
        if own:
            accelerator.state.distributed_type = DistributedType.FSDP
            accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
            assert accelerator.is_fsdp2
            self.model, self.optimizer, self.loader, self.scheduler = accelerator.prepare(
                model, optimizer, loader, scheduler
            )
        else:
            self.model = accelerator.prepare_model(model, evaluation_mode=True)
            self.optimizer, self.loader, self.scheduler = accelerator.prepare(optimizer, loader, scheduler)
        self.comm = attach(
            accelerator, self.model, self.optimizer, recipe, seed=3, public_only=public_only, deadline=60.0
        )

    def train(self, begin: int = 0, end: int = STEPS, each: Callable[[int], None] = lambda step: None) -> list[Tensor]:
        """What this rank holds after each step."""
        accelerator, seen = self.accelerator, list[Tensor]()
        loader = accelerator.skip_first_batches(self.loader, begin * MICRO) if begin else self.loader
        for x, y in loader:
            with accelerator.accumulate(self.model):
                accelerator.backward(nn.functional.mse_loss(self.model(x), y))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(self.model.parameters(), 0.05)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            if accelerator.sync_gradients:
                seen.append(self.held())
                each(begin + len(seen))
                if begin + len(seen) == end:
                    break
        return seen

    def held(self) -> Tensor:
        parts: list[Any] = [p.detach() for p in self.model.parameters()]
        return torch.cat([part.to_local().reshape(-1) for part in parts]).clone()

    def whole(self) -> dict[str, Tensor]:
        state: dict[str, Any] = self.comm.model.state_dict()
        return {name: value.full_tensor().clone() for name, value in state.items()}


def resumed(folder: Path, recipe: str, own: bool) -> dict[str, Any]:
    """Saved twice into one folder; what an unbroken run does after, what one does that loads it, and what is public of it."""
    told, place = dict[str, Any](), folder / f"{recipe} {own}"
    first = ShardedLoop(recipe, own)

    def at(step: int) -> None:
        if step in (SAVED - 2, SAVED):
            first.accelerator.save_state(str(place))
        if step == SAVED:
            told["rate then"] = first.scheduler.get_last_lr()
            with first.comm.consensus():
                told["consensus"] = first.whole()
            told["state dict"] = dict(first.accelerator.get_state_dict(first.model))
            first.accelerator.save_model(first.model, folder / f"model {recipe} {own}")
            first.accelerator.wait_for_everyone()

    told["unbroken"] = first.train(each=at)[SAVED:]
    first.comm.detach()
    second = ShardedLoop(recipe, own)
    second.accelerator.load_state(str(place))
    told["step"], told["rate"] = second.comm.step, second.scheduler.get_last_lr()
    told["resumed"] = second.train(begin=SAVED)
    second.comm.detach()
    told["files"] = sorted(path.name for path in place.iterdir())
    return told


def topk(folder: Path) -> dict[str, Any]:
    return resumed(folder, "topk(ratio=0.2)", own=False)


def local(folder: Path) -> dict[str, Any]:
    return resumed(folder, "local_sgd(4)", own=False)


def own_topk(folder: Path) -> dict[str, Any]:
    return resumed(folder, "topk(ratio=0.2)", own=True)


def own_local(folder: Path) -> dict[str, Any]:
    return resumed(folder, "local_sgd(4)", own=True)


def refused(folder: Path) -> dict[str, Any]:
    """A folder without the shards, or of another recipe; and going on with another recipe on purpose."""
    told, place = dict[str, Any](), folder / "refused"
    first = ShardedLoop("local_sgd(4)")
    first.train(end=3)
    first.accelerator.save_state(str(place))
    with first.comm.consensus():
        consensus = first.whole()
    first.comm.detach()

    other = ShardedLoop("topk(ratio=0.2)")
    before, rates = other.held(), other.scheduler.get_last_lr()
    told["other recipe"] = text_of(lambda: other.accelerator.load_state(str(place)))
    told["untouched"] = torch.equal(before, other.held()) and other.scheduler.get_last_lr() == rates
    other.comm.detach()

    purposely = ShardedLoop("topk(ratio=0.2)", public_only=True)
    purposely.accelerator.load_state(str(place))
    loaded = purposely.whole()
    told["on purpose"] = all(torch.equal(loaded[name], value) for name, value in consensus.items())
    told["its step"] = purposely.comm.step
    told["its optimizer"] = {int(state["step"]) for state in purposely.comm.optimizers[0].state.values()}
    purposely.train(end=2)
    told["too late"] = text_of(lambda: purposely.accelerator.load_state(str(place)))
    purposely.comm.check_sync()
    if purposely.accelerator.is_main_process:
        (place / "gossamer" / ".metadata").unlink()
    purposely.accelerator.wait_for_everyone()
    purposely.comm.detach()

    again = ShardedLoop("local_sgd(4)")
    told["cut off"] = text_of(lambda: again.accelerator.load_state(str(place)))
    bare = folder / "bare"
    bare.mkdir(exist_ok=True)
    told["bare"] = text_of(lambda: again.accelerator.load_state(str(bare)))
    again.comm.detach()
    return told


CASES: dict[str, Callable[[Path], dict[str, Any]]] = {
    each.__name__: each for each in (topk, local, own_topk, own_local, refused)
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, *names = sys.argv[1:]
    for name in names:
        told = CASES[name](Path(folder))  # makes the process group
        save(Path(folder), name, dist.get_rank(), told)
    dist.destroy_process_group()
