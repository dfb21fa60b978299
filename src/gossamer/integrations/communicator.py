"""The communicator: what a user holds of a run that was attached."""

import contextlib
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn

from gossamer.core.errors import AttachError, CheckpointError, GossamerError, PeerError
from gossamer.fabrics.ledger import Ledger
from gossamer.integrations import consensus
from gossamer.integrations.backward import Backward
from gossamer.integrations.handshake import agree
from gossamer.integrations.load_balance import Stopwatch, share_out
from gossamer.integrations.metrics import Told
from gossamer.integrations.steps import StepLoop
from gossamer.recipe import Recipe
from gossamer.runtime import Heterogeneity, checkpoint, gradients_of, heterogeneity

attached: "WeakSet[nn.Module]" = WeakSet()


class Communicator:
    """What `gossamer.attach` returns: the run's controls, its bytes, and its state.

    The training loop does not change. Gradients are averaged when `backward()` returns; parameters are averaged, mixed or
    pulled when `optimizer.step()` returns, as the recipe says.
    """

    def __init__(self, steps: StepLoop, backward: Backward, besides: Iterable[Any] = ()) -> None:
        self.model, self.optimizers, self.worker, self.fabric = (
            steps.model,
            steps.optimizers,
            steps.worker,
            steps.fabric,
        )
        self._steps, self._backward, self._meter = steps, backward, steps.meter
        self._shares = list[int]()  # of samples, by rank, when they were last shared out
        self._watch = Stopwatch()
        self._micro = 0  # micro-batches since the last step, under `accumulating`
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
        """Whether the last step ended a round: the time to judge, or to keep, the models. Without rounds every step does."""
        return self.recipe.schedule.ends_round(self.step)

    @property
    def rank(self) -> int:
        """This process's number in the group it was attached with, from 0."""
        return self.fabric.rank

    @property
    def size(self) -> int:
        """How many ranks train together; 1 where there is no process group."""
        return self.fabric.size

    @property
    def present(self) -> tuple[int, ...]:
        """Which ranks are there; under `members()` some may be lost, and come back."""
        return self.worker.present.ranks

    @property
    def ledger(self) -> Ledger:
        """Every request of this rank that crossed the network, with its bytes and seconds."""
        return self.fabric.ledger

    @property
    def dropped(self) -> list[int]:
        """Steps whose gradient came too late on this rank and was not used."""
        return list(self.worker.dropped)

    @property
    def dropped_samples(self) -> dict[int, list[Any]]:
        """Of those steps, what was told to `samples`: what to feed again, or to write down."""
        return dict(self.worker.dropped_samples)

    @property
    def accepted(self) -> tuple[int, ...]:
        """Whose gradients the update under way, or the last one, is made of; empty where all are waited for."""
        return self.worker.last_accepted

    @property
    def acceptance(self) -> list[float]:
        """For each rank the share of steps that its gradient was a part of; empty where all are waited for.

        A rank near zero is always late: its data are not learned. Give it another shard now and then.
        """
        worker = self.worker
        return [worker.accepted[rank] / worker.closed for rank in range(self.size)] if worker.closed else []

    @property
    def staleness(self) -> dict[int, int]:
        """How many steps old the models were that have landed on this rank: how often each number. Under `async_sgd`, by how many
        steps the model had moved on that this rank's steps were added to. Empty where what is on its way lands by schedule, and
        on ranks that only answer.
        """
        return dict(sorted(self.worker.ages.items()))

    def samples(self, *batch: Any) -> None:
        """Say which samples the gradient of this step is of, by whatever names you have for them.

        If it comes too late they are in `dropped_samples[step]` when `on_late(step)` is called, and in the ledger.
        """
        self.worker.samples += batch

    def share(self, samples: int, seconds: float | None = None, most: int | None = None) -> int:
        """How many of a step's `samples` this rank shall take, so that all ranks are done at the same time.

        All ranks call it together, before every step: what lies between calls is timed, without what was waited for
        others, and after 3, 8, 16, 32, 64 steps and then every 64 ranks plan anew; shares stay where less than a tenth of a
        step's time would be gained. Whoever knows how many `seconds` one sample takes this rank says so, and ranks plan then.

        Every mean then counts a rank by its share, as `attach(weight=)` does, so that training is that of all samples in one
        batch. `most` is what fits into this rank's memory. Ranks draw from one pool of data then, or from shards as large as their
        shares: what a rank sees counts by its share.

        What it returns is not in a checkpoint: keep it beside, and resume with `attach(..., weight=share)`.
        """
        if self.size > 1 and seconds is None:
            mine = self._shares[self.rank] if self._shares else 1
            if not self._watch.stop(self.exposed_seconds, self.step, mine) and sum(self._shares) == samples:
                self._watch.start(self.exposed_seconds, self.step)
                return mine
            seconds = self._watch.seconds(self.worker.weight)
        mine = self._plan(samples, 1.0 if seconds is None else seconds, most)
        self._watch.start(self.exposed_seconds, self.step)
        return mine

    def _plan(self, samples: int, seconds: float, most: int | None) -> int:
        program = share_out(self.worker, samples, seconds, most, self._shares)
        self._shares = self.fabric.run(program, "comm.share", self.step) if self.size > 1 else [samples]
        return self._shares[self.worker.rank]

    @property
    def spoilt(self) -> dict[int, int]:
        """How many averages each rank has spoilt with values that were not finite, by rank, and under gossip at how many steps
        its model was left out, as far as this rank met it; those that spoilt none are left out."""
        return self.worker.count_spoilers()

    @property
    def accumulate(self) -> int:
        """How many micro-batches make one step at the moment."""
        return self.recipe.schedule.accumulate

    def loss(self, loss: Tensor | float) -> None:
        """An older word for `log(loss=loss)` before `optimizer.step()`; only a controller hears it."""
        self.worker.loss = loss

    @property
    def progress(self) -> float:
        """What the steps so far are worth, in steps of one rank's batch: under `adascale` more than were taken."""
        known = self.worker.steering.state.get("progress")
        return float(self.step if known is None else known)

    @property
    def exposed_seconds(self) -> float:
        """Time since `attach` that the training loop stood still for the network."""
        return self._meter.exposed_seconds

    @property
    def before_step(self) -> Callable[[], None] | None:
        """Called before every descent, also of missed updates under backup workers; may be set at any time."""
        return self._steps.before_step

    @before_step.setter
    def before_step(self, call: Callable[[], None] | None) -> None:
        self._steps.before_step = call

    @contextlib.contextmanager
    def no_sync(self) -> Generator[None, None, None]:
        """Backward passes in here only accumulate; the first one outside sends the sum.

        For trainers that ask the model for it: `model.no_sync = comm.no_sync`.
        """
        before, self._backward.syncing = self._backward.syncing, False
        try:
            yield
        finally:
            self._backward.syncing = before

    @contextlib.contextmanager
    def accumulating(self) -> Generator[bool, None, None]:
        """Wraps one micro-batch; gives True for the last of `accumulate`, the one to step after.

        Divide the loss by `comm.accumulate`.
        """
        last = self._micro + 1 >= self.accumulate
        with contextlib.nullcontext() if last else self.no_sync():
            yield last
        self._micro = 0 if last else self._micro + 1

    def skip(self) -> None:
        """Say that this step's `optimizer.step()` is left out (a `scaler` does it alone); on all ranks.

        Schedules count the step all the same. Gradients that were averaged for it leave no trace in memories.
        """
        if self.fabric.size > 1:
            self._steps.skip()

    @contextlib.contextmanager
    def consensus(self) -> Generator[None, None, None]:
        """Swap in the model that all ranks agree on, for evaluation or saving; all ranks enter it together.

        Synchronous recipes hold it already, but for `accelerated`, which takes its gradients elsewhere; local, overlapping and
        gossiping ones hold it only on average.
        """
        if not self._may_differ_from_the_consensus:
            yield
            return
        with self._during("consensus"):
            self._steps.settle_local()
        own = consensus.remember(self.model)
        try:
            with self._during("consensus"):
                self._swap_in(own)
            yield
        finally:
            consensus.restore(self.model, own)

    def finish(self) -> None:
        """The end of training: every rank keeps the consensus, an exact average where models had parted, and the hooks go.

        All ranks call it together, wherever in a round they are.
        """
        if self._may_differ_from_the_consensus:
            with self._during("finish"):
                self._steps.settle_local()
                self._swap_in(consensus.remember(self.model) if self.fabric.members else {})
        self.detach()

    @property
    def _may_differ_from_the_consensus(self) -> bool:
        """On a rank alone too, where a schedule judges another model than it trains."""
        schedule = self.recipe.schedule
        return self.size > 1 or schedule.trains_elsewhere or (schedule.works_alone and not schedule.averages_gradients)

    def _swap_in(self, own: dict[str, Tensor]) -> None:
        """The consensus; anew from this rank's `own` model where another one is lost meanwhile, and the others can go on."""
        while True:
            try:
                return self.fabric.run(consensus.swap_in(self.worker, self._steps.shared))
            except PeerError as failure:
                if not self.fabric.members:
                    raise
                consensus.restore(self.model, own)
                self.fabric.run(self.recipe.schedule.outlive(self.worker.loop, failure))

    def heterogeneity(self, losses: Iterable[Tensor]) -> Heterogeneity:
        """How unlike the ranks' gradients are now, at the consensus model; all ranks call it together, between steps.

        `losses` are those of a few micro-batches, equally many on each rank and at least two, best computed one by one:
        `comm.heterogeneity(loss_of(model, batch) for batch in batches)`. Neither model nor training changes.
        """
        self._require_one_step("heterogeneity")
        parameters = [param.parameter for param in self.worker.params.values()]
        with self._during("heterogeneity"), self.consensus():
            return self.fabric.run(heterogeneity(gradients_of(losses, parameters), self.fabric.size))

    def quiet(self) -> None:
        """Wait for what is on its way, before collectives of your own; it lands when it would have, and nothing else changes.

        Two communicators of NCCL that are used at the same time, in another order on another rank, can wait for each other
        for ever. Without averages or messages that travel between steps there is nothing to wait for.
        """
        if "waits for few" in self.recipe.schedule.traits and self.fabric.size > 1:
            raise AttachError(
                f"under {self.recipe} the lane is never quiet, since a late rank's update may come at any time: use a "
                "process group of gloo for collectives of your own, torch.distributed.new_group(backend='gloo')"
            )
        self.fabric.run(self.worker.quiesce(), "comm.quiet", self.step)

    def check_sync(self) -> None:
        """Compare a hash of all parameters and buffers that should be equal on all ranks; an error names those that are not."""
        if self.fabric.size > 1:
            self._require_one_step("check_sync")
            with self._during("check_sync"):
                self._steps.settle_local()
                self.fabric.run(consensus.check(self.worker, self.model, self._steps.shared.agreed))

    def _during(self, method: str) -> contextlib.AbstractContextManager[None]:
        """What errors call the requests of one of these methods."""
        return self.fabric.during(f"comm.{method}", self.step)

    def _require_one_step(self, what: str) -> None:
        if apart := self.apart():
            raise AttachError(f"comm.{what}() is done by all ranks at the same step, and {apart}")

    def apart(self) -> str:
        """Why ranks may be at steps of their own now, where they are: who waits for all others here waits for ever."""
        if self.size == 1 or self.ends_round or not self.recipe.schedule.skips_steps:
            return ""
        return (
            f"rank {self.rank} is at step {self.step}, within a round of {self.recipe.schedule}, in which each rank takes steps of "
            "its own: do it where a round has ended, `if comm.ends_round:`"
        )

    def log(self, *, loss: Told = None, held_out: Told = None) -> None:
        """Tell the training loss, or a held-out quality, as numbers or tensors of one element.

        It is in `metrics()` from then on; `gossamer compare --script` goes by it, and a controller such as `adacomm`. Before
        `optimizer.step()` it is of the step under way, after it of the step just done: once a step, always in the same place.
        Nothing is communicated.
        """
        self._meter.log(loss, held_out)
        if loss is not None:
            self.worker.loss = loss

    def metrics(self) -> dict[str, float]:
        """Bytes, ratio to dense, waiting, compression error and residual of this rank, since `attach`.

        Nothing is communicated. For a time series give `attach` a function as `on_metrics`.
        """
        return self._meter.totals()

    def state_dict(self) -> dict[str, Any]:
        """Plain tensors and scalars; save one per rank, between steps. Rank-local entries carry the rank in their key."""
        with self._during("state_dict"):
            self._steps.settle_skipped()
            self.fabric.run(self.worker.quiesce())
            state = checkpoint.save(self.worker)
            self.fabric.run(self.worker.quiesce())  # who goes on asks others, and they have all saved by now
            return state

    def load_state_dict(self, saved: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Take up where `state_dict` left off; after a change of world size, give the dictionaries of all old ranks.

        All ranks load together; what one cannot load is an error on all. Attach first, then load the model, the optimizer
        and this: attaching makes all models equal to rank 0's.
        """
        if self.worker.live and self.recipe.schedule.lane:
            raise CheckpointError(
                f"under {self.recipe} a checkpoint is loaded before the first step: the other ranks' lanes wait for the step "
                "that is under way; detach, attach again, and load then"
            )
        put, error = None, None
        try:
            put = checkpoint.prepare(self.worker, saved)
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

    def detach(self) -> None:
        """Remove all hooks and end the comm lanes; the model trains on alone."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        attached.discard(self.model)
        self.fabric.close()

    def __enter__(self) -> "Communicator":
        return self

    def __exit__(self, *exc: object) -> None:
        self.detach()
