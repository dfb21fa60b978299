"""Nodes: a dense average inside nodes, with fast links, and the recipe's exchange between nodes, with slow links."""

from dataclasses import replace
from math import ceil
from typing import final

from torch import Tensor

from gossamer.codecs import FP32
from gossamer.core.binding import Binding
from gossamer.core.bucket import Bucket, Layout, State
from gossamer.core.constraints import Constraint, excludes, those
from gossamer.core.contracts import Context, Exchange, Policy, ReduceResult, Unit
from gossamer.core.groups import within
from gossamer.core.parts import part, require
from gossamer.core.rng import CounterRng
from gossamer.core.verbs import Program
from gossamer.exchanges.allreduce import AllReduced
from gossamer.exchanges.as_one import Node, added_up, as_one
from gossamer.exchanges.two_steps import TwoSteps

BETWEEN, INSIDE = "between.", "inside."  # prefixes of the two exchanges' state entries


@final
@part("nodes", sample="nodes(scatter(fp32()), 2)")
class Nodes(TwoSteps, Exchange):
    """Two levels: `per_node` ranks average inside their node, then the nodes average as if each were one rank.

    M_k = the mean of node k, through `inside`;  the mean of all M_k through `between`, among the first ranks of the nodes,
    which forward every message to their node. Ranks are numbered node by node; a last node of fewer ranks weighs less.
    A node's compression error, M_k - (the decoded part of M_k), counts for each of its ranks, so a memory works: the mean of
    the residuals is the error of the mean. Messages that can be summed, such as low rank, are summed inside nodes too, and no
    dense M_k is formed: that is `between` over all ranks, with only its sums in two levels. The residual of a chunk's owner
    is left to the memory; without a memory it is lost.

    `per_node(4)` after a recipe applies it to all its exchanges: `qsgd + per_node(4)`. A single node uses `inside` alone, and
    nodes of one rank each use `between` alone, bit for bit.

    Use: for several ranks behind one slow network card. There flat recipes send each rank's bytes, this one each node's: with
    two nodes of four ranks `scatter(qsgd())` sends 8.5 MB a step through a card, and in two levels 2.9.

    Not for: one rank per node, where it equals `between`; nor ranks with equal links; nor to save bytes of a ring all-reduce,
    which crosses a card only twice as often as necessary.

    Wire: that of `between` among N / g ranks, through the card of a node; inside, that of `inside`, and the messages of
    `between` once for each other rank.

    >>> from gossamer.codecs import Ternary
    >>> from gossamer.exchanges import Scatter
    >>> Nodes(Scatter(Ternary()), 4)
    nodes(scatter(ternary()), 4)
    """

    between: Exchange
    per_node: int
    inside: Exchange = AllReduced(FP32())

    def __post_init__(self) -> None:
        require(
            self.per_node >= 1, f"nodes: per_node must be the number of ranks per node, 1 or more, got {self.per_node}"
        )
        for where, exchange in ("between", self.between), ("inside", self.inside):
            require(
                "own feedback" not in exchange.traits,
                f"nodes: {exchange} has its own feedback, but {where} nodes the memory keeps the residual; leave feedback out, and "
                "use error_feedback() or diana()",
            )

    @property
    def traits(self) -> frozenset[str]:
        moves = any("adds momentum" in one.traits for one in self.both)
        return super().traits | those(two_levels=self.per_node > 1, adds_momentum=moves)

    @property
    def both(self) -> tuple[Exchange, Exchange]:
        return self.between, self.inside

    @property
    def owes(self) -> bool:
        return any(one.owes for one in self.both)

    @property
    def votes(self) -> bool:
        return self.between.votes or self.inside.votes

    @property
    def sum_rounding(self) -> float:
        return self.between.sum_rounding + self.inside.sum_rounding

    @property
    def whole(self) -> bool:
        return self.between.whole or self.inside.whole

    @property
    def encodes_mean(self) -> bool:
        return self.between.encodes_mean

    @property
    def bucket_mb(self) -> float:
        return self.between.bucket_mb

    @property
    def ranks_per_node(self) -> int:
        return max(self.per_node, super().ranks_per_node)

    @property
    def sparse(self) -> bool:
        """True if `between` is sparse, unless nodes form dense means: then every rank has residuals in all elements."""
        return (self.per_node == 1 or self._adds_up) and self.between.sparse

    @property
    def _adds_up(self) -> bool:
        """True if messages are summed inside nodes too, where a dense mean would cost more; not for exact exchanges."""
        dense = self.inside.adds_up and self.inside.exact
        return dense and self.between.adds_up and not self.between.exact

    @property
    def constraints(self) -> tuple[Constraint, ...]:
        because = (
            "{exchange} under {schedule}: the schedule sends models from rank to rank, not by nodes. Apply per_node to the whole "
            "gossip recipe, 'sgp + per_node(4)'; leave the nodes out; or use '{exchange} + slowmo(48)', whose rounds end with an "
            "average in two levels"
        )
        # What they require is required of both together, and so by Exchange.
        theirs = [term for one in self.both for term in one.constraints if not term.wanted]
        return (*super().constraints, *theirs, excludes("rank to rank", because=because))

    def groups(self, size: int) -> tuple[tuple[int, ...], ...]:
        if (only := self._only(size)) is not None:
            return only[0].groups(size)
        nodes = [Node.of(rank, size, self.per_node) for rank in range(0, size, self.per_node)]
        found = list[tuple[int, ...]]()
        for node in nodes:
            found += [node.ranks, *_of(self.inside.groups(len(node.ranks)), node.ranks)]
        leaders = nodes[0].leaders
        found += [leaders, *_of(self.between.groups(len(leaders)), leaders)]
        return tuple(g for g in dict.fromkeys(found) if len(g) > 1)

    def fits(self, binding: Binding) -> None:
        self.inside.fits(binding._replace(size=min(self.per_node, binding.size)))
        nodes = binding.size if self._adds_up else ceil(binding.size / self.per_node)
        self.between.fits(binding._replace(size=nodes))

    def omega(self, layout: Layout, size: int) -> float:
        """Relative variance of both levels together: (1 + w1) (1 + w2) - 1."""
        if self._adds_up:
            return self.between.omega(layout, size)
        inside = self.inside.omega(layout, min(self.per_node, size))
        nodes = ceil(size / self.per_node)
        return (1 + inside) * (1 + self.between.omega(layout, nodes)) - 1 if nodes > 1 else inside

    def policy(self, key: str) -> Policy:
        exchange, word = self._whose(key)
        policy = exchange.policy(word)
        return "mean" if policy == "equal" and exchange is self.inside else policy  # equal inside one node only

    def unit(self, key: str) -> Unit:
        exchange, word = self._whose(key)
        return exchange.unit(word)

    def _whose(self, key: str) -> tuple[Exchange, str]:
        """The exchange that a state entry belongs to, and its own name for it."""
        between = key.startswith(BETWEEN)
        return (self.between, key.removeprefix(BETWEEN)) if between else (self.inside, key.removeprefix(INSIDE))

    def _only(self, size: int) -> tuple[Exchange, str] | None:
        """`inside` if there is one node, `between` if each node has one rank, else None."""
        if size <= self.per_node:
            return self.inside, INSIDE
        return (self.between, BETWEEN) if self.per_node == 1 else None

    def average(self, block: Bucket, state: State, context: Context) -> Program[ReduceResult]:
        if (only := self._only(context.size)) is not None:
            return (yield from _alone(*only, block, state, context))
        node = Node.of(context.rank, context.size, self.per_node)
        if self._adds_up:
            program = _alone(self.between, BETWEEN, block, state, context)
            return (yield from added_up(program, node, block.layout.buffers))
        near = yield from self._inside(block, state, context, node)
        weight = len(node.ranks) * len(node.leaders) / context.size
        asked = near.mean if weight == 1 else near.mean.mul_(weight)
        first = CounterRng(context.rng.seed, context.step, node.ranks[0])
        place = context._replace(rank=node.number, size=len(node.leaders), rng=first)
        # If the mean may be written over the bucket itself, add_sent is not called.
        into = asked if block.into is block.flat else None
        program = _paid(self.between, BETWEEN, Bucket(asked, block.layout, into), state, place)
        far = yield from as_one(program, node, block.flat.device, block.layout.buffers)

        def add_sent(into: Tensor, share: float) -> None:
            lost = block.new().copy_(asked)
            far.add_sent(lost, -1.0)
            near.add_sent(into, share)
            into.sub_(lost, alpha=share / weight)

        return ReduceResult(far.mean, add_sent)

    def _inside(self, block: Bucket, state: State, context: Context, node: Node) -> Program[ReduceResult]:
        rng = replace(context.rng, seed=context.rng.seed ^ 0x1D5)  # other random numbers than between nodes
        place = context._replace(rank=node.place, size=len(node.ranks), rng=rng)
        whole = replace(block, drains=False)  # the memory takes out what both levels have sent, when that is known
        return (yield from within(_paid(self.inside, INSIDE, whole, state, place), node.ranks))


def _of(groups: tuple[tuple[int, ...], ...], ranks: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Groups of indices into `ranks`, as groups of ranks."""
    return [tuple(ranks[i] for i in group) for group in groups]


def _alone(exchange: Exchange, whose: str, block: Bucket, state: State, context: Context) -> Program[ReduceResult]:
    """Average through one exchange alone; its state entries keep their prefix."""
    own = _own(state, whose)
    result = yield from exchange.average(block, own, context)
    for key, value in own.items():
        state[whose + key] = value
    return result


def _own(state: State, whose: str) -> State:
    return {key.removeprefix(whose): value for key, value in state.items() if key.startswith(whose)}


def _paid(exchange: Exchange, whose: str, block: Bucket, state: State, context: Context) -> Program[ReduceResult]:
    """Average, and hand the owners' residuals over to the memory: they count as not sent.

    An owner's residual counts once in the mean, so N times in what one of N ranks sent.
    """
    own = _own(state, whose)
    result = yield from exchange.average(block, own, context._replace(feedback=float(bool(context.feedback))))
    owed = [own.pop(key) for key in [*own] if exchange.policy(key) == "owner"]
    for key, value in own.items():
        state[whose + key] = value

    def add_sent(into: Tensor, share: float) -> None:
        result.add_sent(into, share)
        for debt in owed:
            into.sub_(debt, alpha=share * context.size)

    return ReduceResult(result.mean, add_sent)
