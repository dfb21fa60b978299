"""Critical regimes: when the accumulated gradient changes fast, training is fragile."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import hypot
from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.core.bucket import Bucket, State
from gossamer.core.contracts import Facts


class Look(NamedTuple):
    """The norm of a parameter's accumulated gradient, in the epoch that was watched before, and now."""

    old: float
    now: float


class EpochMonitor:
    """Accumulates gradients over every `interval`-th epoch, for their norms. All of it lives in `state`."""

    def __init__(self, epoch: int, interval: int) -> None:
        self.epoch, self.interval = epoch, interval

    def watch(self, facts: Facts, state: State) -> dict[str, Look] | None:
        """At the end of a watched epoch after the first: each parameter's norm, and the last one."""
        epoch, position = divmod(facts.step - 1, self.epoch)
        begun = state.get("epoch")
        # Where an epoch's last step was skipped, or averaged nothing, its verdict comes with the next step that does.
        late = self._close(state, ()) if begun is not None and int(begun) != epoch else None
        if epoch % self.interval:
            return late
        if position == self.epoch - 1:
            return self._close(state, facts.blocks)
        for name, total in totals(state, facts.blocks):
            state[f"delta:{name}"] = total
        state["epoch"] = torch.tensor(epoch)
        return late

    def _close(self, state: State, last: Sequence[Bucket]) -> dict[str, Look] | None:
        """The norms of the sums, with the `last` gradients added; one after the other, since there is no room for all."""
        looks = dict[str, Look]()
        for name, norm in norms(totals(state, last)).items():
            old = state.get(f"old:{name}")
            state[f"old:{name}"] = torch.tensor(norm, dtype=torch.float64)
            if old is not None:
                looks[name] = Look(float(old), norm)
        for key in [k for k in state if k.startswith("delta:") or k == "epoch"]:
            del state[key]
        return looks or None


def totals(state: Mapping[str, Tensor], blocks: Sequence[Bucket]) -> Iterator[tuple[str, Tensor]]:
    """Each parameter's sum with its gradient added, as a tensor of its own; of one dimension at least, since a state's numbers are the host's."""
    gradients = {name: torch.atleast_1d(gradient) for block in blocks for name, gradient in block.tensors()}
    for key, total in [(k, v) for k, v in state.items() if k.startswith("delta:")]:
        name = key.removeprefix("delta:")
        gradient = gradients.pop(name, None)
        yield name, total if gradient is None else total + gradient
    for name, gradient in gradients.items():
        yield name, gradient.clone()


def norms(sums: Iterable[tuple[str, Tensor]]) -> dict[str, float]:
    """Of each parameter's sum; the host asks for all of them at once."""
    found = {name: total.double().norm() for name, total in sums}
    return dict(zip(found, torch.stack([*found.values()]).tolist() if found else [], strict=True))


def together(looks: Iterable[Look]) -> Look:
    """The norm of the whole gradient."""
    olds, nows = zip(*looks, strict=True)
    return Look(hypot(*olds), hypot(*nows))


def critical(look: Look, threshold: float) -> bool:
    """ratio = | |D_old| - |D_now| | / |D_old|;  critical if ratio >= threshold, or if |D_old| = 0."""
    old, now = look
    return old == 0 or abs(old - now) / old >= threshold


def slowed(facts: Facts, state: State, factor: float) -> set[str]:
    """Parameters whose learning rate fell by `factor` or more since the last step: a step decay, not a smooth schedule.

    Parameter groups that join do so behind those there were. One number is what older checkpoints have of all groups.
    """
    groups, last = facts.param_groups, state.get("lr", torch.zeros(0, dtype=torch.float64))
    state["lr"] = torch.tensor([group.lr for group in groups], dtype=torch.float64)
    before = last.tolist() if last.dim() else [float(last)] * (len(groups) == 1)
    return {n for group, lr in zip(groups, before) if group.lr < lr and group.lr * factor <= lr for n in group.names}
