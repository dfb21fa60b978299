"""Integer lanes."""

import torch
from torch import Tensor
from torch.nn.functional import pad


def pack(levels: Tensor, top: int, bits: int, fields: int) -> Tensor:
    lanes = -(-levels.numel() // fields)
    rows = pad(levels.int() + top, (0, lanes * fields - levels.numel())).view(fields, lanes)
    return (rows << _shifts(bits, fields, levels.device)).sum(0, dtype=torch.int32)


def unpack(lanes: Tensor, n: int, shift: int, bits: int, fields: int) -> Tensor:
    rows = (lanes >> _shifts(bits, fields, lanes.device)) & ((1 << bits) - 1)
    return rows.view(-1)[:n] - shift


def _shifts(bits: int, fields: int, device: torch.device) -> Tensor:
    return torch.arange(0, bits * fields, bits, dtype=torch.int32, device=device).view(-1, 1)
