"""Critical regimes: when the accumulated gradient changes fast, training is fragile."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gossamer.core.block import Block, State
from gossamer.core.contracts import Facts


class EpochWatch:
    """Accumulates gradients over every `interval`-th epoch, and compares the norm with the last accumulated one.

    ratio = | |D_old| - |D_now| | / |D_old|;  critical if ratio >= threshold, or if |D_old| = 0. All of it lives in `state`.
    """

    def __init__(self, epoch: int, interval: int, threshold: float) -> None:
        self.epoch, self.interval, self.threshold = epoch, interval, threshold

    def watch(self, facts: Facts, state: State) -> dict[str, bool] | None:
        """At the end of a watched epoch after the first: which parameters are in a critical regime."""
        epoch, position = divmod(facts.step - 1, self.epoch)
        begun = state.get("epoch")
        # Where an epoch's last step was skipped, or averaged nothing, its verdict comes with the next step that does.
        late = self._close(state) if begun is not None and int(begun) != epoch else None
        if epoch % self.interval:
            return late
        accumulate(facts.blocks, state)
        state["epoch"] = torch.tensor(epoch)
        return self._close(state) if position == self.epoch - 1 else late

    def _close(self, state: State) -> dict[str, bool] | None:
        verdict = dict[str, bool]()
        for name, norm in norms(state).items():
            old = state.get(f"old:{name}")
            state[f"old:{name}"] = torch.tensor(norm, dtype=torch.float64)
            if old is not None:
                verdict[name] = critical(float(old), norm, self.threshold)
        for key in [k for k in state if k.startswith("delta:") or k == "epoch"]:
            del state[key]
        return verdict or None


def accumulate(blocks: Sequence[Block], state: State) -> None:
    for block in blocks:
        for name, gradient in block.tensors():
            key, gradient = (
                f"delta:{name}",
                torch.atleast_1d(gradient),
            )  # what has no dimension is a number of the host's
            state[key] = state[key] + gradient if key in state else gradient.clone()


def norms(state: Mapping[str, Tensor]) -> dict[str, float]:
    """Of each parameter's sum; the host asks for all of them at once."""
    sums = {k.removeprefix("delta:"): v for k, v in state.items() if k.startswith("delta:")}
    found = torch.stack([v.double().norm() for v in sums.values()]).tolist() if sums else []
    return dict(zip(sums, found, strict=True))


def critical(old: float, now: float, threshold: float) -> bool:
    return old == 0 or abs(old - now) / old >= threshold


def rate_dropped(facts: Facts, state: State, factor: float) -> bool:
    """True where the learning rate fell by `factor` or more since the last step: a step decay, not a smooth schedule."""
    last = state.get("lr")
    state["lr"] = torch.tensor(facts.lr, dtype=torch.float64)
    return last is not None and facts.lr * factor <= float(last)
