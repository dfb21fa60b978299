"""Symmetric gossip (D-PSGD): neighbours use equal weights for each other, so no weight is sent."""

from collections.abc import Sequence
from typing import ClassVar, Literal, final

import torch
from torch import Tensor

from gossamer.core.binding import Binding
from gossamer.core.bucket import Bucket, State
from gossamer.core.contracts import Context, Mixer, Topology
from gossamer.core.contracts.mixer import Report
from gossamer.core.parts import part
from gossamer.core.verbs import Program
from gossamer.core.wire import expect, take
from gossamer.mixers.healing import heal, keep_sources
from gossamer.mixers.push_sum import deliver, numerator
from gossamer.mixers.weights import given, metropolis, refuse_directed, refuse_unequal
from gossamer.topologies import Ring, TwoWay


@final
@part("symmetric")
class Symmetric(Mixer):
    """D-PSGD: replaces every model by a weighted mean of itself and its neighbours' models.

    x_i <- sum_j W_ij x_j, with W_ij = 1 / (1 + max(deg_i, deg_j)) and the rest for W_ii (Metropolis weights), or with
    `weights="given"` the topology's own shares. W is symmetric, so the sum of all models never changes. Optimizer steps taken
    while messages travel are added to the mean: with `gossip(overlap=True)` this is x <- W x - lr g(x), the
    gradient taken before the mixing.

    Use: in `gossip(overlap=True)`, where models travel while a step computes; on links that send both ways at once.

    Not for: one-way graphs (use `push_sum()`); saving bytes: with two neighbours it sends two models per step.

    Wire: 4 d bytes per bucket and neighbour (8 d in double precision).

    >>> Symmetric()
    symmetric()
    >>> from gossamer.topologies import Bipartite
    >>> Symmetric(Bipartite())
    symmetric(topology=bipartite())

    Paper: Lian et al., Can Decentralized Algorithms Outperform Centralized Algorithms?, NIPS 2017.
    """

    forgets: ClassVar[bool] = True

    topology: Topology = TwoWay(Ring())
    weights: Literal["metropolis", "given"] = "metropolis"

    @property
    def prelude(self) -> int:
        return self.topology.prelude

    def fits(self, binding: Binding) -> None:
        super().fits(binding)
        if binding.size > 1:
            refuse_directed(self, self.topology, binding.size)
            if self.weights == "given":
                refuse_unequal(self, self.topology, binding.size)

    def numerator(self, block: Bucket, state: State) -> Tensor:
        return numerator(block, state)[0]

    def push(self, block: Bucket, state: State, context: Context, round: int) -> Program[list[Tensor]]:
        """Send the current x, and keep it: optimizer steps taken meanwhile are not mixed."""
        x = numerator(block, state)[0]
        peers = self.topology.peers(context.rank, context.size, round)
        weigh = metropolis if self.weights == "metropolis" else given
        weights = weigh(self.topology, context.rank, context.size, round)
        state["x"], state["z"], state["keep"] = x, block.flat, torch.tensor(1 - sum(weights), dtype=torch.float64)
        order = dict(zip(peers.to, weights, strict=True))
        keep_sources(state, peers.source)
        state |= {f"weight{i}": torch.tensor(order[j], dtype=torch.float64) for i, j in enumerate(peers.source)}
        messages = {w: torch.mul(x, w, out=block.new()).view(torch.uint8) for w in dict.fromkeys(weights)}
        return deliver([messages[w] for w in weights], peers, x.numel() * x.element_size())

    def heal(
        self, block: Bucket, state: State, arrived: Sequence[Tensor], report: Report
    ) -> tuple[Bucket, Sequence[Tensor]]:
        weights = [state.pop(f"weight{i}", None) for i in range(len(arrived))]
        if not arrived or any(weight is None for weight in weights):  # of a checkpoint that did not keep them
            return block, arrived
        messages, length = list[Tensor](), block.numel * block.flat.element_size()
        for wire in arrived:
            expect(wire, length, "symmetric")
            messages.append(take(wire, block.flat.dtype, block.numel)[0])
        shares = [float(weight) for weight in weights if weight is not None]
        block, healed = heal(block, state, messages, shares, 1.0, report)
        return block, [message.view(torch.uint8) for message in healed]

    def absorb(self, block: Bucket, state: State, arrived: Sequence[Tensor]) -> Tensor:
        """Return W x plus the optimizer steps since the push. `block` is the model after the optimizer's step."""
        if not arrived:
            if "keep" not in state:  # no message in flight: a local step
                state["x"] = numerator(block, state)[0]
            return state["x"] if "keep" not in state else block.flat
        mixed = torch.mul(state["x"], float(state["keep"]), out=block.new())
        for wire in arrived:
            expect(wire, mixed.numel() * mixed.element_size(), "symmetric")
            mixed += take(wire, mixed.dtype, block.numel)[0]
        if state["z"] is not block.flat:
            mixed += torch.sub(block.flat, state["z"], out=block.new())
        state["x"] = mixed
        del state["z"], state["keep"]
        return mixed

    def wrote(self, block: Bucket, state: State) -> None:
        if "keep" in state:  # in flight
            return
        if block.flat is state["x"]:  # nothing was rounded: the parameters hold x
            state.clear()
            return
        state["z"] = block.flat
