"""The bytes that a request moves over a rank's link."""

from typing import NamedTuple

from gossamer.core.groups import members, place
from gossamer.core.verbs import AllGather, AllReduce, AllToAll, Receive, Send, Shared, Verb


class Traffic(NamedTuple):
    """Bytes handed to the backend, sent and received over this rank's link, and sent within the node (`inside`)."""

    handed: int
    sent: int
    received: int
    inside: int = 0


def traffic(verb: Verb, rank: int, size: int, per_node: int = 1) -> Traffic:
    """The bytes that a request of this rank moves, with `size` ranks and `per_node` ranks per node.

    All-reduce and all-gather are counted as rings: 2 (N-1)/N of the tensor, and N-1 wires, each way. A ring sends to the
    next rank of the group; the bytes leave the node if that rank is on another node.
    """
    if not isinstance(verb, Shared):
        return Traffic(0, 0, 0)
    everyone, (index, count) = members(verb, size), place(verb, rank, size)
    mine = rank // per_node

    def stays(to: int) -> bool:
        return everyone[to] // per_node == mine

    match verb:
        case AllReduce(tensor):
            n = tensor.numel() * tensor.element_size()
            return _ring(n, 2 * (count - 1) * n // count, stays((index + 1) % count))
        case AllGather(wire):
            return _ring(wire.numel(), (count - 1) * wire.numel(), stays((index + 1) % count))
        case AllToAll(wires, lengths):
            sent = {j: w.numel() for j, w in enumerate(wires) if j != index}
            inside = sum(n for j, n in sent.items() if stays(j))
            came = sum(n for j, n in enumerate(lengths) if j != index)
            return Traffic(sum(sent.values()), sum(sent.values()), came, inside)
        case Send(to, wire):
            n = wire.numel()
            return Traffic(n, n, 0, n if stays(to) else 0)
        case Receive(_, length):
            return Traffic(0, 0, length)
        case _:
            return Traffic(0, 0, 0)


def _ring(handed: int, crossed: int, stays: bool) -> Traffic:
    return Traffic(handed, crossed, crossed, crossed if stays else 0)
