"""Checks that all values are finite."""

from collections.abc import Sequence
from math import isfinite

import torch
from torch import Tensor

from gossamer.core.stream_events import read_numbers
from gossamer.kernels import absmax

_FEW = 64  # numbers, for which no kernel is loaded


def all_finite(tensors: Sequence[Tensor]) -> bool:
    return all_peaks_finite([peak(t) for t in tensors])


def peak(tensor: Tensor) -> Tensor:
    """The largest absolute value; not finite if any value is not."""
    if tensor.numel() == 0:
        return tensor.new_zeros((), dtype=torch.float64)
    if tensor.dtype != torch.float32 or tensor.numel() < _FEW:
        return tensor.abs().amax().double()
    return absmax(tensor.reshape(-1), (0, tensor.numel())).view(()).double()


def all_peaks_finite(peaks: Sequence[Tensor]) -> bool:
    """True if all peaks are finite, with one device synchronisation for all."""
    return all(map(isfinite, read_numbers(*peaks)))
