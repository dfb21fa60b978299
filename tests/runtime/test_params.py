"""Leaves: a worker trains what a rank holds of its parameters, wherever that lies today."""

from collections.abc import Callable

import pytest
import torch
from tests.gang import Gang
from tests.runtime.fleet import SMALL
from tests.runtime.gym import Flat, bit_equal, noise, sgd, train
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from gossamer.fabrics.torch.fabric import TorchFabric
from gossamer.recipe import Recipe
from gossamer.runtime import Param, Worker, params_of
from gossamer.simulate import Replica

RECIPES = [
    "allreduce" + SMALL,
    "scatter(qsgd(bits=4, bucket=16)) + diana()" + SMALL,
    "topk(ratio=0.1)" + SMALL,
    "powersgd",
    "allreduce + slowmo(3, buffers='average')" + SMALL,
    "overlap_local_sgd(3)",
    "sgp" + SMALL,
    "backup",
    "accordion_qsgd(epoch=2, interval=1, threshold=0.1)",
]
SHAPES = {"matrix": (8, 6), "still": (4,), "cube": (4, 3, 5), "bias": (6,)}


class Half(Param):
    """This rank holds the upper half of a parameter's rows; the lower half is somebody else's."""

    def local(self, tensor: Tensor) -> Tensor:
        return tensor[: len(tensor) // 2]

    def hand(self, part: Tensor) -> None:
        if self.parameter.grad is None:
            self.parameter.grad = torch.zeros_like(self.parameter)
        self.local(self.parameter.grad).copy_(part)


def model_of(rows: int) -> nn.ParameterDict:
    rng = torch.Generator().manual_seed(4)
    whole = {name: torch.randn(shape, generator=rng) for name, shape in SHAPES.items()}
    return nn.ParameterDict({name: nn.Parameter(t[: len(t) * rows // 2].clone()) for name, t in whole.items()})


def ranks_of(recipe: str, rows: int, params: Callable[[dict[str, Tensor]], dict[str, Param]]) -> list[Replica]:
    out = list[Replica]()
    for rank in range(3):
        model = model_of(rows)
        optimizer = sgd()(model)
        worker = Worker(Recipe.of(recipe), params(dict(model.named_parameters())), optimizer, rank, 3, seed=3)
        out.append(Replica(model, optimizer, worker))
    return out


def pulled(ranks: list[Replica], moves: bool) -> Callable[[nn.Module, int, int], float]:
    """Every rank towards a target of its own. With `moves`, all parameters lie in other storage at every step."""

    def backward(model: nn.Module, rank: int, step: int) -> float:
        for i, (name, param) in enumerate(ranks[rank].worker.params.items()):
            if moves:
                param.parameter.data = param.parameter.data.clone()
            target = noise(i, rank, numel=param.values.numel()).view(param.shape)
            param.hand((param.values - target) * (name != "still"))
        return 0.0

    return backward


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_part_of_each_parameter_trains_as_a_model_of_such_parameters(recipe: str) -> None:
    parts = ranks_of(recipe, 2, lambda named: {name: Half(p) for name, p in named.items()})
    whole = ranks_of(recipe, 1, params_of)
    before = [p.detach().clone() for p in model_of(2).parameters()]
    train(parts, pulled(parts, moves=True), 8)
    train(whole, pulled(whole, moves=False), 8)
    for part, dense in zip(parts, whole, strict=True):
        for p, q, start in zip(part.model.parameters(), dense.model.parameters(), before, strict=True):
            assert bit_equal([p.detach()[: len(q)], q.detach()])
            assert bit_equal([p.detach()[len(q) :], start[len(q) :]])
    assert not bit_equal([whole[0].model["matrix"].detach(), model_of(1)["matrix"].detach()])


def over_two_ranks(rank: int, size: int, recipe: str, sharded: bool) -> list[Tensor]:
    """Two replicas, each of one shard."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    if sharded:
        from torch.distributed.fsdp import fully_shard

        for part in (*model, model):
            fully_shard(part, mesh=init_device_mesh("cpu", (size, 1), mesh_dim_names=("replicate", "shard"))["shard"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    fabric = TorchFabric(deadline=20.0)
    worker = Worker(Recipe.of(recipe), params_of(dict(model.named_parameters())), optimizer, rank, size)
    try:
        for step in range(6):
            optimizer.zero_grad()
            model(noise(rank, step, numel=24).view(4, 6)).square().mean().backward()
            gradients = [c.gradients() for c in worker.buckets]

            def descend() -> bool:
                if worker.recipe.schedule.shape.averages_gradients:
                    worker.update_step.put()
                optimizer.step()
                return True

            fabric.run(worker.train_step(gradients, descend, optimizer.step))
            if sharded:  # whoever moves a model gives it other storage
                at = [param.values.data_ptr() for param in worker.params.values()]
                held = [param.values.clone() for param in worker.params.values()]  # so that no old place comes back
                model._apply(lambda t: t.clone())
                assert at != [param.values.data_ptr() for param in worker.params.values()]
                assert bit_equal(
                    [
                        torch.cat([t.view(-1) for t in held]),
                        torch.cat([v.values.view(-1) for v in worker.params.values()]),
                    ]
                )
        return [param.values.detach().clone() for param in worker.params.values()]
    finally:
        fabric.close()


@pytest.mark.gang
@pytest.mark.skipif(torch.__version__ < "2.13", reason="FSDP2 trains on CPUs since torch 2.13")
@pytest.mark.parametrize("recipe", ["topk(ratio=0.3)" + SMALL, "allreduce + slowmo(2, buffers='average')"])
def test_shards_of_fsdp2_train_as_plain_parameters_do(gang2: Gang, recipe: str) -> None:
    for shards, dense in zip(gang2.run(over_two_ranks, recipe, True), gang2.run(over_two_ranks, recipe, False)):
        assert all(bit_equal([a, b]) for a, b in zip(shards, dense, strict=True))


def test_leaves_of_a_model_are_its_parameters() -> None:
    (param,) = params_of(dict(Flat(3).named_parameters())).values()
    param.write(torch.ones(3, dtype=torch.float64))
    param.put_gradient(view := torch.zeros(3, dtype=torch.float64))
    assert param.gradient is view
    assert param.parameter.tolist() == [1.0] * 3
    param.forget_gradient()
    assert param.gradient is None
