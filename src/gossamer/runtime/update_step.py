"""The update step: from the agreed gradients to the optimizer step, the same in every integration."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gossamer.core.bucket import Bucket, PendingState
from gossamer.core.contracts import Context
from gossamer.core.schedule import CompressesSome
from gossamer.core.verbs import LateUpdate

if TYPE_CHECKING:
    from gossamer.runtime.worker import Worker


class UpdateStep:
    """Sets the parameters' gradients to the means, applies the recipe's update, and sets the learning rates of the step."""

    def __init__(self, worker: "Worker") -> None:
        self._worker = worker
        # Of an optimizer that is stepping: the user's rates, and those of the schedule.
        self._rates = dict[Any, list[tuple[float, float]]]()
        self._drafts = dict[int, PendingState]()  # pending states of updates, from sending this step's gradients
        self._taken = list[tuple[Tensor, Tensor]]()  # parameters that were moved, and their directions
        self.unused = set[str]()  # parameters that no rank has used, though a momentum came for them

    def put(self) -> None:
        """Set the parameters' gradients to the agreed means; to None where this step has none."""
        if not self._worker.averaging.means:
            for param in self._worker.params.values():
                if param.trains:
                    param.forget_gradient()
            return
        for bucket, mean in zip(self._worker.buckets, self._worker.averaging.means, strict=True):
            bucket.put_gradient(mean)

    def outgoing(self, index: int, flat: Tensor, scale: float) -> Tensor:
        """The tensor to send in place of a bucket's gradient, which may be overwritten and is multiplied by `scale`."""
        update, bucket = self._worker.recipe.update, self._worker.buckets[index]
        if update is None:
            return flat
        self._drafts[index] = PendingState(bucket.states["update"])
        return update.sent(Bucket(flat, bucket.layout), self._drafts[index], scale)

    def drop(self) -> None:
        """Forget what was sent for a step that is dropped."""
        self._drafts.clear()

    def redirect(self) -> list[PendingState]:
        """Replace the gradients, after unscaling and clipping, with the directions of the recipe's update.

        As in all of torch, a parameter without a gradient takes no step, nor weight decay; momenta take it for zeros. But what a
        rank's own steps came to is summed for all parameters. Returns the update's pending states, to commit if the optimizer steps.
        """
        update, drafts = self._worker.recipe.update, list[PendingState]()
        if update is None:
            return drafts
        unused, self.unused, averages = self.unused, set(), self._worker.recipe.schedule.averages(self._worker.step)
        for i, bucket in enumerate(self._worker.buckets):
            pairs = zip(bucket.names, bucket.params) if averages else ()
            rest = [param for name, param in pairs if name in unused or param.parameter.grad is None]
            flat = bucket.gradients()
            if self._worker.size == 1:  # a single rank sends nothing, so its outgoing tensor is the mean
                flat = self.outgoing(i, flat, 1.0)
            drafts.append(self._drafts.pop(i, None) or PendingState(bucket.states["update"]))
            mean, model = Bucket(flat, bucket.layout), Bucket(bucket.read(), bucket.layout)
            with without_autocast(self._worker.device):  # inside of which a loop may step
                direction = update.direction(mean, model, drafts[-1], self._context(i))
            bucket.put_gradient(direction)
            for param in rest:
                param.forget_gradient()
        return drafts

    def _context(self, index: int) -> Context:
        schedule, step = self._worker.recipe.schedule, self._worker.step
        compressed = isinstance(schedule, CompressesSome) and schedule.is_compressed(step)
        return self._worker.context(index)._replace(is_compressed=compressed, own=not schedule.averages(step))

    def enter(self, optimizer: Any) -> None:
        """Set the optimizer's rates to those of the schedule, before its step."""
        self._give_back(optimizer)
        factor = self._worker.recipe.schedule.shape.lr_factor
        if factor != 1:
            self._rates[optimizer] = [(group["lr"], group["lr"] * factor) for group in optimizer.param_groups]
            for group, (_, raised) in zip(optimizer.param_groups, self._rates[optimizer]):
                group["lr"] = raised
        update = self._worker.recipe.update
        if update is not None and update.is_step and isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
            self._take(optimizer)

    def _take(self, optimizer: Any) -> None:
        """Apply whole steps that an adaptive optimizer would rescale again, and clear the gradients so that it skips them."""
        ours = {id(param.parameter) for param in self._worker.params.values()}
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None and id(p) in ours:
                    with torch.no_grad():
                        p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(p.grad * group["lr"])
                    self._taken.append((p, p.grad))
                    p.grad = None

    def leave(self, optimizer: Any) -> None:
        """Restore the user's rates after the optimizer step."""
        for group, (users, _) in zip(optimizer.param_groups, self._rates.pop(optimizer, [])):
            group["lr"] = users
        for p, direction in self._taken:
            p.grad = direction
        self._taken.clear()

    def remove(self) -> None:
        """Give all optimizers the user's rates back."""
        for optimizer in [*self._rates]:
            self._give_back(optimizer)

    def _give_back(self, optimizer: Any) -> None:
        """Restore the rates of a step that ended in an error, unless the user has set others since."""
        for group, (users, raised) in zip(optimizer.param_groups, self._rates.pop(optimizer, [])):
            if group["lr"] is raised:
                group["lr"] = users

    def make_up(self, missed: LateUpdate, step: Callable[[], object], before: Callable[[], None] | None = None) -> None:
        """Apply an update that this rank missed, with the agreed rates; `before` is what the user does before a step."""
        if missed.gradient is None:
            return
        self._worker.set_rates(missed.rates)
        self._worker.decay.take_out([missed.gradient])
        self._worker.buckets[0].put_gradient(missed.gradient)
        if before is not None:
            before()
        drafts = self.redirect()
        step()
        for draft in drafts:
            draft.commit()


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    known = torch.amp.is_autocast_available(device.type)  # of "meta", on which models are only counted, it is not
    return torch.autocast(device.type, enabled=False) if known else nullcontext()
