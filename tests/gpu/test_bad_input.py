"""Models and groups that do not go together: one sentence that says what to do, on every rank."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.gpu.loops import Plan
from tests.gpu.nursery import Nursery
from torch import nn

import gossamer

pytestmark = pytest.mark.gang

ADVICE = "all trainable parameters must be on one device: call model.to('cuda:{0}') before the optimizer is made, then attach"


def gpu(rank: int) -> str:
    return f"cuda:{rank + 1}"


def refused(
    rank: int,
    size: int,
    make: Callable[[int], nn.Module],
    backends: str,
    buffers: Any = None,
    recipe: str = "local_sgd(2)",
) -> tuple[str, str]:
    from tests.gpu import users

    users.begin(Plan(recipe, backends=backends))
    model = make(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        gossamer.attach(model, optimizer, recipe, deadline=20.0, buffers=buffers).detach()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", "no error"


def on_two_gpus(rank: int) -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2).to(gpu(rank)), nn.Linear(2, 2).to(gpu(rank + 2)))


def half_on_the_cpu(rank: int) -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).to(gpu(rank)))


def buffers_on_the_cpu(rank: int) -> nn.Module:
    norm = nn.BatchNorm1d(2).to(gpu(rank))
    norm.running_mean = torch.zeros(2)
    return nn.Sequential(nn.Linear(2, 2).to(gpu(rank)), norm)


def half_on_one_rank(rank: int) -> nn.Module:
    return nn.Linear(2, 2).to(gpu(rank)) if rank == 0 else half_on_the_cpu(rank)


def on_the_cpu(rank: int) -> nn.Module:
    return nn.Linear(2, 2)


def on_the_gpu(rank: int) -> nn.Module:
    return nn.Linear(2, 2).to(gpu(rank))


def frozen_on_the_cpu(rank: int) -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2).to(gpu(rank)))


@pytest.mark.parametrize("backends", ["nccl", "gloo"])
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (on_two_gpus, "parameter '0.weight' is on cuda:{0} and '1.weight' on cuda:{1}; " + ADVICE),
        (half_on_the_cpu, "parameter '1.weight' is on cuda:{0} and '0.weight' on cpu; " + ADVICE),
        (
            buffers_on_the_cpu,
            "buffer '1.running_mean' is on cpu and the parameters on cuda:{0}: call model.to('cuda:{0}')",
        ),
    ],
)
def test_a_model_lies_on_one_device(nursery: Nursery, make: Any, said: str, backends: str) -> None:
    policy = "average" if make is buffers_on_the_cpu else None
    for rank, (kind, text) in enumerate(nursery.run(2, refused, make, backends, policy)):
        assert kind == "AttachError"
        assert text.startswith(said.format(rank + 1, rank + 3))


def test_what_one_rank_refuses_all_are_told(nursery: Nursery) -> None:
    zero, one = nursery.run(2, refused, half_on_one_rank, "nccl")
    assert zero[0] == "PeerError"
    assert zero[1].startswith("rank 1 cannot go on: parameter '1.weight' is on cuda:2 and '0.weight' on cpu")
    assert one[0] == "AttachError"


def test_a_model_on_the_cpu_needs_a_group_for_it(nursery: Nursery) -> None:
    for kind, text in nursery.run(2, refused, on_the_cpu, "nccl"):
        assert kind == "AttachError"
        assert text.startswith("the model is on cpu, and the process group has no backend that gossamer can use there")


def on_the_first_gpu(rank: int) -> nn.Module:
    return on_the_gpu(0)


def test_ranks_that_share_a_gpu_are_told_before_nccl_fails(nursery: Nursery) -> None:
    for kind, text in nursery.run(2, refused, on_the_first_gpu, "nccl"):
        assert kind == "AttachError"
        assert text.startswith("ranks 0, 1 share one GPU, ")
        assert "process_group=torch.distributed.new_group(backend='gloo')" in text


RICE = "gather(topk(ratio=0.3, index='rice')) + error_feedback()"
RULED = "gather(topk(ratio=0.3)) + error_feedback() + rule('ndim > 1', gather(topk(ratio=0.3, index='rice')), error_feedback())"


@pytest.mark.parametrize("recipe", [RICE, RULED, RICE.replace("gather", "scatter")])
def test_lengths_that_only_the_gpu_knows_are_refused(nursery: Nursery, recipe: str) -> None:
    for rank, (kind, text) in enumerate(nursery.run(2, refused, on_the_gpu, "nccl", None, recipe)):
        assert kind == "AttachError"
        assert text.startswith("topk(ratio=0.3, index='rice') writes messages whose length depends on their content")
        assert f"cuda:{rank + 1}" in text
    assert nursery.run(2, refused, on_the_cpu, "gloo", None, recipe) == [("", "no error")] * 2


@pytest.mark.parametrize(
    ("make", "backends", "buffers"),
    [
        (on_the_gpu, "gloo", None),
        (on_the_first_gpu, "gloo", None),
        (on_the_cpu, "gloo", None),
        (on_the_cpu, "undefined", None),
        (frozen_on_the_cpu, "nccl", None),
        (buffers_on_the_cpu, "nccl", "local"),
    ],
)
def test_what_can_be_trained_is_not_refused(nursery: Nursery, make: Any, backends: str, buffers: Any) -> None:
    assert nursery.run(2, refused, make, backends, buffers) == [("", "no error")] * 2


def synced(rank: int, size: int, make: Callable[[int], nn.Module], buffers: Any) -> str:
    from tests.gpu import users

    users.begin(Plan("local_sgd(2)"))
    model = make(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gossamer.attach(model, optimizer, "local_sgd(2)", deadline=20.0, buffers=buffers) as comm:
        comm.check_sync()
        for p in model.parameters():
            if not p.requires_grad:
                p.fill_(torch.nan)
        try:
            comm.check_sync()
        except gossamer.PeerError as error:
            return str(error)
    return ""


@pytest.mark.parametrize(("make", "buffers"), [(frozen_on_the_cpu, None), (buffers_on_the_cpu, "local")])
def test_what_is_kept_elsewhere_is_looked_at_too(nursery: Nursery, make: Any, buffers: Any) -> None:
    """Numbers of two devices were put into one tensor: RuntimeError."""
    for said in nursery.run(2, synced, make, buffers):
        assert said == "" if buffers else "the model of rank(s) [0, 1] is not finite (here: 0.weight, 0.bias)" in said
