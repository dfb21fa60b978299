"""Floor 6: a whole training run in one process, on a virtual clock.

The same worker, recipe and algorithms as on real processes; only the fabric differs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from gossamer.core.verbs import Compute, Program
from gossamer.counting import bytes_per_step
from gossamer.fabrics.ledger import Ledger
from gossamer.fabrics.sim import Network, simulate
from gossamer.kernels.finite import all_finite
from gossamer.recipe import Recipe
from gossamer.worker import Worker, leaves_of

Backward = Callable[[nn.Module, int, int], float]  # (model, rank, step): leaves gradients in .grad, returns the loss
Seconds = Callable[[int, int], float]  # (rank, step): how long the step computes on the virtual clock


@dataclass
class Replica:
    """One virtual rank: its model, optimizer and worker, and what it saw."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    worker: Worker
    losses: list[float] = field(default_factory=list)
    clock: float = 0.0

    def flat(self) -> Tensor:
        """All parameters, end to end."""
        return torch.cat([p.detach().reshape(-1) for p in self.model.parameters()])


@dataclass
class Trained:
    replicas: list[Replica]
    ledger: Ledger

    @property
    def seconds(self) -> float:
        return max(r.clock for r in self.replicas)


def replicas(
    recipe: "str | Recipe",
    model: Callable[[], nn.Module],
    optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    size: int,
    seed: int = 0,
) -> list[Replica]:
    """Virtual ranks that start from the same parameters."""
    parsed, out = Recipe.of(recipe), list[Replica]()
    start = model().state_dict()
    for rank in range(size):
        mine = model()
        mine.load_state_dict(start)
        opt = optimizer(mine)
        named = {n: p for n, p in mine.named_parameters() if p.requires_grad}
        out.append(Replica(mine, opt, Worker(parsed, leaves_of(named), opt, rank, size, seed)))
    return out


def train(
    ranks: Sequence[Replica],
    backward: Backward,
    steps: int,
    network: Network | None = None,
    seconds: Seconds = lambda rank, step: 0.0,
) -> Trained:
    """Train all ranks for `steps` optimizer steps each, side by side; one alone trains plainly, as it does under `attach`.

    >>> def linear(): return nn.Linear(2, 1, bias=False)
    >>> def sgd(model): return torch.optim.SGD(model.parameters(), lr=0.1)
    >>> def backward(model, rank, step):
    ...     loss = (model(torch.ones(1, 2)) - rank).square().sum(); loss.backward(); return loss.item()
    >>> run = train(replicas("allreduce", linear, sgd, size=2), backward, steps=50)
    >>> round(run.replicas[0].model(torch.ones(1, 2)).item(), 3)
    0.5
    """
    ledger = Ledger(per_node=ranks[0].worker.origin.ranks_per_node)
    for replica in ranks:
        replica.worker.on_decision = ledger.decide
    outcome = simulate([_run(r, backward, steps, seconds) for r in ranks], network, ledger)
    for replica, clock in zip(ranks, outcome.clocks, strict=True):
        replica.clock = clock
    return Trained(list(ranks), ledger)


def _run(replica: Replica, backward: Backward, steps: int, seconds: Seconds) -> Program[None]:
    worker = replica.worker
    last = worker.step + steps
    alone = worker.size == 1  # training is plain then, as under `attach`, but for what acts on the optimizer's steps
    plain = alone and not worker.recipe.schedule.works_alone
    if not alone:
        worker.live.clear()  # what an earlier `train` left waits in a simulation that is over
        yield from worker.begin()
    while worker.step < last:
        rank, step, parts = worker.rank, worker.step, worker.recipe.schedule.accumulate
        loss = yield Compute(lambda: _gradients(replica, backward), "compute", parts * seconds(rank, step))
        replica.losses.append(loss)
        gradients = [c.gradients() for c in worker.channels]
        if plain:
            _descend(replica)
            worker.step += 1
        else:
            yield from worker.train_step(gradients, partial(_descend, replica), replica.optimizer.step)
        worker.descent.leave(replica.optimizer)


def _gradients(replica: Replica, backward: Backward) -> float:
    """The mean over as many micro-batches as the schedule wants."""
    parts = replica.worker.recipe.schedule.accumulate
    replica.optimizer.zero_grad(set_to_none=True)
    losses, sums = list[float](), dict[Tensor, Tensor]()
    for _ in range(parts):
        losses.append(backward(replica.model, replica.worker.rank, replica.worker.step))
        for p in replica.model.parameters() if parts > 1 else ():
            if p.grad is not None:
                sums[p] = p.grad / parts + sums.get(p, 0.0)
                p.grad = None
    for p, gradient in sums.items():
        p.grad = gradient
    return sum(losses) / parts


def _descend(replica: Replica) -> bool:
    """Put the agreed gradients where the optimizer looks for them, and step; not finite ones are left out."""
    worker = replica.worker
    if worker.recipe.schedule.averages(worker.step) and worker.size > 1:
        worker.descent.put()
        finite = worker.finite
    else:
        finite = all_finite([p.grad for p in replica.model.parameters() if p.grad is not None])
    if finite:  # as a loss scaler would
        worker.redirect()
        worker.descent.enter(replica.optimizer)
        replica.optimizer.step()
    return finite


__all__ = ["Backward", "Replica", "Seconds", "Trained", "bytes_per_step", "replicas", "train"]
