"""What can be read of an attached run, at any time; nothing is communicated for it."""

from typing import Any

from gossamer.data.parts import Parts
from gossamer.fabrics.ledger import Ledger
from gossamer.fabrics.torch.fabric import TorchFabric
from gossamer.integrations.metrics import Meter
from gossamer.recipe import Recipe
from gossamer.runtime import Sharded, Worker


class RunFacts:
    """The facts of a run, of a `Communicator` as of the hook of a DDP model."""

    def __init__(self, worker: Worker, fabric: TorchFabric, meter: Meter) -> None:
        self.worker, self.fabric, self.meter = worker, fabric, meter

    @property
    def recipe(self) -> Recipe:
        """The recipe in force; a controller may have changed it since `attach`."""
        return self.worker.recipe

    @property
    def step(self) -> int:
        """Optimizer steps completed; under a DDP hook, the number of times that gradients were averaged.

        With backup workers it may jump: loop `while comm.step < total`.
        """
        return self.worker.step - 1

    @property
    def ends_round(self) -> bool:
        """True if the last step ended a round: evaluate or save then. Without rounds, true after every step."""
        return self.recipe.schedule.ends_round(self.step)

    @property
    def accumulate(self) -> int:
        """Number of micro-batches per step, as of now."""
        return self.recipe.schedule.shape.micro_batches

    @property
    def progress(self) -> float:
        """Steps so far, counted in steps with one rank's batch: under `adascale` more than `step`."""
        known = self.worker.controller.state.get("progress")
        return float(self.step if known is None else known)

    # -- who trains --------------------------------------------------------------------------------------------------

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
    def present(self) -> tuple[int, ...]:
        """Ranks that take part now, in order; under `members()` ranks may be lost, and may come."""
        return self.worker.ranks.present.ranks

    @property
    def is_sharded(self) -> bool:
        """True if FSDP2 shards the model, so that this rank holds a part of each parameter."""
        return any(isinstance(param, Sharded) for param in self.worker.params.values())

    @property
    def parts(self) -> Parts:
        """Who takes samples now, with which weights: all ranks present, and the shards of each. `gossamer.data.Order` asks it."""
        ranks, replica = self.worker.ranks, self.worker.replica
        present, weighed = ranks.cut_for(self.step)
        held = weighed or (1.0,) * self.size
        weights = held if len(held) == len(present.ranks) else [held[rank] for rank in present.ranks]
        each = tuple(float(weight) for weight in weights for _ in range(replica.size))
        return Parts(each, present.place * replica.size + replica.index)

    # -- what was sent, and what was left out ------------------------------------------------------------------------

    @property
    def ledger(self) -> Ledger:
        """All requests that this rank sent over the network, with bytes and seconds."""
        return self.fabric.ledger

    @property
    def exposed_seconds(self) -> float:
        """Seconds since `attach` that the training loop waited for the network."""
        return self.ledger.exposed_seconds

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
        record = self.worker.record
        if not record.closed_steps:
            return []
        return [record.accepted[rank] / record.closed_steps for rank in range(self.size)]

    @property
    def staleness(self) -> dict[int, int]:
        """Counts of models that this rank received, by their age in steps.

        Under `async_sgd` the age of this rank's updates: steps that the model has moved on when they are added. Empty if
        messages arrive by schedule, and on ranks that only serve others.
        """
        return dict(sorted(self.worker.record.ages.items()))

    @property
    def spoilt(self) -> dict[int, int]:
        """Number of averages that values of a rank made non-finite, by rank, and under gossip of the steps at which its model was
        left out, as far as this rank met it; ranks with none are left out."""
        return self.worker.record.spoilers()

    def metrics(self) -> dict[str, float]:
        """Return bytes, ratio to dense, waiting time, compression error and residual of this rank since `attach`.

        For a time series pass a function to `attach` as `on_metrics`.
        """
        return self.meter.totals()
