"""Replays what the training loop does on a clock: the seconds of a step, and what they go to.

All ranks are alike, so one rank is replayed. Its training loop and its comm threads share processors with the other ranks
of the host, and transfers that are under way at once share the host's card.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

from gossamer.costs import Cluster
from gossamer.costs.laws import ComputingLaw
from gossamer.costs.sharing import Flow, fair_rates
from gossamer.planning.events import BackwardEnds, Busy, OptimizerSteps, Ready, StepEnds, Wait
from gossamer.planning.model_cost import ModelCost
from gossamer.planning.pieces import Piece

CODEC_SLOWS = 1.07  # by how much a codec on the same GPU slows the backward pass; literature says 1.04 to 1.1
TINY = 1e-12  # seconds


@lru_cache(maxsize=256)
def late_by(law: ComputingLaw, ranks: int, steps: int) -> float:
    """How many times the mean rank's seconds pass until the slowest has computed so many steps."""
    return law.slowest(ranks, steps) if steps else 1.0


class StartProgram(NamedTuple):
    """A program starts: the key that waits name, its comm thread, and its pieces."""

    key: int
    lane: str
    pieces: tuple[Piece, ...]


Action = Ready | StartProgram | Wait | Busy | BackwardEnds | OptimizerSteps | StepEnds
Step = tuple[Action, ...]


@dataclass(frozen=True)
class StepSeconds:
    """The seconds of a mean step; `work` and `network` are what nothing hides."""

    step: float
    forward: float
    backward: float
    work: float
    network: float
    optimizer: float
    sent: float  # bytes of a rank
    card: float  # bytes of a node's card
    waiting: float = 0.0  # for ranks that compute longer

    @property
    def computing(self) -> float:
        return self.forward + self.backward + self.optimizer

    @property
    def utilisation(self) -> float:
        """The share of a step in which the machine computes."""
        return min(self.computing / self.step, 1.0) if self.step else 1.0


@dataclass(eq=False)
class _Lane:
    """A comm thread: programs that wait their turn, and the piece under way."""

    queue: deque[tuple[int, Piece | None]] = field(default_factory=deque[tuple[int, Piece | None]])
    work: float = 0.0  # processor seconds left
    latency: float = 0.0
    link: float = 0.0  # seconds on the link left, if it is not shared
    then: tuple[float, float, float] | None = None  # latency, link and work of the request that comes after the work
    flow: Flow = Flow(1.0, {})  # what its bytes take of the links
    busy: bool = False  # it has a piece
    needs: str = ""
    opens: str = ""


class Replay:
    """Replays steps of a training loop on a cluster; `work` is by how much to multiply what programs compute.

    `model` has the seconds of the cluster's slowest host.
    """

    def __init__(self, cluster: Cluster, model: ModelCost, work: float = 1.0) -> None:
        self._cluster, self._times = cluster, work / cluster.speed
        self._alone, self._model = model, model.at_speed(1 / late_by(cluster.law, cluster.size, model.waits))
        self._lanes = dict[str, _Lane]()
        self._done, self._open = set[int](), set[str]()
        self.clock = 0.0
        self._blocked = {"work": 0.0, "network": 0.0}
        self._sent = self._card = 0.0

    def seconds(self, steps: Sequence[Step], warm: int) -> StepSeconds:
        """The mean over the steps after the first `warm` ones."""
        for step in steps[:warm]:
            self._take(step)
        began, self._blocked = self.clock, {"work": 0.0, "network": 0.0}
        self._sent = self._card = 0.0
        for step in steps[warm:]:
            self._take(step)
        many = len(steps) - warm
        updates = sum(isinstance(action, OptimizerSteps) for step in steps[warm:] for action in step) / many
        model, slowest = (self._told(each, updates) for each in (self._alone, self._model))
        mean, late = (self.clock - began) / many, slowest.computing
        network = self._blocked["network"] / many
        work, waiting = max(mean - late - network, 0.0), late - model.computing
        sent, card = self._sent / many, self._card / many
        forward, backward = model.passes
        network += sum(model.gathering)
        return StepSeconds(mean, forward, backward, work, network, model.optimizer, sent, card, waiting)

    def _told(self, model: ModelCost, updates: float) -> ModelCost:
        """A step's computing on cores that ranks share, where the optimizer makes so many updates a step."""
        shared = model.in_turns(self._cluster.turns)
        return replace(shared, optimizer=updates * shared.optimizer)

    # -- the training loop -----------------------------------------------------------------------------------------------

    def _take(self, step: Step) -> None:
        model, cluster = self._model, self._cluster
        self._train(model.forward)
        passed = 0.0
        for action in step:
            match action:
                case Ready(bucket):
                    share = model.arrival(bucket)
                    self._train(max(share - passed, 0.0) * model.backward)
                    passed = max(passed, share)
                    self._compute(model.copies(bucket) / cluster.memory_rate / cluster.speed)
                case BackwardEnds():
                    self._train((1 - passed) * model.backward)
                case OptimizerSteps():
                    self._compute(model.optimizer)
                case Busy(seconds):
                    self._compute(self._times * seconds)
                case StartProgram(key, lane, pieces):
                    self._start(key, lane, pieces)
                case Wait(keys):
                    self._wait(keys)
                case StepEnds():
                    pass

    def _start(self, key: int, name: str, pieces: Sequence[Piece]) -> None:
        lane = self._lanes.setdefault(name, _Lane())
        self._done.discard(key)
        lane.queue.append((key, Piece(self._cluster.program_seconds, None)))
        lane.queue.extend((key, piece) for piece in pieces)
        lane.queue.append((key, None))
        self._next(lane)

    def _train(self, seconds: float) -> None:
        self._compute(seconds, on_cores=self._model.on_cores)

    def _compute(self, seconds: float, on_cores: bool = True) -> None:
        left = seconds
        while left > TINY:
            left -= self._advance(left, on_cores)

    def _wait(self, keys: Sequence[int]) -> None:
        while missing := [key for key in keys if key not in self._done]:
            lane = next((lane for lane in self._lanes.values() if lane.busy and not lane.needs), None)
            if lane is None:
                raise RuntimeError(f"programs {missing} never end")
            kind = "work" if any(lane.work > TINY for lane in self._lanes.values()) else "network"
            before = self.clock
            self._advance(0.0)
            self._blocked[kind] += self.clock - before

    # -- the clock ---------------------------------------------------------------------------------------------------------

    def _advance(self, computing: float, on_cores: bool = True) -> float:
        """Go on to the next moment at which something ends; returns how much of the loop's computing was done."""
        lanes = [lane for lane in self._lanes.values() if lane.busy and not lane.needs]
        working = [lane for lane in lanes if lane.work > TINY]
        linking = [lane for lane in lanes if lane.latency <= TINY and lane.link > TINY]
        runnable = self._cluster.ranks_per_node * (len(working) + (computing > 0 and on_cores))
        share = min(1.0, self._cluster.cores / runnable) if runnable else 1.0
        pace = share if on_cores else 1.0
        if self._cluster.has_gpus and working:
            pace /= CODEC_SLOWS
        rates = self._progress(linking)
        ends = [lane.work / share for lane in working]
        ends += [lane.latency for lane in lanes if lane.latency > TINY]
        ends += [lane.link / rates[id(lane)] for lane in linking]
        if computing:
            ends.append(computing / pace)
        if not ends:
            for lane in lanes:
                self._end_piece(lane)
            return 0.0
        passed = min(ends)
        self.clock += passed
        for lane in lanes:
            if lane.link > TINY and lane.latency <= TINY:
                lane.link -= passed * rates[id(lane)]
            lane.latency -= passed
            lane.work -= passed * share
            if max(lane.work, lane.latency, lane.link) <= TINY:
                self._end_piece(lane)
        return passed * pace

    def _progress(self, linking: Sequence[_Lane]) -> dict[int, float]:
        """How fast each transfer goes on, of what it would alone: those at once have fair shares of the card and of the node."""
        if len(linking) < 2:
            return {id(lane): 1.0 for lane in linking}
        flows = [lane.flow for lane in linking]
        through_card = sum(flow.links.get("card", 0.0) > 0 for flow in flows)
        card = self._cluster.reaches("shared") if through_card > 1 else 1.0
        rates = fair_rates(flows, {"card": card, "inside": 1.0})
        return {id(lane): rate / lane.flow.limit for lane, rate in zip(linking, rates, strict=True)}

    def _end_piece(self, lane: _Lane) -> None:
        if lane.then is not None:  # the work before a request is done: now the request
            lane.latency, lane.link, lane.work = lane.then
            lane.then = None
            if max(lane.latency, lane.link, lane.work) > TINY:
                return
        if lane.opens:
            self._opened(lane.opens)
            lane.opens = ""
        lane.busy = False
        self._next(lane)

    def _opened(self, ticket: str) -> None:
        self._open.add(ticket)
        for lane in self._lanes.values():
            if lane.needs == ticket:
                lane.needs = ""
                if lane.work <= TINY:
                    self._end_piece(lane)

    def _next(self, lane: _Lane) -> None:
        """Begin the next piece of a comm thread, if it has one and is free."""
        while not lane.busy and lane.queue:
            key, piece = lane.queue.popleft()
            if piece is None:
                self._done.add(key)
                continue
            lane.busy = True
            lane.work, lane.latency, lane.link, lane.then = self._times * piece.work, 0.0, 0.0, None
            lane.opens = piece.opens
            lane.needs = piece.needs if piece.needs not in self._open else ""
            if piece.crossing is not None:
                lane.then, lane.flow = self._request(piece), piece.crossing.flow(self._cluster)
            if lane.work <= TINY and not lane.needs:
                self._end_piece(lane)

    def _request(self, piece: Piece) -> tuple[float, float, float]:
        crossing, cluster = piece.crossing, self._cluster
        assert crossing is not None
        self._sent += crossing.sent
        self._card += crossing.card
        copies = crossing.sent * 2 * cluster.byte_seconds
        return crossing.latency_seconds(cluster), crossing.link_seconds(cluster), self._times * piece.inside + copies
