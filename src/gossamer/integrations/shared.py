"""Shared buffers: average or broadcast float buffers, such as running statistics, when they have changed."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from gossamer.core.stream_events import read_numbers
from gossamer.core.verbs import Handle, Program, all_reduce, join, start
from gossamer.integrations.in_pieces import first_of, mean_of
from gossamer.runtime import Worker

SHARED = ("average", "broadcast")  # the policies under which buffers are equal on all ranks
LABEL = "buffers"
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Named = Mapping[str, Tensor]


class SharedBuffers:
    """Keeps a model's float buffers equal on all ranks, and remembers their last shared values.

    A buffer that no rank has changed is not sent. A buffer that some rank has changed is sent by all ranks, and then at every
    step, until no rank changes it. So running statistics need one message a step, which also says what else has changed; if
    no change is expected, ranks exchange flags while gradients are computed. Changes are found by comparing bits, so also
    those that autograd's version counter misses.
    """

    def __init__(self, model: nn.Module, worker: Worker, policy: str) -> None:
        self._model, self._worker, self.policy = model, worker, policy
        self.agreed = dict[str, Tensor]()  # copies of the last shared values, equal on all ranks
        self._versions = dict[str, int | None]()
        self._lively = list[str]()  # buffers that changed at the last sharing, expected to change again
        self._asked: tuple[list[str], Handle[Tensor]] | None = None
        self._anew = False  # True if the members have changed, so that ranks expect other buffers to change
        self._begun = 0  # a step that some ranks had begun when the members changed: they ask no more in it
        if policy in SHARED:
            self._keep(floats(model))

    def ask(self) -> Program[None]:
        """Start to exchange flags of changed buffers, if no change is expected; `agree` uses the result."""
        worker = self._worker
        self._forget_if_told()
        if (
            self._lively
            or not self.agreed
            or self._asked is not None
            or worker.step <= self._begun
            or worker.averaging.resumes  # then ranks may be at different steps when members change
            or worker.recipe.schedule.shape.skips_steps  # a rank learns only in the step that it is the round's last
            or not worker.recipe.schedule.is_synced(worker.step)
        ):
            return
        changed = self._changed(floats(self._model))
        self._asked = [*changed], (yield from start(self._anywhere(changed), LABEL, worker.step))

    def agree(self) -> Program[None]:
        """Set changed buffers on all ranks to their mean, or to rank 0's.

        The mean leaves out ranks where a buffer is not finite; a buffer that is finite on no rank gets its last shared value.
        """
        if self.policy not in SHARED or not (now := floats(self._model)):
            return
        self._forget_if_told()
        asked, self._asked = self._asked, None
        expected = {name: now[name] for name in self._lively if name in now}
        if expected:
            changed = yield from self._settle(expected, self._changed(now), self.policy)
        elif asked is None:
            flags = self._changed(now)
            changed = _names([*flags], (yield from self._anywhere(flags)))
        else:
            changed = _names(asked[0], (yield from join(asked[1])))
        late = {name: now[name] for name in changed if name not in expected}
        if late:
            yield from self._settle(late, dict.fromkeys(late, True), self.policy)
        self._lively = changed
        self._keep({name: now[name] for name in changed})

    def average(self) -> Program[None]:
        """Set buffers to their mean over ranks, for evaluation; shared buffers that no rank has changed are equal already."""
        if self.policy == "local" or self._worker.size == 1 or not (now := floats(self._model)):
            return
        if self.policy in SHARED:
            flags = self._changed(now)
            changed = _names([*flags], (yield from self._anywhere(flags)))
            now = {name: now[name] for name in changed}
        if now:
            yield from self._settle(now, dict.fromkeys(now, True), "average")

    def let_go(self) -> None:
        """Drop the flags that `ask` requested: this step shares no buffers."""
        self._asked = None

    def forget(self) -> None:
        """Forget what is expected to change, after all ranks have loaded another model."""
        self._lively, self._asked = [], None

    def members_changed(self, takes: bool, begun: int = 0) -> None:
        """Expect no change at the next step; a rank that `takes` another's buffers has those as their last shared values.

        Ranks that had `begun` a step share its buffers at its end, without having asked, so nobody asks before.
        """
        self._anew, self._begun = True, begun
        if takes and self.policy in SHARED:
            self._keep(floats(self._model))

    def _forget_if_told(self) -> None:
        if self._anew:
            self._anew = False
            self.forget()

    def _keep(self, buffers: Named) -> None:
        self.agreed |= {name: b.detach().clone() for name, b in buffers.items()}
        self._versions |= {name: _version(b) for name, b in buffers.items()}

    def _changed(self, now: Named) -> dict[str, bool]:
        """Flag the buffers that differ from their last shared values; autograd's counter decides for those that often change."""
        out = {name: True for name, b in now.items() if not _alike(b, self.agreed.get(name))}
        for name in self._lively:
            if name in now and _version(now[name]) != self._versions[name]:
                out[name] = True
        rest = {name: b for name, b in now.items() if name not in out}
        if self._worker.device.type == "cpu":
            out |= {name: not torch.equal(_bits(b), _bits(self.agreed[name])) for name, b in rest.items()}
        else:
            answers = read_numbers(*((_bits(b) != _bits(self.agreed[name])).any() for name, b in rest.items()))
            out |= {name: bool(answer) for name, answer in zip(rest, answers)}
        return {name: out[name] for name in now}

    def _anywhere(self, changed: Mapping[str, bool]) -> Program[Tensor]:
        """Flag the buffers that any rank has changed."""
        flags = torch.tensor([*changed.values()], dtype=torch.uint8, device=self._worker.device)
        return (yield from all_reduce(flags, "max"))

    def _settle(self, buffers: Named, changed: Mapping[str, bool], policy: str) -> Program[list[str]]:
        """Share these buffers, and write the result to those that any rank has changed; return their names."""
        worker, tensors = self._worker, [*buffers.values()]
        said = torch.tensor([*changed.values()], dtype=torch.uint8, device=worker.device)
        if policy == "average":
            weights = worker.ranks.weights or [1.0] * worker.size
            values, answers = yield from mean_of(tensors, said, weights, worker.rank)
        else:
            values, answers = yield from first_of(tensors, said, worker.rank, worker.size)
        names = _names([*changed], torch.stack(answers).amax(0))
        found = [(name, value) for name, value in zip(buffers, values, strict=True) if name in names]
        fine = read_numbers(*(value.isfinite().all() for _, value in found))
        for (name, value), finite in zip(found, fine, strict=True):
            agreed = value if finite else self.agreed.get(name)
            if agreed is not None and agreed.shape == buffers[name].shape:
                buffers[name].copy_(agreed)
        return names


def floats(model: nn.Module) -> dict[str, Tensor]:
    """Return the float buffers of a model that are not empty, by name."""
    return {n: b for n, b in model.named_buffers() if b.is_floating_point() and b.numel()}


def _names(every: Sequence[str], flags: Tensor) -> list[str]:
    return [name for name, flag in zip(every, flags.tolist(), strict=True) if flag]


def _alike(one: Tensor, other: Tensor | None) -> bool:
    """True if both have the same shape, dtype and device."""
    return other is not None and (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().view(_BITS[tensor.element_size()])


def _version(buffer: Tensor) -> int | None:
    """Return autograd's version counter of a buffer."""
    return None if buffer.is_inference() else buffer._version
