"""Hashes: compare tensors between ranks."""

from zlib import crc32

import torch
from torch import Tensor


def hash_of(tensor: Tensor) -> int:
    """Return a CRC-32 of a tensor's bits."""
    return crc32(tensor.detach().contiguous().cpu().view(-1).view(torch.uint8).numpy().data) if tensor.numel() else 0
