"""Runs a controller: collects its facts, asks for its decision, and applies the next recipe."""

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gossamer.changes import begins_anew, crosses, kind_of
from gossamer.core.bucket import Bucket, State
from gossamer.core.contracts import ARREARS, Controller, Exchange, Facts, ParamGroup, RankTimes
from gossamer.core.errors import GossamerError
from gossamer.core.events import Decision
from gossamer.core.stream_events import read_numbers
from gossamer.core.verbs import Handle, Program, all_reduce, join, start
from gossamer.recipe import Recipe
from gossamer.runtime.buckets import BucketState, are_cut_alike, build, choose_codecs
from gossamer.runtime.optimizers import rate_of
from gossamer.runtime.recipe_changes import describe
from gossamer.runtime.replica import WholeReplica
from gossamer.runtime.step_times import StepTimes
from gossamer.runtime.succession import carry_over, hand_over, replace_parts

if TYPE_CHECKING:
    from gossamer.runtime.worker import Worker


LABEL = "numbers"


class ControllerRunner:
    """Runs the controller of a worker. Without a controller it computes and sends nothing."""

    def __init__(self, worker: "Worker") -> None:
        self._worker = worker
        self.state: State = {}
        self.next: Recipe | None = None  # decided; applied when no average is in flight
        self.times = StepTimes(worker)
        self._own = dict[int, Tensor]()  # statistics of this rank's own gradients, by bucket

    @property
    def due(self) -> Recipe:
        """The recipe that will be in force when no average is in flight."""
        return self.next or self._worker.recipe

    def add_statistics(self, index: int, flat: Tensor) -> None:
        """Compute the statistics of a bucket's gradient before it is sent."""
        controller = self._worker.recipe.controller
        if controller.counts:
            bucket = self._worker.buckets[index]
            self._own[index] = numbers(controller, self._unscaled(flat, bucket), bucket.exchange)

    def drop(self) -> None:
        """Forget the statistics of a step that is dropped."""
        self._own.clear()

    def start_sums(self) -> Program[Handle[Any] | None]:
        """Start summing the statistics over all ranks."""
        if not self._own:
            return None
        own, self._own = [self._own[i] for i in sorted(self._own)], {}
        return (yield from start(_sum(own), LABEL, self._worker.step))

    def wait_sums(self, handle: Handle[Any] | None) -> Program[Sequence[Tensor]]:
        """Wait for the sums; returns them per bucket."""
        return () if handle is None else (yield from join(handle))

    def own_gradients(self) -> list[Tensor]:
        """The gradients of a single rank, which sends nothing, for a controller that may change the optimizer's steps."""
        worker = self._worker
        if not worker.recipe.controller.moves_schedule:
            return []
        return [bucket.gradients() for bucket in worker.buckets]

    def mean_loss(self) -> Program[float | None]:
        """This step's mean loss over the ranks that reported one; None where none did, or the controller does not use it."""
        worker = self._worker
        if not worker.recipe.controller.hears_loss:
            return None
        known = 0.0 if worker.loss is None else worker.loss
        if isinstance(known, Tensor):
            loss = known.detach().to(worker.device, torch.float64).reshape(())
        else:
            loss = torch.full((), known, dtype=torch.float64, device=worker.device)
        told = torch.full_like(loss, float(worker.loss is not None))
        handle = yield from start(_sum([torch.stack([loss, told])]), LABEL, worker.step)
        (sums,) = yield from join(handle)
        total, ranks = read_numbers(sums)
        return total / ranks if ranks else None

    def decide(
        self,
        means: Sequence[Tensor],
        sums: Sequence[Tensor] = (),
        state: State | None = None,
        loss: float | None = None,
        *,
        times: Sequence[RankTimes] = (),
        words: list[str] | None = None,
    ) -> Recipe | None:
        """Ask the controller for the next recipe; its state change may wait in a pending state, and what it says in `words`."""
        worker, controller = self._worker, self._worker.recipe.controller
        if "control" not in controller.traits:
            return None  # before all means are unscaled and copied in vain
        blocks = [self._unscaled(mean, bucket) for mean, bucket in zip(means, worker.buckets)]
        if controller.counts and not sums:  # a single rank: its own gradients are the means
            sums = [numbers(controller, b, bucket.exchange) for b, bucket in zip(blocks, worker.buckets, strict=True)]
        total = None if isinstance(worker.replica, WholeReplica) else worker.replica.total
        facts = Facts(
            step=worker.step,
            lr=max(worker.loop.optimizer.rates),
            blocks=blocks,
            sums=sums,
            loss=loss,
            groups=self._groups,
            over_shards=total,
            times=times,
            size=worker.size,
            shapes={name: param.whole_shape for name, param in worker.params.items()},
            sizes_under=self._sizes_under,
            tell=([] if words is None else words).append,
        )
        return self._other(controller.decide(facts, worker.recipe, self.state if state is None else state))

    def _sizes_under(self, recipe: Recipe) -> list[int]:
        worker = self._worker
        bound = recipe.bound({name: param.whole_shape for name, param in worker.params.items()})
        return [each.layout.numel for each in build(bound, worker.params, worker.rate_groups(), worker.size)]

    def _other(self, decided: Recipe) -> Recipe | None:
        """What a controller decided, for this model; None if it is in force already."""
        worker = self._worker
        if decided is worker.recipe:
            return None
        bound = decided.bound({name: param.whole_shape for name, param in worker.params.items()})
        return bound if bound != worker.recipe else None

    def decide_without_means(self, times: Sequence[RankTimes]) -> None:
        """Ask a controller that hears times after averages that are not finite: it may be the recipe in force that makes them so.

        Its decision stands although the step may be skipped.
        """
        worker = self._worker
        if not worker.recipe.controller.hears_times or worker.size == 1:
            return
        words = list[str]()
        facts = Facts(worker.step, 0.0, (), times=times, finite=False, size=worker.size, tell=words.append)
        self.next = self._other(worker.recipe.controller.decide(facts, worker.recipe, self.state)) or self.next
        self.tell(words)

    def tell(self, words: Sequence[str]) -> None:
        """Tell what was decided for the next step."""
        for text in words:
            self._worker.record.tell(Decision(self._worker.step + 1, self._worker.rank, text))

    def agree(self) -> Program[None]:
        """Before gradients are averaged after rounds of local steps, make what optimizers remember equal on all ranks.

        Each rank's momenta are of its own gradients until then, and equal gradients would move equal models apart.
        """
        worker, after = self._worker, self.next
        if after is None or worker.size == 1 or not after.schedule.shape.averages_gradients:
            return
        if not crosses(worker.recipe.schedule, after.schedule):
            return
        fine = yield from worker.optimizer_state.agree()
        if not fine:
            self.tell([f"the optimizer's state begins anew: ranks had skipped different steps before {after.schedule}"])

    @property
    def may_adopt(self) -> bool:
        """True if the recipe that was decided may come in force: nothing is in flight, and gradients that were owed are paid."""
        worker, after = self._worker, self.next
        if after is None or worker.in_flight.averages:
            return False
        owes = any(ARREARS in bucket.states["memory"] for bucket in worker.buckets)
        return not (owes and crosses(worker.recipe.schedule, after.schedule))

    def adopt(self, recipe: Recipe) -> list[BucketState]:
        """Put another recipe in force; returns the old buckets."""
        worker = self._worker
        old, before, self.next, worker.recipe = worker.buckets, worker.recipe, None, recipe
        if begins_anew(before.schedule, recipe.schedule):
            worker.live.clear()
        worker.record.tell(Decision(worker.step, worker.rank, describe(before, recipe, len(worker.params))))
        if not recipe.controller.cuts:
            choose_codecs(recipe, worker.buckets, worker.size)
        elif _cut(recipe) != _cut(before):  # else all buckets stay as they are
            pieces = hand_over(old, before, recipe, worker.size)
            cut = build(recipe, worker.params, worker.rate_groups(), worker.size)
            if are_cut_alike(old, cut):
                replace_parts(old, cut)
            else:
                worker.buckets = cut
                carry_over(pieces, cut, worker.size)
        return old

    def adopt_for(self, means: list[Tensor] | None) -> list[Tensor] | None:
        """Apply the recipe decided while these means were in flight; returns them in the layout of the new buckets."""
        if self.next is None or self._worker.in_flight.averages:
            return means
        old = self.adopt(self.next)
        if means is None or old is self._worker.buckets:
            return means
        pairs = zip(old, means, strict=True)
        named = {name: view for bucket, mean in pairs for name, view in Bucket(mean, bucket.layout).tensors()}
        return [bucket.gather([named[name] for name in bucket.names]) for bucket in self._worker.buckets]

    def restore(self, recipe: Recipe, due: Recipe, state: State) -> None:
        """Restore a controller's choice and state from a checkpoint."""
        worker, self.state = self._worker, state
        self.next = due if due != recipe else None
        if worker.recipe != recipe:
            worker.recipe = recipe
            worker.buckets = build(recipe, worker.params, worker.rate_groups(), worker.size)

    def _groups(self) -> list[ParamGroup]:
        names = {id(param.parameter): name for name, param in self._worker.params.items()}
        out = list[ParamGroup]()
        for group in self._worker.optimizer.param_groups:
            ours = [names[id(p)] for p in group["params"] if id(p) in names]
            out.append(ParamGroup(rate_of(group), ours, sum(prod(self._worker.params[n].shape) for n in ours)))
        return out

    def _unscaled(self, gradient: Tensor, bucket: BucketState) -> Bucket:
        """A bucket of the gradient divided by the loss scale; as it is, and no copy, for a controller that reads no means."""
        scale = 1.0 if self._worker.recipe.controller.hears_times else self._worker.scale
        return Bucket(gradient / scale if scale != 1 else gradient, bucket.layout)


def _cut(recipe: Recipe) -> tuple[Any, ...]:
    """The parts of a recipe that determine the cut into buckets and each bucket's exchange and memory."""
    ways = recipe.exchange, recipe.memory, recipe.rules, recipe.routes
    return ways, recipe.bucket, recipe.follows_rate, kind_of(recipe.schedule)


def numbers(controller: Controller, block: Bucket, exchange: Exchange) -> Tensor:
    """The controller's statistics of one bucket."""
    own = controller.local(block, exchange).detach().reshape(-1).double()
    wanted = controller.counts * (len(block.layout.segments) if controller.counts_each else 1)
    if own.numel() != wanted:
        raise GossamerError(
            f"{controller} declares {wanted} number(s) for a bucket, and its `local` returned {own.numel()} for {block.name!r}"
        )
    return own


def _sum(rows: list[Tensor]) -> Program[tuple[Tensor, ...]]:
    """Sum statistics over all ranks: one row for each bucket."""
    lengths = [row.numel() for row in rows]
    return tuple((yield from all_reduce(torch.cat(rows))).split(lengths))
