"""A small awkward model, ways to train it on the simulator, and ways to look inside."""

import io
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.bench.catalogue.samples import parts_of
from gossamer.checkpoints import state as checkpoint
from gossamer.core.bucket import Bucket
from gossamer.core.contracts import Update
from gossamer.core.verbs import Program
from gossamer.fabrics.sim import Network, simulate
from gossamer.memories import EF21
from gossamer.recipe import Recipe
from gossamer.runtime import BucketState, Worker
from gossamer.schedules import Accelerated, mixing
from gossamer.simulate import Replica, replicas, train
from gossamer.updates import Signs

Optimizer = Callable[[nn.Module], torch.optim.Optimizer]


class Odd(nn.Module):
    """Odd sizes, a transposed parameter, an empty one, one whose gradient is always zero, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        matrix, turned, still, bias, scale = (nn.Parameter(drawn.clone()) for drawn in _odd(torch.get_default_dtype()))
        self.matrix, self.turned, self.empty = matrix, turned, nn.Parameter(torch.zeros(0, 3))
        self.still, self.bias, self.scale = still, bias, scale


@cache  # tens of thousands of ranks have one
def _odd(dtype: torch.dtype) -> list[Tensor]:
    rng = torch.Generator().manual_seed(1)
    shapes = (17, 13), (12, 10), (5,), (7,), ()
    matrix, turned, *others = (torch.randn(shape, generator=rng, dtype=dtype) for shape in shapes)
    return [matrix, turned.t(), *others]


class Flat(nn.Module):
    """One vector of parameters, in double precision unless said otherwise."""

    def __init__(self, numel: int = 5, dtype: torch.dtype = torch.float64, start: float = 1.0) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.linspace(-start, start, numel, dtype=dtype))


class Zeros(nn.Module):
    """Three layers of one number each: as many as a model in fragments needs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ParameterList([nn.Parameter(torch.zeros(1)) for _ in range(3)])


def noise(*key: int, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers that follow from the key alone."""
    seed = 0
    for k in key:
        seed = (seed * 1_000_003 + k + 17) % (2**31)
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@cache  # for those who only read them: every recipe is pulled alike
def _target(i: int, rank: int, shape: torch.Size) -> Tensor:
    return noise(i, rank, numel=shape.numel()).view(shape)


@cache
def _wind(i: int, rank: int, step: int, shape: torch.Size) -> Tensor:
    return (0.1 * noise(i, rank, step, numel=shape.numel())).view(shape)


def pull(model: nn.Module, rank: int, step: int) -> float:
    """Gradients of 1/2 |x - target_rank|^2 with noise; the empty parameter gets none, the still one zero."""
    loss = 0.0
    for i, (name, p) in enumerate(model.named_parameters()):
        if not p.numel():
            continue
        apart = p.detach() - _target(i, rank, p.shape)
        p.grad = torch.zeros_like(p) if name == "still" else apart + _wind(i, rank, step, p.shape)
        loss += float(apart.square().sum()) / 2
    return loss


def spoiled(at: Sequence[tuple[int, int]], value: float) -> Callable[[nn.Module, int, int], float]:
    """`pull`, but at these (rank, step) one element of a gradient is `value`."""

    def backward(model: nn.Module, rank: int, step: int) -> float:
        loss = pull(model, rank, step)
        if (rank, step) in at:
            gradient = model.get_parameter("matrix").grad
            assert gradient is not None
            gradient[step % 17, 3] = value
        return loss

    return backward


def sgd(lr: float = 0.05, momentum: float = 0.9) -> Optimizer:
    return lambda model: torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)


def usual(recipe: "str | Recipe") -> Optimizer:
    """SGD with momentum; without, where the recipe brings its own."""
    return sgd(momentum=0.0) if _has_momentum(Recipe.of(recipe)) else sgd()


@cache
def _has_momentum(recipe: Recipe) -> bool:
    parts = [*parts_of(recipe)]
    own = any("adds momentum" in p.traits for p in parts)
    own |= any(isinstance(p, EF21) and p.eta < 1 for p in parts)
    own |= any("sends momentum" in p.traits or (isinstance(p, Update) and p.is_step) for p in parts)
    own |= any(isinstance(p, Accelerated) for p in parts)
    return own or (any(isinstance(p, Signs) for p in parts) and any("fades" in p.traits for p in parts))


def make(recipe: "str | Recipe", size: int, model: Callable[[], nn.Module] = Odd, optimizer: Optimizer | None = None):
    read = _read(recipe) if isinstance(recipe, str) else recipe
    return replicas(read, model, optimizer or usual(read), size, seed=3)


@cache  # laws make ranks of one text again and again; and what a controller may put in force is found once for each recipe
def _read(text: str) -> Recipe:
    return Recipe.of(text)


@cache  # two laws ask for it
def weighted_optimum(schedule: Any) -> float:
    """Where two ranks end under f_i = (x - i)^2 / 2 if the first counts three times as much: it should be 1/4.

    From 0 the way there is as long as from there to 1/2, where whoever counts them alike ends; the slowest schedules have gone
    four fifths of it by then.
    """
    ranks = make(f"allreduce(fp32()) + {schedule}", 2, Zeros, sgd(0.02, 0.0))
    for r in ranks:
        r.worker.ranks.weights = (1.5, 0.5)
    train(ranks, _to_its_number, 230)
    return float(torch.stack(parameters(ranks)).mean())


def _to_its_number(model: nn.Module, rank: int, step: int) -> float:
    for p in model.parameters():
        p.grad = p.detach() - rank
    return 0.0


def parameters(ranks: Sequence[Replica]) -> list[Tensor]:
    return [r.flat().clone() for r in ranks]


def bit_equal(tensors: Sequence[Tensor]) -> bool:
    """Every bit, the sign of zero and the payload of NaN included."""
    raw = [t.contiguous().view(-1).view(torch.uint8) for t in tensors]
    return all(torch.equal(raw[0], other) for other in raw[1:])


def anchors(rank: Replica) -> Tensor:
    return torch.cat([c.states["schedule"]["anchor"] for c in rank.worker.buckets])


def remembered(worker: Worker, *roles: str) -> dict[str, Tensor]:
    """Copies of what a worker remembers in these roles, by channel and key."""
    return {
        f"{i}/{role}/{key}": tensor.clone()
        for i, c in enumerate(worker.buckets)
        for role in roles or ("memory", "exchange")
        for key, tensor in c.states[role].items()
    }


def same_memory(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(bit_equal([a[k], b[k]]) for k in a)


def by_name(buckets: Sequence[BucketState], role: str, key: str) -> dict[str, Tensor]:
    """One state entry, cut up by parameter."""
    out = dict[str, Tensor]()
    for c in buckets:
        if key in c.states[role]:
            out |= {n: t.clone() for n, t in Bucket(c.states[role][key], c.layout).tensors()}
    return out


def land(worker: Worker) -> Program[None]:
    """Absorb what is on its way to the worker's mixer."""
    mixer = worker.recipe.schedule.shape.mixer
    assert mixer is not None
    yield from mixing.land(worker.loop, mixer)


def held(rank: Replica) -> Tensor:
    """What sums to the model over all ranks, end to end."""
    shares = rank.worker.recipe.schedule.consensus_share(rank.worker.loop) or []
    views = {n: v for c, s in zip(rank.worker.buckets, shares) for n, v in Bucket(s.value, c.layout).tensors()}
    return torch.cat([views.get(n, p.detach()).reshape(-1) for n, p in rank.model.named_parameters()])


def on_all(ranks: Sequence[Replica], program: Callable[[Worker], Program[None]]) -> None:
    simulate([program(r.worker) for r in ranks])


def contents(ranks: Sequence[Replica]) -> list[dict[str, Any]]:
    """What a user would save of every rank: parameters, optimizer and worker."""
    on_all(ranks, Worker.quiesce)
    return [
        {
            "model": deepcopy(r.model.state_dict()),
            "opt": deepcopy(r.optimizer.state_dict()),
            "comm": checkpoint.save(r.worker),
        }
        for r in ranks
    ]


def saved(ranks: Sequence[Replica]) -> list[bytes]:
    """The same, as files."""
    files = [io.BytesIO() for _ in ranks]
    for content, file in zip(contents(ranks), files, strict=True):
        torch.save(content, file)
    return [file.getvalue() for file in files]


def resumed(recipe: "str | Recipe", files: Sequence[bytes | Mapping[str, Any]], **options) -> list[Replica]:
    """New ranks that go on from files, or from what would be in them."""
    ranks = make(recipe, len(files), **options)
    for r, file in zip(ranks, files, strict=True):
        content = torch.load(io.BytesIO(file), weights_only=True) if isinstance(file, bytes) else file
        r.model.load_state_dict(content["model"])
        r.optimizer.load_state_dict(content["opt"])
        checkpoint.load(r.worker, content["comm"])
    return ranks


__all__ = [
    "Flat",
    "Network",
    "Odd",
    "Replica",
    "anchors",
    "bit_equal",
    "by_name",
    "contents",
    "held",
    "land",
    "make",
    "noise",
    "on_all",
    "parameters",
    "pull",
    "remembered",
    "resumed",
    "same_memory",
    "saved",
    "sgd",
    "spoiled",
    "train",
]
