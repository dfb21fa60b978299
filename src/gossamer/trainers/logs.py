"""Logs: gossamer's metrics under names for a trainer's own log."""

from gossamer.integrations.communicator import Communicator

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
        self._meter = comm._meter
        self._last = self._meter.mark()

    def __call__(self) -> dict[str, float]:
        """Nothing is communicated. Values that the training loop logs itself, such as its loss, are left out."""
        self._last, metrics = self._meter.report_since(self._last)
        return {PREFIX + name: value for name, value in metrics.items() if name not in self._meter.logged}
