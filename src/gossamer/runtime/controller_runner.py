"""Steering: what a controller is told, what it decides, and how that comes into force."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gossamer.core.bucket import Bucket, PendingState, State
from gossamer.core.contracts import Facts
from gossamer.core.stream_events import read_numbers
from gossamer.core.verbs import Handle, Program, join
from gossamer.recipe import Recipe
from gossamer.runtime.buckets import BucketState, are_cut_alike, build, retell
from gossamer.runtime.checkpoint import carry_over, turn
from gossamer.runtime.controller_stats import numbers, summed
from gossamer.runtime.recipe_changes import describe

if TYPE_CHECKING:
    from gossamer.runtime.worker import Worker


class ControllerRunner:
    """The controller's side of a worker. Without a controller nothing is computed for one, and nothing is sent."""

    def __init__(self, worker: "Worker") -> None:
        self._worker = worker
        self.state: State = {}
        self.next: Recipe | None = None  # decided, and in force when nothing is in flight any more
        self._own = dict[int, Tensor]()  # numbers of this rank's own gradients, by channel

    @property
    def due(self) -> Recipe:
        """The recipe that will be in force when nothing is in flight any more."""
        return self.next or self._worker.recipe

    def note(self, index: int, flat: Tensor) -> None:
        """A channel's gradient is about to leave."""
        controller = self._worker.recipe.controller
        if controller.counts:
            bucket = self._worker.buckets[index]
            self._own[index] = numbers(controller, self._unscaled(flat, bucket), bucket.exchange)

    def ask(self) -> Program[Handle[Any] | None]:
        """Start summing what was noted, over all ranks."""
        if not self._own:
            return None
        own, self._own = [self._own[i] for i in sorted(self._own)], {}
        return (yield summed(own, self._worker.step))

    def told(self, handle: Handle[Any] | None) -> Program[Sequence[Tensor]]:
        """The sums, for each channel."""
        return () if handle is None else (yield from join(handle))

    def look_alone(self) -> list[Tensor]:
        """A host alone sends nothing; who may change the optimizer's steps must see the gradients all the same."""
        worker = self._worker
        if not worker.recipe.controller.moves_schedule:
            return []
        return [c.gradients() for c in worker.buckets]

    def mean_loss(self) -> Program[float | None]:
        """Of this step's batches, over all ranks that told theirs; None where nobody did, or nobody wants to know."""
        worker = self._worker
        if not worker.recipe.controller.hears_loss:
            return None
        known = 0.0 if worker.loss is None else worker.loss
        if isinstance(known, Tensor):
            loss = known.detach().to(worker.device, torch.float64).reshape(())
        else:
            loss = torch.full((), known, dtype=torch.float64, device=worker.device)
        told = torch.full_like(loss, float(worker.loss is not None))
        (sums,) = yield from join((yield summed([torch.stack([loss, told])], worker.step)))
        total, ranks = read_numbers(sums)
        return total / ranks if ranks else None

    def decide(
        self,
        means: Sequence[Tensor],
        sums: Sequence[Tensor] = (),
        state: State | None = None,
        loss: float | None = None,
    ) -> Recipe | None:
        """The controller's next recipe, where it is another one; its own state may wait in a draft."""
        worker, controller = self._worker, self._worker.recipe.controller
        if "control" not in controller.traits:
            return None  # before all means are copied, free of the loss scale, for nobody
        blocks = [self._unscaled(mean, c) for mean, c in zip(means, worker.buckets)]
        if controller.counts and not sums:  # a rank alone: its own gradients are the means
            sums = [numbers(controller, b, c.exchange) for b, c in zip(blocks, worker.buckets, strict=True)]
        facts = Facts(worker.step, max(worker.rates), blocks, sums, loss)
        decided = controller.decide(facts, worker.recipe, self.state if state is None else state)
        return decided if decided != worker.recipe else None

    def draft(self) -> PendingState:
        return PendingState(self.state)

    def adopt(self, recipe: Recipe) -> list[BucketState]:
        """Put another recipe in force; returns the channels there were."""
        worker = self._worker
        old, before, self.next, worker.recipe = worker.buckets, worker.recipe, None, recipe
        if worker.on_decision is not None:
            worker.on_decision(worker.step, worker.rank, describe(before, recipe, len(worker.params)))
        if not recipe.controller.cuts:
            retell(recipe, worker.buckets, worker.size)
        elif (recipe.exchange, recipe.routes) != (before.exchange, before.routes):  # else all go on as they went
            cut = build(recipe, worker.params, worker.rate_groups(), worker.size)
            if are_cut_alike(old, cut):
                turn(old, cut, worker.size)
            else:
                worker.buckets = cut
                carry_over(old, cut, worker.size)
        return old

    def adopt_for(self, means: list[Tensor] | None) -> list[Tensor] | None:
        """Put in force what was decided while these were under way; returns them as the new channels are laid out."""
        if self.next is None or self._worker.flights.averages:
            return means
        old = self.adopt(self.next)
        if means is None or old is self._worker.buckets:
            return means
        pairs = zip(old, means, strict=True)
        named = {name: view for c, mean in pairs for name, view in Bucket(mean, c.layout).tensors()}
        return [c.gather([named[s.name] for s in c.layout.segments]) for c in self._worker.buckets]

    def restore(self, recipe: Recipe, due: Recipe, state: State) -> None:
        """A controller's choice, from a checkpoint."""
        worker, self.state = self._worker, state
        self.next = due if due != recipe else None
        if worker.recipe != recipe:
            worker.recipe = recipe
            worker.buckets = build(recipe, worker.params, worker.rate_groups(), worker.size)

    def _unscaled(self, gradient: Tensor, bucket: BucketState) -> Bucket:
        """Free of the loss scale."""
        scale = self._worker.scale
        return Bucket(gradient / scale if scale != 1 else gradient, bucket.layout)
