"""Average with one neighbour at a time, and wait for nobody."""

from functools import partial
from typing import Annotated, ClassVar, Literal, final

import torch
from torch import Tensor

from gossamer.core.binding import Binding
from gossamer.core.bucket import Bucket, State
from gossamer.core.constraints import Constraint
from gossamer.core.contracts import Context, Topology
from gossamer.core.loop import Loop
from gossamer.core.parts import part, require
from gossamer.core.ranges import Choice
from gossamer.core.schedule import Schedule, Share
from gossamer.core.topology import rounds, sides
from gossamer.core.verbs import OptimizerStep, Program, all_reduce, start
from gossamer.mixers.weights import refuse_directed
from gossamer.schedules import mixing, pair_server
from gossamer.schedules.pair_server import PairServer
from gossamer.topologies import Bipartite


@final
@part("pairwise")
class Pairwise(Schedule):
    """AD-PSGD: ranks on one side of a graph ask a neighbour on the other side for its model, and both move to the middle.

    A rank that asks sends its model m and trains on; when the answer r is there it adds (r - m) / 2 to what its model is by
    then, and the rank that answered adds (m - r) / 2 to its own. Differences are added and averages never assigned, so
    that no step is lost that was made meanwhile, and the sum of all models changes by what optimizers do and by nothing else.
    Who answers does so beside its training, from a copy of its model: gradients are taken at the model as it was when the
    step began, and what came meanwhile is added after the optimizer's step. Ranks of one side ask, those of the other only
    answer: nobody who is waited for waits, so there is no deadlock.

    After each `every`-th step a rank asks, unless an answer is still on its way: whom, it draws ("random": a round of the
    topology, and a peer in it), or takes the topology's rounds "in turn". Each rank counts its own steps. `consensus`,
    `finish`, `state_dict` and `save` are for all ranks together: those that are ahead wait there for the others, and ask nobody,
    but answer as ever, so that the others go on; what they are owed by then counts. A rank that detaches without them answers
    until all who may ask have left. An answer that takes longer than the deadline is waited for: who is to give it may
    stand still, and this rank would train on alone. What a run comes to depends on time; in the simulator it is the same
    each time. How many steps old an answer was when it landed is noted: `comm.metrics()` has the mean and the most, the
    ledger each.

    Any graph of two sides will do. `bipartite()` pairs all ranks, so it takes an even number of them; an odd number takes one
    such as `graph('0-1 0-2')`, whose rank 0 asks the others in turn.

    Use: among ranks of unlike or moody speed, on links that carry a model in a few steps: nobody waits for the slowest.

    Not for: runs that must repeat themselves to the bit; ranks of one speed, where `gossip(symmetric(bipartite()),
    overlap=True)` does the same in order; few bytes.

    Wire: 4 d + 8 bytes a block from who asks, and 4 d from who answers (8 d each in double precision).

    >>> Pairwise()
    pairwise()
    >>> from gossamer.topologies import TwoWay
    >>> Pairwise(TwoWay(), every=2)
    pairwise(topology=two_way(), every=2)

    Paper: Lian, Zhang, Zhang, Liu, Asynchronous Decentralized Parallel Stochastic Gradient Descent, ICML 2018.
    """

    lane: ClassVar[str] = "pairs"
    serves: ClassVar[bool] = True

    topology: Topology = Bipartite()
    every: Annotated[int, Choice(1, 2, 4)] = 1
    partners: Literal["random", "in turn"] = "random"

    def __post_init__(self) -> None:
        require(self.every >= 1, f"pairwise: every must be at least 1 step, got {self.every}")

    @property
    def mixes(self) -> bool:
        return True

    @property
    def is_async(self) -> bool:
        return True

    @property
    def constraints(self) -> tuple[Constraint, ...]:
        return mixing.whole_models(
            "partners change, and what one of them did not get another would; drop the memory, or compress with "
            "gossip(choco(topk()))",
            "whole models are averaged",
            "rank to rank, uncompressed; use 'allreduce(fp32()) + {schedule}', or gossip(choco()) to compress",
        )

    @property
    def period(self) -> int:
        return self.every

    @property
    def prelude(self) -> int:
        return self.topology.prelude * self.every

    def ends_round(self, step: int) -> bool:
        return step % self.every == 0

    def fits(self, binding: Binding) -> None:
        super().fits(binding)
        if binding.size > 1:
            refuse_directed(self, self.topology, binding.size, "bipartite()")
            sides(self.topology, binding.size)

    def consensus_share(self, loop: Loop) -> list[Share]:
        """With what this rank owes its model: answers that have come, and those that it gave."""
        desk: PairServer = loop.live.get("desk") or self._desk(loop)
        return [Share(model, torch.ones(())) for model in desk.models()]

    def begin(self, loop: Loop) -> Program[None]:
        if loop.size > 1 and "desk" not in loop.live:
            loop.live["desk"] = desk = self._desk(loop)
            yield from desk.open()

    def step(self, loop: Loop) -> Program[None]:
        yield from self.begin(loop)  # where no forward pass was seen
        yield OptimizerStep()
        desk: PairServer = loop.live["desk"]
        if desk.serves:
            yield from desk.take()
            return
        if loop.has_come():
            desk.land((yield from loop.collect()))
            if desk.asked is not None:
                loop.age(loop.step - desk.asked)
        if loop.step % self.every == 0 and not loop.has_posted():
            desk.asked = loop.step
            for i in range(len(loop.which)):
                yield from loop.part([i]).post(partial(self._meet, index=i))

    def quiesce(self, loop: Loop) -> Program[None]:
        """Both halves of every pair are done when the last rank has come here. All ranks come."""
        if loop.size == 1:
            return
        asked = yield from self._tell(loop, loop.has_posted())
        if asked:
            yield from self.begin(loop)  # on a rank that has never trained
            yield from loop.wait()
            yield from self._tell(loop, False)

    def leave(self, loop: Loop) -> Program[None]:
        """Who asks says goodbye; who answers goes on until all have."""
        yield from self.begin(loop)
        desk: PairServer = loop.live["desk"]
        if not desk.serves:
            yield from start(pair_server.send_shutdown(desk.near, loop.places[0].device), "goodbye", lane=self.lane)

    def _tell(self, loop: Loop, so: bool) -> Program[bool]:
        """Whether it is so on any rank, which is known when all have said it."""
        flag = torch.tensor([float(so)], device=loop.places[0].device)
        return bool((yield from all_reduce(flag, "max")))

    def _desk(self, loop: Loop) -> PairServer:
        asking, _ = sides(self.topology, loop.size)
        return PairServer(loop, self._near(loop.rank, loop.size), loop.rank not in asking, self.lane)

    def _near(self, rank: int, size: int) -> list[int]:
        """Its neighbours, each as often as there are rounds in which it is one."""
        return [other for round in rounds(self.topology, size) for other in self.topology.peers(rank, size, round).to]

    def _meet(self, block: Bucket, state: State, context: Context, index: int) -> Program[list[Tensor]]:
        """What a rank says in a meeting that it asks for; of one that only answers, what it says in one (to be counted)."""
        partner, model = self._partner(context), pair_server.model_with_residual(block, state)
        if partner is None:
            return _nothing()
        asking, _ = sides(self.topology, context.size)
        if context.rank in asking:
            return _as_wire(pair_server.ask(partner, index, model))
        return _unheard(pair_server.answer(partner, pair_server.length_of(model), lambda theirs: model))

    def _partner(self, context: Context) -> int | None:
        """Drawn evenly, or the next round's: nobody, perhaps."""
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
