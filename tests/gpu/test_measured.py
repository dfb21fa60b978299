"""What a step and a recipe's work cost on a GPU, on the pretended device: told by its events, since calls return early."""

from typing import Any

import pytest
from tests.gpu.nursery import Nursery

pytestmark = pytest.mark.gang

SLEEP = 0.02  # seconds that the device is late
LATE = 0.4  # and, in a round, behind the host


def measures_a_step(rank: int, size: int) -> dict[str, Any]:
    """The events of this device are as late as the host's clock would be early."""
    import torch
    from tests.gpu import clocks
    from torch import nn

    from gossamer.planning.measured_model import measure

    device = torch.device("cuda", 1)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)).to(device)
    recorded = list[clocks.Event]()
    elapsed = clocks.Event.elapsed_time

    def late(begin: clocks.Event, end: clocks.Event) -> float:
        recorded.append(end)
        return elapsed(begin, end) + 1e3 * SLEEP

    clocks.Event.elapsed_time = late  # type: ignore[method-assign]
    x = torch.ones(4, 8, device=device)
    cost = measure(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda step: model(x).sum())
    return {"cost": cost, "events": len(recorded)}


def test_a_step_is_measured_by_the_gpus_own_clock(nursery: Nursery) -> None:
    (seen,) = nursery.run(1, measures_a_step)
    cost = seen["cost"]
    assert seen["events"] > 0
    assert min(cost.forward, cost.backward, cost.optimizer) >= SLEEP
    assert "on this machine's GPU" in cost.source
    assert cost.shares["0.weight"] >= cost.shares["2.weight"] > 0


def measures_work(rank: int, size: int) -> dict[str, Any]:
    import torch
    from tests.gpu.diary import diary

    from gossamer.costs import from_flags
    from gossamer.planning.work_tables import measure_tables, work_of

    work = work_of(from_flags(nodes=2, gpus=1, rate=1e9))
    launched = sum(diary.launches.values())
    (table,) = measure_tables(["qsgd"], work, "gpu").values()  # type: ignore[arg-type]
    return {
        "name": work.name,
        "launches": sum(diary.launches.values()) - launched,
        "seconds": sum(table.seconds[0]),
        "here": torch.cuda.is_available(),
    }


def test_work_is_measured_on_a_gpu_that_is_here(nursery: Nursery) -> None:
    (seen,) = nursery.run(1, measures_work)
    assert seen["name"] == "measured on this machine's GPU"
    assert seen["launches"] > 0
    assert seen["seconds"] > 0


def answers(rank: int, size: int) -> list[float]:
    """The seconds of a step that a rank has noted when it answers a round; its device is late wherever the host waits for it."""
    import time

    import torch
    from tests.gpu import users
    from tests.gpu.loops import Plan, net, step

    import gossamer
    from gossamer.schedules import async_worker

    recipe, paces = "allreduce + quorum_rounds(2)", list[float]()
    users.begin(plan := Plan(recipe))
    finite, offer = async_worker.all_finite, async_worker.AsyncWorker._offer

    def late(tensors: Any) -> bool:
        time.sleep(LATE)
        return finite(tensors)

    def offered(worker: Any, round: Any) -> Any:
        paces.append(worker._closing.pace)
        yield from offer(worker, round)

    async_worker.all_finite, async_worker.AsyncWorker._offer = late, offered  # type: ignore[method-assign]
    device = torch.device("cuda", rank + 1)
    torch.cuda.set_device(device)
    model = net(plan).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with gossamer.attach(model, optimizer, recipe, deadline=20.0) as comm:
        for _ in range(6):
            step(model, optimizer, comm, torch.Generator().manual_seed(rank), device)
        comm.check_sync()  # all settle their rounds before one leaves
    return paces


def test_a_round_stays_open_by_what_a_step_takes_on_the_gpu(nursery: Nursery) -> None:
    """The host's launches took next to nothing, so that no rank waited for one that was a little late."""
    for paces in nursery.run(2, answers):
        assert paces
        assert min(paces) >= LATE / 4


def measures_a_kernel(rank: int, size: int) -> set[str]:
    """The devices on whose streams events were recorded; another device is the current one."""
    import torch
    from tests.gpu import clocks

    from gossamer.bench import kernels

    devices, record = set[str](), clocks.Event.record

    def noted(event: clocks.Event, stream: clocks.Stream | None = None) -> None:
        devices.add(str((stream or clocks.current_stream()).device))
        record(event, stream)

    clocks.Event.record = noted  # type: ignore[method-assign]
    kernels._SIDE = 4
    torch.cuda.set_device(0)
    kernels.measure(elements=2000, rounds=1, only=("absmax",), device="cuda:3")
    return devices


def test_a_kernel_is_measured_by_the_clock_of_its_own_gpu(nursery: Nursery) -> None:
    assert nursery.run(1, measures_a_kernel) == [{"cuda:3"}]
