"""The descent: what stands between the agreed gradients and the optimizer's step, the same on every host."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gossamer.core.block import Block, Draft
from gossamer.core.verbs import Missed

if TYPE_CHECKING:
    from gossamer.worker.worker import Worker


class Descent:
    """Puts means where the optimizer looks for them, makes directions of them, and sets the rates that they are taken with."""

    def __init__(self, worker: "Worker") -> None:
        self._worker = worker
        self._rates = dict[Any, list[float]]()  # those of an optimizer that is stepping, as its user set them

    def put(self) -> None:
        """The agreed means become the parameters' gradients."""
        for channel, mean in zip(self._worker.channels, self._worker.means, strict=True):
            channel.put_gradient(mean)

    def redirect(self) -> list[Draft]:
        """What the recipe's update makes of the gradients, clipped and unscaled as they are now, takes their place.

        Returns its state, to be settled if the optimizer takes them.
        """
        update, drafts = self._worker.recipe.update, list[Draft]()
        if update is None:
            return drafts
        for i, channel in enumerate(self._worker.channels):
            drafts.append(Draft(channel.states["update"]))
            mean, model = Block(channel.gradients(), channel.layout), Block(channel.read(), channel.layout)
            channel.put_gradient(update.direction(mean, model, drafts[-1], self._worker.context(i)))
        return drafts

    def enter(self, optimizer: Any) -> None:
        """The optimizer is about to step: its rates are those of the schedule in force."""
        factor = self._worker.recipe.schedule.lr_factor
        if factor == 1:
            return
        self._rates[optimizer] = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * factor

    def leave(self, optimizer: Any) -> None:
        """It has had its turn, and its rates are its user's again."""
        for group, rate in zip(optimizer.param_groups, self._rates.pop(optimizer, [])):
            group["lr"] = rate

    def make_up(self, missed: Missed, step: Callable[[], object], before: Callable[[], None] | None = None) -> None:
        """Apply what this rank was too late for, with the rates that were agreed on; `before` is what the user does first."""
        if missed.gradient is None:
            return
        self._worker.set_rates(missed.rates)
        self._worker.channels[0].put_gradient(missed.gradient)
        if before is not None:
            before()
        drafts = self.redirect()
        step()
        for draft in drafts:
            draft.commit()
