"""The optimizer's state for our parameters: averages, resets and counts its momentum buffers."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast
from zlib import crc32

import torch
from torch import Tensor
from torch.optim import Optimizer

from gossamer.core.binding import MOMENTS, buffers_after_a_step, is_buffer
from gossamer.core.bucket import Layout
from gossamer.core.hashes import hash_of
from gossamer.core.memory_pool import MemoryPool
from gossamer.core.verbs import AllReduce, Program, all_reduce, join, start
from gossamer.kernels.finite import all_finite
from gossamer.runtime.optimizers import members
from gossamer.runtime.params import Param, local_part

if TYPE_CHECKING:
    from gossamer.runtime.worker import Worker

LABEL = "optimizer"


class OptimizerState:
    """The optimizer's state for our parameters."""

    def __init__(self, worker: "Worker") -> None:
        self._worker, self._buffers = worker, MemoryPool()

    def tensors(self, moments: Sequence[int] = ()) -> list[Tensor]:
        """The momentum buffers, without counters; only the first or the second moments (1, 2) if asked."""
        return [
            param.local(value)
            for param in self._worker.params.values()
            for key, value in self._entries(param)
            if (not moments or MOMENTS.get(key) in moments) and _is_buffer_of(param, key, value)
        ]

    def reset(self) -> None:
        for state, group in self._states():
            _begin_anew(state, group)

    def heal(self) -> None:
        """Reset the state of parameters whose momentum is not finite, after the round that it made non-finite was dropped.

        Counters are reset too: bias correction with an old counter and a new momentum makes steps several times too long.
        """
        held = [*self._states()]
        fine = [all(local_part(t).isfinite().all() for t in s.values() if isinstance(t, Tensor)) for s, _ in held]
        for (state, group), kept in zip(held, self._worker.replica.least(fine)):
            if not kept:
                _begin_anew(state, group)

    def _states(self) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """The optimizer's state of each of our parameters, and the parameter's group."""
        ours = {id(param.parameter) for param in self._worker.params.values()}
        for group in self._worker.optimizer.param_groups:
            for p in group["params"]:
                if id(p) in ours:
                    yield self._kept(p), group

    def _kept(self, parameter: Tensor) -> dict[str, Any]:
        """The optimizer's state of a parameter; empty where it has none."""
        return next((o.state[parameter] for o in members(self._worker.optimizer) if parameter in o.state), {})

    def _entries(self, param: Param) -> list[tuple[str, Any]]:
        """The same by key, in an order that all ranks share."""
        return sorted(self._kept(param.parameter).items())

    def average(self, moments: Sequence[int] = ()) -> Program[None]:
        """Average the buffers over all ranks, uncompressed, with this rank's weight."""
        tensors = self.tensors(moments)
        if (yield from self._all_hold([tuple(t.shape) for t in tensors])) and tensors:
            yield from self._average(tensors)

    def agree(self) -> Program[bool]:
        """Make the state equal on all ranks: its buffers are averaged. Where ranks hold other things besides, such as other
        counters after skipped steps, all of it begins anew, and False is returned.
        """
        tensors = self.tensors()
        equal = yield from self._all_hold([tuple(t.shape) for t in tensors] + self._besides_buffers())
        if equal and tensors:
            equal = yield from self._average(tensors)
        if not equal:
            self.reset()
        return equal

    def _besides_buffers(self) -> list[Any]:
        """What the state holds besides buffers of a parameter's shape, or hashes of it."""
        found = list[Any]()
        for name, param in self._worker.params.items():
            for key, value in self._entries(param):
                if not _is_buffer_of(param, key, value):
                    found.append((name, key, hash_of(value) if isinstance(value, Tensor) else repr(value)))
        return found

    def _average(self, tensors: Sequence[Tensor]) -> Program[bool]:
        """Average buffers. If a mean is not finite, each rank keeps its own, and those that are not finite begin anew.

        A gradient may be finite and its square not: then Adam moves that element no more, and one rank would spread this to all.
        """
        size, weight, step = self._worker.size, self._worker.ranks.weight, self._worker.step
        wide = together(t.dtype for t in tensors)
        length = sum(t.numel() for t in tensors) * wide.itemsize
        flat = torch.cat(
            [t.reshape(-1).to(wide) for t in tensors], out=self._buffers.of(length, tensors[0].device).view(wide)
        )
        total = yield from join((yield from start(all_reduce(flat if weight == 1 else flat.mul_(weight)), LABEL, step)))
        if not self._worker.replica.all(all_finite([total])):
            self.heal()
            return False
        for tensor, mean in zip(tensors, total.div_(size).split([t.numel() for t in tensors])):
            tensor.copy_(mean.view_as(tensor))
        return True

    def _all_hold(self, what: Sequence[Any]) -> Program[bool]:
        """True if all ranks hold the same, such as buffers of equal shapes; a rank that has skipped every step so far has none."""
        mine = crc32(repr(what).encode())
        held = torch.tensor([mine, -mine], dtype=torch.int64, device=self._worker.device)
        extremes = yield from join((yield from start(all_reduce(held, "max"), LABEL, self._worker.step)))
        largest, smallest = extremes.tolist()
        return largest == -smallest


def together(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """The precision in which tensors of these types are averaged."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def requests(layouts: Sequence[Layout], momenta: int) -> list[AllReduce]:
    """The requests of `average` for `momenta` buffers per parameter: the check that all hold them, and their mean."""
    asked = [AllReduce(torch.empty(2, dtype=torch.int64, device="meta"), "max")]
    length = momenta * sum(s.numel for s in layouts)
    wide = together(layout.dtype for layout in layouts)
    return [*asked, AllReduce(torch.empty(length, dtype=wide, device="meta"))] if length else asked


def kept_by(optimizer: Optimizer) -> int:
    """The number of buffers that an optimizer keeps per parameter; the maximum over groups."""
    return max((len(buffers_after_a_step(optimizer, group)) for group in optimizer.param_groups), default=0)


def kept_so_far(optimizer: Optimizer) -> int:
    """The number of buffers that an optimizer which has stepped keeps per parameter; the maximum over parameters."""
    states = cast("Mapping[Any, dict[str, Any]]", optimizer.state)  # some keep what is of no parameter
    stepped = ((p, state) for p, state in states.items() if isinstance(p, Tensor))
    return max(
        (sum(is_buffer(k, t) and t.shape == p.shape for k, t in state.items()) for p, state in stepped), default=0
    )


def gain(group: Mapping[str, Any]) -> float:
    """The factor by which momentum lengthens a step of torch's SGD under a constant gradient."""
    momentum = float(group.get("momentum", 0.0))
    if momentum == 0:
        return 1.0
    heavy = (1 - float(group.get("dampening", 0.0))) / (1 - momentum)
    return 1 + momentum * heavy if group.get("nesterov") else heavy


def _is_buffer_of(param: Param, key: str, value: Any) -> bool:
    return is_buffer(key, value) and value.shape == param.parameter.shape


def _begin_anew(state: dict[str, Any], group: Mapping[str, Any]) -> None:
    """Reset a parameter's state to that of a new optimizer: empty, since optimizers make it at a parameter's first step.

    Only so do counters, and all that is kept besides momenta, fit each other again, in optimizers that we do not know as
    well. Adagrad makes its state before.
    """
    start = group.get("initial_accumulator_value")
    if start is None or "sum" not in state:
        state.clear()
        return
    state["sum"], state["step"] = torch.full_like(state["sum"], start), torch.zeros_like(state["step"])
