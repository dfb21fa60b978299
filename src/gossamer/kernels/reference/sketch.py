"""Count sketches: the sums in each row of a table, and the median of the rows' estimates."""

from collections.abc import Iterator

import torch
from torch import Tensor

from gossamer.kernels.layout import SIGN_WORDS, SIGNS, Turns
from gossamer.kernels.reference.hashing import mix3

_TOGETHER = 1 << 20  # elements whose dice are thrown at once


def add(x: Tensor, turns: Turns, table: Tensor) -> None:
    for first, layers in _groups(turns, x.device):
        inside = x[first * turns.columns :][: layers.numel() * turns.columns]
        whole = torch.nn.functional.pad(inside, (0, layers.numel() * turns.columns - inside.numel()))
        signed = _signed(whole.view(1, -1, turns.columns).expand(turns.rows, -1, -1), layers, turns)
        for layer in signed.gather(2, _places(turns, layers, back=True)).unbind(1):
            table += layer  # one after the other: in another order they would have another sum


def estimate(table: Tensor, turns: Turns, out: Tensor) -> None:
    for first, layers in _groups(turns, table.device):
        into = out[first * turns.columns :][: layers.numel() * turns.columns]
        near = table[:, None, :].expand(-1, layers.numel(), -1).gather(2, _places(turns, layers))
        said = _signed(near, layers, turns).flatten(1)[:, : into.numel()]
        torch.add(said.median(0).values, 0.0, out=into)  # -0.0 and 0.0 are equal, so that either may be the median


def _groups(turns: Turns, device: torch.device) -> Iterator[tuple[int, Tensor]]:
    """Groups of layers, to bound memory: the number of the first layer, and the group's elements."""
    count = max(_TOGETHER // turns.columns, 1)
    for first in range(0, turns.layers, count):
        yield first, torch.arange(first, min(first + count, turns.layers), device=device)


def _places(turns: Turns, layers: Tensor, back: bool = False) -> Tensor:
    """The column of each element of a layer, or the element of each column."""
    shifts = (mix3(_turn(turns, layers), turns.key) >> 9) * turns.columns >> 23
    along = torch.arange(turns.columns, device=layers.device)
    return (along - shifts if back else along + shifts) % turns.columns


def _signed(values: Tensor, layers: Tensor, turns: Turns) -> Tensor:
    """Change the signs of the elements that each row's hash selects."""
    place = torch.arange(turns.columns, device=layers.device)
    words = _turn(turns, layers) * turns.words + place // SIGNS * SIGN_WORDS + place % SIGN_WORDS
    rng = mix3(turns.first_word + words, turns.key) >> (31 - place % SIGNS // SIGN_WORDS)
    return torch.where(rng & 1 == 1, -values, values)


def _turn(turns: Turns, layers: Tensor) -> Tensor:
    rows = torch.arange(turns.rows, device=layers.device)
    return rows[:, None, None] * turns.layers + layers[:, None]
