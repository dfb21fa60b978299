"""Communicator: the object that `gossamer.attach` returns."""

import contextlib
import os
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn

from gossamer.checkpoints import state as checkpoints
from gossamer.core.errors import AttachError, CheckpointError, GossamerError, PeerError
from gossamer.core.schedule import Elastic, TrainsElsewhere
from gossamer.data.parts import Parts
from gossamer.fabrics.ledger import Ledger
from gossamer.fabrics.liveness.notice import Notice, OwnNotice
from gossamer.integrations import consensus
from gossamer.integrations.backward import Backward
from gossamer.integrations.handshake import agree
from gossamer.integrations.joint_consensus import JointConsensus
from gossamer.integrations.metrics import Told
from gossamer.integrations.saving import Saving
from gossamer.integrations.shard_group import ShardGroup
from gossamer.integrations.steps import StepLoop
from gossamer.integrations.weights import Stopwatch, share_out
from gossamer.recipe import Recipe
from gossamer.runtime import Heterogeneity, Sharded, gradients_of, heterogeneity

attached: "WeakSet[nn.Module]" = WeakSet()


class Communicator:
    """Controls an attached run and reports its bytes and state; `gossamer.attach` returns it.

    The training loop does not change. When `backward()` returns, gradients are averaged; when `optimizer.step()` returns,
    parameters are averaged, mixed or pulled, as the recipe says.
    """

    def __init__(self, steps: StepLoop, backward: Backward, besides: Iterable[Any] = ()) -> None:
        self.model, self.optimizers, self.worker, self.fabric = (
            steps.model,
            steps.optimizers,
            steps.worker,
            steps.fabric,
        )
        self._steps, self._backward, self._meter = steps, backward, steps.meter
        self._shares = list[int]()  # samples of each rank that is present, as last planned
        self._shared_among = self.worker.ranks.present  # the ranks of that plan
        self._watch = Stopwatch()
        self._micro = 0  # micro-batches since the last step, under `accumulating`
        self.shows_consensus = False  # the model is not this rank's own now
        self._notice: Notice | OwnNotice | None = None  # inside of `leaving_at`, and after it
        self._notice_seconds = 0.0
        self.saving: Saving | None = None  # the last `checkpoint.save(..., wait=False)`, perhaps still under way
        self._handles = [*steps.install(), *backward.install(), *besides]
        attached.add(self.model)

    @property
    def recipe(self) -> Recipe:
        """The recipe in force; a controller may have changed it since `attach`."""
        return self.worker.recipe

    @property
    def step(self) -> int:
        """Optimizer steps completed. With backup workers it may jump: loop `while comm.step < total`."""
        return self.worker.step - 1

    @property
    def ends_round(self) -> bool:
        """True if the last step ended a round: evaluate or save then. Without rounds, true after every step."""
        return self.recipe.schedule.ends_round(self.step)

    @property
    def rank(self) -> int:
        """Rank of this process in its group, from 0; under `members()` its seat. It stays as long as the process."""
        return self.fabric.rank

    @property
    def size(self) -> int:
        """Number of ranks that train together; 1 without a process group.

        Under `members()` the number of seats, however many are taken: `len(comm.present)` is that of ranks at work.
        """
        return self.fabric.size

    @property
    def is_sharded(self) -> bool:
        """True if FSDP2 shards the model, so that this rank holds a part of each parameter."""
        return any(isinstance(param, Sharded) for param in self.worker.params.values())

    @property
    def present(self) -> tuple[int, ...]:
        """Ranks that take part now, in order; under `members()` ranks may be lost, and may come."""
        return self.worker.ranks.present.ranks

    @property
    def parts(self) -> Parts:
        """Who takes samples now, with which weights: all ranks present, and the shards of each. `gossamer.data.Order` asks it."""
        ranks, replica = self.worker.ranks, self.worker.replica
        present, weighed = ranks.cut_for(self.step)
        held = weighed or (1.0,) * self.size
        weights = held if len(held) == len(present.ranks) else [held[rank] for rank in present.ranks]
        each = tuple(float(weight) for weight in weights for _ in range(replica.size))
        return Parts(each, present.place * replica.size + replica.index)

    @property
    def retries(self) -> int:
        """Steps that were dropped since the members changed, and are taken again: their numbers stay. `gossamer.data.Order` asks it."""
        return self._steps.retries

    @property
    def ledger(self) -> Ledger:
        """All requests that this rank sent over the network, with bytes and seconds."""
        return self.fabric.ledger

    @property
    def dropped(self) -> list[int]:
        """Steps at which this rank's gradient was not used: too late, or dropped when the members changed."""
        return list(self.worker.record.dropped_steps)

    @property
    def dropped_samples(self) -> dict[int, list[Any]]:
        """Samples of the dropped steps, as given to `samples()`: feed them again, or log them."""
        return dict(self.worker.record.dropped_samples)

    @property
    def accepted(self) -> tuple[int, ...]:
        """Ranks whose gradients are in the current or last update; empty if every step waits for all ranks."""
        return self.worker.record.last_accepted

    @property
    def acceptance(self) -> list[float]:
        """Fraction of steps that used each rank's gradient; empty if every step waits for all ranks.

        A rank near zero is always late, and its data are not learned. Give it another shard now and then.
        """
        worker = self.worker
        return (
            [worker.record.accepted[rank] / worker.record.closed_steps for rank in range(self.size)]
            if worker.record.closed_steps
            else []
        )

    @property
    def staleness(self) -> dict[int, int]:
        """Counts of models that this rank received, by their age in steps.

        Under `async_sgd` the age of this rank's updates: steps that the model has moved on when they are added. Empty if
        messages arrive by schedule, and on ranks that only serve others.
        """
        return dict(sorted(self.worker.record.ages.items()))

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

        Under `members()` all plan anew after ranks were lost or have come.

        Where FSDP2 shards the model, each rank of a replica takes the replica's share, and `samples` are those of one rank of each
        replica: it is planned by the slowest of its ranks.

        Checkpoints do not store the share: store it yourself, and resume with `attach(..., weight=share)`.
        """
        self._follow_present()
        if self.size > 1 and seconds is None:
            mine = self._shares[self.worker.rank] if self._shares else 1
            if not self._watch.stop(self.exposed_seconds, self.step, mine) and sum(self._shares) == samples:
                self._watch.start(self.exposed_seconds, self.step)
                return mine
            seconds = self._watch.seconds(self.worker.ranks.weight)
        mine = self._plan(samples, 1.0 if seconds is None else seconds, most)
        self._watch.start(self.exposed_seconds, self.step)
        return mine

    def _plan(self, samples: int, seconds: float, most: int | None) -> int:
        if self.size == 1:
            self._shares = [samples]
            return samples
        while True:
            try:
                program = share_out(self.worker, samples, seconds, most, self._shares)
                self._shares = self.fabric.run(program, "comm.share", self.step)
                return self._shares[self.worker.rank]
            except PeerError as failure:
                self._outlive(failure)
                self._follow_present()

    def _follow_present(self) -> None:
        """Plan shares anew, at equal calls from now on, if ranks were lost or have come since the last plan."""
        if self._shared_among != self.worker.ranks.present:
            self._shared_among, self._shares, self._watch = self.worker.ranks.present, [], Stopwatch()

    @property
    def spoilt(self) -> dict[int, int]:
        """Number of averages that values of a rank made non-finite, by rank, and under gossip of the steps at which its model was
        left out, as far as this rank met it; ranks with none are left out."""
        return self.worker.record.spoilers()

    @property
    def accumulate(self) -> int:
        """Number of micro-batches per step, as of now."""
        return self.recipe.schedule.shape.micro_batches

    def loss(self, loss: Tensor | float) -> None:
        """Pass the loss to the controller only; older form of `log(loss=loss)`."""
        self.worker.loss = loss

    @property
    def progress(self) -> float:
        """Steps so far, counted in steps with one rank's batch: under `adascale` more than `step`."""
        known = self.worker.controller.state.get("progress")
        return float(self.step if known is None else known)

    @property
    def exposed_seconds(self) -> float:
        """Seconds since `attach` that the training loop waited for the network."""
        return self._meter.exposed_seconds

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
        """Declare that this step has no `optimizer.step()`; call it on all ranks. A `scaler` does it by itself.

        Schedules still count the step. Memories are as if its gradients had never been averaged.
        """
        if self.fabric.size > 1:
            self._steps.skip()

    @contextlib.contextmanager
    def consensus(self) -> Generator[None, None, None]:
        """Swap in the consensus model, for evaluation or saving; all ranks enter it together.

        Under synchronous recipes the model is the consensus already, except for `accelerated`, which computes gradients at
        another point. Under local, overlapping and gossip recipes only the average over ranks is.
        """
        if not self._may_differ_from_the_consensus:
            yield
            return
        with self._during("consensus"):
            self._steps.settle_local()
        own, life = consensus.remember(self.model), self.fabric.present.life
        try:
            with self._during("consensus"):
                self._swap_in(own)
            self.shows_consensus = True
            yield
        finally:
            self.shows_consensus = False
            # In another life the others have counted this rank as lost, and it has their model now.
            if self.fabric.present.life == life:
                consensus.restore(self.model, own)

    @contextlib.contextmanager
    def leaving_at(self, seconds: float) -> Generator[None, None, None]:
        """Take SIGTERM and SIGUSR1 as a notice: `stopping` becomes true on all ranks; `seconds` is what the platform gives.

        Under `members()` it becomes true on the rank that was told, once it has left and the others have what it owed.

        For example 120 on spot machines, or what `--signal=USR1@120` says under Slurm. Enter it on all ranks, around the loop:
        `if comm.stopping:` after each step, save and leave the loop. A second signal acts as before, and so do all afterwards.
        A warning says if a save takes longer than the notice.
        """
        if self._notice is not None:
            raise AttachError("comm.leaving_at() was entered before: enter it once, around the whole loop")
        if not seconds > 0:
            raise AttachError(f"comm.leaving_at: seconds must be above 0, got {seconds!r}")
        self._notice, self._notice_seconds = self._watch_for_notice(), seconds
        self._meter.watch(self._notice)
        with self._notice.on_signals():
            yield

    def _watch_for_notice(self) -> Notice | OwnNotice:
        shards, parting = self.worker.replica, self._steps.parting
        if parting is not None:
            parting.refuse_nodes()
            return parting.notice
        if not isinstance(shards, ShardGroup):
            return self.fabric.watch_for_notice()
        return shards.watch_for_notice(self.fabric, self.worker.device, self.step)

    @property
    def stopping(self) -> bool:
        """True after the step after which all ranks stop, since one of them was told to; see `leaving_at`.

        Ask on all ranks after the same steps. While nobody is told it asks nobody. Under `members()` only for this rank.
        """
        if isinstance(self._notice, Notice):
            return self._notice.may_stop(self.step)
        return self._steps.parting is not None and self._steps.parting.is_over

    @property
    def has_left(self) -> bool:
        """True if this rank was told to leave `members()`, and the others have what it owed and go on; see `leaving_at`."""
        return self._steps.parting is not None and self._steps.parting.has_left

    @property
    def members_just_came(self) -> bool:
        """True if ranks have come to `members()` since the last step; they are about to take the next one."""
        regrouping = self._steps.regrouping
        return regrouping is not None and regrouping.came_before == self.worker.step

    def take_part(self) -> None:
        """Take part in the rest of a step of others, where this rank was counted as lost and has just taken their state."""
        self._steps.take_part()

    def took_to_save(self, path: str | os.PathLike[str], seconds: float, is_over: bool) -> None:
        """Note a save for which training stood still, and if it `is_over`, warn where a notice is shorter."""
        self._meter.saved(path, seconds)
        if is_over and self._notice is not None and seconds > self._notice_seconds:
            warnings.warn(
                f"a save took {seconds:.3g} seconds, and a notice of {self._notice_seconds:g} seconds is shorter: a run that is told "
                "to stop would be ended in its save. Save every few minutes besides, or to a faster disk",
                stacklevel=3,
            )

    def finish(self) -> None:
        """End training: set every rank's model to the consensus (an exact average) and detach.

        All ranks call it together, at any point of a round.
        """
        if self._may_differ_from_the_consensus:
            with self._during("finish"):
                self._steps.settle_local()
                self._swap_in(consensus.remember(self.model) if self.fabric.members else {})
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

    def _swap_in(self, own: dict[str, Tensor]) -> None:
        """Write the consensus into the model; if a rank is lost and the others can go on, start again from `own`."""
        if self.fabric.members is None:
            self.fabric.run(consensus.swap_in(self.worker, self._steps.shared))
        else:
            JointConsensus(self._steps, own, self._outlive).swap_in()

    def _outlive(self, failure: PeerError) -> None:
        """Go on with the ranks that are left after a request of this communicator; raises the failure where they cannot."""
        schedule = self.recipe.schedule
        if self.fabric.members is None or not isinstance(schedule, Elastic):
            raise failure
        self.fabric.run(schedule.outlive(self.worker.loop, failure))

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
        self.fabric.run(self.worker.quiesce(), "comm.quiet", self.step)

    def check_sync(self) -> None:
        """Compare hashes of the parameters and buffers that must be equal on all ranks; the error names those that differ."""
        if self.fabric.size > 1:
            self._require_one_step("check_sync")
            with self._during("check_sync"):
                self._steps.settle_local()
                self.fabric.run(consensus.check(self.worker, self.model, self._steps.shared.agreed))

    def _during(self, method: str) -> contextlib.AbstractContextManager[None]:
        """Name the method of this communicator in errors of its requests."""
        return self.fabric.during(f"comm.{method}", self.step)

    def _require_one_step(self, what: str) -> None:
        if apart := self.apart():
            raise AttachError(f"comm.{what}() needs all ranks at the same step, and {apart}")

    def refuse_to_save(self, what: str) -> None:
        """Raise an error if this rank's own model and state cannot be saved now."""
        if apart := self.apart():
            raise CheckpointError(f"{what} needs all ranks at the same step, and {apart}")
        if self.shows_consensus and not self.recipe.is_synced(self.step):
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

    def log(self, *, loss: Told = None, held_out: Told = None) -> None:
        """Log the training loss, or a quality on held-out data, as a number or a tensor of one element.

        It appears in `metrics()`, and `gossamer compare --script` and controllers such as `adacomm` use it. Before
        `optimizer.step()` it belongs to the current step, after it to the step just done; call it once a step, always at the
        same place. Nothing is communicated.
        """
        self._meter.log(loss, held_out)
        if loss is not None:
            self.worker.loss = loss

    def metrics(self) -> dict[str, float]:
        """Return bytes, ratio to dense, waiting time, compression error and residual of this rank since `attach`.

        Nothing is communicated. For a time series pass a function to `attach` as `on_metrics`.
        """
        return self._meter.totals()

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain tensors and scalars; save one per rank, between steps.

        Keys of rank-local entries contain the rank.
        """
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
        self._meter.restart()

    def settle_saving(self) -> None:
        """Wait for a checkpoint that is being written; raise its error where `wait()` has not raised it before."""
        saving, self.saving = self.saving, None
        if saving is not None:
            saving.settle()

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
            self._meter.end()

    def __enter__(self) -> "Communicator":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.detach()
        except GossamerError as failure:
            if error is None:
                raise
            error.add_note(f"Besides, a checkpoint was not saved: {failure}")
