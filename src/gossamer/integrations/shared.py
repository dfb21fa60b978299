"""Shared buffers: what ranks agree on besides parameters, such as running statistics. They travel when they have changed."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from gossamer.core.stream_events import read_numbers
from gossamer.core.verbs import Handle, Program, all_reduce, join, start
from gossamer.integrations.in_pieces import first_of, mean_of
from gossamer.runtime import Worker

SHARED = ("average", "broadcast")  # what may be said of buffers so that ranks agree on them
LABEL = "buffers"
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Named = Mapping[str, Tensor]


class SharedBuffers:
    """A model's float buffers, and what ranks agreed on of them last.

    What no rank has changed since stays where it is. What some rank changed is sent by all, and from then on it travels
    without being asked for, until a step comes in which nobody changed it. So running statistics need one message a step, in
    which ranks also say what else has changed; where nothing is expected to change, they say so while gradients are computed.
    A change is seen by the bits, so also one past autograd's counter of versions.
    """

    def __init__(self, model: nn.Module, worker: Worker, policy: str) -> None:
        self._model, self._worker, self.policy = model, worker, policy
        self.agreed = dict[str, Tensor]()  # copies, as all ranks have them
        self._versions = dict[str, int | None]()
        self._lively = list[str]()  # what changed when ranks agreed last
        self._asked: tuple[list[str], Handle[Tensor]] | None = None
        if policy in SHARED:
            self._keep(floats(model))

    def ask(self) -> Program[None]:
        """Where nothing is expected to change, find out meanwhile whether something has: `agree` needs the answer."""
        worker = self._worker
        if (
            self._lively
            or not self.agreed
            or self._asked is not None
            or not worker.recipe.schedule.is_synced(worker.step)
        ):
            return
        changed = self._changed(floats(self._model))
        self._asked = [*changed], (yield from start(self._anywhere(changed), LABEL, worker.step))

    def agree(self) -> Program[None]:
        """All ranks have the same buffers: their mean, or rank 0's.

        A buffer that is not finite on some ranks becomes the mean of the others'; one that is finite on none, what it was.
        """
        if self.policy not in SHARED or not (now := floats(self._model)):
            return
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
        """Their mean for now, whatever they are otherwise; what nobody has changed since ranks agreed on it is that."""
        if self.policy == "local" or self._worker.size == 1 or not (now := floats(self._model)):
            return
        if self.policy in SHARED:
            flags = self._changed(now)
            changed = _names([*flags], (yield from self._anywhere(flags)))
            now = {name: now[name] for name in changed}
        if now:
            yield from self._settle(now, dict.fromkeys(now, True), "average")

    def let_go(self) -> None:
        """Nobody agrees at this step: what was asked need not be answered."""
        self._asked = None

    def forget(self) -> None:
        """Another model was loaded, on all ranks."""
        self._lively, self._asked = [], None

    def _keep(self, buffers: Named) -> None:
        self.agreed |= {name: b.detach().clone() for name, b in buffers.items()}
        self._versions |= {name: _version(b) for name, b in buffers.items()}

    def _changed(self, now: Named) -> dict[str, bool]:
        """What is not as it was agreed on. Of what changes all the time, autograd's counter says enough."""
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
        flags = torch.tensor([*changed.values()], dtype=torch.uint8, device=self._worker.device)
        return (yield from all_reduce(flags, "max"))

    def _settle(self, buffers: Named, changed: Mapping[str, bool], policy: str) -> Program[list[str]]:
        """Send these buffers, and write what ranks agree on, where any of them was changed; the names of all that were."""
        worker, tensors = self._worker, [*buffers.values()]
        said = torch.tensor([*changed.values()], dtype=torch.uint8, device=worker.device)
        if policy == "average":
            weights = worker.weights or [1.0] * worker.size
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
    return {n: b for n, b in model.named_buffers() if b.is_floating_point() and b.numel()}


def _names(every: Sequence[str], flags: Tensor) -> list[str]:
    return [name for name, flag in zip(every, flags.tolist(), strict=True) if flag]


def _alike(one: Tensor, other: Tensor | None) -> bool:
    return other is not None and (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().view(_BITS[tensor.element_size()])


def _version(buffer: Tensor) -> int | None:
    """How often autograd has seen it written to."""
    return None if buffer.is_inference() else buffer._version
