"""Somebody else averages, shards or steps: it is said before a wrong model comes of it."""

import warnings

import pytest
import torch
from tests.gang import Gang
from tests.integrations.loops import Awkward, attached, data, flat, loss_of, same, sgd
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gossamer
from gossamer.core.errors import AttachError, PeerError

pytestmark = pytest.mark.gang


def wrapped(rank: int, size: int, how: str) -> str:
    """DDP around an attached model; or attach to what is inside of DDP, as a trainer's callback does."""
    plain = nn.Linear(17, 7)
    ddp = DistributedDataParallel(plain) if how == "before" else None
    with attached("qsgd", plain if ddp is None else ddp.module) as (model, optimizer, _):
        trained = ddp or DistributedDataParallel(model)
        x, y = data(rank, 1)
        for _ in range(2):  # not once only
            with pytest.raises(AttachError) as caught:
                (trained(x) - y).square().mean().backward()
        optimizer.zero_grad()
        return str(caught.value)


@pytest.mark.parametrize("how", ["before", "after"])
def test_a_model_that_ddp_averages_too_is_an_error(gang2: Gang, how: str) -> None:
    for said in gang2.run(wrapped, how):
        assert "attach the DDP model itself, gossamer.attach(ddp_model, optimizer, recipe), or register it" in said


def taken_out(rank: int, size: int) -> Tensor:
    """The wrapper still lives, and is not used any more."""
    model = nn.Linear(17, 7)
    ddp = DistributedDataParallel(model)
    with attached("allreduce", ddp.module) as (plain, optimizer, comm):
        loss_of(plain, rank, 1).backward()
        optimizer.step()
        comm.check_sync()
        return flat(plain)


def test_a_model_that_was_taken_out_of_ddp_trains(gang2: Gang) -> None:
    a, b = gang2.run(taken_out)
    assert same(a, b)


def sharded(rank: int, size: int, how: str) -> str:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import distribute_tensor

    mesh = init_device_mesh("cpu", (size,))
    model = nn.Sequential(nn.Linear(17, 7))
    if how == "fully_shard":
        fully_shard(model, mesh=mesh)
    else:
        weight = nn.Parameter(distribute_tensor(model[0].weight.detach(), mesh))
        model[0].register_parameter("weight", weight)
    with pytest.raises(AttachError) as caught:
        gossamer.attach(model, sgd(model), "allreduce")
    return str(caught.value)


@pytest.mark.parametrize(
    ("how", "words"),
    [("fully_shard", "there are no replicas to average between"), ("dtensor", "sharded by tensor parallelism")],
)
def test_sharded_models_without_replicas_are_refused_on_every_rank(gang2: Gang, how: str, words: str) -> None:
    for said in gang2.run(sharded, how):
        assert words in said


def zero(rank: int, size: int, recipe: str) -> Tensor | str:
    with warnings.catch_warnings():  # torch's own, of torch.jit.script
        warnings.simplefilter("ignore")
        from torch.distributed.optim import ZeroRedundancyOptimizer
    model = Awkward()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.05, momentum=0.9)
    try:
        with gossamer.attach(model, optimizer, recipe, seed=3) as comm:
            for step in range(1, 5):
                optimizer.zero_grad()
                loss_of(model, rank, step).backward()
                optimizer.step()
            comm.check_sync()
            return flat(model)
    except AttachError as error:
        return str(error)


def plainly(rank: int, size: int, recipe: str) -> Tensor:
    with attached(recipe) as (model, optimizer, _):
        for step in range(1, 5):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
        return flat(model)


def test_a_sharded_optimizer_steps_as_a_plain_one_or_is_refused(gang2: Gang) -> None:
    for a, b in zip(gang2.run(zero, "topk(ratio=0.3)"), gang2.run(plainly, "topk(ratio=0.3)")):
        torch.testing.assert_close(a, b)
    assert all("models would never be averaged" in said for said in gang2.run(zero, "local_sgd(2)"))


class Around:
    """As Accelerate's optimizer is."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer


class SAM(torch.optim.Optimizer):
    def __init__(self, params, **options) -> None:
        super().__init__(params, {})
        self.base_optimizer = torch.optim.SGD(self.param_groups, **options)

    def first_step(self) -> None: ...
    def second_step(self) -> None: ...


def misunderstood(rank: int, size: int) -> list[str]:
    model, said = Awkward(), list[str]()
    wrong = [
        ("allreduce", Around(sgd(model))),
        ("allreduce", "adam"),
        ("allreduce", []),
        ("allreduce", torch.optim.lr_scheduler.StepLR(sgd(model), 3)),
        ("allreduce", torch.optim.SparseAdam(model.parameters())),
        ("local_sgd(2)", SAM(model.parameters(), lr=0.1)),
    ]
    for recipe, optimizer in wrong:
        with pytest.raises(AttachError) as caught:
            gossamer.attach(model, optimizer, recipe)
        said.append(str(caught.value))
    return said


def test_what_is_no_optimizer_is_told_what_to_pass(gang2: Gang) -> None:
    for said in gang2.run(misunderstood):
        assert "give attach the inner optimizer, optimizer.optimizer" in said[0]
        assert "or a list of them, got a str" in said[1]
        assert "this list is empty" in said[2]
        assert "optimizer.optimizer" in said[3]
        assert "SparseAdam takes only sparse gradients" in said[4]
        assert "give attach its base_optimizer" in said[5]


def refused_on_one(rank: int, size: int) -> str:
    model = Awkward()
    with pytest.raises((AttachError, PeerError)) as caught:
        gossamer.attach(model, sgd(model) if rank == 0 else "adam", "allreduce")
    return str(caught.value)


def test_what_one_rank_refuses_is_an_error_on_all(gang2: Gang) -> None:
    zero, one = gang2.run(refused_on_one)
    assert one in zero
    assert zero.startswith("rank 1 cannot go on")
