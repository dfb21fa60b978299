"""Hashes by which ranks learn whether they hold the same."""

from zlib import crc32

import torch
from torch import Tensor


def hash_of(tensor: Tensor) -> int:
    """Of its bits: tensors that are equal, and hardly any others, have equal ones."""
    return crc32(tensor.detach().contiguous().cpu().view(-1).view(torch.uint8).numpy().data) if tensor.numel() else 0
