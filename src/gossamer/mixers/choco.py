"""CHOCO-SGD: compressed gossip, which sends the difference between a model and its neighbours' copy of it."""

from collections.abc import Sequence
from typing import Annotated, final

import torch
from torch import Tensor

from gossamer.core.binding import Binding
from gossamer.core.bucket import Bucket, Layout, State
from gossamer.core.contracts import Codec, Context, Mixer, Topology
from gossamer.core.contracts.mixer import Report
from gossamer.core.errors import AttachError
from gossamer.core.parts import part, require
from gossamer.core.ranges import LogRange
from gossamer.core.verbs import Program
from gossamer.core.wire import expect, pack, take
from gossamer.mixers.consensus_rate import TRIED, consensus_rate, damping
from gossamer.mixers.healing import finite_or_zero, is_finite, keep_sources, pick, replaced, take_sources
from gossamer.mixers.push_sum import deliver, numerator
from gossamer.mixers.weights import metropolis, refuse_directed
from gossamer.topologies import Ring, TwoWay


@final
@part("choco", sample="choco(qsgd())")
class Choco(Mixer):
    """CHOCO-SGD: gossips through a codec, biased or not, and keeps the sum of all models.

    q = C(x - y), to all neighbours;  y_i += q_i;  p_i += sum_j W_ij q_j - q_i;  x += gamma p.
    Here y is the neighbours' copy of the model, and p = sum_j W_ij y_j - y_i the weighted difference to their copies. A rank keeps
    these two tensors, for any codec and graph. (The paper keeps the sum; the difference is smaller, so it is rounded less.) W
    are Metropolis weights. In the first round whole models are sent, as the first y. With an exact codec and gamma = 1 this is
    `symmetric()`. The output of an unbiased codec is divided by 1 + its variance.

    Without `gamma`, ranks choose it at the start: the rate at which random vectors agree fastest through this codec on this
    graph, of 1, .5, .25 and so on. The paper uses .34 with four bits, and .04 with the largest hundredth of the elements. Too
    large a rate diverges.

    Use: on slow links, where whole models are too many bytes for gossip.

    Not for: graphs that change from round to round, because neighbours must keep copies of the same models.

    Wire: the codec's bytes per bucket and neighbour.

    >>> from gossamer.codecs import TopK
    >>> Choco(TopK(), gamma=0.04)
    choco(topk(), gamma=0.04)

    Paper: Koloskova, Stich, Jaggi, Decentralized Stochastic Optimization and Gossip Algorithms with Compressed Communication,
    ICML 2019.
    """

    codec: Codec
    topology: Topology = TwoWay(Ring())
    gamma: Annotated[float | None, LogRange(0.01, 1.0)] = None

    def __post_init__(self) -> None:
        codec = self.codec
        require(
            self.gamma is None or 0 < self.gamma <= 1,
            f"choco: gamma must lie in (0, 1], got {self.gamma}; or leave gamma out",
        )
        require(
            isinstance(codec, Codec),  # pyright: ignore[reportUnnecessaryIsInstance]
            f"choco: {codec} can only decode sums of messages, and neighbours decode single messages; use topk() or qsgd()",
        )
        require(
            not codec.whole, f"choco: {codec} needs the whole model in one bucket, and gossip uses several; use topk()"
        )
        require(
            codec.wire_bytes(_TYPICAL) is not None,
            f"choco: the message size of {codec} depends on the data, and neighbours must know it in advance; use another code or index",
        )
        require(
            codec.unbiased or codec.contracts,
            f"choco: {codec} is biased and its error may be larger than its input, so no gamma is safe; use topk() or qsgd()",
        )

    @property
    def begins(self) -> bool:
        return True

    @property
    def prelude(self) -> int:
        return 1  # the first round sends whole models

    def fits(self, binding: Binding) -> None:
        super().fits(binding)
        if binding.size == 1:
            return
        refuse_directed(self, self.topology, binding.size)
        if self.topology.period(binding.size) > 1 or self.topology.prelude:
            raise AttachError(
                f"{self}: neighbours keep copies of each other's models, and {self.topology} changes neighbours from round to round; use "
                "a topology that does not change, such as two_way(ring()) or complete()"
            )
        if self.gamma is None and self.codec.unbiased and not self.codec.omega(TRIED):
            kept = min((damping(self.codec, layout) for layout in binding.layouts), default=1.0)
            if kept < 1:
                raise AttachError(
                    f"{self}: gamma is chosen with a vector of {TRIED.numel} elements, which {self.codec} sends in full, and some "
                    f"tensors of this model it does not; the one chosen would diverge: pass one, such as gamma={kept / 2:.1g}"
                )

    def numerator(self, block: Bucket, state: State) -> Tensor:
        return numerator(block, state)[0]

    def push(self, block: Bucket, state: State, context: Context, round: int) -> Program[list[Tensor]]:
        x = numerator(block, state)[0]
        peers = self.topology.peers(context.rank, context.size, round)
        weights = metropolis(self.topology, context.rank, context.size, round)
        gamma = consensus_rate(self.codec, self.topology, context.size) if self.gamma is None else self.gamma
        state["gamma"] = torch.tensor(gamma, dtype=torch.float64)
        order = dict(zip(peers.to, weights))
        keep_sources(state, peers.source)
        state |= {f"weight{i}": torch.tensor(order[peer], dtype=torch.float64) for i, peer in enumerate(peers.source)}
        wire = self._wire(x, block, state, context, sum(weights))
        return deliver([wire] * len(peers.to), peers, wire.numel())

    def _wire(self, x: Tensor, block: Bucket, state: State, context: Context, others: float) -> Tensor:
        """Encode this rank's message, and update its own copy as neighbours will. `others` is the sum of their weights."""
        if "belief" not in state:
            state["belief"] = finite_or_zero(x)
            state["pull"] = torch.mul(state["belief"], -others, out=block.new())
            state["whole"] = torch.ones((), dtype=torch.float32)
            return pack(x)
        news = torch.sub(x, state["belief"], out=block.new())
        wire = self.codec.encode(block.like(news), {}, context)
        through = block.new()
        self.codec.overwrite(wire, block.layout, through)
        through = finite_or_zero(through.mul_(damping(self.codec, block.layout)))  # as the neighbours will take it
        state["belief"] = torch.add(state["belief"], through, out=block.new())
        state["pull"] = torch.add(state["pull"], through, alpha=-others, out=block.new())
        return wire

    def heal(
        self, block: Bucket, state: State, arrived: Sequence[Tensor], report: Report
    ) -> tuple[Bucket, Sequence[Tensor]]:
        """Who gets what is not finite does without it; whose own model is not takes the mean of what its neighbours are known by."""
        if not arrived:
            return block, arrived
        own, whole = is_finite(block.flat), "whole" in state
        weights = [float(state[f"weight{i}"]) for i in range(len(arrived))]
        pull = block.new().copy_(state["pull"])
        for wire, weight, source in zip(arrived, weights, take_sources(state, len(arrived)), strict=True):
            pulled = block.new().copy_(pull)
            self._add(wire, block.layout, pulled, weight, whole)
            fine = is_finite(pulled)
            pull = pick(fine, pulled, pull)
            if source is not None:
                report(source, fine)
        own = report(None, own)
        state.pop("whole", None)
        state["pull"], state["came"] = pull, torch.ones((), dtype=torch.float32)
        if own is True:
            return block, []
        # `absorb` adds gamma times the pull.
        known = state["belief"] + pull * (1 / sum(weights) - float(state["gamma"]))
        return replaced(block, state, own, pick(own, block.flat, known), 1.0), []

    def absorb(self, block: Bucket, state: State, arrived: Sequence[Tensor]) -> Tensor:
        x = numerator(block, state)[0]
        came = state.pop("came", None) is not None
        if arrived:
            pull = block.new().copy_(state["pull"])
            whole = state.pop("whole", None) is not None
            for i, wire in enumerate(arrived):
                self._add(wire, block.layout, pull, float(state[f"weight{i}"]), whole)
            state["pull"] = pull
        if arrived or came:
            x = torch.add(x, state["pull"], alpha=float(state["gamma"]), out=block.new())
        state["x"] = x
        return x

    def _add(self, wire: Tensor, layout: Layout, into: Tensor, weight: float, whole: bool) -> None:
        if not whole:
            self.codec.accumulate(wire, layout, into, weight * damping(self.codec, layout))
            return
        expect(wire, into.numel() * into.element_size(), "choco")
        into.add_(take(wire, into.dtype, into.numel())[0], alpha=weight)

    def wrote(self, block: Bucket, state: State) -> None:
        if block.flat is state["x"]:  # nothing was rounded: the parameters hold x
            del state["x"]
            state.pop("z", None)
            return
        state["z"] = block.flat


_TYPICAL = Layout.of({"vector": (64,), "matrix": (1024, 1024)})  # some codecs draw a number of atoms for matrices only
