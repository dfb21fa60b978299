"""Models that FSDP2 shards, as their users build them, and loops that train them beside dense ones."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from tests.integrations.loops import DEADLINE, SEED
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import gossamer
from gossamer.integrations import Communicator

WIDTHS = (6, 9, 5, 3)  # uneven over two and over three shards
Optimizers = Callable[[nn.Module], torch.optim.Optimizer]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def dense() -> nn.Sequential:
    torch.manual_seed(7)
    layers = list[nn.Module]()
    for before, after in pairwise(WIDTHS):
        layers += [nn.Linear(before, after), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


@cache
def mesh_of(shards: int) -> DeviceMesh:
    size = dist.get_world_size()
    return init_device_mesh("cpu", (size // shards, shards), mesh_dim_names=("replicate", "shard"))


def cut(model: nn.Module, mesh: DeviceMesh, blocks: bool = True) -> nn.Module:
    for part in model.children() if blocks else ():
        if any(True for _ in part.parameters()):
            fully_shard(part, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def batch(replica: int, step: int, shard: int = 0) -> tuple[Tensor, Tensor]:
    """Ranks of one replica have equal data, unless their shard is given: then FSDP2's own mean is exact."""
    rng = torch.Generator().manual_seed(1000 * step + 10 * replica + shard)
    return torch.randn(4, WIDTHS[0], generator=rng), torch.randn(4, WIDTHS[-1], generator=rng)


def loss_of(model: nn.Module, replica: int, step: int, shard: int = 0) -> Tensor:
    x, y = batch(replica, step, shard)
    return (model(x) - y).square().mean()


def full(tensor: Any) -> Tensor:
    return tensor.full_tensor().detach().clone() if hasattr(tensor, "full_tensor") else tensor.detach().clone()


@contextmanager
def attached(
    recipe: str,
    mesh: DeviceMesh,
    optimizers: Optimizers = sgd,
    *,
    one_dimension: bool = False,
    blocks: bool = True,
    **options: Any,
) -> Iterator[tuple[nn.Module, torch.optim.Optimizer, Communicator]]:
    model = cut(dense(), mesh["shard"] if one_dimension else mesh, blocks)
    optimizer = optimizers(model)
    given = {"process_group": mesh["replicate"]} if one_dimension else {}
    settings = {"seed": SEED, "deadline": DEADLINE, **given, **options}
    with gossamer.attach(model, optimizer, recipe, **settings) as comm:
        yield model, optimizer, comm
