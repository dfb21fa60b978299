"""The loop, seen by schedules that a user might write: a sort of exchange of their own, fragments, a second exchange."""

from collections.abc import Iterator
from functools import cached_property
from typing import final

import pytest
import torch
from tests.runtime.gym import (
    bit_equal,
    held,
    make,
    parameters,
    pull,
    remembered,
    resumed,
    same_memory,
    saved,
    sgd,
    train,
)
from torch import Tensor

from gossamer.codecs import FP32
from gossamer.core.bucket import Bucket, State
from gossamer.core.contracts import Context
from gossamer.core.loop import Loop
from gossamer.core.parts import part, registry
from gossamer.core.schedule import Schedule, Shape
from gossamer.core.verbs import OptimizerStep, Program, receive, send
from gossamer.core.wire import pack
from gossamer.exchanges import AllReduced
from gossamer.planning import bytes_per_step

SMALL = " + bucket(0.00002)"  # four channels
SIZE = 4


@pytest.fixture(autouse=True, scope="module")
def registered() -> Iterator[None]:
    """Parts of a user's own; they leave the registry with this module."""
    before = dict(registry._parts)

    @final
    @part("visits")
    class Visits(Schedule):
        """A sort of exchange that nobody else knows: two ranks swap their models and both take the middle."""

        def step(self, loop: Loop) -> Program[None]:
            yield OptimizerStep()
            yield from loop.messages.post(swap)
            models = zip(loop.parameters(), (yield from loop.messages.collect()))
            loop.write([(mine + wires[0].view(mine.dtype)) / 2 for mine, wires in models])

    @final
    @part("fragments")
    class Fragments(Schedule):
        """One block after the other is averaged, and lands a step later."""

        def step(self, loop: Loop) -> Program[None]:
            yield OptimizerStep()
            for i in range(len(loop.buckets)):
                fragment = loop.part([i])
                if fragment.averages.in_flight() and (means := (yield from fragment.averages.wait())) is not None:
                    fragment.assign(means)
            yield from loop.part([loop.step % len(loop.buckets)]).averages.launch(
                loop.part([loop.step % len(loop.buckets)]).parameters()
            )

    @final
    @part("beside")
    class Beside(Schedule):
        """Gradients go through memory and exchange, and every second step the models through another exchange."""

        @cached_property
        def shape(self) -> Shape:
            return Shape(averages_gradients=True, works_alone=True)

        def step(self, loop: Loop) -> Program[None]:
            yield from loop.averages.wait_gradients()
            yield OptimizerStep()
            if loop.step % 2 == 0:
                means = yield from loop.averages.of(loop.parameters(), over=AllReduced(FP32()))
                assert means is not None
                loop.assign(means)

    yield
    registry._parts.clear()
    registry._parts.update(before)


def swap(block: Bucket, state: State, context: Context) -> Program[list[Tensor]]:
    partner = context.rank ^ (1 << (context.step % 2))
    wire = pack(block.flat)
    return _swapped(partner, wire)


def _swapped(partner: int, wire: Tensor) -> Program[list[Tensor]]:
    yield from send(partner, wire, [(partner, wire.numel())])
    return [(yield from receive(partner, wire.numel()))]


def still(model: torch.nn.Module, rank: int, step: int) -> float:
    for p in model.parameters():
        p.grad = torch.full_like(p, float(rank)) if step == 1 else torch.zeros_like(p)
    return 0.0


def test_a_new_sort_of_exchange_is_one_schedule() -> None:
    ranks = make(f"allreduce(fp32()) + visits(){SMALL}", SIZE, optimizer=sgd(momentum=0.0))
    start = torch.stack(parameters(ranks)).mean(0)
    train(ranks, still, 1)
    middle = torch.stack(parameters(ranks)).mean(0)
    assert not bit_equal(parameters(ranks))
    train(ranks, still, 1)
    assert torch.allclose(middle, start - 0.05 * 1.5, atol=1e-6)
    models = torch.stack(parameters(ranks))
    assert float((models - models.mean(0)).abs().max()) < 1e-6  # four ranks, two rounds


def test_it_is_counted_as_it_is_trained() -> None:
    recipe = f"allreduce(fp32()) + visits(){SMALL}"
    ranks = make(recipe, SIZE)
    shapes = {n: tuple(p.shape) for n, p in ranks[0].model.named_parameters()}
    assert train(ranks, pull, 4).ledger.sent / 4 / SIZE == bytes_per_step(recipe, shapes, SIZE)


@pytest.mark.parametrize("stop", [1, 2, 3, 5])
@pytest.mark.parametrize("schedule", ["visits()", "fragments()", "beside()"])
def test_it_is_saved_and_resumed_with_what_is_on_its_way(schedule: str, stop: int) -> None:
    recipe = f"allreduce(fp32()) + {schedule}{SMALL}"
    ranks = make(recipe, SIZE)
    train(ranks, pull, stop)
    again = resumed(recipe, saved(ranks))
    for each in (ranks, again):
        train(each, pull, 4)
    assert all(bit_equal(pair) for pair in zip(parameters(ranks), parameters(again)))


def test_fragments_keep_the_mean_and_tell_their_bytes() -> None:
    recipe = f"allreduce(fp32()) + fragments(){SMALL}"
    ranks, plain = (make(r, SIZE, optimizer=sgd(momentum=0.0)) for r in (recipe, "allreduce"))
    assert len(ranks[0].worker.buckets) == 4
    run = train(ranks, still, 9)
    train(plain, still, 9)
    assert torch.allclose(sum(held(r) for r in ranks) / SIZE, plain[0].flat(), atol=1e-5)
    shapes = {n: tuple(p.shape) for n, p in ranks[0].model.named_parameters()}
    whole = bytes_per_step("allreduce" + SMALL, shapes, SIZE)
    assert bytes_per_step(recipe, shapes, SIZE) == pytest.approx(whole / 4)
    assert run.ledger.sent / SIZE < 9 * whole / 3


def test_a_lost_fragment_is_dropped_and_the_others_land() -> None:
    def spoilt(model: torch.nn.Module, rank: int, step: int) -> float:
        loss = pull(model, rank, step)
        if (rank, step) == (2, 3):
            with torch.no_grad():
                model.get_parameter("bias")[0] = float("nan")
        return loss

    recipe = f"allreduce(fp32()) + fragments(){SMALL}"
    ranks = make(recipe, SIZE)
    train(ranks, spoilt, 8)
    lost = {r.worker.record.dropped_rounds for r in ranks}
    assert len(lost) == 1
    assert lost.pop() > 0
    again = resumed(recipe, saved(ranks))
    for each in (ranks, again):
        train(each, pull, 4)
    assert bit_equal([torch.cat(parameters(ranks)), torch.cat(parameters(again))])


def test_another_exchange_leaves_memory_alone() -> None:
    recipe = f"topk(ratio=0.1) + beside(){SMALL}"
    ranks, plain = make(recipe, SIZE), make(f"topk(ratio=0.1){SMALL}", SIZE)
    for step in range(1, 5):
        sent, alone = (train(each, pull, 1).ledger.sent for each in (ranks, plain))
        assert (sent > alone) == (step % 2 == 0)
    for mine, others in zip(ranks, plain):
        assert same_memory(remembered(mine.worker, "memory"), remembered(others.worker, "memory"))
