"""A loop as users write it under every schedule, against the formula of its paper in plain torch, by three real ranks.

Two micro-batches a step, clipping, Nesterov, weight decay, BatchNorm and a rate that is another one at every step; and once
more, for one of each kind, with all saved and taken up in the midst of a round.
"""

from collections.abc import Callable, Iterator
from io import BytesIO
from itertools import pairwise
from math import cos, pi

import pytest
import torch
from tests.gang import Gang
from tests.integrations.loops import attached, flat, same
from torch import Tensor, nn

pytestmark = pytest.mark.gang
SIZE, STEPS, STOP = 3, 11, 6
WEIGHTS = (1.0, 2.0, 5.0)


def normed(seed: int = 5) -> nn.Module:
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(9, 13), nn.BatchNorm1d(13), nn.Tanh(), nn.Linear(13, 3)).double()


def nesterov(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3)


def changing(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """A warm-up of four steps, and a cosine."""
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / 4) * (0.55 + 0.45 * cos(pi * step / STEPS))
    )


def loss_of(model: nn.Module, rank: int, step: int, micro: int) -> Tensor:
    rng = torch.Generator().manual_seed(10007 * step + 101 * micro + rank)
    x = torch.randn(6, 9, generator=rng, dtype=torch.float64) + rank
    return (model(x) - torch.randn(6, 3, generator=rng, dtype=torch.float64) + rank).square().mean() / 2


def mean(values: list[Tensor], weights: tuple[float, ...] = (1.0,) * SIZE) -> Tensor:
    return torch.stack([w * x for w, x in zip(weights, values, strict=True)]).sum(0) / sum(weights)


class Ranks:
    """What all ranks have, in one process and without gossamer."""

    def __init__(self) -> None:
        self.models = [normed() for _ in range(SIZE)]
        self.optimizers = [nesterov(m) for m in self.models]
        self.schedulers = [changing(o) for o in self.optimizers]
        self.done, self.rate = 0, 0.0

    def backward(self) -> None:
        for rank, (model, optimizer) in enumerate(zip(self.models, self.optimizers)):
            optimizer.zero_grad()
            for micro in range(2):
                loss_of(model, rank, self.done, micro).backward()

    def mean_gradients(self) -> list[Tensor]:
        every = zip(*(model.parameters() for model in self.models))
        return [torch.stack([p.grad for p in same if p.grad is not None]).mean(0) for same in every]

    def take(self, gradients: list[Tensor] | None) -> None:
        for model in self.models:
            for i, p in enumerate(model.parameters()):
                p.grad = None if gradients is None else gradients[i].clone()

    def descend(self) -> None:
        self.rate = self.optimizers[0].param_groups[0]["lr"]
        for model, optimizer, scheduler in zip(self.models, self.optimizers, self.schedulers):
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
        self.done += 1

    def steps(self) -> Iterator[int]:
        """Local steps, counted from one."""
        while self.done < STEPS:
            self.backward()
            self.descend()
            yield self.done

    @property
    def x(self) -> list[Tensor]:
        return [flat(model) for model in self.models]

    @x.setter
    def x(self, values: list[Tensor]) -> None:
        for model, value in zip(self.models, values, strict=True):
            nn.utils.vector_to_parameters(value.clone(), model.parameters())

    def all_become(self, value: Tensor) -> None:
        self.x = [value] * SIZE


class SlowRate:
    """beta (lr_t / lr_(t-1)), from round to round."""

    def __init__(self, beta: float) -> None:
        self.beta, self.last = beta, 0.0

    def __call__(self, rate: float) -> float:
        factor = self.beta * (rate / self.last if self.last else 1.0)
        self.last = rate
        return factor


def allreduce(ranks: Ranks) -> None:
    for _ in range(STEPS):
        ranks.backward()
        ranks.take(ranks.mean_gradients())
        ranks.descend()


def delayed(ranks: Ranks) -> None:
    before = None
    for _ in range(STEPS):
        ranks.backward()
        mine, now = before, ranks.mean_gradients()
        ranks.take(mine)
        ranks.descend()
        before = now


def local_sgd(ranks: Ranks, every: int, weights: tuple[float, ...] = (1.0,) * SIZE) -> None:
    for step in ranks.steps():
        if step % every == 0:
            ranks.all_become(mean(ranks.x, weights))


def post_local(ranks: Ranks, first: int, every: int) -> None:
    for _ in range(first):
        ranks.backward()
        ranks.take(ranks.mean_gradients())
        ranks.descend()
    local_sgd(ranks, every)


def hierarchical(ranks: Ranks, near: int, every: int, weights: tuple[float, ...] = (1.0,) * SIZE) -> None:
    """Groups of two: ranks 0 and 1, and rank 2 alone."""
    for step in ranks.steps():
        x = ranks.x
        if step % every == 0:
            ranks.all_become(mean(x, weights))
        elif step % near == 0:
            pair = (weights[0] * x[0] + weights[1] * x[1]) / (weights[0] + weights[1])
            ranks.x = [pair, pair, x[2]]


def slowmo(ranks: Ranks, every: int, beta: float, alpha: float) -> None:
    a, v, factor = ranks.x[0], torch.zeros(()), SlowRate(beta)
    for step in ranks.steps():
        if step % every == 0:
            v = factor(ranks.rate) * v + (a - mean(ranks.x))
            a = a - alpha * v
            ranks.all_become(a)


def diloco(ranks: Ranks, every: int, beta: float, alpha: float) -> None:
    a, v = ranks.x[0], torch.zeros(())
    for step in ranks.steps():
        if step % every == 0:
            moved = a - mean(ranks.x)
            v = beta * v + moved
            a = a - alpha * (moved + beta * v)
            ranks.all_become(a)


def bmuf(ranks: Ranks, every: int, momentum: float, nesterov: bool) -> None:
    whole, start, v = ranks.x[0], ranks.x[0], torch.zeros(())
    for step in ranks.steps():
        if step % every == 0:
            v = momentum * v + (mean(ranks.x) - start)
            whole = whole + v
            start = whole + momentum * v if nesterov else whole
            ranks.all_become(start)
            for optimizer in ranks.optimizers:
                for state in optimizer.state.values():
                    state["momentum_buffer"] = None


def lookahead(ranks: Ranks, every: int) -> None:
    a = ranks.x[0]
    for step in ranks.steps():
        if step % every == 0:
            a = a + 0.5 * (mean(ranks.x) - a)
            ranks.all_become(a)


def overlap_local_sgd(ranks: Ranks, every: int, delay: int) -> None:
    alpha, a, v, factor = 0.6, ranks.x[0], torch.zeros(()), SlowRate(0.7)
    away = None
    for step in ranks.steps():
        if step % every == delay % every:
            if away is not None:
                v = factor(ranks.rate) * v - away
                a, away = a + v, None
            ranks.x = [(1 - alpha) * x + alpha * a for x in ranks.x]
        if step % every == 0:
            away = mean([a - x for x in ranks.x])


def cocod(ranks: Ranks, every: int, delay: int) -> None:
    away = None
    for step in ranks.steps():
        if away is not None and step % every == delay % every:
            ranks.x = [mean(away) + (x - start) for x, start in zip(ranks.x, away)]
            away = None
        if step % every == 0:
            away = ranks.x


def easgd(ranks: Ranks, every: int) -> None:
    alpha, centre, away = 0.9 / SIZE, ranks.x[0], torch.zeros(())
    for step in ranks.steps():
        if step % every == 0:
            centre = centre + alpha * away
            x = ranks.x
            away = torch.stack([each - centre for each in x]).sum(0)
            ranks.x = [each - alpha * (each - centre) for each in x]


def push_sum(
    ranks: Ranks, every: int = 1, overlap: bool = False, exact: Callable[[int], bool] = lambda step: False
) -> Iterator[tuple[int, list[Tensor], list[float]]]:
    """x and w after each step, to be changed; messages go 1 and 2 ranks ahead in turn."""
    x, w, away = ranks.x, [1.0] * SIZE, None
    before = ranks.x
    for step in ranks.steps():
        x = [mine + (new - old) for mine, new, old in zip(x, ranks.x, before)]
        if exact(step):
            x, w = [mean(x)] * SIZE, [1.0] * SIZE
        elif step % every == 0:
            if overlap and away is not None:
                x, w = [a + b for a, b in zip(x, away[0])], [a + b for a, b in zip(w, away[1])]
            hop = 1 + (step // every - 1) % 2
            x, w = [each / 2 for each in x], [each / 2 for each in w]
            away = [x[rank - hop] for rank in range(SIZE)], [w[rank - hop] for rank in range(SIZE)]
            if not overlap:
                x, w = [a + b for a, b in zip(x, away[0])], [a + b for a, b in zip(w, away[1])]
        yield step, x, w
        ranks.x = [a / b for a, b in zip(x, w)]
        before = ranks.x


def gossip(
    ranks: Ranks, every: int = 1, overlap: bool = False, exact: Callable[[int], bool] = lambda step: False
) -> None:
    for _ in push_sum(ranks, every, overlap, exact):
        pass


def slow_gossip(ranks: Ranks, every: int, beta: float) -> None:
    a, v, factor = ranks.x[0], torch.zeros(()), SlowRate(beta)
    for step, x, w in push_sum(ranks, exact=lambda step: step % every == 0):
        if step % every == 0:
            v = factor(ranks.rate) * v + (a - x[0])
            a = a - v
            x[:], w[:] = [a] * SIZE, [1.0] * SIZE


def symmetric(ranks: Ranks, overlap: bool) -> None:
    """On a ring of three everybody is everybody's neighbour."""
    before, away = ranks.x, None
    for _ in ranks.steps():
        if overlap:
            learned = [new - old for new, old in zip(ranks.x, before)]
            ranks.x = ranks.x if away is None else [away + each for each in learned]
            before, away = ranks.x, mean(ranks.x)
        else:
            ranks.all_become(mean(ranks.x))


FORMULAS: dict[str, Callable[[Ranks], None]] = {
    "allreduce": allreduce,
    "allreduce + delayed()": delayed,
    "local_sgd(4)": lambda ranks: local_sgd(ranks, 4),
    "local_sgd(4), by weight": lambda ranks: local_sgd(ranks, 4, WEIGHTS),
    "allreduce + post_local(4, local_sgd(3))": lambda ranks: post_local(ranks, 4, 3),
    "allreduce + hierarchical(2, 2, local_sgd(4))": lambda ranks: hierarchical(ranks, 2, 4),
    "allreduce + hierarchical(1, 2, local_sgd(5)), by weight": lambda ranks: hierarchical(ranks, 1, 5, WEIGHTS),
    "allreduce + slowmo(4, beta=0.6, alpha=0.8)": lambda ranks: slowmo(ranks, 4, 0.6, 0.8),
    "allreduce + slowmo(2, beta=0.6, alpha=0.8, by_lr=False, nesterov=True)": lambda ranks: diloco(ranks, 2, 0.6, 0.8),
    "allreduce + slowmo(4, beta=0.6, inner=push_sum())": lambda ranks: slow_gossip(ranks, 4, 0.6),
    "allreduce + bmuf(3, momentum=0.5)": lambda ranks: bmuf(ranks, 3, 0.5, nesterov=False),
    "allreduce + bmuf(3, momentum=0.5, nesterov=True)": lambda ranks: bmuf(ranks, 3, 0.5, nesterov=True),
    "allreduce + lookahead(3)": lambda ranks: lookahead(ranks, 3),
    "allreduce + overlap_local_sgd(4, delay=2)": lambda ranks: overlap_local_sgd(ranks, 4, 2),
    "allreduce + overlap_local_sgd(3)": lambda ranks: overlap_local_sgd(ranks, 3, 3),
    "allreduce + cocod(4, delay=2)": lambda ranks: cocod(ranks, 4, 2),
    "allreduce + cocod(3)": lambda ranks: cocod(ranks, 3, 3),
    "allreduce + easgd(3)": lambda ranks: easgd(ranks, 3),
    "allreduce + gossip()": gossip,
    "allreduce + gossip(every=2)": lambda ranks: gossip(ranks, 2),
    "allreduce + gossip(overlap=True)": lambda ranks: gossip(ranks, overlap=True),
    "allreduce + gossip(every=3, overlap=True)": lambda ranks: gossip(ranks, 3, overlap=True),
    "allreduce + gossip(exact=4)": lambda ranks: gossip(ranks, exact=lambda step: step % 4 == 0),
    "allreduce + gossip(warmup=3)": lambda ranks: gossip(ranks, exact=lambda step: step <= 3),
    "allreduce + gossip(symmetric())": lambda ranks: symmetric(ranks, overlap=False),
    "allreduce + gossip(symmetric(), overlap=True)": lambda ranks: symmetric(ranks, overlap=True),
}

# What they keep between steps is what another of the list keeps, which is saved and taken up.
ALIKE = {
    "local_sgd(4), by weight",
    "allreduce + hierarchical(1, 2, local_sgd(5)), by weight",
    "allreduce + slowmo(2, beta=0.6, alpha=0.8, by_lr=False, nesterov=True)",
    "allreduce + bmuf(3, momentum=0.5, nesterov=True)",
    "allreduce + overlap_local_sgd(3)",
    "allreduce + cocod(3)",
    "allreduce + gossip(every=2)",
    "allreduce + gossip(every=3, overlap=True)",
    "allreduce + gossip(warmup=3)",
}
assert FORMULAS.keys() >= ALIKE


def used(rank: int, size: int, case: str, stop: int | None) -> Tensor:
    """A user's loop; at `stop` a new process would find what this one has saved."""
    recipe, _, by_weight = case.partition(", by ")
    apart = "gossip" in recipe or "push_sum" in recipe
    options = {"buffers": "local" if apart else "average", "weight": WEIGHTS[rank] if by_weight else 1.0}
    model, saved = normed(), None
    for begin, end in pairwise([0, *([stop] if stop else []), STEPS]):
        model = normed(5 + begin)
        with attached(recipe, model, nesterov, **options) as (_, optimizer, comm):
            parts = [model, optimizer, changing(optimizer), comm]
            if saved is not None:
                for part, state in zip(parts, torch.load(BytesIO(saved)), strict=True):
                    part.load_state_dict(state)
            for step in range(begin, end):
                optimizer.zero_grad()
                with comm.no_sync():
                    loss_of(model, rank, step, 0).backward()
                loss_of(model, rank, step, 1).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                parts[2].step()
            file = BytesIO()
            torch.save([part.state_dict() for part in parts], file)
            saved = file.getvalue()
    return flat(model)


@pytest.mark.parametrize("case", FORMULAS)
def test_a_users_loop_does_what_the_formula_says(gang3: Gang, case: str) -> None:
    ranks = Ranks()
    FORMULAS[case](ranks)
    at_once = gang3.run(used, case, None)
    for got, expected in zip(at_once, ranks.x, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-13)
    if case not in ALIKE:
        assert all(map(same, at_once, gang3.run(used, case, STOP)))
