"""The descent: what stands between the agreed gradients and the optimizer's step, the same on every host."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gossamer.core.bucket import Bucket, PendingState
from gossamer.core.contracts import Context
from gossamer.core.verbs import LateUpdate

if TYPE_CHECKING:
    from gossamer.runtime.worker import Worker


class UpdateStep:
    """Puts means where the optimizer looks for them, makes directions of them, and sets the rates that they are taken with."""

    def __init__(self, worker: "Worker") -> None:
        self._worker = worker
        self._rates = dict[Any, list[float]]()  # those of an optimizer that is stepping, as its user set them
        self._drafts = dict[
            int, PendingState
        ]()  # what this step's gradients have changed of updates' states as they left
        self._taken = list[tuple[Tensor, Tensor]]()  # parameters that have moved, and the directions that they took

    def put(self) -> None:
        """The agreed means become the parameters' gradients; where there are none at this step, neither are these."""
        if not self._worker.means:
            for param in self._worker.params.values():
                if param.trains:
                    param.forget_gradient()
            return
        for bucket, mean in zip(self._worker.buckets, self._worker.means, strict=True):
            bucket.put_gradient(mean)

    def outgoing(self, index: int, flat: Tensor, scale: float) -> Tensor:
        """What travels in place of a channel's gradient, which is given away, and is so many times as long as it should be."""
        update, bucket = self._worker.recipe.update, self._worker.buckets[index]
        if update is None:
            return flat
        self._drafts[index] = PendingState(bucket.states["update"])
        return update.sent(Bucket(flat, bucket.layout), self._drafts[index], scale)

    def redirect(self) -> list[PendingState]:
        """What the recipe's update makes of the gradients, clipped and unscaled as they are now, takes their place.

        Returns its state, to be settled if the optimizer takes them.
        """
        update, drafts = self._worker.recipe.update, list[PendingState]()
        if update is None:
            return drafts
        for i, bucket in enumerate(self._worker.buckets):
            flat = bucket.gradients()
            if self._worker.size == 1:  # it has not left, and what would have left is all there is
                flat = self.outgoing(i, flat, 1.0)
            drafts.append(self._drafts.pop(i, None) or PendingState(bucket.states["update"]))
            mean, model = Bucket(flat, bucket.layout), Bucket(bucket.read(), bucket.layout)
            bucket.put_gradient(update.direction(mean, model, drafts[-1], self._context(i)))
        return drafts

    def _context(self, index: int) -> Context:
        schedule, step = self._worker.recipe.schedule, self._worker.step
        return self._worker.context(index)._replace(
            is_compressed=schedule.is_compressed(step), own=not schedule.averages(step)
        )

    def enter(self, optimizer: Any) -> None:
        """The optimizer is about to step: its rates are those of the schedule in force."""
        factor = self._worker.recipe.schedule.lr_factor
        if factor != 1:
            self._rates[optimizer] = [group["lr"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * factor
        update = self._worker.recipe.update
        if update is not None and update.is_step and isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
            self._take(optimizer)

    def _take(self, optimizer: Any) -> None:
        """Make the steps that an adaptive optimizer would divide once more; it leaves parameters without gradients alone."""
        ours = {id(param.parameter) for param in self._worker.params.values()}
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None and id(p) in ours:
                    with torch.no_grad():
                        p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(p.grad * group["lr"])
                    self._taken.append((p, p.grad))
                    p.grad = None

    def leave(self, optimizer: Any) -> None:
        """It has had its turn, and its rates are its user's again."""
        for group, rate in zip(optimizer.param_groups, self._rates.pop(optimizer, [])):
            group["lr"] = rate
        for p, direction in self._taken:
            p.grad = direction
        self._taken.clear()

    def make_up(self, missed: LateUpdate, step: Callable[[], object], before: Callable[[], None] | None = None) -> None:
        """Apply what this rank was too late for, with the rates that were agreed on; `before` is what the user does first."""
        if missed.gradient is None:
            return
        self._worker.set_rates(missed.rates)
        self._worker.buckets[0].put_gradient(missed.gradient)
        if before is not None:
            before()
        drafts = self.redirect()
        step()
        for draft in drafts:
            draft.commit()
