"""Small integers packed side by side into int32 lanes, so that an ordinary integer all-reduce adds them exactly."""

import torch
from torch import Tensor

from gossamer.kernels.backends import twin
from gossamer.kernels.layout import require_count, require_vector


def lane_fields(top: int, size: int) -> tuple[int, int]:
    """(bits per field, fields per lane) for levels in [-top, top] summed over `size` workers.

    A sum of shifted levels lies in [0, 2 * top * size], so no carry can cross a field.
    """
    if top < 1 or size < 1:
        raise ValueError(f"top and size must be at least 1, got {top} and {size}")
    bits = (2 * top * size).bit_length()
    if bits > 31:
        raise ValueError(f"levels up to {top} from {size} workers do not fit into a 31-bit lane")
    return bits, 31 // bits


def lane_count(n: int, top: int, size: int) -> int:
    """Number of int32 lanes that n levels take."""
    return -(-n // lane_fields(top, size)[1])


def lanes_pack(levels: Tensor, top: int, size: int) -> Tensor:
    """int8 levels in [-top, top] as int32 lanes: field i of lane j holds level[j + i * lanes] + top.

    Reads 1 and writes 4 / fields bytes per element.
    """
    require_vector("levels", levels, torch.int8)
    bits, fields = lane_fields(top, size)
    return twin("lanes", "pack", levels.device)(levels, top, bits, fields)


def lanes_unpack(lanes: Tensor, n: int, top: int, size: int) -> Tensor:
    """The n sums of levels (int32), from the sum of the lanes of `size` workers.

    Reads 4 / fields and writes 4 bytes per element.
    """
    require_vector("lanes", lanes, torch.int32)
    require_count("lanes", lanes, lane_count(n, top, size))
    bits, fields = lane_fields(top, size)
    return twin("lanes", "unpack", lanes.device)(lanes, n, size * top, bits, fields)
