"""A run that a trainer has attached: its metrics for the trainer's log, and whether the consensus is in the model."""

import contextlib
from collections.abc import Generator

from gossamer.integrations.communicator import Communicator, attached

PREFIX = "gossamer/"


class TrainerLog:
    """Called at the trainer's logging interval, returns the totals so far and the rates since the last call.

    >>> import torch, gossamer
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with gossamer.attach(model, optimizer, "topk") as comm:
    ...     log = TrainerLog(comm)
    ...     optimizer.step()
    ...     {name: value for name, value in log().items() if "sent" in name}
    {'gossamer/sent_bytes': 0.0, 'gossamer/sent_bytes_per_step': 0.0}
    """

    def __init__(self, comm: Communicator) -> None:
        self._meter = comm.meter
        self._last = self._meter.mark()

    def __call__(self) -> dict[str, float]:
        """Nothing is communicated. Values that the training loop logs itself, such as its loss, are left out."""
        before = max(self._last, self._meter.first, key=lambda mark: mark.clock)  # loading begins the counters anew
        self._last, metrics = self._meter.report_since(before)
        return {PREFIX + name: value for name, value in metrics.items() if name not in self._meter.logged}


class AttachedRun:
    """An attached model under a trainer, which may evaluate it within an evaluation, and save it within either."""

    def __init__(self, comm: Communicator) -> None:
        self.comm, self.log = comm, TrainerLog(comm)
        self._inside: contextlib.ExitStack | None = None

    @property
    def goes_on(self) -> bool:
        """False once the communicator has been detached, by `comm.finish()` too."""
        return self.comm.model in attached

    @property
    def shows_consensus(self) -> bool:
        """True while the consensus is in the model."""
        return self._inside is not None

    def enter_consensus(self) -> None:
        """Swap in the consensus until `leave_consensus`. All ranks call it together."""
        if self._inside is None and self.goes_on:
            with contextlib.ExitStack() as stack:
                stack.enter_context(self.comm.consensus())
                self._inside = stack.pop_all()

    def leave_consensus(self) -> None:
        """Put this rank's own model back, if the consensus is in its place. Nothing is communicated."""
        inside, self._inside = self._inside, None
        if inside is not None:
            inside.close()

    @contextlib.contextmanager
    def consensus(self) -> Generator[None, None, None]:
        """Swap in the consensus, unless it is there already."""
        if self._inside is not None:
            yield
            return
        self.enter_consensus()
        try:
            yield
        finally:
            self.leave_consensus()
