"""Momenta: what an optimizer remembers of the gradients, and what becomes of it when ranks agree on a model."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from gossamer.core.memory_pool import MemoryPool
from gossamer.core.verbs import Program, all_reduce
from gossamer.runtime.optimizers import Optimizing
from gossamer.runtime.params import Param

# What torch's optimizers count per parameter: for a scalar parameter these have the shape of a momentum.
COUNTERS = ("step", "eta", "mu", "mu_product")


class OptimizerState:
    """What the optimizer remembers of our parameters."""

    def __init__(self, params: Mapping[str, Param], optimizer: Optimizing) -> None:
        self._leaves, self._optimizer, self._buffers = params, optimizer, MemoryPool()

    def tensors(self) -> list[Tensor]:
        """Those that follow the gradient, not the counters."""
        found = list[Tensor]()
        for param in self._leaves.values():
            values: dict[str, Any] = self._optimizer.state.get(param.parameter, {})
            kept = [t for key, t in sorted(values.items()) if key not in COUNTERS and isinstance(t, Tensor)]
            found += [param.local(t) for t in kept if t.shape == param.parameter.shape]
        return found

    def reset(self) -> None:
        for state, group in self._states():
            _begin_anew(state, group)

    def heal(self) -> None:
        """A momentum that is not finite would spoil all rounds to come; the round it spoilt is dropped, and so is it.

        Counters go with it: a momentum that is corrected as an old one, and is new, makes steps several times too long.
        """
        for state, group in self._states():
            if not all(t.isfinite().all() for t in state.values() if isinstance(t, Tensor)):
                _begin_anew(state, group)

    def _states(self) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """What the optimizer keeps of each of our parameters, and the parameter's group."""
        ours = {id(param.parameter) for param in self._leaves.values()}
        for group in self._optimizer.param_groups:
            for p in group["params"]:
                if id(p) in ours:
                    yield self._optimizer.state.get(p, {}), group

    def average(self, size: int, weight: float = 1.0) -> Program[None]:
        """Densely, over all ranks; this one's count `weight` times."""
        tensors = self.tensors()
        if not (yield from self._all_hold_the_same(tensors)) or not tensors:
            return
        wide = torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
        length = sum(t.numel() for t in tensors) * wide.itemsize
        flat = torch.cat(
            [t.reshape(-1).to(wide) for t in tensors], out=self._buffers.of(length, tensors[0].device).view(wide)
        )
        total = yield from all_reduce(flat if weight == 1 else flat.mul_(weight))
        for tensor, mean in zip(tensors, total.div_(size).split([t.numel() for t in tensors])):
            tensor.copy_(mean.view_as(tensor))

    def _all_hold_the_same(self, tensors: Sequence[Tensor]) -> Program[bool]:
        """A rank whose every step so far was skipped has none yet; then there is nothing to average."""
        mine = crc32(repr([tuple(t.shape) for t in tensors]).encode())
        device = next(iter(self._leaves.values())).device
        extremes = yield from all_reduce(torch.tensor([mine, -mine], device=device), "max")
        largest, smallest = extremes.tolist()
        return largest == -smallest


def gain(group: Mapping[str, Any]) -> float:
    """How many times the gradient a step of torch's SGD is in the end, if the gradient stays as it is."""
    momentum = float(group.get("momentum", 0.0))
    if momentum == 0:
        return 1.0
    heavy = (1 - float(group.get("dampening", 0.0))) / (1 - momentum)
    return 1 + momentum * heavy if group.get("nesterov") else heavy


def _begin_anew(state: dict[str, Any], group: Mapping[str, Any]) -> None:
    """As a new optimizer has it: empty, since optimizers make their state at a parameter's first step.

    Only so do counters, and all that is kept besides momenta, fit each other again, in optimizers that we do not know as
    well. Adagrad makes its state before.
    """
    start = group.get("initial_accumulator_value")
    if start is None or "sum" not in state:
        state.clear()
        return
    state["sum"], state["step"] = torch.full_like(state["sum"], start), torch.zeros_like(state["step"])
