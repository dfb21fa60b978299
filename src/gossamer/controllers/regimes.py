"""Critical regimes: phases of training in which the accumulated gradient changes fast."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import hypot, sqrt
from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.core.bucket import Bucket, State
from gossamer.core.contracts import Facts


class Look(NamedTuple):
    """Norms of a parameter's accumulated gradient: in the last watched epoch, and now."""

    old: float
    now: float


def watch(length: int, interval: int, facts: Facts, state: State) -> dict[str, Look] | None:
    """Add a step's gradients to the sums of every `interval`-th epoch of so many steps.

    At the end of each watched epoch but the first return every parameter's last and current norm. All is kept in `state`.
    """
    epoch, position = divmod(facts.step - 1, length)
    begun = state.get("epoch")
    # Where an epoch's last step was skipped, or averaged nothing, its verdict comes with the next step that does.
    late = _close(state, (), facts) if begun is not None and int(begun) != epoch else None
    if epoch % interval:
        return late
    if position == length - 1:
        return _close(state, facts.blocks, facts)
    for name, total in totals(state, facts.blocks):
        state[f"delta:{name}"] = total
    state["epoch"] = torch.tensor(epoch)
    return late


def _close(state: State, last: Sequence[Bucket], facts: Facts) -> dict[str, Look] | None:
    """Norms of the sums with the `last` gradients added, one parameter after the other to save memory."""
    looks = dict[str, Look]()
    for name, norm in of_whole(norms(totals(state, last)), facts).items():
        old = state.get(f"old:{name}")
        state[f"old:{name}"] = torch.tensor(norm, dtype=torch.float64)
        if old is not None:
            looks[name] = Look(float(old), norm)
    for key in [k for k in state if k.startswith("delta:") or k == "epoch"]:
        del state[key]
    return looks or None


def totals(state: Mapping[str, Tensor], blocks: Sequence[Bucket]) -> Iterator[tuple[str, Tensor]]:
    """Yield each parameter's sum with its gradient added, as a new tensor of at least one dimension (0-dim entries of a state are on the host)."""
    gradients = {name: torch.atleast_1d(gradient) for block in blocks for name, gradient in block.tensors()}
    for key, total in [(k, v) for k, v in state.items() if k.startswith("delta:")]:
        name = key.removeprefix("delta:")
        gradient = gradients.pop(name, None)
        yield name, total if gradient is None else total + gradient
    for name, gradient in gradients.items():
        yield name, gradient.clone()


def norms(sums: Iterable[tuple[str, Tensor]]) -> dict[str, float]:
    """Norm of each parameter's sum, read from the device in one transfer."""
    found = {name: total.double().norm() for name, total in sums}
    return dict(zip(found, torch.stack([*found.values()]).tolist() if found else [], strict=True))


def of_whole(norms: Mapping[str, float], facts: Facts) -> Mapping[str, float]:
    """Norms of whole parameters, from those of this rank's shards."""
    if facts.over_shards is None:
        return norms
    names = sorted(norms)
    return dict(zip(names, map(sqrt, facts.over_shards([norms[name] ** 2 for name in names])), strict=True))


def together(looks: Iterable[Look]) -> Look:
    """The norm of the whole gradient."""
    olds, nows = zip(*looks, strict=True)
    return Look(hypot(*olds), hypot(*nows))


def critical(look: Look, threshold: float) -> bool:
    """True if | |D_old| - |D_now| | / |D_old| >= threshold, or if |D_old| = 0."""
    old, now = look
    return old == 0 or abs(old - now) / old >= threshold


def slowed(facts: Facts, state: State, factor: float) -> set[str]:
    """Parameters whose learning rate fell by `factor` or more since the last step: a step decay, not a smooth schedule.

    New parameter groups come after the existing ones. Older checkpoints hold one number for all groups.
    """
    groups, last = facts.param_groups, state.get("lr", torch.zeros(0, dtype=torch.float64))
    state["lr"] = torch.tensor([group.lr for group in groups], dtype=torch.float64)
    before = last.tolist() if last.dim() else [float(last)] * (len(groups) == 1)
    return {n for group, lr in zip(groups, before) if group.lr < lr and group.lr * factor <= lr for n in group.names}
