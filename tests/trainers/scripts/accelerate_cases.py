"""Cases of Accelerate, named on the command line; each rank says in a file what it saw."""

import os
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from accelerate import DataLoaderConfiguration
from accelerate.local_sgd import LocalSGD
from accelerate.utils import DistributedType
from accelerate_model import MICRO, STEPS, Loop, flat, fresh, net, plain, rows, save
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.data import DataLoader
from wrappers import WRAPPERS

import gossamer
from gossamer.integrations import Communicator
from gossamer.trainers.accelerate import attach

SAVED = 6  # inside a round of four steps


def same_as_ddp(folder: Path) -> dict[str, Any]:
    told = dict[str, Any]()
    for name, options in {"fp32": {}, "bf16": {"mixed_precision": "bf16"}}.items():
        told[f"stock {name}"] = Loop("", **options).train()
        loop = Loop("allreduce", **options)
        told[f"attached {name}"], told[f"steps {name}"] = loop.train(), loop.comm and loop.comm.step
        loop.close()
    loop = Loop("allreduce", whole=True)
    told["attached without ddp"] = loop.train()
    loop.close()
    told["left on the model"] = hasattr(loop.model, "no_sync")
    return told


def resumed(folder: Path, recipe: str) -> dict[str, Any]:
    """What an unbroken run does after its save, and what a run does that loads it."""
    place = folder / f"state {recipe}"
    told = dict[str, Any]()
    first = Loop(recipe)
    comm = first.comm
    assert comm is not None

    def at(step: int) -> None:
        if step == SAVED:
            first.accelerator.save_state(str(place))
            with comm.consensus():
                told["consensus"] = plain(comm.model.state_dict())
            told["state dict"] = plain(first.accelerator.get_state_dict(first.model))
            told["own"] = flat(comm.model)
            first.accelerator.save_model(first.model, folder / f"model {recipe}")
            first.accelerator.wait_for_everyone()

    told["unbroken"] = first.train(each=at)[SAVED:]
    first.close()
    second = Loop(recipe)
    second.accelerator.load_state(str(place))
    told["step"] = second.comm and second.comm.step
    told["resumed"] = second.train(begin=SAVED)
    second.close()
    return told


def resumed_local(folder: Path) -> dict[str, Any]:
    return resumed(folder, "local_sgd(4)")


def resumed_topk(folder: Path) -> dict[str, Any]:
    return resumed(folder, "topk(ratio=0.2)")


def stopped(folder: Path) -> dict[str, Any]:
    """Rank 1 is told to stop after step 2: all save after the same step, and go on from there as if unbroken."""
    first = Loop("topk")
    comm = first.comm
    assert comm is not None
    with comm.leaving_at(seconds=60):
        while not comm.stopping:
            first.train(end=1)
            if comm.step == 2 and first.rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
        first.accelerator.save_state(str(folder / "told"))
    step, unbroken = comm.step, [first.train(end=1)[0] for _ in range(3)]
    first.close()
    again = Loop("topk")
    again.accelerator.load_state(str(folder / "told"))
    told = {"step": step, "unbroken": unbroken, "again": [again.train(end=1)[0] for _ in range(3)]}
    again.close()
    return told


def logged(folder: Path) -> dict[str, Any]:
    loop = Loop("topk(ratio=0.2)", log_with="tensorboard", project_dir=str(folder / "runs"))
    accelerator = loop.accelerator
    accelerator.init_trackers("names")

    def each(step: int) -> None:
        if step % 3 == 0:
            accelerator.log({"loss": 1.0 / step}, step=step)

    loop.train(each=each)
    for tracker in accelerator.trackers:
        tracker.finish()
    loop.close()
    if loop.rank:
        return {}
    reader = EventAccumulator(str(folder / "runs" / "names")).Reload()
    return {tag: [(e.step, e.value) for e in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Collectives of the trainer: those in the default group, by name."""
    seen, before = Counter[str](), dict[str, Any]()

    def counting(name: str) -> Callable[..., Any]:
        def call(*args: Any, group: Any = None, **given: Any) -> Any:
            if group is None or group is dist.group.WORLD:
                seen[name] += 1
            return before[name](*args, group=group, **given)

        return call

    for name in ("all_reduce", "broadcast", "all_gather", "all_gather_into_tensor", "barrier", "broadcast_object_list"):
        before[name] = getattr(dist, name)
        setattr(dist, name, counting(name))
    try:
        yield seen
    finally:
        for name, call in before.items():
            setattr(dist, name, call)


def collectives(folder: Path) -> dict[str, Any]:
    """Between rounds of local_sgd(8): what the trainer sends at each step, and what we do."""
    loop = Loop("local_sgd(8)")
    comm = loop.comm
    assert comm is not None
    steps, sent = list[dict[str, int]](), list[int]()
    with counted() as seen:

        def each(step: int) -> None:
            steps.append(dict(seen))
            seen.clear()
            sent.append(comm.ledger.sent)

        loop.train(each=each)
        loop.accelerator.gather(torch.ones(1))
        asked = dict(seen)
    loop.close()
    return {"steps": steps, "sent": sent, "asked for": asked}


def text_of(do: Callable[[], Any]) -> str:
    try:
        do()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def refused(folder: Path) -> dict[str, Any]:
    told = dict[str, Any]()
    loop = Loop("topk(ratio=0.2)")
    accelerator, comm = loop.accelerator, loop.comm
    assert comm is not None
    told["register"] = text_of(lambda: accelerator.register_for_checkpointing(comm))
    told["second attach"] = text_of(lambda: attach(accelerator, loop.model, loop.optimizer, "topk"))
    told["join"] = text_of(lambda: accelerator.join_uneven_inputs([loop.model], even_batches=False))
    told["LocalSGD"] = text_of(LocalSGD(accelerator, loop.model, 8).__enter__)
    with LocalSGD(accelerator, loop.model, 8, enabled=False) as off, accelerator.join_uneven_inputs([loop.model]):
        off.step()

    loop.train(end=3)
    accelerator.save_state(str(folder / "whole"))
    before, place = flat(comm.model), folder / "partial"
    accelerator.save_state(str(place))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        (place / "gossamer-rank1-of-2.pt").unlink()
    accelerator.wait_for_everyone()
    loop.train(begin=3, end=4)
    moved = flat(comm.model)
    told["partial"] = text_of(lambda: accelerator.load_state(str(place)))
    told["untouched"] = torch.equal(moved, flat(comm.model)) and not torch.equal(moved, before)
    loop.close()
    told["given back"] = not {"save_state", "log", "get_state_dict"} & vars(accelerator).keys()

    other = Loop("powersgd(rank=1)")
    began = flat(other.model)
    told["other recipe"] = text_of(lambda: other.accelerator.load_state(str(folder / "whole")))
    told["other untouched"] = torch.equal(began, flat(other.model))
    other.close()

    on_purpose = Loop("topk(ratio=0.2)", public_only=True)
    on_purpose.accelerator.load_state(str(place))
    told["on purpose"] = torch.equal(before, flat(on_purpose.model))
    on_purpose.close()

    raw = fresh()
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    told["raw optimizer"] = text_of(lambda: attach(raw, model, optimizer, "topk"))
    wrapped, prepared = raw.prepare(net(), raw.prepare(optimizer))
    told["raw model"] = text_of(lambda: attach(raw, model, prepared, "topk"))
    with wrapped.no_sync():
        told["no_sync"] = text_of(lambda: attach(raw, wrapped, prepared, "topk"))
    searching = raw.prepare(torch.optim.LBFGS(wrapped.parameters()))
    told["LBFGS"] = text_of(lambda: attach(raw, wrapped, searching, "topk"))
    for name, around in WRAPPERS.items():
        held = raw.prepare_model(around(net()), evaluation_mode=True)
        its = raw.prepare(torch.optim.AdamW(held.parameters()))
        told[name] = text_of(lambda held=held, its=its: attach(raw, held, its, "topk"))
    for kind in (DistributedType.DEEPSPEED, DistributedType.FSDP, DistributedType.NO):
        raw.state.distributed_type, kept = kind, raw.state.distributed_type
        raw.state.fsdp_plugin = SimpleNamespace(fsdp_version=1)
        told["one process" if kind == DistributedType.NO else kind.value] = text_of(
            lambda: attach(raw, wrapped, prepared, "topk")
        )
        raw.state.distributed_type = kept
    return told


def told_later(folder: Path) -> dict[str, Any]:
    """Registered after a plain `gossamer.attach`, which knows of no accelerator."""
    accelerator = fresh()
    model = net()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with gossamer.attach(model, optimizer, "topk(ratio=0.2)") as comm:
        accelerator.register_for_checkpointing(comm)
        accelerator.save_state(str(folder / "registered"))
        accelerator.wait_for_everyone()
        return {"said": text_of(lambda: accelerator.load_state(str(folder / "registered")))}


def dispatched(folder: Path) -> dict[str, Any]:
    def warned(recipe: str) -> list[str]:
        accelerator = fresh(dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
        model = net()
        model, optimizer, _ = accelerator.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(rows(), batch_size=2)
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            attach(accelerator, model, optimizer, recipe).detach()
        return [str(w.message) for w in caught if "dispatch_batches" in str(w.message)]

    return {recipe: warned(recipe) for recipe in ("local_sgd(4)", "topk(ratio=0.2)")}


def sharded(folder: Path) -> dict[str, Any]:
    """A model that FSDP2 shards before it is prepared: two replicas of half as many ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def trained(cut: bool) -> list[Any]:
        accelerator = fresh()
        mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
        model: nn.Module = net()
        if cut:
            fully_shard(model, mesh=mesh)
        model = accelerator.prepare_model(model, evaluation_mode=True)
        optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
        group = None if cut else mesh["replicate"]
        comm: Communicator = attach(accelerator, model, optimizer, "allreduce", group)
        replica, seen = mesh.get_local_rank("replicate"), list[Any]()
        x, y = (t[replica::2] for t in rows().tensors)  # ranks of a replica have equal data
        for step in range(4 * MICRO):
            part = slice(2 * step, 2 * step + 2)
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(model(x[part]), y[part]))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                held = [p.full_tensor() if cut else p for p in model.parameters()]
                seen.append(torch.cat([p.detach().reshape(-1) for p in held]).clone())
        assert comm.step == len(seen) == 4
        comm.detach()
        return seen

    return {"dense": trained(cut=False), "sharded": trained(cut=True)}


CASES: dict[str, Callable[[Path], dict[str, Any]]] = {
    each.__name__: each
    for each in (
        same_as_ddp,
        stopped,
        resumed_local,
        resumed_topk,
        logged,
        collectives,
        refused,
        told_later,
        dispatched,
        sharded,
    )
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    assert STEPS > SAVED
    folder, *names = sys.argv[1:]
    for name in names:
        told = CASES[name](Path(folder))
        save(Path(folder), name, dist.get_rank(), told)
    dist.destroy_process_group()
