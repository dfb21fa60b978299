"""A workload on an emulated accelerator: forward and backward are waits, and gradients come in backward's order.

The model, its parameters' names and its optimizer are those of the real workload; `forward` is replaced. What it returns
depends on every parameter through autograd, one function for each, so that backward visits them one after the other: it
waits until a parameter's time has come and returns a gradient, which `AccumulateGrad`, hooks, DDP and the optimizer treat
as any other. A waiting rank sleeps, and its comm threads run.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, cast, final

import torch
from torch import Tensor, nn

from gossamer.bench.workloads.computing import ComputeTime
from gossamer.bench.workloads.contract import Workload
from gossamer.bench.workloads.shards import Batch, Data
from gossamer.costs.laws import FORWARD

FREEDOM = 3  # degrees of freedom of Student's t: heavy tails, and still a variance
OFFSETS = 2**20  # places where a gradient's values may begin


class GradientArrival(NamedTuple):
    """When backward has a parameter's gradient, as a share of backward, and the gradient's root mean square."""

    name: str
    share: float
    rms: float


class BackwardOrder(NamedTuple):
    """How a pass is divided: the forward's share of computing, and the gradients in the order in which they come."""

    forward: float
    arrivals: list[GradientArrival]


def measure_order(workload: Workload) -> BackwardOrder:
    """Run the real model once, on one batch, and count multiply-adds up to each gradient.

    They do not depend on the processor, so all ranks find the same. A parameter of several uses comes with the last one;
    one without a gradient does not come at all.
    """
    from torch.utils.flop_counter import FlopCounterMode  # it loads Triton, for which a launcher would wait

    model = workload.model()
    counted = list[tuple[str, nn.Parameter, int]]()
    with FlopCounterMode(display=False) as counter:

        def hook(name: str) -> Callable[[Tensor], None]:
            return lambda parameter: counted.append(
                (name, cast(nn.Parameter, parameter), int(counter.get_total_flops()))
            )

        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(hook(name))
        loss = workload.loss(model, workload.batch(0, 0, 1))
        before = int(counter.get_total_flops())
        loss.backward()
        total = int(counter.get_total_flops())
    shares = _shares([p.numel() for _, p, _ in counted], [flops - before for _, _, flops in counted])
    arrivals = [GradientArrival(n, s, _rms(p)) for (n, p, _), s in zip(counted, shares, strict=True)]
    return BackwardOrder(before / total if before else FORWARD, arrivals)


def _shares(sizes: list[int], flops: list[int]) -> list[float]:
    """Shares of backward that are done at each arrival: of the multiply-adds, or where none are known, of the elements."""
    if flops and flops[-1] > 0:
        return [count / flops[-1] for count in flops]
    return [sum(sizes[: i + 1]) / sum(sizes) for i in range(len(sizes))]


def _rms(parameter: nn.Parameter) -> float:
    found = 0.0 if parameter.grad is None else float(parameter.grad.square().mean().sqrt())
    return found if math.isfinite(found) and found > 0 else 1e-4


@final
class HeavyTails:
    """Values of Student's t with unit variance; a gradient is a stretch of them, and each step begins elsewhere."""

    def __init__(self, largest: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        normals = torch.randn((1 + FREEDOM, OFFSETS), dtype=torch.float32, generator=generator)
        scale = math.sqrt((FREEDOM - 2) / FREEDOM)
        once = normals[0] * scale / normals[1:].square().mean(0).sqrt()
        self.values = once.repeat(1 + -(-largest // OFFSETS))

    def gradient(self, like: Tensor, rms: float, begin: int) -> Tensor:
        """A tensor of its own, with the shape and type of `like`."""
        begin %= OFFSETS
        stretch = self.values[begin : begin + like.numel()].view(like.shape)
        return (stretch * rms).to(device=like.device, dtype=like.dtype)


# Makes a parameter's gradient, at the scale of its loss: that of a part of a batch, or a GradScaler's.
Gradient = Callable[[Tensor, float], Tensor]


@final
class _HandOut(torch.autograd.Function):
    """A link of the chain: backward hands out one parameter's gradient, then goes on to the parameter before it."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, parameter: Tensor, make: Gradient) -> Tensor:
        ctx.make, ctx.parameter = make, parameter.detach()
        return token.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], ctx.make(ctx.parameter, float(grads[0])), None


@dataclass
class PassTotals:
    """What went on while passes waited, in sum: of the processor, by all threads of this process; and how late they ended."""

    used: float = 0.0
    late: float = 0.0

    def add(self, used: float, late: float) -> None:
        self.used, self.late = self.used + used, self.late + late


@final
class EmulatedForward:
    """In place of a model's forward: waits, and returns a loss that is not a number, with the real backward's order.

    Waits end at times that are fixed when the pass begins, so that what is late does not make the rest late.
    """

    def __init__(self, model: nn.Module, workload: "EmulatedWorkload") -> None:
        parameters = dict(model.named_parameters())
        self.workload = workload
        self.order = workload.order
        self.chain = [(parameters[a.name], a) for a in reversed(self.order.arrivals)]  # as forward uses them

    def __call__(self, place: Tensor) -> Tensor:
        began, used = time.perf_counter(), time.process_time()
        step, rank = map(int, place.flatten())
        seconds = self.workload.compute.at(rank, step, self.workload.seed)
        forward = seconds * self.order.forward
        begin = self.workload.first_value(step, rank)

        def make(index: int, arrival: GradientArrival) -> Gradient:
            due = began + forward + (seconds - forward) * arrival.share

            def gradient(parameter: Tensor, scale: float) -> Tensor:
                made = self.workload.values.gradient(parameter, arrival.rms * scale, begin + index * 7919)
                sleep_until(due)
                if index == 0:
                    self.workload.totals.add(time.process_time() - used, time.perf_counter() - due)
                return made

            return gradient

        token = torch.full((), math.nan, dtype=torch.float32)
        for index, (parameter, arrival) in enumerate(self.chain):
            token = cast(Any, _HandOut).apply(token, parameter, make(index, arrival))
        sleep_until(began + forward)
        return token


def sleep_until(due: float) -> None:
    """Sleep, and do not spin: the comm threads of a waiting rank must run."""
    while (left := due - time.perf_counter()) > 0:
        time.sleep(left)


@final
@dataclass(frozen=True, kw_only=True)
class EmulatedWorkload(Workload):
    """Another workload whose computing is waited for. Its losses and its quality are not numbers: nothing is learned."""

    real: Workload
    compute: ComputeTime

    def __post_init__(self) -> None:
        """Both parts were checked when they were made."""

    def load(self) -> Data:
        return self.real.data

    def network(self) -> nn.Module:
        model = self.real.network()
        cast(Any, model).forward = EmulatedForward(model, self)
        return model

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return self.real.optimizer(model)

    def batch(self, step: int, rank: int, size: int) -> Batch:
        """Where the pass is: of whose step the draws and the gradients are."""
        return (torch.tensor([[step, rank]]),)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return model(*batch)

    def evaluate(self, model: nn.Module) -> float:
        return math.nan

    @cached_property
    def order(self) -> BackwardOrder:
        return measure_order(self.real)

    @cached_property
    def totals(self) -> PassTotals:
        return PassTotals()

    @cached_property
    def values(self) -> HeavyTails:
        largest = max((p.numel() for p in self.real.model().parameters()), default=1)
        return HeavyTails(largest, self.seed)

    def first_value(self, step: int, rank: int) -> int:
        """Where the values of a pass begin: elsewhere for every rank and step."""
        return ((self.seed * 31 + rank) * 1_000_003 + step) * 0x9E3779B1


def emulated(workload: Workload, compute: str) -> Workload:
    """The same workload with its computing emulated; unchanged if `compute` is empty.

    >>> from gossamer.bench.workloads import get
    >>> emulated(get("ridge"), "150ms").evaluate(get("ridge").model())
    nan
    """
    if not compute:
        return workload
    return EmulatedWorkload(seed=workload.seed, real=workload, compute=ComputeTime.of(compute))
