"""What may be told to attach, on the pretended device: a scaler, and parameters that are not always used."""

from collections import Counter
from typing import Any

import pytest
import torch
from tests.gpu.loops import Plan, net
from tests.gpu.nursery import Nursery

import gossamer
from gossamer.core.errors import AttachError

pytestmark = pytest.mark.gang
STEPS = 4


def waits(rank: int, size: int, options: dict[str, Any], scales: bool) -> Counter[str]:
    """Where a host waited for its device in some steps; the last layer is used at none."""
    from tests.gpu import users
    from tests.gpu.diary import ELSEWHERE, diary

    users.begin(Plan("powersgd"))
    device = torch.device("cuda", rank + 1)
    torch.cuda.set_device(device)
    model = net(Plan("powersgd")).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cuda", init_scale=64.0, growth_interval=2, enabled=scales)
    told = {"scaler": scaler} if scales else {}
    with gossamer.attach(model, optimizer, "powersgd", deadline=20.0, **told, **options) as comm:
        for step in range(2 + STEPS):
            if step == 2:
                diary.syncs.clear()
            optimizer.zero_grad()
            batch = torch.randn(4, 32).pin_memory().to(device, non_blocking=True)
            scaler.scale(model[:-1](batch).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        seen = Counter({k: v for k, v in diary.syncs.items() if ELSEWHERE not in k})
        saved = comm.state_dict()
        assert not any(v.is_cuda for v in saved.values() if isinstance(v, torch.Tensor))  # there is no room to spare
        assert comm.worker.scale == (2 ** ((1 + STEPS) // 2) * 64.0 if scales else 1.0)
    assert not diary.races
    assert not diary.lifetimes
    return seen


def test_unused_parameters_are_asked_for_with_the_verdict(nursery: Nursery) -> None:
    for seen in nursery.run(2, waits, {"find_unused_parameters": True}, False):
        assert sum(seen.values()) == STEPS, seen


def test_a_scale_is_not_asked_for_in_the_midst_of_backward(nursery: Nursery) -> None:
    """What is waited for is a copy that set out when the scale had changed, before the forward pass."""
    for seen in nursery.run(2, waits, {}, True):
        asked = Counter(k.split(" @ ")[0] for k in seen.elements())
        own = {"_local_scalar_dense": STEPS}  # the scaler's: has it found inf?
        assert asked == {"tolist": STEPS, "Event.synchronize": STEPS, **own}, seen


def compiled(rank: int, size: int) -> list[int]:
    """How many of Triton's programs were launched when attach was through, and how many are new in the first step."""
    from tests.gpu import users
    from tests.gpu.diary import diary

    def launched() -> set[str]:
        return {name for name in diary.launches if name.startswith("triton ")}

    users.begin(Plan("qsgd"))
    device = torch.device("cuda", rank + 1)
    torch.cuda.set_device(device)
    model = net(Plan("qsgd")).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with gossamer.attach(model, optimizer, "qsgd", deadline=20.0):
        before = launched()
        model(torch.randn(4, 32).to(device)).square().mean().backward()
        optimizer.step()
        return [len(before), len(launched() - before)]


def test_kernels_are_compiled_before_the_first_step(nursery: Nursery) -> None:
    for before, new in nursery.run(2, compiled):
        assert before > 0
        assert new == 0


def captured(rank: int, size: int) -> tuple[str, str]:
    """A loop that captures its step in a CUDA graph: what backward says of it, and what attach says of compiled autograd."""
    import torch._dynamo.config
    from tests.gpu import users

    users.begin(Plan("allreduce"))
    device = torch.device("cuda", rank + 1)
    torch.cuda.set_device(device)
    model = net(Plan("allreduce")).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with gossamer.attach(model, optimizer, "allreduce", deadline=20.0):
        torch.cuda.is_current_stream_capturing = lambda: True
        with pytest.raises(AttachError) as graph:
            model(torch.randn(4, 32).to(device)).sum().backward()
    torch._dynamo.config.compiled_autograd = True
    with pytest.raises(AttachError) as engine:
        gossamer.attach(model, optimizer, "allreduce", deadline=20.0)
    return str(graph.value), str(engine.value)


def test_graphs_and_compiled_autograd_are_refused(nursery: Nursery) -> None:
    for graph, engine in nursery.run(2, captured):
        assert "CUDA graph" in graph
        assert "compiled_autograd" in engine


def written(rank: int, size: int) -> list[str]:
    """Where the tensors of a checkpoint lie that DCP's writer is given; the loop has set no device."""
    from gossamer.checkpoints.chunks import Chunk, everything, planner

    torch.cuda.set_device(0)
    x = torch.ones(4, device="cuda:3")
    made = planner()
    made.set_up_planner({"own": {"whole": x, "part": Chunk(x, everything((4,))), "step": 3}}, is_coordinator=True)
    data = [made.resolve_data(item) for item in made.create_local_plan().items]
    return [str(each.device) for each in data if isinstance(each, torch.Tensor)]


def test_a_checkpoint_is_copied_to_the_host_before_it_is_written(nursery: Nursery) -> None:
    """DCP's writer wrote what was still on its way, and the checkpoint could not be loaded: it waits for the current device."""
    assert nursery.run(1, written) == [["cpu", "cpu"]]


def with_another_default(rank: int, size: int) -> list[float]:
    """A loss scale, and numbers that are on the GPU already, where new tensors are not made on the host."""
    from gossamer.core.stream_events import copied_to
    from gossamer.integrations.grad_scaler import KnownScale

    ones = torch.ones(2, device="cuda:1")
    scaler = torch.amp.GradScaler("cuda", init_scale=64.0)
    scaler.scale(ones)  # which makes its scale
    known = KnownScale(scaler)
    with torch.device("meta"):
        known._send()
        return [known.now(), float(copied_to(ones, ones.device).sum())]


def test_a_default_device_is_none_of_ours(nursery: Nursery) -> None:
    """Under torch.set_default_device("cuda") the copies on the host were made on the GPU, and could not be pinned."""
    assert nursery.run(1, with_another_default) == [[64.0, 2.0]]


def with_its_rate_on_the_gpu(rank: int, size: int) -> Counter[str]:
    """Where a host waited for its device in some steps; the learning rate is a tensor there, as capturable optimizers have it."""
    from tests.gpu import users
    from tests.gpu.diary import ELSEWHERE, diary

    recipe = "allreduce + bucket(0.01)"
    users.begin(Plan(recipe))
    device = torch.device("cuda", rank + 1)
    torch.cuda.set_device(device)
    model = net(Plan(recipe)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.01, device=device), foreach=False)
    with gossamer.attach(model, optimizer, recipe, deadline=20.0) as comm:
        assert len(comm.worker.buckets) > 1
        for step in range(2 + STEPS):
            if step == 2:
                diary.syncs.clear()
            optimizer.zero_grad()
            model(torch.randn(4, 32).pin_memory().to(device, non_blocking=True)).square().mean().backward()
            optimizer.step()
        return Counter({k: v for k, v in diary.syncs.items() if ELSEWHERE not in k})


def test_a_rate_on_the_gpu_is_not_asked_for_at_each_bucket(nursery: Nursery) -> None:
    for seen in nursery.run(2, with_its_rate_on_the_gpu):
        assert sum(seen.values()) == STEPS, seen
