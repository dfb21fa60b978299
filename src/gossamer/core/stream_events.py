"""Stream events: marks and timers on a device, which runs asynchronously to the host."""

from collections.abc import Iterable

import torch
from torch import Tensor


class StreamMark:
    """A mark after all work that the current stream has been given so far. On a CPU that work is done already."""

    def __init__(self, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self._event = torch.cuda.current_stream(device).record_event() if cuda else None
        self._device = device

    def precedes(self) -> None:
        """Make the current stream wait for the mark. The host does not wait."""
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)

    def wait(self) -> None:
        """Make the host wait for the mark."""
        if self._event is not None:
            self._event.synchronize()


class StepTimer:
    """Times a stretch of device work, from here to `end`; `seconds` is known once the device has reached the end."""

    def __init__(self, device: torch.device, time: float) -> None:
        self._device, self._began, self._ended = device, DeviceMoment(device, time), None

    def end(self, time: float) -> None:
        self._ended = DeviceMoment(self._device, time)

    @property
    def seconds(self) -> float | None:
        """The measured seconds; None until the device has reached the end. Does not wait."""
        return None if self._ended is None else self._ended.since(self._began)


class DeviceMoment:
    """When all work is done that the current stream was given so far. On a CPU it is done already, and `time` is now."""

    def __init__(self, device: torch.device, time: float) -> None:
        self._time, self._event = time, None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record(torch.cuda.current_stream(device))

    def since(self, other: "DeviceMoment") -> float | None:
        """Seconds from another moment to this one; None until the device has reached this one. Does not wait."""
        return self.seconds_since(other) if self._event is None or self._event.query() else None

    def seconds_since(self, other: "DeviceMoment") -> float:
        """Seconds from another moment to this one; waits until the device has reached this one."""
        if self._event is None or other._event is None:
            return self._time - other._time
        if not self._event.query():
            self._event.synchronize()
        return other._event.elapsed_time(self._event) / 1000


def read_numbers(*tensors: Tensor) -> list[float]:
    """Read scalars from the device in one transfer, which waits for all work the device was given.

    Some may lie elsewhere, such as those of frozen parameters that are kept on the CPU.
    """
    if not tensors:
        return []
    device = next((t.device for t in tensors if t.is_cuda), tensors[0].device)
    numbers = (t.reshape(-1).double() for t in tensors)
    return torch.cat([n if n.device == device else n.to(device) for n in numbers]).tolist()


def copied_to(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to a device without waiting. Under torch.set_default_device() it may be there already."""
    pinned = tensor.pin_memory() if device.type == "cuda" and tensor.is_cpu else tensor
    return pinned.to(device, non_blocking=True)


def record_stream_use(tensors: Iterable[Tensor]) -> None:
    """Tell the allocator that the current stream reads these tensors, so that their memory is not reused too early."""
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
