"""Push-sum gossip: a rank waits only for its peers, and models still tend to the exact average."""

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, final

import torch
from torch import Tensor

from gossamer.core.bucket import Bucket, Layout, State
from gossamer.core.contracts import Context, Mixer, Peers, Topology
from gossamer.core.contracts.mixer import Report
from gossamer.core.parts import part
from gossamer.core.verbs import Program, receive, send
from gossamer.core.wire import expect, take
from gossamer.kernels import follow
from gossamer.kernels.finite import all_finite
from gossamer.mixers.healing import heal, keep_sources, take_sources
from gossamer.topologies import Exponential


@final
@part("push_sum")
class PushSum(Mixer):
    """Stochastic gradient push: sends shares of (x, w) to a few peers; the model is x / w.

    send (p x, p w) to each peer;  keep the rest;  add what arrives;  z = x / w.  Sums of x and of w over all ranks never
    change, so z tends to the average whatever the graph, the order or the delay. x and w travel in one message. x is kept
    in single precision at least: a model in half precision is z rounded, and x does not lose what rounding removes. w has
    the precision of x, or else their ratio would drift.

    Use: in `gossip()` or inside `slowmo`, among many ranks that should not wait for all others.

    Not for: two ranks; networks that are slow everywhere, because it sends whole models.

    Wire: 4 d + 4 bytes per bucket and peer (8 d + 8 in double precision).

    >>> PushSum()
    push_sum()
    >>> from gossamer.topologies import Ring
    >>> PushSum(Ring())
    push_sum(topology=ring())

    Paper: Assran et al., Stochastic Gradient Push for Distributed Deep Learning, ICML 2019.
    """

    forgets: ClassVar[bool] = True

    topology: Topology = Exponential()

    @property
    def prelude(self) -> int:
        return self.topology.prelude

    def numerator(self, block: Bucket, state: State) -> Tensor:
        return numerator(block, state)[0]

    def push(self, block: Bucket, state: State, context: Context, round: int) -> Program[list[Tensor]]:
        """Split off the shares now; returns the program that sends them and receives others."""
        x, w = numerator(block, state)
        peers = self.topology.peers(context.rank, context.size, round)
        messages = {share: _message(x, share, w * share, block) for share in dict.fromkeys(peers.shares)}
        state["x"], state["w"], state["z"] = _times(x, peers.keep, messages, block), w * peers.keep, block.flat
        keep_sources(state, peers.source)
        if self.topology.alike:
            state["gave"] = w * (peers.shares[0] if peers.to else 0.0)
        return deliver([messages[share] for share in peers.shares], peers, _length(x))

    def heal(
        self, block: Bucket, state: State, arrived: Sequence[Tensor], report: Report
    ) -> tuple[Bucket, Sequence[Tensor]]:
        if not arrived:
            return block, arrived
        x, weights, messages = state["x"], list[float](), list[Tensor]()
        for wire in arrived:
            expect(wire, _length(x), "push_sum")
            more, rest = take(wire, x.dtype, x.numel())
            messages.append(more)
            weights.append(float(self._weight(rest, x.dtype, state)))
        block, healed = heal(block, state, messages, weights, float(state["w"]), report)
        wires = [w if a is b else _wire(a, v) for w, a, b, v in zip(arrived, healed, messages, weights, strict=True)]
        return block, wires

    def absorb(self, block: Bucket, state: State, arrived: Sequence[Tensor]) -> Tensor:
        """Add the messages that arrived, if any. `block` is the model after the optimizer's step."""
        x, w = numerator(block, state)
        came, w = self._open(arrived, x, w, state)
        for more in came:
            x = torch.add(x, more, out=block.new())
        if float(w) == 1:
            state.pop("z", None)
            state["x"], state["w"] = x, w
            return x
        state["x"], state["w"], state["z"] = x, w, torch.div(x, x.new_full((), float(w)), out=block.new())
        return state["z"]

    def wrote(self, block: Bucket, state: State) -> None:
        if block.flat is state["x"]:  # w = 1 and nothing was rounded: the parameters hold x
            state.clear()
            return
        state["z"] = block.flat

    def follow(
        self, pieces: Callable[[], Sequence[Tensor]], layout: Layout, state: State, arrived: Sequence[Tensor]
    ) -> Sequence[Tensor] | None:
        """Do what `absorb` does, bit for bit, in one pass over the parameters; None if it cannot."""
        if "x" not in state or len(arrived) > 1 or not (parts := pieces()):
            return None
        kept, was = state["x"], state["w"]
        if arrived and not self._is_sound(parts, kept, arrived):
            return None
        take_sources(state, len(arrived))
        came, w = self._open(arrived, kept, was, state)
        x = layout.buffers.like(kept)
        follow(parts, state.pop("z", float(was)), kept, came[0] if came else None, float(w), x)
        if float(w) == 1:
            state.clear()
            return [x]
        state["x"], state["w"] = x, w
        return []

    def _is_sound(self, parts: Sequence[Tensor], kept: Tensor, arrived: Sequence[Tensor]) -> bool:
        """Whether all there is to merge is finite; a device is not asked, and takes the way that needs no answer."""
        return kept.device.type == "cpu" and all_finite(
            [*parts, *(take(w, kept.dtype, kept.numel())[0] for w in arrived)]
        )

    def _open(self, arrived: Sequence[Tensor], x: Tensor, w: Tensor, state: State) -> tuple[list[Tensor], Tensor]:
        """Return the parts of x that arrived, and w plus the weights that arrived."""
        came = list[Tensor]()
        for wire in arrived:
            expect(wire, _length(x), "push_sum")
            more, rest = take(wire, x.dtype, x.numel())
            came.append(more)
            w = w + self._weight(rest, x.dtype, state)
        return came, w

    def _weight(self, wire: Tensor, dtype: torch.dtype, state: State) -> Tensor:
        """Return a message's weight, as a tensor on the host.

        If the topology is the same for all ranks, all weights are equal at any time, so a received weight equals the last one sent.
        Then a GPU's message is not read, because that would wait for the device.
        """
        known = state.get("gave")
        if wire.device.type != "cpu" and self.topology.alike and known is not None:
            return known
        return take(wire, dtype)[0].cpu()


def numerator(block: Bucket, state: State) -> tuple[Tensor, Tensor]:
    """Return x and w, with the optimizer's change of z = x / w added to x. A missing w is 1."""
    if "x" not in state:
        return block.flat, torch.ones((), dtype=block.flat.dtype)
    # An old checkpoint may hold w in single precision.
    w = state.get("w", torch.ones((), dtype=torch.float32)).to(block.flat.dtype)
    z = state.get("z")
    if z is None and float(w) == 1:  # nothing was rounded: the model is the numerator
        return block.flat, w
    if z is block.flat:  # no one has written to it
        return state["x"], w
    # x -= rate * direction: the step is taken on the numerator. z is what the parameters held: kept, or the quotient to the
    # bit, so that an unchanged model adds exactly 0.
    if z is None:
        z = torch.div(state["x"], w, out=block.new())
    moved = torch.sub(block.flat, z, out=block.new())
    return torch.add(state["x"], moved, out=moved), w


def _message(x: Tensor, share: float, weight: Tensor, block: Bucket) -> Tensor:
    wire = block.layout.buffers.of(_length(x), x.device)
    numbers = wire.view(x.dtype)
    torch.mul(x, share, out=numbers[:-1])
    numbers[-1:].fill_(float(weight))
    return wire


def _wire(x: Tensor, weight: float) -> Tensor:
    return torch.cat([x, x.new_full((1,), weight)]).view(torch.uint8)


def _times(x: Tensor, share: float, messages: Mapping[float, Tensor], block: Bucket) -> Tensor:
    """Return x times the share that is kept; if a sent share is equal, reuse its message."""
    if share in messages:
        return messages[share].view(x.dtype)[:-1]
    return torch.mul(x, share, out=block.new())


def _length(x: Tensor) -> int:
    """Return the length of a message with x and w, in bytes."""
    return (x.numel() + 1) * x.element_size()


def deliver(wires: Sequence[Tensor], peers: Peers, length: int) -> Program[list[Tensor]]:
    """Send a message to each peer, and receive one of the same length from each source."""
    awaits = [(rank, length) for rank in peers.source]
    for rank, wire in zip(peers.to, wires, strict=True):
        yield from send(rank, wire, awaits)
        awaits = []
    arrived = list[Tensor]()
    for rank in peers.source:
        arrived.append((yield from receive(rank, length)))
    return arrived
