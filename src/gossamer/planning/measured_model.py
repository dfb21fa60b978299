"""Measures what a step costs on one rank: forward, backward, the moment of each gradient, and the optimizer."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.core.errors import CostError
from gossamer.planning.model_cost import WIDTHS, ModelCost
from gossamer.planning.model_shapes import from_shapes
from gossamer.planning.step_moments import StepMoments, measured_on, medians, now
from gossamer.runtime.optimizer_state import kept_so_far

WARM, STEPS = 3, 8


def measure(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[int], Tensor], *, name: str = ""
) -> ModelCost:
    """Train a few steps here, alone. `loss(step)` runs the forward pass of a step.

    >>> model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> cost = measure(model, sgd, lambda step: model(torch.ones(2, 8)).sum())
    >>> cost.shares["0.weight"] >= cost.shares["1.weight"] > 0, cost.numel
    (True, 81)
    """
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    if not named:
        raise CostError(f"{name or 'the model'} has no parameters to train")
    device = next(iter(named.values())).device
    steps = list[StepMoments]()

    def note(name: str) -> Callable[[Tensor], None]:
        return lambda parameter: steps[-1].note(name)

    hooks = [p.register_post_accumulate_grad_hook(note(n)) for n, p in named.items()]
    try:
        for step in range(1, WARM + STEPS + 1):
            steps.append(StepMoments(device, now(device)))
            _step(steps[-1], optimizer, loss, step)
    finally:
        for hook in hooks:
            hook.remove()
    return ModelCost(
        shapes={n: tuple(p.shape) for n, p in named.items()},
        **medians(steps[WARM:], named),
        momenta=kept_so_far(optimizer),
        dtype=dtype_of(named.values()),
        frozen=frozen_bytes(model),
        name=name,
        source=f"measured {measured_on(device)}, one rank alone",
    )


def _step(moments: StepMoments, optimizer: torch.optim.Optimizer, loss: Callable[[int], Tensor], step: int) -> None:
    optimizer.zero_grad(set_to_none=True)
    value = loss(step)
    moments.begin_backward()
    value.backward()
    moments.end_backward()
    optimizer.step()
    moments.finish()


def with_step(model: ModelCost, step: float) -> ModelCost:
    """The same model with steps of another length: forward, backward and optimizer by the same factor."""
    scaled = model.at_speed(model.computing / step)
    return replace(scaled, source=f"{model.source}, then scaled to the step's seconds as given")


def dtype_of(parameters: Iterable[Tensor]) -> str:
    """The dtype that parameters are planned in: that of most of their numbers, as norms in fp32 do not make a model wide.

    >>> dtype_of([torch.ones(9, dtype=torch.bfloat16), torch.ones(2)]), dtype_of([torch.ones(2), torch.ones(2, dtype=torch.float16)])
    ('bf16', 'fp32')
    """
    numbers = Counter[str]()
    for p in parameters:
        numbers[{torch.bfloat16: "bf16", torch.float16: "fp16"}.get(p.dtype, "fp32")] += p.numel()
    return max(numbers, key=lambda name: (numbers[name], WIDTHS[name]), default="fp32")


def frozen_bytes(model: nn.Module) -> int:
    """Bytes of parameters that are not trained, and of buffers.

    >>> frozen_bytes(nn.Sequential(nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 1)))
    288
    """
    held = [*(p for p in model.parameters() if not p.requires_grad), *model.buffers()]
    return sum(t.nbytes for t in held)


def untrained(model: nn.Module, step: float, *, name: str, memory_rate: float, dtype: str | None = None) -> ModelCost:
    """The cost of a model that was only built, on the meta device for instance, with a step's seconds as given.

    Its dtype is that of its parameters, unless another is given.
    """
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    if not named:
        raise CostError(f"{name} has no parameters to train")
    shapes: Mapping[str, Any] = {n: tuple(p.shape) for n, p in named.items()}
    own = dtype_of(named.values())
    found = from_shapes(shapes, step, name=name, memory_rate=memory_rate, dtype=dtype or own)
    return replace(found, frozen=frozen_bytes(model) * found.width // WIDTHS[own])
