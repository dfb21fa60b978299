"""A few steps of a tiny model on virtual ranks, with everything written down."""

from collections import defaultdict
from contextlib import suppress
from dataclasses import astuple, dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from gossamer.bench.explain.messages import Message, MessageListener
from gossamer.core.errors import AttachError
from gossamer.recipe import Recipe
from gossamer.runtime.buckets import ROLES
from gossamer.simulate import Replica, replicas, train

MATRICES = ((2, 3), (4, 4), (8, 8))  # the smallest that a recipe takes: some need a rank to lose, or long rows
FEW = (3, 4)  # ranks, unless somebody says how many
MOST = 4096  # steps that a tiny model trains in some seconds


@dataclass
class KeptTensor:
    """What a part remembers of some parameters."""

    role: str
    name: str
    values: Tensor


@dataclass
class Rank:
    """What one rank has at a step: before, and when it is over."""

    before: Tensor
    gradients: list[Tensor] = field(default_factory=list[Tensor])
    kept_before: list[KeptTensor] = field(default_factory=list[KeptTensor])
    used: Tensor | None = None  # what the optimizer steps with
    after: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float32))
    kept: list[KeptTensor] = field(default_factory=list[KeptTensor])


@dataclass
class ExplainedStep:
    number: int
    ranks: list[Rank]
    messages: list[Message]
    decisions: list[str]


@dataclass
class Explained:
    recipe: str
    optimizer: str
    parameters: dict[str, tuple[int, ...]]
    steps: list[ExplainedStep]  # of which the silent ones say nothing


class Tiny(nn.Module):
    """So few parameters that every number can be looked at."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.arange(1.0, rows * columns + 1, dtype=torch.float32).reshape(rows, columns) / 10
        )
        self.bias = nn.Parameter((torch.arange(rows) % 2 - 0.5).neg())


def explain(recipe: str | Recipe, ranks: int | None = None, spoken: int = 2) -> Explained:
    """Train until something was said in so many steps; write down what was said, and what everybody had and kept.

    >>> told = explain("allreduce")
    >>> told.steps[0].messages[0].bytes
    32
    """
    parsed = Recipe.of(recipe)
    size = ranks or _few(parsed)
    found = _run(parsed, size, spoken)
    rounds = spoken * parsed.schedule.shape.period
    for steps in (rounds, parsed.schedule.shape.prelude + rounds):
        if sum(bool(step.messages) for step in found.steps) < spoken and steps > len(found.steps):
            found = _run(parsed, size, min(steps, MOST))
    return _cut(found, spoken)


def _few(recipe: Recipe) -> int:
    """Three ranks, or four where the recipe does not take three: as where they meet in pairs."""
    for size in FEW:
        with suppress(AttachError):
            _fleet(recipe, size)
            return size
    return FEW[0]


def _cut(found: Explained, spoken: int) -> Explained:
    """What comes after the last step that was asked for is more of the same."""
    numbers = [step.number for step in found.steps if step.messages]
    found.steps = found.steps[: numbers[spoken - 1] if len(numbers) >= spoken else None]
    return found


def _run(recipe: Recipe, size: int, steps: int) -> Explained:
    fleet, optimizer = _fleet(recipe, size)
    listener, seen = MessageListener(size), defaultdict[int, dict[int, Rank]](dict)

    def backward(model: nn.Module, rank: int, step: int) -> float:
        """Gradients that anybody could have, no two alike."""
        replica = fleet[rank]
        if rank not in seen[step]:
            seen[step][rank] = Rank(_flat(replica), kept_before=_kept(replica))
        for i, p in enumerate(model.parameters()):
            p.grad = _gradient(p.numel(), i, rank, step, len(seen[step][rank].gradients)).reshape(p.shape)
        seen[step][rank].gradients.append(_gradients(replica))
        return 0.0

    def step_with(replica: Replica, *_: object) -> None:
        seen[replica.worker.step][replica.worker.rank].used = _gradients(replica)

    for replica in fleet:
        replica.optimizer.register_step_pre_hook(partial(step_with, replica))
    with listener.codecs():
        trained = train(
            fleet,
            backward,
            steps,
            seconds=lambda rank, step: 1.0 + 0.1 * rank,  # who is first is so for all to see
            listen=lambda rank, program: listener.overhear(rank, program, lambda: fleet[rank].worker.step),
        )
    _end(fleet, seen)
    told = defaultdict[int, list[str]](list)
    for step, _, decision in map(astuple, trained.ledger.decisions):
        words = f"from step {step} on {decision}"
        told[step - 1] += [words] if words not in told[step - 1] else []
    numbered = [
        ExplainedStep(n, [seen[n][r] for r in sorted(seen[n])], [m for m in listener.messages if m.step == n], told[n])
        for n in sorted(seen)
    ]
    shapes = {s.name: s.shape for c in fleet[0].worker.buckets for s in c.layout.segments}
    return Explained(repr(recipe), optimizer, shapes, numbered)


def _fleet(recipe: Recipe, size: int) -> tuple[list[Replica], str]:
    """Under plain SGD, whose steps can be followed; a recipe that refuses it has Adam, or a larger matrix."""
    refusal: AttachError | None = None
    for shape in MATRICES:
        for words, optimizer in OPTIMIZERS.items():
            try:
                return replicas(recipe, partial(Tiny, *shape), optimizer, size), words
            except AttachError as error:
                refusal = refusal or error
    assert refusal is not None
    raise refusal


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5)


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


OPTIMIZERS = {"SGD of rate 0.5": _sgd, "AdamW of rate 0.1": _adam}


def _gradient(numel: int, parameter: int, rank: int, step: int, part: int) -> Tensor:
    """Tenths from -0.4 to 0.5, as any loss could have them."""
    i = torch.arange(numel)
    return ((i * 7 + parameter * 2 + rank * 5 + step * 3 + part + i * rank * step) % 10 - 4) / 10


def _flat(replica: Replica) -> Tensor:
    """All parameters, in the order in which their gradients are made and travel."""
    return torch.cat([bucket.read() for bucket in replica.worker.buckets])


def _gradients(replica: Replica) -> Tensor:
    return torch.cat([bucket.gradients() for bucket in replica.worker.buckets])


def _kept(replica: Replica) -> list[KeptTensor]:
    """What the parts of one rank remember now."""
    buckets = replica.worker.buckets
    several = len(buckets) > 1
    return [
        KeptTensor(role, f"{key} of {bucket.name}" if several else key, value.detach().clone())
        for bucket in buckets
        for role in ROLES
        for key, value in bucket.states[role].items()
    ]


def _end(fleet: list[Replica], seen: dict[int, dict[int, Rank]]) -> None:
    """A step ends as the next one begins; the last as training does."""
    for replica in fleet:
        mine = replica.worker.rank
        numbers = sorted(n for n in seen if mine in seen[n])
        for number, following in zip(numbers, [*numbers[1:], None]):
            here = seen[number][mine]
            if following is None:
                here.after, here.kept = _flat(replica), _kept(replica)
            else:
                here.after, here.kept = seen[following][mine].before, seen[following][mine].kept_before
