"""Order: a sampler whose only state is how many samples all ranks have taken together."""

from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any, NamedTuple, final

from torch.utils.data import Sampler

from gossamer.core.errors import CheckpointError, GossamerError
from gossamer.data.parts import Parts, TrainingRun, part
from gossamer.data.shuffled import Shuffled, Source


class Draw(NamedTuple):
    """One batch of all ranks together: places in the order, counted over all epochs, and among whom they are cut."""

    begin: int
    end: int
    parts: Parts


@final
class Order(Sampler[list[Any]]):
    """Gives each rank its part of each step's samples, in an order that is another one in each epoch.

    - `source`: the number of samples, or `Shards`.
    - `seed`: of the order, the same on all ranks.
    - `samples`: of one batch of all ranks together; a step takes `comm.accumulate` of them, or `micro_batches`.
    - `drop_last`: every batch has exactly so many samples, and the rest of an epoch is left out. Else the rest is spread over
      the epoch's steps, whose sizes differ by at most 1, so that no last batch is a small one.

    An epoch of n samples has n // S steps of S samples or a few more. Its order, a keyed permutation of which nothing is stored,
    and the steps' edges are pure functions of the seed, the epoch and the samples taken; so a run that goes on with other
    ranks, or with other weights, cuts what is left among them.

        order = gossamer.data.Order(len(dataset), seed=7, samples=64, comm=comm)
        loader = DataLoader(dataset, batch_sampler=order, num_workers=2)
        while order.epoch < 3:
            for x, y in order.over(loader):
                ...
    """

    def __init__(
        self,
        source: int | Source,
        seed: int,
        samples: int,
        comm: TrainingRun,
        *,
        micro_batches: int | None = None,
        drop_last: bool = False,
    ) -> None:
        self._source: Source = Shuffled(source) if isinstance(source, int) else source
        self._n, self.seed, self.samples, self._run = len(self._source), seed, samples, comm
        self._micro, self.drop_last = micro_batches, drop_last
        for name, value in (("samples", samples), ("micro_batches", 1 if micro_batches is None else micro_batches)):
            if not isinstance(value, int) or value < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
                raise GossamerError(f"Order: {name} must be a whole number of 1 or more, got {value!r}")
        self._taken, self._step = 0, 0  # samples that steps have used, and after how many steps
        self._retries = comm.retries
        self._drawn = 0  # samples that the loop has got since then
        self._is_ahead = False  # True if it got more than one step's
        self._planned, self._is_watched = deque[Draw](), False
        self._scale = 1.0
        self._step_samples()

    # -- what a loop asks ------------------------------------------------------------------------------------------------------

    def over(self, loader: Iterable[Any]) -> Generator[Any]:
        """The loader's batches from here to the end of the epoch, made anew where ranks or weights have changed.

        A loader fetches ahead. Where a rank is lost or comes, or `comm.share` plans anew, what it has fetched is cut for
        others: it is thrown away, and fetched again.
        """
        if not getattr(loader, "in_order", True):
            raise GossamerError("the loader has in_order=False, so nobody knows which batch is whose: leave it out")
        self._is_watched = True
        try:
            self._go_on()
            end, goes_on = self._epoch_end(), True
            while goes_on and self._taken + self._drawn < end:  # who takes over a later step may be past it
                goes_on = yield from self._until_stale(loader)
        finally:
            self._is_watched = False

    def _until_stale(self, loader: Iterable[Any]) -> Generator[Any, None, bool]:
        """The loader's batches while they are cut for those who are there; True if the epoch goes on with others."""
        self._go_on()
        retries = self._retries
        for batch in loader:
            self._go_on()
            if not self._planned:
                raise GossamerError(
                    "the loader's batches are not this order's: make it with DataLoader(..., batch_sampler=order)"
                )
            draw = self._planned.popleft()
            if draw != Draw(*next(self._draws(), (-1, -1)), self._run.parts):
                return True
            self._drawn += draw.end - draw.begin
            self._scale = _scale(draw)
            yield batch
        self._go_on()
        return retries != self._retries  # the last step was dropped, and is still to be taken

    @property
    def epoch(self) -> int:
        """Epochs that are over."""
        self._settle()
        return self._taken // self._n

    @property
    def taken(self) -> int:
        """Samples that all ranks have taken together and used in a step, over all epochs."""
        self._settle()
        return self._taken

    @property
    def scale(self) -> float:
        """Multiply the loss of this batch by it, and the ranks' mean is the mean over samples where parts are uneven."""
        return self._scale

    def start(self) -> None:
        """Begin with the first epoch at the current step: for a second data set in one run."""
        self._put(0, self._run.step)

    # -- what a DataLoader asks ------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[list[Any]]:
        self._go_on()
        self._planned = deque[Draw]()
        return self._batches(self._draws(), self._planned, self._is_watched)

    def __len__(self) -> int:
        """Batches of this rank from here to the end of the epoch."""
        self._settle()
        wanted, count = self._step_samples(), self._count
        left = self._n - self._taken % self._n
        drawn = sum(edge <= self._taken + self._drawn for edge in self._edges(self._taken, wanted)[1:])
        return max(1, left // wanted) * count - drawn

    def _batches(self, draws: Iterator[tuple[int, int]], planned: deque[Draw], watched: bool) -> Generator[list[Any]]:
        parts, retries = self._run.parts, self._run.retries
        for begin, end in draws:
            if not watched and (self._run.parts, self._run.retries) != (parts, retries):
                raise GossamerError(
                    f"ranks or their weights have changed at step {self._run.step}, and the loader has fetched batches that were cut "
                    "for those before: iterate over order.over(loader) instead of the loader"
                )
            low, high = part(end - begin, *parts)
            planned.append(Draw(begin, end, parts))
            yield self._items(begin + low, begin + high)

    def _items(self, begin: int, end: int) -> list[Any]:
        """What the data set is asked for at these places, which may be in two epochs."""
        out = list[Any]()
        while begin < end:
            epoch, first = divmod(begin, self._n)
            last = min(end - epoch * self._n, self._n)
            out += self._source.items(f"{self.seed}/{epoch}", first, last)
            begin = epoch * self._n + last
        return out

    # -- arithmetic: where steps and batches begin -----------------------------------------------------------------------------

    @property
    def _count(self) -> int:
        """Batches of one step."""
        return self._run.accumulate if self._micro is None else self._micro

    def _step_samples(self) -> int:
        wanted = self.samples * self._count
        if wanted > self._n:
            raise GossamerError(
                f"a step takes {wanted} samples, and an epoch of {self._source.describe()} has fewer: say a smaller `samples`"
            )
        return wanted

    def _settled(self, place: int, wanted: int) -> int:
        """With `drop_last` a rest that is smaller than a step is passed over."""
        left = self._n - place % self._n
        return place + left if self.drop_last and left < wanted else place

    def _end(self, place: int, wanted: int) -> int:
        """Where the step ends that begins at a place. A rest smaller than a step, as after other sizes, goes on in the next epoch."""
        left = self._n - place % self._n
        return place + (wanted if self.drop_last or left < wanted else left // (left // wanted))

    def _edges(self, place: int, wanted: int) -> list[int]:
        """Where the batches of the step that begins at a place begin and end."""
        size, count = self._end(place, wanted) - place, self._count
        return [place + size * i // count for i in range(count + 1)]

    def _after(self, place: int, steps: int, wanted: int) -> int:
        """Where so many steps more begin."""
        while steps:
            place = self._settled(place, wanted)
            left, whole = self._n - place % self._n, self._n // wanted
            if left < wanted:
                place, steps = place + wanted, steps - 1
            elif steps >= left // wanted:  # to the end of the epoch, and whole epochs
                epochs, steps = divmod(steps - left // wanted, whole)
                place += left + epochs * self._n
            elif self.drop_last:
                return place + steps * wanted
            else:  # the smaller steps of an epoch come first
                size, larger = divmod(left, left // wanted)
                return place + steps * size + max(0, steps - (left // wanted - larger))
        return place

    def _draws(self) -> Generator[tuple[int, int]]:
        """Begin and end of each batch from here to the end of the epoch."""
        wanted, at = self._step_samples(), self._taken + self._drawn
        place, end = self._taken, self._epoch_end()
        while (place := self._settled(place, wanted)) < end:
            edges = self._edges(place, wanted)
            yield from ((max(begin, at), end) for begin, end in pairwise(edges) if end > at)
            place = edges[-1]

    def _epoch_end(self) -> int:
        """Where the epoch ends that the next batch is of."""
        place = self._settled(self._taken, self._step_samples())
        return (max(self._taken + self._drawn, place) // self._n + 1) * self._n

    # -- what steps have used --------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Count what the steps since the last look have used. A step that was dropped has used nothing, and is taken again."""
        if self._run.retries != self._retries:
            self._retries, self._drawn, self._is_ahead = self._run.retries, 0, False
        now, wanted = self._run.step, self._step_samples()
        if now > self._step and (self._drawn or self._is_ahead):
            self._taken, self._step = self._taken + self._drawn, self._step + 1
            self._drawn, self._is_ahead = 0, False
        if now > self._step:  # by steps whose batches were not got here: as large as others' were
            self._taken, self._step = self._after(self._taken, now - self._step, wanted), now
        self._taken = self._settled(self._taken, wanted)

    def _go_on(self) -> None:
        """Come to the next batch. Batches of a step that the loop did not take count as used."""
        self._step = min(self._step, self._run.step)  # of a checkpoint whose order was loaded without its communicator
        self._settle()
        whole = self._end(self._taken, self._step_samples()) - self._taken
        if self._drawn >= whole:
            self._taken = self._settled(self._taken + self._drawn, self._step_samples())
            self._drawn, self._is_ahead = 0, True

    # -- checkpoints -----------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """How many samples steps have used; call it between steps. It is equal on all ranks."""
        self._settle()
        epoch, taken = divmod(self._taken, self._n)
        return {"of": self._source.describe(), "seed": self.seed, "epoch": epoch, "taken": taken, "step": self._step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the order of a checkpoint was, whatever the ranks are now; load the communicator too."""
        then = {"of": state.get("of"), "seed": state.get("seed")}
        now = {"of": self._source.describe(), "seed": self.seed}
        if then != now:
            raise CheckpointError(
                f"the checkpoint's order is of {then['of']} with seed {then['seed']}, and this one of {now['of']} with seed "
                f"{now['seed']}: make the Order of the same samples and seed, or leave it out to begin anew"
            )
        places = [state.get(name) for name in ("epoch", "taken", "step")]
        if not all(isinstance(place, int) and place >= 0 for place in places):
            raise CheckpointError(f"the checkpoint's order is damaged: it is at {places}")
        self._put(state["epoch"] * self._n + state["taken"], state["step"])

    def _put(self, taken: int, step: int) -> None:
        self._taken, self._step = taken, step
        self._drawn, self._is_ahead = 0, False


def _scale(draw: Draw) -> float:
    """What one sample weighs in the mean over ranks, to what it weighs in the mean over samples."""
    weights, place = draw.parts
    samples = draw.end - draw.begin
    low, high = part(samples, weights, place)
    return (high - low) / samples * sum(weights) / weights[place] if weights[place] else 0.0
