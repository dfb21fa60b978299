"""The bytes of a step: those of each thing that the schedule asks for, as often as it does."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from gossamer.core.block import Block
from gossamer.core.contracts import Echo, Exchange, Mixer, Quorum, Seat
from gossamer.core.draw import Draw
from gossamer.core.verbs import AllGather, AllReduce, AllToAll, Claim, Closed, Program, Receive, Verb, kept
from gossamer.counting.hollow import hollow
from gossamer.counting.rehearsal import Rehearsal, span
from gossamer.fabrics.ledger import traffic
from gossamer.recipe import Recipe
from gossamer.worker.channels import Channel, build


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
    first, last = span(parsed)
    loop = Rehearsal(parsed, first)
    while loop.step <= last:
        loop.take_step()

    def average(channel: Channel, flat: Tensor, seat: Seat) -> Program[Any]:
        return _averaging(channel, Block(flat, channel.layout), seat)

    total = loop.averages * _sent(average, channels, size) if loop.averages else 0.0
    return (total + _mixed(loop.rounds, channels, size)) / (last - first + 1)


def _mixed(rounds: Iterable[tuple[Mixer, int]], channels: Sequence[Channel], size: int) -> float:
    """Rounds in which everybody has as many peers as in another send as much as that one, and are not done again."""
    known, total = dict[Any, float](), 0.0
    for mixer, round in rounds:

        def push(channel: Channel, flat: Tensor, seat: Seat, mixer: Mixer = mixer, round: int = round) -> Program[Any]:
            return mixer.push(Block(flat, channel.layout), {}, seat, round)

        topology = getattr(mixer, "topology", None)
        peers = topology and tuple(len(topology.peers(rank, size, round).to) for rank in range(size))
        if (mixer, peers) not in known:
            known[mixer, peers] = _sent(push, channels, size)
        total += known[mixer, peers]
    return total


def _sent(program: Callable[[Channel, Tensor, Seat], Program[Any]], channels: Sequence[Channel], size: int) -> float:
    """What a rank sends on average if every channel goes through the program once; like channels are done once."""
    total, like = 0, dict[Any, list[Channel]]()
    for c in channels:
        shapes = tuple(s.shape for s in c.layout.segments)
        like.setdefault((shapes, c.layout.dtype, c.exchange, c.memory), []).append(c)
    for channel, *others in like.values():
        noise = torch.Generator().manual_seed(0)
        flat = torch.empty(channel.layout.numel, dtype=channel.layout.dtype).uniform_(-1, 1, generator=noise)
        for rank in range(size):
            seat = Seat(rank, size, 1, Draw(0, 1, rank), shift=channel.shift)
            total += _alone(program(channel, flat, seat), seat) * (1 + len(others))
    return total / size


def _averaging(channel: Channel, block: Block, seat: Seat) -> Program[Any]:
    if isinstance(channel.exchange, Quorum):
        channel.exchange.check(seat.size)
        yield from channel.exchange.claim(seat)
        quorum, rates = hollow(channel.exchange), torch.zeros(1, dtype=torch.float64)
        return (yield from quorum.settle(block, {}, seat, lambda: (block.flat, rates), 1))
    assert isinstance(channel.exchange, Exchange)
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
            answer = _answer(verb, seat.size)
    return sent


def _answer(verb: Verb, size: int) -> Any:
    match verb:
        case AllReduce(tensor):
            return tensor
        case AllGather(wire):
            return [wire] * size
        case AllToAll(wires, lengths):
            made = [kept(w) for w in wires]
            return [w if w.numel() == n else w.new_zeros(n) for w, n in zip(made, lengths, strict=True)]
        case Receive(_, length):
            return torch.zeros(length, dtype=torch.uint8)
        case Claim():
            return 1
        case Closed(_, count):
            return tuple(range(count))
        case _:
            return None
