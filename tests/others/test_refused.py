"""What averages or shards on its own: refused on every rank, before anything is wrong."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from tests.gang import Gang
from tests.integrations.loops import DEADLINE, sgd
from tests.others.both import torch_may_deprecate
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gossamer
from gossamer.core.errors import AttachError

pytestmark = pytest.mark.gang


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


@contextmanager
def refused(said: list[str]) -> Iterator[None]:
    with pytest.raises(AttachError) as caught:
        yield
    said.append(str(caught.value))


def sharded(rank: int, size: int) -> list[str]:
    with torch_may_deprecate():
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
    said = list[str]()
    mesh = init_device_mesh("cpu", (size,))
    whole, part = small(), small()
    fully_shard(whole, mesh=mesh)
    fully_shard(part[0], mesh=mesh)
    for model in (whole, part):
        with refused(said):
            gossamer.attach(model, sgd(model), "allreduce", deadline=DEADLINE)
    return said


def test_fsdp_is_refused_on_every_rank(gang2: Gang) -> None:
    for said in gang2.run(sharded):
        assert len(said) == 2
        assert all("FSDP" in text or "DTensor" in text for text in said)


class DeepSpeedEngine(nn.Module):
    """By this name deepspeed wraps a model; it averages and steps itself. That of deepspeed 0.19.8 was refused when it was tried."""

    __module__ = "deepspeed.runtime.engine"

    def __init__(self) -> None:
        super().__init__()
        self.module = small()


def engine(rank: int, size: int) -> list[str]:
    said, model = list[str](), DeepSpeedEngine()
    with refused(said):
        gossamer.attach(model, sgd(model), "allreduce", deadline=DEADLINE)
    return said


def test_deepspeed_s_engine_is_refused(gang2: Gang) -> None:
    for (text,) in gang2.run(engine):
        assert "DeepSpeed" in text


def in_threads(rank: int, size: int) -> list[str]:
    said = list[str]()
    around, inside = nn.DataParallel(small()), nn.Sequential(nn.DataParallel(small()))
    for model in (around, inside):
        with refused(said):
            gossamer.attach(model, sgd(model), "allreduce", deadline=DEADLINE)
    return said


def test_data_parallel_is_refused_with_the_way_out(gang2: Gang) -> None:
    for around, inside in gang2.run(in_threads):
        assert around.startswith("this model is wrapped in DataParallel, by which one process trains on several GPUs")
        assert inside.startswith("the model's '0' is wrapped in DataParallel")
        assert "torchrun --nproc-per-node" in around


def one_backward(used: nn.Module, attached: nn.Module, recipe: str, said: list[str]) -> None:
    optimizer = sgd(attached)
    with gossamer.attach(attached, optimizer, recipe, deadline=DEADLINE), refused(said):
        used(torch.ones(2, 8)).sum().backward()
        optimizer.step()


def ddp_around(rank: int, size: int, recipe: str) -> list[str]:
    """`DDP(model)` after `attach(model)`; and `attach(ddp.module)`, as a callback of a trainer does naturally."""
    said = list[str]()
    model = small()
    optimizer = sgd(model)
    with gossamer.attach(model, optimizer, recipe, deadline=DEADLINE), refused(said):
        ddp = DistributedDataParallel(model)
        ddp(torch.ones(2, 8)).sum().backward()
        optimizer.step()
    ddp = DistributedDataParallel(small())
    one_backward(ddp, ddp.module, recipe, said)
    return said


@pytest.mark.parametrize("recipe", ["allreduce", "topk(ratio=0.3)", "local_sgd(2)"])
def test_ddp_around_an_attached_model_is_refused_with_both_ways_out(gang2: Gang, recipe: str) -> None:
    for said in gang2.run(ddp_around, recipe):
        assert len(said) == 2
        for text in said:
            assert "attach the DDP model itself" in text
            assert "register" in text
