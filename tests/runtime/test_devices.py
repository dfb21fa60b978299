"""Where a worker's state lies. No GPU is needed to see it: torch's "meta" device stands for one."""

import inspect
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from tests.runtime import fleet
from tests.runtime.gym import Odd, Worker, make, on_all, pull, train
from torch import Tensor

from gossamer.checkpoints import state as checkpoint
from gossamer.controllers import noise, regimes
from gossamer.core.verbs import Program
from gossamer.kernels import finite
from gossamer.runtime import averaging, controller_runner, succession
from gossamer.schedules import quorum


def far() -> torch.nn.Module:
    return Odd().to("meta")


def remembered(worker: Worker) -> Iterator[tuple[str, Tensor]]:
    """All that a worker keeps, what is on its way included."""
    for bucket in worker.buckets:
        for role, state in bucket.states.items():
            yield from ((f"{role}/{key}", tensor) for key, tensor in state.items())
    yield from worker.controller.state.items()
    yield from (("landing", mean) for mean in worker.in_flight.landing().values())
    yield from (("arrived", wire) for wires in worker.loop.messages.arrived() for wire in wires)


@pytest.mark.parametrize("recipe", fleet.each(fleet.ALL))
def test_a_checkpoint_that_was_loaded_to_the_host_goes_to_the_parameters_device(recipe: str) -> None:
    """`torch.load(map_location="cpu")`, or a folder. Numbers stay on the host, which asks for them at each step."""
    near = make(recipe, 3)
    train(near, pull, 5)
    on_all(near, Worker.quiesce)
    for old, new in zip(near, make(recipe, 3, far), strict=True):
        checkpoint.load(new.worker, checkpoint.save(old.worker))
        for key, tensor in remembered(new.worker):
            assert tensor.device.type == ("meta" if tensor.dim() else "cpu"), key


@pytest.fixture
def questions(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Answers what hosts ask of the device, and counts how often they do. Any other question to it is an error of torch's."""
    asked = list[int]()

    def ask(*tensors: Tensor) -> list[float]:
        asked.append(1)
        return [1.0] * sum(t.numel() for t in tensors)

    for module in finite, noise, quorum, averaging, controller_runner:
        monkeypatch.setattr(module, "read_numbers", ask)
    return lambda: len(asked)


def zeros(model: torch.nn.Module, rank: int, step: int) -> float:
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    return 0.0


ASKS = (
    "topk",
    "dropping",
    "strom",
    "adacomp",
    "independent",
    "accordion",
    "dqsgd",
    "auto(",
    "buffers='average'",
)  # lengths that follow data; controllers
SILENT = [r for r in fleet.ALL if not any(word in r for word in ASKS)]


@pytest.mark.parametrize("recipe", fleet.each(SILENT))
def test_a_host_asks_the_device_once_a_step(recipe: str, questions: Callable[[], int]) -> None:
    """Whether all is finite; and the simulator, which has no scaler, once more for gradients that are not averaged.

    So it is for each fragment of a model that lands by itself. A controller may ask once for what ranks have summed for it.
    """
    size = 3 if "nodes" in recipe else max(2, fleet.smallest(recipe))
    ranks = make(recipe, size, far)
    train(ranks, zeros, 7)
    worker = ranks[0].worker
    schedule, controller = worker.recipe.schedule, worker.recipe.controller
    models = not (schedule.shape.averages_gradients or schedule.shape.mixes) or "resyncs" in schedule.traits
    rounds = len(landings(worker)) if models else 0
    told = rounds if controller.hears_loss else 7 if controller.counts else 0
    assert questions() <= size * (7 + rounds + told)


def landings(worker: Worker) -> list[int]:
    """The steps out of seven after which something lands; of a model in fragments, each has rounds of its own."""
    schedule, fragments = worker.recipe.schedule, 1 + max(c.fragment for c in worker.buckets)
    early = [schedule.shape.period * p // fragments for p in range(fragments)]
    return [step for step in range(1, 8) for e in early if schedule.ends_round(step + e)]


def test_a_controller_asks_for_all_its_norms_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[int]()
    tolist = Tensor.tolist

    def counting(self: Tensor) -> Any:
        asked.append(self.numel())
        return tolist(self)

    sums = [(str(i), torch.full((3,), float(i))) for i in range(5)]
    monkeypatch.setattr(Tensor, "tolist", counting)
    monkeypatch.setattr(Tensor, "__float__", lambda self: pytest.fail("a tensor was asked for by itself"))
    assert regimes.norms(sums) == pytest.approx({str(i): i * 3**0.5 for i in range(5)})
    assert asked == [5]


def test_backup_workers_are_as_fast_as_their_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handle is claimed when the gradient is there, and the lane, which began before, reads it only then."""
    story = list[str]()

    class StreamMark(quorum.StreamMark):
        def __init__(self, device: torch.device) -> None:
            story.append("offered")

        def wait(self) -> None:
            story.append("ready")

        def precedes(self) -> None:
            story.append("read after it")

    claim = quorum.take_ticket

    def claiming(name: str) -> Program[int]:
        story.append("claimed")
        return claim(name)

    monkeypatch.setattr(quorum, "StreamMark", StreamMark)
    monkeypatch.setattr(quorum, "take_ticket", claiming)
    train(make("backup(backups=0)", 2), pull, 4)
    assert story.count("read after it") == story.count("offered") == 8
    after = {(a, b) for a, b in pairwise(story) if a in ("offered", "ready")}
    assert after == {("offered", "ready"), ("ready", "claimed")}


def test_what_a_lane_is_given_is_kept_until_its_program_is_joined() -> None:
    """A stream's order keeps what a program is started with: the caller of `launch` lets go of it at once."""
    worker = make("overlap_local_sgd(2)", 2)[0].worker
    message = torch.zeros(worker.buckets[0].layout.numel)
    started: Any = worker.averaging.program(0, message)[0]
    assert any(kept is message for kept in inspect.getgeneratorlocals(started).values())


def test_memories_that_change_their_channel_are_marked_as_used_by_who_moves_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    marked = list[Tensor]()

    def used_here(tensors: Iterable[Tensor]) -> None:
        marked.extend(tensors)

    monkeypatch.setattr(succession, "record_stream_use", used_here)
    ranks = make("powersgd", 2)
    train(ranks, pull, 2)
    worker, apart = ranks[0].worker, make("powersgd" + fleet.SMALL, 2)[0].worker
    succession.carry_over(worker.buckets, apart.buckets, 2)
    residuals = [c.states["memory"]["residual"] for c in worker.buckets]
    assert {r.data_ptr() for r in residuals} <= {t.untyped_storage().data_ptr() for t in marked}
