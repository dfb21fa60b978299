"""Critical regimes: when the accumulated gradient changes fast, training is fragile."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from gossamer.core.bucket import Bucket, State
from gossamer.core.contracts import Facts


class EpochMonitor:
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
        late = self._close(state, ()) if begun is not None and int(begun) != epoch else None
        if epoch % self.interval:
            return late
        if position == self.epoch - 1:
            return self._close(state, facts.blocks)
        for name, total in totals(state, facts.blocks):
            state[f"delta:{name}"] = total
        state["epoch"] = torch.tensor(epoch)
        return late

    def _close(self, state: State, last: Sequence[Bucket]) -> dict[str, bool] | None:
        """The verdict on the sums, with the `last` gradients added; one after the other, since there is no room for all."""
        verdict = dict[str, bool]()
        for name, norm in norms(totals(state, last)).items():
            old = state.get(f"old:{name}")
            state[f"old:{name}"] = torch.tensor(norm, dtype=torch.float64)
            if old is not None:
                verdict[name] = critical(float(old), norm, self.threshold)
        for key in [k for k in state if k.startswith("delta:") or k == "epoch"]:
            del state[key]
        return verdict or None


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


def critical(old: float, now: float, threshold: float) -> bool:
    return old == 0 or abs(old - now) / old >= threshold


def rate_dropped(facts: Facts, state: State, factor: float) -> bool:
    """True where the learning rate fell by `factor` or more since the last step: a step decay, not a smooth schedule."""
    last = state.get("lr")
    state["lr"] = torch.tensor(facts.lr, dtype=torch.float64)
    return last is not None and facts.lr * factor <= float(last)
