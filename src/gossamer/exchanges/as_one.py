"""The ranks of a node act as one: the first rank communicates with other nodes and forwards every answer to its node."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from gossamer.core.errors import GossamerError
from gossamer.core.groups import among
from gossamer.core.memory_pool import MemoryPool
from gossamer.core.programs import through
from gossamer.core.verbs import AllGather, AllReduce, AllToAll, Program, Receive, Send, Shared, Start, Verb
from gossamer.core.wire import Read, kept, receive_order, send_order

T = TypeVar("T")


class Node(NamedTuple):
    """A rank's node: its number, the rank's place in it, its ranks, and the first rank of every node."""

    number: int
    place: int
    ranks: tuple[int, ...]
    leaders: tuple[int, ...]

    @staticmethod
    def of(rank: int, size: int, per_node: int) -> "Node":
        """The node of a rank; ranks are numbered node by node, and the last node may be smaller.

        >>> Node.of(3, 5, per_node=2)
        Node(number=1, place=1, ranks=(2, 3), leaders=(0, 2, 4))
        """
        number, place = divmod(rank, per_node)
        first = number * per_node
        return Node(number, place, tuple(range(first, min(first + per_node, size))), tuple(range(0, size, per_node)))


def as_one(program: Program[T], node: Node, device: torch.device, buffers: MemoryPool) -> Program[T]:
    """Run a program on all ranks of a node as if the node were one rank among the nodes.

    Only the first rank communicates with other nodes; it then forwards each answer, still encoded, to its node: so all its
    ranks decode the same bytes, and what is short between nodes is short inside. A program that reads messages one by one gets
    them when all have arrived. The first rank keeps what it forwards in `buffers` until it is sent.
    """

    def ask(verb: Verb) -> Program[Any]:
        if isinstance(verb, Start):
            return (yield replace(verb, program=as_one(verb.program, node, device, buffers)))
        return (yield from _ask(verb, node, device, buffers)) if isinstance(verb, Shared) else (yield verb)

    return through(program, ask)


def added_up(program: Program[T], node: Node, buffers: MemoryPool) -> Program[T]:
    """Run a program on all ranks with its all-reduces in two levels: inside the nodes first, then between them.

    Only the all-reduces change: in all other requests each rank remains one among all ranks.
    """

    def ask(verb: Verb) -> Program[Any]:
        match verb:
            case Start():
                return (yield replace(verb, program=added_up(verb.program, node, buffers)))
            case AllReduce(among=None):
                near = yield replace(verb, among=node.ranks)
                return (yield from _all_reduce(near, replace(verb, tensor=near, among=node.leaders), node, buffers))
            case _:
                return (yield verb)

    return through(program, ask)


def _ask(verb: Shared, node: Node, device: torch.device, buffers: MemoryPool) -> Program[Any]:
    """Do a request between nodes, and return the first rank's answer on all ranks of the node."""
    leads, asked = node.place == 0, among(verb, node.leaders)
    match verb:
        case AllReduce(tensor):
            return (yield from _all_reduce(tensor, asked, node, buffers))
        case AllGather(wire, read):
            if leads:
                wires = yield replace(asked, read=None)
                yield from _tell(wires, node, buffers)
            else:
                wires = yield from _hear([wire.numel()] * _count(verb, node), node, wire.device)
            return _read(wires, read, verb, node)
        case AllToAll(_, _, read):
            return _read((yield from _all_to_all(verb, asked, node, buffers)), read, verb, node)
        case Send():
            return (yield asked) if leads else None
        case Receive(int(), length):
            if leads:
                wire = yield asked
                yield from _tell([wire], node, buffers)
                return wire
            return (yield from _hear([length], node, device))[0]
        case _:
            raise GossamerError(
                f"{type(verb).__name__} between nodes: a node acts as one rank there, and this request cannot be split over its ranks"
            )


def _all_reduce(tensor: Tensor, asked: Verb, node: Node, buffers: MemoryPool) -> Program[Tensor]:
    if node.place == 0:
        total = yield asked
        yield from _tell([total.reshape(-1).view(torch.uint8)], node, buffers)
        return total
    (bits,) = yield from _hear([tensor.numel() * tensor.element_size()], node, tensor.device)
    return tensor.copy_(bits.view(tensor.dtype).view(tensor.shape))


def _all_to_all(verb: AllToAll, asked: Verb, node: Node, buffers: MemoryPool) -> Program[list[Tensor]]:
    """All-to-all between nodes. Every rank of a node encodes all messages, as its first rank does, since an encoder stores
    what it wrote; the message to the own node is not sent.
    """
    me, count = _index(verb, node), _count(verb, node)
    if node.place == 0:
        came = yield replace(asked, read=None)
        yield from _tell([w for j, w in enumerate(came) if j != me], node, buffers)
        return came
    made = {j: kept(verb.wires[j]) for j in send_order(me, count)}
    lengths = [n for j, n in enumerate(verb.lengths) if j != me]
    heard = yield from _hear(lengths, node, made[me].device)
    return [*heard[:me], made[me], *heard[me:]]


def _read(wires: list[Tensor], read: Read | None, verb: Shared, node: Node) -> list[Tensor]:
    if read is None:
        return wires
    for j in receive_order(_index(verb, node), len(wires)):
        read(j, wires[j])
    return []


def _index(verb: Shared, node: Node) -> int:
    """Index of the node among the participating nodes."""
    return node.number if verb.among is None else verb.among.index(node.number)


def _count(verb: Shared, node: Node) -> int:
    return len(node.leaders if verb.among is None else verb.among)


def _tell(wires: Sequence[Tensor], node: Node, buffers: MemoryPool) -> Program[None]:
    """Send messages to the other ranks of the node, as an all-to-all: summing them with zeros would cost twice the bytes."""
    if len(node.ranks) > 1 and wires:
        said = wires[0]
        if len(wires) > 1:
            said = torch.cat([*wires], out=buffers.of(sum(w.numel() for w in wires), said.device))
        nothing = said.new_empty(0)
        yield AllToAll([nothing, *[said] * (len(node.ranks) - 1)], [0] * len(node.ranks), among=node.ranks)


def _hear(lengths: Sequence[int], node: Node, device: torch.device) -> Program[list[Tensor]]:
    if not lengths:
        return []
    nothing = torch.empty(0, dtype=torch.uint8, device=device)
    silent = [nothing] * len(node.ranks)
    told = yield AllToAll(silent, [sum(lengths), *[0] * (len(node.ranks) - 1)], among=node.ranks)
    return list(told[0].split([*lengths]))
