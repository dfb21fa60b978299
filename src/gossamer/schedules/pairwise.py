"""AD-PSGD: average with one neighbour at a time, without waiting for the others."""

from functools import cached_property, partial
from typing import Annotated, Literal, final

import torch
from torch import Tensor

from gossamer.core.binding import Binding
from gossamer.core.bucket import Bucket, State
from gossamer.core.constraints import Constraint
from gossamer.core.contracts import Context, Topology
from gossamer.core.loop import Loop
from gossamer.core.parts import part, require
from gossamer.core.ranges import Choice
from gossamer.core.schedule import Schedule, Shape, Share
from gossamer.core.topology import rounds, sides
from gossamer.core.verbs import OptimizerStep, Program, all_reduce, start
from gossamer.mixers.weights import refuse_directed
from gossamer.schedules import mixing, pair_server
from gossamer.schedules.pair_server import PairServer
from gossamer.topologies import Bipartite


@final
@part("pairwise")
class Pairwise(Schedule):
    """AD-PSGD: a rank asks one neighbour for its model, and both ranks move to the middle of their models.

    A rank that asks sends its model m and trains on; when it has the answer r, it adds (r - m) / 2 to its current model, and
    the rank that answered adds (m - r) / 2 to its own. Differences are added, and averages are never assigned, so no local
    step made meanwhile is lost, and only optimizer steps change the sum of all models.
    A rank answers on a comm thread, from a copy of its model: gradients are taken at the model as it was when the step
    began, and moves that arrived meanwhile are added after the optimizer's step. The graph is bipartite: ranks of one side
    only ask, ranks of the other side only answer, so there is no deadlock.

    After each `every`-th step a rank asks, unless an answer is still in flight. It draws its partner ("random": a round of the
    topology, and a peer in it), or takes the topology's rounds "in turn". Each rank counts its own steps. All ranks must call
    `consensus`, `finish`, `state_dict` and `save` together: ranks that are ahead wait there for the others, ask no more, but
    still answer, so that the others can go on; moves that have arrived by then are included. A rank that detaches without these
    calls answers until all ranks that may ask it have left. An answer that takes longer than the deadline is waited for: its
    sender may be stuck, and else this rank would train on alone. Results depend on timing; in the simulator they are the same
    each time. The age of each answer, in steps, is recorded: `comm.metrics()` has the mean and the largest, the ledger has all.

    Any bipartite graph works. `bipartite()` pairs all ranks, so it needs an even number of them; for an odd number use one
    such as `graph('0-1 0-2')`, in which rank 0 asks the others in turn.

    Use: on ranks of different or changing speed, if links carry a model in a few steps: no rank waits for the slowest.

    Not for: runs that must be reproducible bit for bit; ranks of equal speed, where `gossip(symmetric(bipartite()),
    overlap=True)` does the same in a fixed order; saving bytes.

    Wire: 4 d + 8 bytes per bucket from the rank that asks, and 4 d from the rank that answers (8 d in double precision).

    >>> Pairwise()
    pairwise()
    >>> from gossamer.topologies import TwoWay
    >>> Pairwise(TwoWay(), every=2)
    pairwise(topology=two_way(), every=2)

    Paper: Lian, Zhang, Zhang, Liu, Asynchronous Decentralized Parallel Stochastic Gradient Descent, ICML 2018.
    """

    topology: Topology = Bipartite()
    every: Annotated[int, Choice(1, 2, 4)] = 1
    partners: Literal["random", "in turn"] = "random"

    def __post_init__(self) -> None:
        require(self.every >= 1, f"pairwise: every must be at least 1 step, got {self.every}")

    @cached_property
    def shape(self) -> Shape:
        return Shape(
            period=self.every,
            prelude=self.topology.prelude * self.every,
            mixes=True,
            is_async=True,
            lane="pairs",
            serves=True,
        )

    @property
    def constraints(self) -> tuple[Constraint, ...]:
        return mixing.whole_models(
            "partners change, so a residual would go to another partner than it was left out for; drop the memory, or compress with "
            "gossip(choco(topk()))",
            "whole models are averaged; drop the {rules}",
            "rank to rank, uncompressed; use 'allreduce(fp32()) + {schedule}', or gossip(choco()) to compress",
        )

    def fits(self, binding: Binding) -> None:
        super().fits(binding)
        if binding.size > 1:
            refuse_directed(self, self.topology, binding.size, "bipartite()")
            sides(self.topology, binding.size)

    def consensus_share(self, loop: Loop) -> list[Share]:
        """Return the models plus the moves that have arrived and are not added yet."""
        server: PairServer = loop.live.get("server") or self._server(loop)
        return Share.each(server.models())

    def begin(self, loop: Loop) -> Program[None]:
        if loop.ranks.size > 1 and "server" not in loop.live:
            loop.live["server"] = server = self._server(loop)
            yield from server.open()

    def step(self, loop: Loop) -> Program[None]:
        yield from self.begin(loop)  # if the forward hook did not run
        yield OptimizerStep()
        server: PairServer = loop.live["server"]
        if server.serves:
            yield from server.take()
            return
        if loop.messages.has_come():
            server.land((yield from loop.messages.collect()))
            if server.asked is not None:
                loop.record.aged(loop.step - server.asked)
        if loop.step % self.every == 0 and not loop.messages.has_posted():
            server.asked = loop.step
            for i in range(len(loop.buckets)):
                yield from loop.part([i]).messages.post(partial(self._meet, index=i))

    def quiesce(self, loop: Loop) -> Program[None]:
        """Wait until every pair has finished its average. All ranks must call it."""
        if loop.ranks.size == 1:
            return
        asked = yield from self._tell(loop, loop.messages.has_posted())
        if asked:
            yield from self.begin(loop)  # on a rank that has never trained
            yield from loop.messages.wait()
            yield from self._tell(loop, False)

    def leave(self, loop: Loop) -> Program[None]:
        """Send a shutdown message, if this rank asks; a rank that answers goes on until it has one from each neighbour."""
        yield from self.begin(loop)
        server: PairServer = loop.live["server"]
        if not server.serves:
            yield from start(
                pair_server.send_shutdown(server.near, loop.buckets[0].device), "goodbye", lane=self.shape.lane
            )

    def _tell(self, loop: Loop, mine: bool) -> Program[bool]:
        """Return True if `mine` is True on any rank; waits for all ranks."""
        flag = torch.tensor([float(mine)], device=loop.buckets[0].device, dtype=torch.float32)
        return bool((yield from all_reduce(flag, "max")))

    def _server(self, loop: Loop) -> PairServer:
        asking, _ = sides(self.topology, loop.ranks.size)
        return PairServer(
            loop, self._near(loop.ranks.rank, loop.ranks.size), loop.ranks.rank not in asking, self.shape.lane
        )

    def _near(self, rank: int, size: int) -> list[int]:
        """Return a rank's neighbours, each once per round in which it is one."""
        return [other for round in rounds(self.topology, size) for other in self.topology.peers(rank, size, round).to]

    def _meet(self, block: Bucket, state: State, context: Context, index: int) -> Program[list[Tensor]]:
        """Return the messages of a rank's request; on a rank that answers, those of its answer (only a dry run uses them)."""
        partner, model = self._partner(context), pair_server.model_with_residual(block, state)
        if partner is None:
            return _nothing()
        asking, _ = sides(self.topology, context.size)
        if context.rank in asking:
            return _as_wire(pair_server.ask(partner, index, model))
        return _unheard(pair_server.answer(partner, pair_server.length_of(model), lambda theirs: model))

    def _partner(self, context: Context) -> int | None:
        """Return the partner: drawn evenly, or that of the next round; None if the rank has no peer in it."""
        if self.partners == "random":
            near, (u,) = self._near(context.rank, context.size), context.rng.uniform("partner", 1).tolist()
            return near[int(u * len(near))]
        number = context.step // self.every - 1
        to = self.topology.peers(context.rank, context.size, number).to
        return to[number % len(to)] if to else None


def _as_wire(meeting: Program[Tensor]) -> Program[list[Tensor]]:
    return [(yield from meeting).view(torch.uint8)]


def _unheard(meeting: Program[None]) -> Program[list[Tensor]]:
    yield from meeting
    return []


def _nothing() -> Program[list[Tensor]]:
    yield from ()
    return []
