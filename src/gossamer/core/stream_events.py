"""Moments: how far a device has come. It runs behind the host, one stream of work beside another."""

from collections.abc import Iterable

import torch
from torch import Tensor


class StreamMark:
    """All that a device has been given up to now, by whoever makes this. A CPU has done so already."""

    def __init__(self, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self._event = torch.cuda.current_stream(device).record_event() if cuda else None
        self._device = device

    def precedes(self) -> None:
        """What the caller gives the device from now on begins after it. Nobody waits but the device."""
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)

    def wait(self) -> None:
        """The host waits for it."""
        if self._event is not None:
            self._event.synchronize()


class StepTimer:
    """A stretch of a device's own time: from here to `end`, which it may come to long after the host; then it has `seconds`."""

    def __init__(self, device: torch.device, time: float) -> None:
        self._device, self._began, self._ended = device, _Point(device, time), None

    def end(self, time: float) -> None:
        self._ended = _Point(self._device, time)

    @property
    def seconds(self) -> float | None:
        """None while the device is on its way. Nobody waits."""
        return None if self._ended is None else self._ended.since(self._began)


class _Point:
    """A device's own time by an event of its stream; a CPU's, by the host's clock."""

    def __init__(self, device: torch.device, time: float) -> None:
        self._time, self._event = time, None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record(torch.cuda.current_stream(device))

    def since(self, other: "_Point") -> float | None:
        if self._event is None or other._event is None:
            return self._time - other._time
        return other._event.elapsed_time(self._event) / 1000 if self._event.query() else None


def read_numbers(*tensors: Tensor) -> list[float]:
    """Numbers that the host wants to know, in one question: each time it waits for all that the device was given."""
    return torch.cat([t.reshape(-1).double() for t in tensors]).tolist() if tensors else []


def copied_to(tensor: Tensor, device: torch.device) -> Tensor:
    """The host's tensor, on its way to a device; the host goes on."""
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def record_stream_use(tensors: Iterable[Tensor]) -> None:
    """The caller's stream reads these, which may be another's memory: it is not to be given away before it has."""
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
