"""Communicator: the object that `gossamer.attach` returns."""

import contextlib
import os
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn

from gossamer.checkpoints import state as checkpoints
from gossamer.core.errors import AttachError, CheckpointError, GossamerError
from gossamer.core.schedule import TrainsElsewhere
from gossamer.core.verbs import MembersChanged
from gossamer.integrations import consensus
from gossamer.integrations.backward import Backward
from gossamer.integrations.checks.wrappers import uncompiled
from gossamer.integrations.handshake import agree
from gossamer.integrations.joint_consensus import JointConsensus
from gossamer.integrations.metrics import Told, kept
from gossamer.integrations.parting import StopNotice
from gossamer.integrations.run_facts import RunFacts
from gossamer.integrations.saving import Saving
from gossamer.integrations.steps import StepLoop
from gossamer.integrations.weights import Shares
from gossamer.runtime import Heterogeneity, gradients_of, heterogeneity

attached: "WeakSet[nn.Module]" = WeakSet()


def is_attached(model: nn.Module) -> bool:
    """True also if another torch.compile of the model is attached."""
    return any(uncompiled(each) is uncompiled(model) for each in attached)


class Communicator(RunFacts):
    """Controls an attached run; `gossamer.attach` returns it.

    The training loop does not change. When `backward()` returns, gradients are averaged; when `optimizer.step()` returns,
    parameters are averaged, mixed or pulled, as the recipe says.
    """

    def __init__(self, steps: StepLoop, backward: Backward, besides: Iterable[Any] = ()) -> None:
        super().__init__(steps.worker, steps.fabric, steps.meter)
        self.model, self.optimizers = steps.model, steps.optimizers
        self._steps, self._backward = steps, backward
        self._shares = Shares(self.worker, self.fabric, lambda: steps.members_just_came)
        self._notice = StopNotice(steps)
        self._micro = 0  # micro-batches since the last step, under `accumulating`
        self.shows_consensus = False  # the model is not this rank's own now
        # That was loaded, or begun to be saved among members(), and its step.
        self._last_checkpoint: tuple[Path, int] | None = None
        self.saving: Saving | None = None  # the last `checkpoint.save(..., wait=False)`, perhaps still under way
        self._handles = [*steps.install(), *backward.install(), *besides]
        attached.add(self.model)

    @property
    def retries(self) -> int:
        """Steps that were dropped since the members changed, and are taken again: their numbers stay. `gossamer.data.Order` asks it."""
        return self._steps.retries

    def samples(self, *batch: Any) -> None:
        """Name the samples of this step's gradient, by indices or any other values.

        If the gradient is too late, they are in `dropped_samples[step]` when `on_late(step)` is called, and in the ledger.
        """
        self.worker.record.samples += batch

    def share(self, samples: int, seconds: float | None = None, most: int | None = None) -> int:
        """Return how many of a step's `samples` this rank should take, so that all ranks finish at the same time.

        All ranks call it together, before every step. The time between calls is measured, without the time spent waiting
        for other ranks. Ranks plan new shares after 3, 8, 16, 32, 64 steps and then every 64; shares stay if a new plan
        would save less than a tenth of the step time. If you know how many `seconds` one sample takes, give them on all
        ranks: each call then plans.

        From then on every mean weighs a rank by its share, as `attach(weight=)` does, so that training equals training on
        all samples in one batch. `most` is the largest share that fits into this rank's memory. Let ranks draw from one
        pool of data, or from shards in proportion to their shares: `gossamer.data.Order` cuts its batches by them.

        Under `members()` all plan anew after ranks were lost or have come; before the first step with one that has come, all take
        equal parts.

        Where FSDP2 shards the model, each rank of a replica takes the replica's share, and `samples` are those of one rank of each
        replica: it is planned by the slowest of its ranks.

        Checkpoints do not store the share: store it yourself, and resume with `attach(..., weight=share)`.
        """
        return self._shares.mine(samples, seconds, most)

    @property
    def before_step(self) -> Callable[[], None] | None:
        """Function called before every optimizer step and every missed update; may be set at any time."""
        return self._steps.before_step

    @before_step.setter
    def before_step(self, call: Callable[[], None] | None) -> None:
        self._steps.before_step = call

    @contextlib.contextmanager
    def no_sync(self) -> Generator[None, None, None]:
        """Accumulate gradients without sending them; the first backward outside sends the sum.

        For trainers that call `model.no_sync()`: set `model.no_sync = comm.no_sync`.
        """
        before, self._backward.syncing = self._backward.syncing, False
        try:
            yield
        finally:
            self._backward.syncing = before

    @contextlib.contextmanager
    def accumulating(self) -> Generator[bool, None, None]:
        """Wrap one micro-batch; yield True for the last of `accumulate`, after which to step.

        Divide the loss by `comm.accumulate`.
        """
        last = self._micro + 1 >= self.accumulate
        with contextlib.nullcontext() if last else self.no_sync():
            yield last
        self._micro = 0 if last else self._micro + 1

    def skip(self) -> None:
        """Declare that this step has no `optimizer.step()`, or no more of them; call it on all ranks. A `scaler` does it by itself.

        Schedules still count the step. Without any, memories are as if its gradients had never been averaged.
        """
        self._micro = 0  # its micro-batches are none of the next step
        if self.fabric.size > 1:
            self._steps.skip()

    def quiet(self) -> None:
        """Wait for messages in flight, before you run collectives of your own; training results do not change.

        Two NCCL communicators that are used at the same time, in different orders on different ranks, can deadlock. A recipe
        with nothing in flight between steps has nothing to wait for.
        """
        if "waits for few" in self.recipe.schedule.traits and self.fabric.size > 1:
            raise AttachError(
                f"comm.quiet() under {self.recipe}: the comm thread is never idle, since a late rank's update may arrive at any "
                "time; use a gloo process group for collectives of your own, torch.distributed.new_group(backend='gloo')"
            )
        self._among_those_left(lambda: self.fabric.run(self.worker.quiesce(), "comm.quiet", self.step))

    def _among_those_left(self, call: Callable[[], Any]) -> Any:
        """Call it; where a rank is lost meanwhile, once more among those who are left."""
        while True:
            try:
                return call()
            except MembersChanged:
                self.take_part()

    def log(self, *, loss: Told = None, held_out: Told = None) -> None:
        """Log the training loss, or a quality on held-out data, as a number or a tensor of one element.

        It appears in `metrics()`, and `gossamer compare --script` and controllers such as `adacomm` use it: there less is better,
        so of an accuracy log 1 minus it. Before `optimizer.step()` it belongs to the current step, after it to the step just
        done; call it once a step, always at the same place. Nothing is communicated.
        """
        self.meter.log(loss, held_out)

    def loss(self, loss: Tensor | float) -> None:
        """Pass the loss to the controller only; older form of `log(loss=loss)`."""
        self.worker.loss = kept(loss)

    # -- the consensus -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def consensus(self) -> Generator[None, None, None]:
        """Swap in the consensus model, for evaluation or saving; all ranks enter it together.

        Under synchronous recipes the model is the consensus already, except for `accelerated`, which computes gradients at
        another point. Under local, overlapping and gossip recipes only the average over ranks is.

        Inside of another one, such as that of a trainer, it changes nothing: the consensus is there already. Under `members()` it
        changes nothing either, with a RuntimeWarning, where a rank has come since the last step, and so is not here.
        """
        if self.shows_consensus or not self._may_differ_from_the_consensus:
            yield
            return
        with self._during("consensus"):
            self._steps.settle_local()
        own, life = consensus.remember(self.model), self.fabric.present.life
        try:
            with self._during("consensus"):
                self.shows_consensus = self._swap_in(own)
            if not self.shows_consensus:
                self._warn_of_newcomers("the model is this rank's own")
            yield
        finally:
            self.shows_consensus = False
            # In another life the others have counted this rank as lost, and it has their model now.
            if self.fabric.present.life == life:
                consensus.restore(self.model, own)

    def finish(self) -> None:
        """End training: set every rank's model to the consensus (an exact average) and detach.

        All ranks call it together, at any point of a round.
        """
        if self._may_differ_from_the_consensus:
            with self._during("finish"):
                self._steps.settle_local()
                self._swap_in(consensus.remember(self.model) if self.fabric.members else {}, ends=True)
        self.detach()

    @property
    def _may_differ_from_the_consensus(self) -> bool:
        """True if the model may differ from the consensus; also with one rank, if a schedule trains another model."""
        if self.has_left:  # its model was the consensus when it left
            return False
        schedule = self.recipe.schedule
        return (
            self.size > 1
            or isinstance(schedule, TrainsElsewhere)
            or (schedule.shape.works_alone and not schedule.shape.averages_gradients)
        )

    def _holds_the_consensus(self) -> bool:
        """True if this rank's own model is the consensus, where all ranks hold equal models. Nothing may be in flight.

        It is not where a schedule computes gradients at another point than that which is evaluated, such as a look-ahead.
        """
        if not self._may_differ_from_the_consensus:
            return True
        if isinstance(self.recipe.schedule, TrainsElsewhere):
            return False
        return consensus.is_held(self.worker)

    def _swap_in(self, own: dict[str, Tensor], ends: bool = False) -> bool:
        """Write the consensus into the model; if a rank is lost and the others can go on, start again from `own`.

        False, with `own`, if a rank has come and is not here; in the end (`ends`) it comes here too.
        """
        if self.fabric.members is not None:
            return JointConsensus(self._steps, own).swap_in(ends)
        self.fabric.run(consensus.swap_in(self.worker, self._steps.shared))
        return True

    def _warn_of_newcomers(self, so: str) -> None:
        said = f"rank {self.rank}, step {self.step}: a rank has come since the last step, and is not here: {so}"
        warnings.warn(said, RuntimeWarning, stacklevel=4)

    def heterogeneity(self, losses: Iterable[Tensor]) -> Heterogeneity:
        """Measure how much the ranks' gradients differ at the consensus model; all ranks call it together, between steps.

        `losses` are the losses of at least two micro-batches, the same number on each rank, best computed one by one:
        `comm.heterogeneity(loss_of(model, batch) for batch in batches)`. Neither model nor training changes.
        """
        self._require_one_step("heterogeneity")
        if self.is_sharded:
            raise AttachError(
                "comm.heterogeneity() compares whole gradients, and FSDP2 shards this model: measure it on a whole one"
            )
        parameters = [param.parameter for param in self.worker.params.values()]
        with self._during("heterogeneity"), self.consensus():
            return self.fabric.run(heterogeneity(gradients_of(losses, parameters), self.worker.size))

    def check_sync(self) -> None:
        """Compare hashes of the parameters and buffers that must be equal on all ranks; the error names those that differ.

        Under `members()` by those who are there, and not, with a RuntimeWarning, where a rank has come since the last step.
        """
        if self.fabric.size > 1:
            self._require_one_step("check_sync")
            with self._during("check_sync"):
                self._steps.settle_local()
                while not self.members_just_came:
                    try:
                        self.fabric.run(consensus.check(self.worker, self.model, self._steps.shared.agreed))
                    except MembersChanged:
                        self.take_part()
                    else:
                        return
            self._warn_of_newcomers("ranks are not compared")

    # -- leaving -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def leaving_at(self, seconds: float) -> Generator[None, None, None]:
        """Take SIGTERM and SIGUSR1 as a notice: `stopping` becomes true on all ranks; `seconds` is what the platform gives.

        Under `members()` it becomes true on the rank that was told, once it has left and the others have what it owed.

        For example 120 on spot machines, or what `--signal=USR1@120` says under Slurm. Enter it on all ranks, around the loop:
        `if comm.stopping:` after each step, save and leave the loop. A second signal acts as before, and so do all afterwards.
        A warning says if a save takes longer than the notice.
        """
        with self._notice.taken(seconds):
            yield

    @property
    def stopping(self) -> bool:
        """True after the step after which all ranks stop, since one of them was told to; see `leaving_at`.

        Ask on all ranks after the same steps. While nobody is told it asks nobody. Under `members()` only for this rank.
        """
        return self._notice.is_over

    @property
    def has_left(self) -> bool:
        """True if this rank was told to leave `members()`, and the others have what it owed and go on; see `leaving_at`."""
        return self._steps.parting is not None and self._steps.parting.has_left

    @property
    def members_just_came(self) -> bool:
        """True if ranks have come to `members()` since the last step; they are about to take the next one."""
        return self._steps.members_just_came

    def take_part(self) -> None:
        """Take part in the rest of a step of others, where this rank was counted as lost and has just taken their state."""
        self._steps.take_part()

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain tensors and scalars; save one per rank, between steps.

        Keys of rank-local entries contain the rank. Under `members()` it is the state among those who are left.
        """
        return self._among_those_left(self._state_to_save)

    def _state_to_save(self) -> dict[str, Any]:
        """The same within a save, which begins anew as a whole where a rank is lost meanwhile: raises MembersChanged."""
        with self._during("state_dict"):
            self._steps.settle_skipped()
            self.fabric.run(self.worker.quiesce())
            state = checkpoints.save(self.worker)
            self.fabric.run(self.worker.quiesce())  # a rank that goes on sends requests: wait until all have saved
            return state

    def load_state_dict(self, saved: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Load a `state_dict`; after a change of world size, give the dictionaries of all old ranks.

        All ranks load together; if one rank cannot load, all raise an error. Attach first, then load the model, the
        optimizer and this: attaching makes all models equal to rank 0's.
        """
        if self.worker.live and self.recipe.schedule.shape.lane:
            raise CheckpointError(
                f"under {self.recipe} a checkpoint can be loaded only before the first step: the comm threads of other ranks wait "
                "for the current step; detach, attach again, then load"
            )
        put, error = None, None
        try:
            put = checkpoints.prepare(self.worker, saved)
        except GossamerError as refused:
            error = refused
        if self.fabric.size > 1:
            self.fabric.run(agree(error, self.worker.device), "comm.load_state_dict", self.step)
        if put is None:
            assert error is not None
            raise error
        put()
        self._micro = 0
        self._steps.forget()
        self._backward.rebuild()
        self.meter.restart()

    def refuse_to_save(self, what: str) -> None:
        """Raise an error if this rank's own model and state cannot be saved now."""
        if apart := self.apart():
            raise CheckpointError(f"{what} needs all ranks at the same step, and {apart}")
        elsewhere = isinstance(self.recipe.schedule, TrainsElsewhere)  # equal models, but not the one that is judged
        if self.shows_consensus and (
            elsewhere or not self.recipe.is_synced(self.step) or not consensus.is_held(self.worker)
        ):
            raise CheckpointError(
                f"{what} inside `with comm.consensus():` would save the consensus as this rank's own model: call it outside; it stores "
                "the consensus besides"
            )

    def apart(self) -> str:
        """Return why ranks may be at different steps now, so that waiting for all of them would hang; "" if they are not."""
        if self.size == 1 or self.ends_round or not self.recipe.schedule.shape.skips_steps:
            return ""
        return (
            f"rank {self.rank} is at step {self.step}, within a round of {self.recipe.schedule}, in which ranks step at their own "
            "pace: call it when a round has ended, `if comm.ends_round:`"
        )

    def took_to_save(self, path: str | os.PathLike[str], seconds: float, is_over: bool) -> None:
        """Note a save for which training stood still, and if it `is_over`, warn where a notice is shorter."""
        self.meter.saved(path, seconds)
        if is_over:
            self._notice.warn_if_shorter_than(seconds)

    def settle_saving(self) -> None:
        """Wait for a checkpoint that is being written; raise its error where `wait()` has not raised it before."""
        saving, self.saving = self.saving, None
        if saving is not None:
            saving.settle()

    # -- the end -----------------------------------------------------------------------------------------------------

    def detach(self) -> None:
        """Remove all hooks and end the comm threads; the model can train on without gossamer.

        A checkpoint that is being written is waited for; its error is raised when all else is done.
        """
        try:
            self.settle_saving()
        finally:
            for handle in self._handles:
                handle.remove()
            self._handles.clear()
            attached.discard(self.model)
            self.fabric.close()
            self.meter.end()

    def __enter__(self) -> "Communicator":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.detach()
        except GossamerError as failure:
            if error is None:
                raise
            error.add_note(f"Besides, a checkpoint was not saved: {failure}")

    def __deepcopy__(self, memo: dict[int, Any]) -> "Communicator":
        """A copy of the model holds this one where its `no_sync` is ours: the copy is not attached, so that does nothing to it."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """What is left of it in a file of the whole model: a `no_sync` that does nothing."""
        return partial(SimpleNamespace, no_sync=contextlib.nullcontext), ()

    def _during(self, method: str) -> contextlib.AbstractContextManager[None]:
        """Name the method of this communicator in errors of its requests."""
        return self.fabric.during(f"comm.{method}", self.step)

    def _require_one_step(self, what: str) -> None:
        if apart := self.apart():
            raise AttachError(f"comm.{what}() needs all ranks at the same step, and {apart}")
