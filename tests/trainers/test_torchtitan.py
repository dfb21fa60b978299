"""torchtitan's seam: a function that gets its container of optimizers, the model's parts and the degrees of parallelism."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.gang import Gang
from tests.integrations.loops import DEADLINE, SEED, Awkward, flat, loss_of, same, sgd, trained
from tests.integrations.sharded import cut, dense, full, mesh_of
from tests.integrations.sharded import loss_of as sharded_loss_of
from torch import Tensor, nn
from torch.optim import Optimizer

from gossamer.core.errors import AttachError
from gossamer.trainers import torchtitan

OPTIONS = {"seed": SEED, "deadline": DEADLINE}


class Container(Optimizer):
    """Steps an optimizer per part of the model, as torchtitan's does, and is an optimizer of torch by name only."""

    def __init__(self, optimizers: list[Optimizer]) -> None:
        self.optimizers = optimizers
        super().__init__([p for each in optimizers for group in each.param_groups for p in group["params"]], {})

    def step(self, closure: Any = None) -> None:
        for each in self.optimizers:
            each.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for each in self.optimizers:
            each.zero_grad(set_to_none)


def dims(**degrees: int) -> SimpleNamespace:
    return SimpleNamespace(**{"dp_replicate": 2, "dp_shard": 1, "cp": 1, "tp": 1, "pp": 1, "ep": 1, **degrees})


def through_the_seam(rank: int, size: int, recipe: str, steps: int) -> list[Tensor]:
    model = Awkward()
    container, seen = Container([sgd(model)]), list[Tensor]()
    after = torchtitan.attach(recipe, **OPTIONS)
    after(container, [model], dims())
    with after.comm as comm:
        while comm.step < steps:
            container.zero_grad()
            loss_of(model, rank, comm.step + 1).backward()
            container.step()
            seen.append(flat(model))
    return seen


@pytest.mark.gang
@pytest.mark.parametrize("recipe", ["topk(ratio=0.3)", "local_sgd(2)"])
def test_it_trains_as_attach_does(gang2: Gang, recipe: str) -> None:
    for direct, seam in zip(gang2.run(trained, recipe, 4), gang2.run(through_the_seam, recipe, 4), strict=True):
        assert len(direct) == len(seam) == 4
        assert all(same(a, b) for a, b in zip(direct, seam, strict=True))


def sharded(rank: int, size: int, recipe: str) -> tuple[list[list[Tensor]], int]:
    """FSDP2 on a mesh of two dimensions, with the divide factor that torchtitan sets: torch's own hop, and ours."""
    outcomes, mesh = list[list[Tensor]](), mesh_of(2)
    steps = 0
    for attached in (False, True):
        model: Any = cut(dense(), mesh)
        for module in (model, *(m for m in model.children() if any(True for _ in m.parameters()))):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        container, after = Container([sgd(model)]), torchtitan.attach(recipe, **OPTIONS)
        if attached:
            after(container, [model], dims(dp_shard=2))
        for step in range(4):
            container.zero_grad()
            sharded_loss_of(model, mesh.get_local_rank("replicate"), step, mesh.get_local_rank("shard")).backward()
            container.step()
        outcomes.append([full(p) for p in model.parameters()])
        if attached:
            steps = after.comm.step
            after.comm.detach()
    assert dist.get_world_size() == size
    return outcomes, steps


@pytest.mark.gang
def test_a_sharded_model_trains_as_torch_s_own_hsdp(gang4: Gang) -> None:
    for (native, ours), steps in gang4.run(sharded, "allreduce"):
        assert steps == 4
        for a, b in zip(native, ours, strict=True):
            torch.testing.assert_close(b, a, rtol=0, atol=1e-7)


def refusal(container: Any, parts: list[nn.Module], degrees: SimpleNamespace) -> str:
    with pytest.raises(AttachError) as caught:
        torchtitan.attach("topk")(container, parts, degrees)
    return str(caught.value)


def test_what_a_recipe_does_not_support_is_refused() -> None:
    model = nn.Linear(2, 1)
    container = Container([sgd(model)])
    assert "the model is in 2 parts" in refusal(container, [model, model], dims())
    for name, word in {"tp": "tensor", "pp": "pipeline", "cp": "context", "ep": "expert"}.items():
        assert f"{word} parallelism is on ({name} = 2)" in refusal(container, [model], dims(**{name: 2}))
    assert "not torchtitan's OptimizersContainer" in refusal(object(), [model], dims())
    assert "is not a torch.optim.Optimizer" in refusal(SimpleNamespace(optimizers=[object()]), [model], dims())


def test_one_function_attaches_one_model() -> None:
    model, after = nn.Linear(2, 1), torchtitan.attach("topk")
    with pytest.raises(AttachError, match="nothing is attached"):
        _ = after.comm
    after(Container([sgd(model)]), [model], dims())
    with after.comm, pytest.raises(AttachError, match="has attached a model already"):
        after(Container([sgd(model)]), [model], dims())
