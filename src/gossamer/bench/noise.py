"""How much noise recipes add to the real gradients of a workload, beside the bytes that they send.

The error of a message is |decoded - gradient|^2 / |gradient|^2, over all ranks; that of a mean |mean said - mean|^2 / |mean|^2,
which is larger: where ranks' gradients differ, their mean is shorter than they are.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from gossamer.bench.workloads import Workload
from gossamer.core.bucket import Bucket, State
from gossamer.core.contracts import Codec, Context, Exchange
from gossamer.core.rng import CounterRng
from gossamer.core.verbs import Program
from gossamer.fabrics.ledger import Ledger
from gossamer.fabrics.sim import simulate
from gossamer.recipe import Recipe
from gossamer.simulate import replicas, train


class NoiseRow(NamedTuple):
    recipe: str
    bits: float  # an element that a rank sends, of those that it would send of a dense gradient in two phases
    message: float | None  # the error of a rank's message; None where messages are summed on their way
    mean: float  # the error of the mean that all ranks get


def gradients(workload: Workload, ranks: int, steps: int, seed: int) -> list[Bucket]:
    """Every rank's gradient after so many steps of synchronous training, on virtual ranks."""
    workload.prepare()
    fleet = replicas("allreduce", workload.model, workload.optimizer, ranks, seed)
    if steps:
        train(fleet, lambda net, rank, step: _learn(workload, net, (step - 1, rank, ranks)), steps)
    return [_gradient(workload, fleet[0].model, (steps, rank, ranks)) for rank in range(ranks)]


def measure(texts: Sequence[str], given: Sequence[Bucket], seed: int = 0) -> list[NoiseRow]:
    """One row for each recipe, of the fewest bits first."""
    exact = cast(Tensor, sum(b.flat.double() for b in given)) / len(given)
    return sorted(_rows(texts, given, exact, seed), key=lambda row: row.bits)


def _rows(texts: Sequence[str], given: Sequence[Bucket], exact: Tensor, seed: int) -> Iterator[NoiseRow]:
    for text in texts:
        exchange, ledger = Recipe.of(text).exchange, Ledger()
        programs = [_program(exchange, given[r], _context(r, len(given), seed)) for r in range(len(given))]
        mean = simulate(programs, ledger=ledger).results[0].double()
        dense = 2 * (len(given) - 1) * given[0].numel
        error = float((mean - exact).square().sum() / exact.square().sum())
        yield NoiseRow(text, 8 * ledger.sent / dense, _message(exchange, given, seed), error)


def _message(exchange: Exchange, given: Sequence[Bucket], seed: int) -> float | None:
    codec = getattr(exchange, "codec", None)
    if not isinstance(codec, Codec):
        return None
    lost = whole = 0.0
    for rank, block in enumerate(given):
        decoded = codec.decode(codec.encode(block, {}, _context(rank, len(given), seed)), block)
        lost += float((decoded.double() - block.flat.double()).square().sum())
        whole += float(block.flat.double().square().sum())
    return lost / whole if whole else 0.0


def _program(exchange: Exchange, block: Bucket, context: Context) -> Program[Tensor]:
    state: State = {}
    result = yield from exchange.average(block.like(block.flat.clone()), state, context)
    return result.mean.clone()


def _context(rank: int, size: int, seed: int) -> Context:
    return Context(rank, size, 1, CounterRng(seed, 1, rank))


def _learn(workload: Workload, net: nn.Module, place: tuple[int, int, int]) -> float:
    loss = workload.loss(net, workload.batch(*place))
    loss.backward()
    return float(loss.detach())


def _gradient(workload: Workload, net: nn.Module, place: tuple[int, int, int]) -> Bucket:
    net.zero_grad()
    _learn(workload, net, place)
    found = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    return Bucket.of({name: g.float() if g.dtype != torch.float64 else g for name, g in found.items()})
