"""The bytes of a step: those of each thing that the schedule asks for, as often as it does."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from math import ceil
from typing import Any

import torch
from torch import Tensor

from gossamer.core.block import Block
from gossamer.core.contracts import Echo, Exchange, Mixer, Quorum, Seat
from gossamer.core.draw import Draw
from gossamer.core.groups import place
from gossamer.core.verbs import AllGather, AllReduce, AllToAll, Claim, Closed, Program, Receive, Verb, kept
from gossamer.counting.hollow import hollow
from gossamer.counting.rehearsal import Rehearsal, span
from gossamer.fabrics.ledger import Ledger, traffic
from gossamer.fabrics.sim import simulate
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
    (sent, _), steps = _counted(recipe, shapes, size, 1)
    return sent / size / steps


def bytes_between(
    recipe: "str | Recipe", shapes: "Mapping[str, tuple[int, ...] | Tensor]", size: int, per_node: int
) -> float:
    """What one node of `per_node` ranks sends to others per step, through its network card, on average over nodes.

    >>> bytes_between("allreduce", {"w": (1000,)}, 4, per_node=2)
    6000.0
    """
    (sent, inside), steps = _counted(recipe, shapes, size, per_node)
    return (sent - inside) / ceil(size / per_node) / steps


Count = tuple[float, float]  # bytes that all ranks together send, and how many of these stay within a node


def _counted(
    recipe: "str | Recipe", shapes: "Mapping[str, tuple[int, ...] | Tensor]", size: int, per_node: int
) -> tuple[Count, int]:
    """What whole rounds of the schedule send, and how many steps they are."""
    parsed = Recipe.of(recipe)
    parameters = {n: torch.empty(s, device="meta") if isinstance(s, tuple) else s for n, s in shapes.items()}
    channels = build(parsed, parameters, dict.fromkeys(parameters, 0), size)
    first, last = span(parsed)
    loop = Rehearsal(parsed, first)
    while loop.step <= last:
        loop.take_step()

    def average(channel: Channel, flat: Tensor, seat: Seat) -> Program[Any]:
        return _averaging(channel, Block(flat, channel.layout), seat)

    done = [_mixed(loop.rounds, channels, size, per_node)]
    if loop.averages:
        done.append(_times(loop.averages, _sent(average, channels, size, per_node)))
    return _sum(done), last - first + 1


def _sum(counts: Iterable[Count]) -> Count:
    sent, inside = 0.0, 0.0
    for a, b in counts:
        sent, inside = sent + a, inside + b
    return sent, inside


def _times(often: int, count: Count) -> Count:
    return often * count[0], often * count[1]


def _mixed(rounds: Iterable[tuple[Mixer, int]], channels: Sequence[Channel], size: int, per_node: int) -> Count:
    """Rounds in which everybody has as many peers as in another send as much as that one, and are not done again."""
    known, done = dict[Any, Count](), list[Count]()
    for mixer, round in rounds:

        def push(channel: Channel, flat: Tensor, seat: Seat, mixer: Mixer = mixer, round: int = round) -> Program[Any]:
            return mixer.push(Block(flat, channel.layout), {}, seat, round)

        topology = getattr(mixer, "topology", None)
        peers = topology and tuple(len(topology.peers(rank, size, round).to) for rank in range(size))
        if (mixer, peers) not in known:
            known[mixer, peers] = _sent(push, channels, size, per_node)
        done.append(known[mixer, peers])
    return _sum(done)


def _sent(
    program: Callable[[Channel, Tensor, Seat], Program[Any]], channels: Sequence[Channel], size: int, per_node: int
) -> Count:
    """What is sent if every channel goes through the program once; like channels are done once."""
    done, like = list[Count](), dict[Any, list[Channel]]()
    for c in channels:
        shapes = tuple(s.shape for s in c.layout.segments)
        like.setdefault((shapes, c.layout.dtype, c.exchange, c.memory), []).append(c)
    for channel, *others in like.values():
        noise = torch.Generator().manual_seed(0)
        flat = torch.empty(channel.layout.numel, dtype=channel.layout.dtype).uniform_(-1, 1, generator=noise)
        seats = [Seat(rank, size, 1, Draw(0, 1, rank), shift=channel.shift) for rank in range(size)]
        programs = (program(channel, flat, seat) for seat in seats)
        if channel.exchange.groups(size):  # what one tells another is not what that one would have told itself
            ledger = simulate([*programs], ledger=Ledger(per_node=per_node)).ledger
            once = float(ledger.sent), float(ledger.inside)
        else:
            once = _sum(_alone(p, seat, per_node) for p, seat in zip(programs, seats))
        done.append(_times(1 + len(others), once))
    return _sum(done)


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


def _alone(program: Program[Any], seat: Seat, per_node: int) -> Count:
    """What a rank sends when every other rank answers as it would itself."""
    sent = inside = 0
    answer = None
    with suppress(StopIteration):
        while True:
            verb = program.send(answer)
            moved = traffic(verb, seat.rank, seat.size, per_node)
            sent, inside = sent + moved.sent, inside + moved.inside
            answer = _answer(verb, place(verb, seat.rank, seat.size)[1])
    return float(sent), float(inside)


def _answer(verb: Verb, size: int) -> Any:
    match verb:
        case AllReduce(tensor):
            return tensor
        case AllGather(wire):
            return [wire] * size
        case AllToAll(wires, lengths):
            made = [kept(w) for w in wires]
            return [w if w.numel() == n else w.new_zeros(n) for w, n in zip(made, lengths, strict=True)]
        case Receive(source, length):
            wire = torch.zeros(length, dtype=torch.uint8)
            return (0, wire) if source is None else wire
        case Claim():
            return 1
        case Closed(_, count):
            return tuple(range(count))
        case _:
            return None
