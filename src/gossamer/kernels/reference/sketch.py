"""Count sketches: what each row of a table adds up, and the median of what the rows say."""

from __future__ import annotations

import torch
from torch import Tensor

from gossamer.kernels.layout import SIGN_WORDS, SIGNS, Turns
from gossamer.kernels.reference.hashing import mix3


def add(x: Tensor, turns: Turns, table: Tensor) -> None:
    for layer in range(turns.layers):
        inside = x[layer * turns.columns : (layer + 1) * turns.columns]
        signed = torch.zeros_like(table)
        signed[:, : inside.numel()] = torch.where(_negative(turns, layer, inside.numel(), x.device), -inside, inside)
        table += signed.gather(1, _places(turns, layer, x.device, back=True))


def estimate(table: Tensor, turns: Turns, out: Tensor) -> None:
    for layer in range(turns.layers):
        into = out[layer * turns.columns : (layer + 1) * turns.columns]
        said = table.gather(1, _places(turns, layer, table.device))[:, : into.numel()]
        said = torch.where(_negative(turns, layer, into.numel(), table.device), -said, said)
        torch.add(said.median(0).values, 0.0, out=into)  # -0.0 and 0.0 are equal, so that either may be the median


def _places(turns: Turns, layer: int, device: torch.device, back: bool = False) -> Tensor:
    """Where in its row each element of a layer lies, or which element lies at each place."""
    rows = torch.arange(turns.rows, device=device) * turns.layers + layer
    shifts = (mix3(rows, turns.key) >> 9) * turns.columns >> 23
    along = torch.arange(turns.columns, device=device)
    return (along - shifts[:, None] if back else along + shifts[:, None]) % turns.columns


def _negative(turns: Turns, layer: int, n: int, device: torch.device) -> Tensor:
    """Which elements of a layer change their sign, in each row."""
    place = torch.arange(n, device=device)
    rows = torch.arange(turns.rows, device=device)[:, None] * turns.layers + layer
    words = rows * turns.words + place // SIGNS * SIGN_WORDS + place % SIGN_WORDS
    return (mix3(turns.first_word + words, turns.key) >> (31 - place % SIGNS // SIGN_WORDS)) & 1 == 1
