"""The bytes of a step: those of each thing that the schedule asks for, as often as it does."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from gossamer.core.block import Block, Layout
from gossamer.core.contracts import Echo, Seat
from gossamer.core.draw import Draw
from gossamer.core.schedule import Message
from gossamer.core.verbs import Program
from gossamer.counting.answers import answer_of
from gossamer.counting.hollow import hollow
from gossamer.counting.rehearsal import Average, Mail, Rehearsal, span
from gossamer.fabrics.ledger import traffic
from gossamer.recipe import Recipe
from gossamer.worker.channels import Channel, build

SMALL = Layout.of({"x": (1,)})


def bytes_per_step(recipe: "str | Recipe", shapes: "Mapping[str, tuple[int, ...] | Tensor]", size: int) -> float:
    """What one rank of `size` sends per step, on average over ranks and over whole rounds of the schedule.

    `shapes` may hold the parameters themselves: `dict(model.named_parameters())`. What a schedule sends of an optimizer's
    buffers (`slowmo(buffers="average")`) is not in it, nor is a warm-up.

    >>> bytes_per_step("allreduce", {"w": (1000,)}, 4)
    6000.0
    >>> bytes_per_step("slowmo(12)", {"w": (1000,)}, 4)
    500.0
    """
    parsed = Recipe.of(recipe)
    parameters = {n: torch.empty(s, device="meta") if isinstance(s, tuple) else s for n, s in shapes.items()}
    channels = build(parsed, parameters, dict.fromkeys(parameters, 0), size)
    parsed.schedule.check(size, [c.layout for c in channels])
    first, last = span(parsed)
    run = Rehearsal(parsed, len(channels), size, first)
    while run.step <= last:
        run.take_step()
    total = _averaged(run.averages, channels, size) + _mailed(run.mail, channels, size)
    total += sum(traffic(verb, rank, size)[1] for verb in run.besides for rank in range(size))
    return total / size / (last - first + 1)


def _averaged(averages: Iterable[Average], channels: Sequence[Channel], size: int) -> int:
    """Averages of the same blocks send the same each time."""
    return sum(_average(asked, channels, size) * times for asked, times in Counter(averages).items())


def _average(asked: Average, channels: Sequence[Channel], size: int) -> int:
    def program(channel: Channel, flat: Tensor, seat: Seat) -> Program[Any]:
        block = Block(flat, channel.layout)
        return _averaging(channel, block, seat) if asked.over is None else asked.over.average(block, {}, seat)

    return _sent(program, [channels[i] for i in asked.which], size)


def _mailed(mail: Iterable[Mail], channels: Sequence[Channel], size: int) -> int:
    """Messages with which every rank would send as much of a small block as with others send as much of a large one too, and
    are not written again.
    """
    known, total = dict[Any, int](), 0
    for which, message in mail:

        def program(channel: Channel, flat: Tensor, seat: Seat, message: Message = message) -> Program[Any]:
            return message(Block(flat, channel.layout), {}, seat)

        seats = [_seat(rank, size) for rank in range(size)]
        small = tuple(_alone(message(Block(torch.zeros(1), SMALL), {}, seat), seat) for seat in seats)
        if (which, small) not in known:
            known[which, small] = _sent(program, [channels[i] for i in which], size)
        total += known[which, small]
    return total


def _sent(program: Callable[[Channel, Tensor, Seat], Program[Any]], channels: Sequence[Channel], size: int) -> int:
    """What all ranks send together if every channel goes through the program once; like channels are done once."""
    total, like = 0, dict[Any, list[Channel]]()
    for c in channels:
        shapes = tuple(s.shape for s in c.layout.segments)
        like.setdefault((shapes, c.layout.dtype, c.exchange, c.memory), []).append(c)
    for channel, *others in like.values():
        noise = torch.Generator().manual_seed(0)
        flat = torch.empty(channel.layout.numel, dtype=channel.layout.dtype).uniform_(-1, 1, generator=noise)
        for rank in range(size):
            seat = _seat(rank, size, channel.shift)
            total += _alone(program(channel, flat, seat), seat) * (1 + len(others))
    return total


def _seat(rank: int, size: int, shift: float = 0.0) -> Seat:
    return Seat(rank, size, 1, Draw(0, 1, rank), shift=shift)


def _averaging(channel: Channel, block: Block, seat: Seat) -> Program[Any]:
    exchange = hollow(channel.exchange)

    def send(block: Block, seat: Seat) -> Program[Echo]:
        return exchange.average(block, {}, seat)

    return (yield from channel.memory.around(block, {}, send, seat))


def _alone(program: Program[Any], seat: Seat) -> int:
    """The bytes that a rank sends when every other rank answers as it would itself."""
    sent, answer = 0, None
    with suppress(StopIteration):
        while True:
            verb = program.send(answer)
            sent += traffic(verb, seat.rank, seat.size)[1]
            answer = answer_of(verb, seat.size)
    return sent
