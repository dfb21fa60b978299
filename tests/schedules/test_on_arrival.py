"""Asynchronous SGD as a recipe: what the simulator's baseline does, on every fabric."""

from collections.abc import Callable

import pytest
import torch
from tests.integrations.loops import Awkward, loss_of
from torch import nn

from gossamer.core.errors import AttachError, RecipeError
from gossamer.core.verbs import Program
from gossamer.fabrics.sim import simulate
from gossamer.planning import bytes_per_step
from gossamer.recipe import Recipe
from gossamer.runtime import Worker
from gossamer.schedules import OnArrival
from gossamer.simulate import Replica, replicas, train, train_on_arrival

SHAPES = {n: tuple(p.shape) for n, p in Awkward().named_parameters()}
PACES = (1.0, 1.31, 0.77, 2.6)


class Point(nn.Module):
    """Two numbers, in double precision."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.tensor([5.0, -3.0], dtype=torch.float64))


def towards(model: nn.Module, rank: int, step: int) -> float:
    """Half the squared distance to a point of the rank's own, which moves with its steps."""
    (x,) = model.parameters()
    target = torch.tensor([float(rank), step / 7], dtype=torch.float64)
    x.grad = x.detach() - target
    return float(x.grad.square().sum()) / 2


def plain(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def pace(rank: int, step: int) -> float:
    return PACES[rank]


def quiesced(ranks: list[Replica]) -> None:
    def rest(worker: Worker) -> Program[None]:
        yield from worker.reopen()
        yield from worker.begin()
        yield from worker.quiesce()

    simulate([rest(r.worker) for r in ranks])


def kept(ranks: list[Replica]) -> torch.Tensor:
    """The server's model."""
    shares = [r.worker.recipe.schedule.consensus_share(r.worker.loop) or [] for r in ranks]
    assert [float(s[0].weight) for s in shares] == [0.0] * (len(ranks) - 1) + [1.0]
    return shares[-1][0].value


def test_it_is_the_baseline_that_the_simulator_has() -> None:
    """The same updates in the same order: ranks of four paces, until each has taken ten steps; models to 1e-12."""
    ranks = replicas("async_sgd", Point, plain, 4, seed=0)
    outcome = train(ranks, towards, 10, seconds=pace)
    clocks = sorted((PACES[r] * k, r, k) for r in range(4) for k in range(1, 11))
    model = Point()
    taken = [model.x.detach().clone() for _ in range(4)]
    began, stale = [0] * 4, list[int]()
    for done, (_, rank, step) in enumerate(clocks):
        mine = Point()
        mine.x.data.copy_(taken[rank])
        towards(mine, rank, step)
        assert mine.x.grad is not None
        model.x.data -= 0.1 * mine.x.grad
        taken[rank] = model.x.detach().clone()
        stale.append(done - began[rank])
        began[rank] = done + 1
    torch.testing.assert_close(kept(ranks), model.x.detach(), rtol=0, atol=1e-12)
    assert sorted(a for r in ranks for a in r.worker.record.ages.elements()) == sorted(stale)
    assert [r.clock for r in ranks] == pytest.approx([10 * p for p in PACES])
    assert outcome.seconds == pytest.approx(26.0)


def test_its_models_are_those_of_train_on_arrival() -> None:
    """Of the first twelve arrivals, before any rank of ours has taken its ten steps: each model that a gradient is taken at."""

    def noted(into: list[torch.Tensor]) -> Callable[[nn.Module, int, int], float]:
        def backward(model: nn.Module, rank: int, step: int) -> float:
            into.append(model.get_parameter("x").detach().clone())
            return towards(model, rank, step)

        return backward

    ours, theirs = list[torch.Tensor](), list[torch.Tensor]()
    train(replicas("async_sgd", Point, plain, 4, seed=0), noted(ours), 10, seconds=pace)
    baseline = train_on_arrival(Point, plain, 4, noted(theirs), 12, pace)
    assert all(any(torch.allclose(x, other, rtol=0, atol=1e-12) for other in ours) for x in theirs)
    assert max(baseline.staleness) > 2


def test_ranks_that_are_alike_are_stale_by_all_others() -> None:
    ranks = replicas("async_sgd", Point, plain, 4, seed=0)
    train(ranks, towards, 12, seconds=lambda rank, step: 1 + 0.01 * rank)
    assert [dict(r.worker.record.ages) for r in ranks] == [{0: 1, 3: 11}, {1: 1, 3: 11}, {2: 1, 3: 11}, {3: 12}]


def test_by_staleness_a_step_counts_less() -> None:
    """Four ranks that take a step each, one after the other: none, one, two and three steps of others late."""
    moved = list[torch.Tensor]()
    for by in (False, True):
        ranks = replicas(f"async_sgd(by_staleness={by})", Point, plain, 4, seed=0)
        train(ranks, towards, 1, seconds=lambda rank, step: 1.0 + rank / 10)
        moved.append(kept(ranks) - torch.tensor([5.0, -3.0], dtype=torch.float64))
    start = torch.tensor([5.0, -3.0], dtype=torch.float64)
    steps = [0.1 * (torch.tensor([float(r), 1 / 7], dtype=torch.float64) - start) for r in range(4)]
    torch.testing.assert_close(moved[0], sum(steps, torch.zeros(2).double()), rtol=0, atol=1e-12)
    scaled = steps[0] + steps[1] + steps[2] / 2 + steps[3] / 3
    torch.testing.assert_close(moved[1], scaled, rtol=0, atol=1e-12)


def test_where_the_rate_bears_no_staleness_it_diverges_as_the_bound_says() -> None:
    """Two ranks of one pace are one step stale each: stable below lr c = 1."""
    for lr, stable in ((0.9, True), (1.1, False)):
        ranks = replicas("async_sgd", Point, lambda m, lr=lr: torch.optim.SGD(m.parameters(), lr=lr), 2)

        def to_zero(model: nn.Module, rank: int, step: int) -> float:
            (x,) = model.parameters()
            x.grad = x.detach().clone()
            return 0.0

        train(ranks, to_zero, 200, seconds=lambda rank, step: 1.0 + 0.001 * rank)
        assert (float(kept(ranks).abs().max()) < 1) == stable


def test_a_step_that_is_not_finite_is_handed_in_as_none() -> None:
    def spoilt(model: nn.Module, rank: int, step: int) -> float:
        loss = towards(model, rank, step)
        (x,) = model.parameters()
        if (rank, step) == (1, 3):
            with torch.no_grad():
                x.fill_(float("nan"))
        return loss

    ranks = replicas("async_sgd", Point, plain, 3)
    train(ranks, spoilt, 6, seconds=pace)
    assert all(bool(r.flat().isfinite().all()) for r in ranks)
    assert bool(kept(ranks).isfinite().all())
    assert [r.worker.record.dropped_rounds for r in ranks] == [0, 1, 0]


def test_it_goes_on_where_it_was_after_a_rest() -> None:
    """What an earlier `train` left is kept: the server's model and everyone's number."""
    ranks = replicas("async_sgd", Point, plain, 3)
    train(ranks, towards, 4, seconds=pace)
    quiesced(ranks)
    before = kept(ranks)
    train(ranks, towards, 1, seconds=pace)
    assert not torch.equal(before, kept(ranks))
    assert int(ranks[-1].worker.loop.mixing[0]["number"]) == 15


@pytest.mark.parametrize("size", [2, 4, 5])
def test_bytes_are_counted_as_they_are_sent(size: int) -> None:
    def of_rank(model: nn.Module, rank: int, step: int) -> float:
        loss = loss_of(model, rank, step)
        loss.backward()
        return float(loss.detach())

    ranks = replicas("async_sgd", Awkward, plain, size)
    ledger = train(ranks, of_rank, 5, seconds=lambda rank, step: 1 + rank / 100).ledger
    assert ledger.sent == 5 * size * bytes_per_step("async_sgd", SHAPES, size)
    d = sum(p.numel() for p in Awkward().parameters())
    assert ledger.sent == 5 * 2 * (size - 1) * (4 * d + 8)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("qsgd + on_arrival()", "uncompressed"),
        ("allreduce + error_feedback() + on_arrival()", "would never be sent"),
        ("async_sgd + rule('ndim < 2', allreduce(fp32()))", "cannot single out"),
        ("async_sgd + adacomm(6)", "has nothing to change"),
        ("async_sgd + per_node(2)", "each rank talks to the server"),
        ("allreduce + hierarchical(1, 2, on_arrival())", "hierarchical"),
        ("allreduce + post_local(3, on_arrival())", "no schedule of local steps"),
        ("allreduce + by_speed(on_arrival())", "by_speed"),
        ("allreduce + slowmo(4, inner=on_arrival())", "cannot run inside a round"),
    ],
)
def test_what_it_cannot_bear_is_refused(text: str, why: str) -> None:
    with pytest.raises(RecipeError, match=why):
        Recipe.of(text)


class Mixed(nn.Module):
    """Parameters of two precisions."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(3))
        self.b = nn.Parameter(torch.zeros(3, dtype=torch.float64))


def test_two_precisions_make_no_one_message() -> None:
    with pytest.raises(
        AttachError, match="all parameters in one bucket; give them all the same dtype and the same device"
    ):
        replicas(Recipe.of("async_sgd"), Mixed, plain, 2)
    assert OnArrival().shape.is_async
