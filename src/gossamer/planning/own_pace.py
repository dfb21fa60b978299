"""Plans schedules whose ranks do not all wait for the slowest: their own programs in virtual time, on tensors of a few numbers.

Who is late and who meets whom follows from the schedule itself. A request takes its latency, and its share of the seconds that
the recipe's pieces take on the real model.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf

import torch

from gossamer.core.errors import CostError, GossamerError
from gossamer.core.verbs import Compute, Program, now
from gossamer.costs import Cluster
from gossamer.costs.laws import AtShare, Constant, SlowRank
from gossamer.fabrics.sim import Network, simulate
from gossamer.memories import NoMemory
from gossamer.planning.bytes import bytes_per_step
from gossamer.planning.events import Busy
from gossamer.planning.model_cost import ModelCost
from gossamer.planning.pieces import Piece
from gossamer.planning.replay import StartProgram, Step, StepSeconds
from gossamer.recipe import Recipe
from gossamer.runtime import Worker, params_of

ROUNDS, SETTLED = 5, 0.4  # rounds that are simulated, and the share of their steps after which paces are measured
SHORTEST = 40  # steps
MOST, RANK_STEPS = 64, 6000  # ranks, and steps of all ranks together
TENSORS = 8  # of the model, in the simulation; more where it has more fragments


def needs_simulation(recipe: Recipe, cluster: Cluster, overlaps: bool) -> bool:
    """True if a step's seconds depend on which rank is late, so that no one rank stands for all."""
    shape, traits = recipe.schedule.shape, recipe.schedule.traits
    random = not isinstance(cluster.law, Constant)
    unlike = random or cluster.speed < max(h.speed for h in cluster.hosts)
    partly = unlike and ("waits for few" in traits or shape.skips_steps)
    return shape.is_async or partly or (random and (shape.mixes or overlaps))


def simulated_ranks(recipe: Recipe, size: int) -> int:
    """All ranks, but at most 64, and fewer where rounds are long; of a schedule that has nodes, whole ones."""
    per_node = recipe.schedule.ranks_per_node
    least = max(2 * per_node, 4)
    found = min(size, max(MOST, least), max(RANK_STEPS // _steps(recipe), least))
    return found - found % per_node if found > per_node else found


def _steps(recipe: Recipe) -> int:
    shape = recipe.schedule.shape
    return shape.prelude + max(ROUNDS * shape.period, SHORTEST)


def at_their_own_pace(
    recipe: Recipe, model: ModelCost, cluster: Cluster, steps: Sequence[Step], work: float, ranks: int
) -> StepSeconds:
    """The seconds in which each of so many simulated ranks takes a step, on average.

    `steps` are those of a cycle, and `model` is the slowest host's.
    """
    actions = [action for step in steps for action in step]
    pieces = [p for a in actions if isinstance(a, StartProgram) for p in a.pieces]
    crossings = [p.crossing for p in pieces if p.crossing is not None]
    busy = cluster.turns * work / cluster.speed * sum(a.seconds for a in actions if isinstance(a, Busy)) / len(steps)
    wires = sum(_piece_seconds(p, cluster, work / cluster.speed) for p in pieces)
    model = model.in_turns(cluster.turns)
    gathered = 8 * model.numel / cluster.memory_rate / cluster.speed  # bytes read and written to gather gradients
    alone = model.computing + cluster.turns * gathered * recipe.schedule.shape.averages_gradients
    places = _places(cluster, ranks)
    factors = _factors(cluster, places)

    def seconds(rank: int, step: int) -> float:
        return busy + alone * factors[rank] * cluster.law.at(places[rank], step)

    paces = _paces(recipe, _tensors(recipe, model), ranks, seconds, cluster.latency, wires / len(steps))
    step = len(paces) / sum(1 / pace for pace in paces)
    computing = len(factors) / sum(1 / factor for factor in factors)  # relative to the slowest host's
    told = model.at_speed(1 / computing)
    rest = max(step - told.computing - busy, 0.0) + sum(told.gathering)
    sent, card = (sum(getattr(c, name) for c in crossings) / len(steps) for name in ("sent", "card"))
    return StepSeconds(step, *told.passes, busy, rest, told.optimizer, sent, card)


def _piece_seconds(piece: Piece, cluster: Cluster, times: float) -> float:
    """The seconds of a piece without latency: work, then the bytes beside the work that they are."""
    if piece.crossing is None:
        return times * piece.work
    copies = piece.crossing.sent * 2 * cluster.byte_seconds
    return times * piece.work + max(piece.crossing.link_seconds(cluster), times * piece.inside + copies)


def _places(cluster: Cluster, ranks: int) -> list[int]:
    """The rank of the cluster that each simulated one is: hosts are as mixed, and a rank that is slow is among them."""
    places = [i * cluster.size // ranks for i in range(ranks)]
    law = cluster.law.law if isinstance(cluster.law, AtShare) else cluster.law
    if isinstance(law, SlowRank):
        places[law.rank * ranks // cluster.size] = law.rank
    return places


def _factors(cluster: Cluster, places: Sequence[int]) -> list[float]:
    """By how much longer than the slowest host each simulated rank computes."""
    speeds = [h.speed for h in cluster.hosts for _ in range(h.count * h.ranks)]
    return [cluster.speed / speeds[place] for place in places]


def _tensors(recipe: Recipe, model: ModelCost) -> dict[str, tuple[int, ...]]:
    """A tensor of a few numbers for the model's first parameters, and for the first one of each fragment."""
    fragments, first = recipe.schedule.fragment_of(model.shapes), dict[int, str]()
    for name in model.shapes:
        first.setdefault(fragments[name], name)
    kept = {*[*model.shapes][:TENSORS], *first.values()}
    return {name: (8,) for name in model.shapes if name in kept}


def _paces(
    recipe: Recipe,
    shapes: dict[str, tuple[int, ...]],
    ranks: int,
    seconds: Callable[[int, int], float],
    latency: float,
    wires: float,
) -> list[float]:
    """The seconds of a step of each rank, once they have settled; `wires` are those of a step's requests without latency."""
    dense = replace(recipe, exchange=Recipe.of("allreduce").exchange, memory=NoMemory(), rules=())
    try:
        sent = bytes_per_step(dense, shapes, ranks)
    except GossamerError as error:
        raise CostError(f"it is simulated, on {ranks} ranks at most, and needs more of them: {error}") from None
    network = Network(latency=latency, rate=sent / wires if wires > 0 and sent > 0 else inf)
    marks = [[(0, 0.0)] for _ in range(ranks)]
    simulate([_train(dense, shapes, rank, ranks, seconds, marks[rank]) for rank in range(ranks)], network)
    return [_pace(mark, SETTLED * _steps(recipe), recipe.schedule.shape.period) for mark in marks]


def _pace(marks: Sequence[tuple[int, float]], settled: float, period: int) -> float:
    """The seconds of a step over whole rounds, at whose ends ranks wait. `marks` say when so many steps were done.

    A rank whose first step was longer than all steps of the others has but the start and one more.
    """
    ends = [(step, clock) for step, clock in marks if step % period == 0]
    a, began = next((end for end in ends[:-1] if end[0] >= settled), ends[0])
    b, ended = ends[-1]
    return (ended - began) / (b - a)


def _train(
    recipe: Recipe,
    shapes: dict[str, tuple[int, ...]],
    rank: int,
    size: int,
    seconds: Callable[[int, int], float],
    marks: list[tuple[int, float]],
) -> Program[None]:
    tensors = {name: torch.zeros(shape, dtype=torch.float32, device="cpu") for name, shape in shapes.items()}
    for tensor in tensors.values():
        tensor.requires_grad_().grad = torch.zeros_like(tensor)
    optimizer = torch.optim.SGD(tensors.values(), lr=0.1)
    worker = Worker(recipe, params_of(tensors), optimizer, rank, size)
    many, parts = _steps(recipe), recipe.schedule.shape.micro_batches
    yield from worker.begin()
    while worker.step <= many:
        yield Compute(lambda: None, "compute", parts * seconds(rank, worker.step))
        gradients = [bucket.gradients() for bucket in worker.buckets]
        yield from worker.train_step(gradients, lambda: True, lambda: None)
        marks.append((worker.step - 1, (yield from now())))
        yield from worker.begin()
    yield from worker.rest()
