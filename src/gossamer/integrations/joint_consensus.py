"""Joint consensus: under members(), all who are left agree on one consensus, whoever is lost meanwhile.

A rank that has the consensus may be gone before others notice that a rank is lost. So the ranks vote before and after they
average: who has it? They are done once all say so, and where only some have it, one of those gives it to the others. After
members have met again, whatever they were at, the next thing that each of them says is its vote.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from gossamer.core.errors import PeerError
from gossamer.core.schedule import Elastic
from gossamer.core.verbs import MembersChanged, Program
from gossamer.fabrics.torch.fabric import TorchFabric
from gossamer.integrations import consensus
from gossamer.integrations.broadcast import broadcast
from gossamer.integrations.handshake import numbers_of_all
from gossamer.integrations.shared import floats
from gossamer.integrations.steps import StepLoop
from gossamer.runtime import Worker


def outlive(worker: Worker, fabric: TorchFabric, failure: PeerError) -> None:
    """Go on with the ranks that are left after a request between steps; raises the failure where they cannot."""
    schedule = worker.recipe.schedule
    if fabric.members is None or not isinstance(schedule, Elastic):
        raise failure
    fabric.run(schedule.outlive(worker.loop, failure))


class JointConsensus:
    """Swaps the consensus into a model, together with those who are there."""

    def __init__(self, steps: StepLoop, own: Mapping[str, Tensor]) -> None:
        """`own` are copies of the model's parameters and buffers."""
        self._steps, self._worker, self._fabric = steps, steps.worker, steps.fabric
        self._own = dict(own)
        self._kept, self._has = dict(own), False  # once the model is the consensus, `_has` is true, and `_kept` is that
        self._life = steps.fabric.present.life

    def swap_in(self, ends: bool) -> bool:
        """Returns with the model of the others where this rank was counted as lost meanwhile: they have ended this without it.

        False, with this rank's own model, where a rank has come since the last step: it is not here, unless all `ends` here.
        """
        while not self._is_anew:
            if self._steps.members_just_came and not ends:
                consensus.restore(self._steps.model, self._own)
                return False
            try:
                if self._attempt_jointly() and (ends or not self._steps.members_just_came):
                    return True
            except MembersChanged:
                if not self._is_anew:
                    self._return()
            except PeerError as failure:
                self._return()
                outlive(self._worker, self._fabric, failure)
                if self._has and not self._is_anew:
                    self._return()
        self._steps.take_part()  # the others may be in the midst of a step
        return True

    @property
    def _is_anew(self) -> bool:
        """True if the others have counted this rank as lost, and it has come back to them."""
        return self._fabric.present.life != self._life

    def _attempt_jointly(self) -> bool:
        """Attempt it on all ranks that hold this replica; the vote of one that is lost is lost on all."""
        try:
            done = self._attempt()
        except MembersChanged as lost:
            self._worker.replica.outlive(lost)
            raise
        self._worker.replica.outlive(None)
        return done

    def _attempt(self) -> bool:
        """Vote, and do what the votes say; True if all have the consensus."""
        began = self._fabric.generation
        holders = self._fabric.run(self._vote())
        if self._fabric.generation != began:
            return False
        if all(holders):
            return True
        if any(holders):
            self._fabric.run(self._take(holders.index(True)))
        else:
            swapping = consensus.swap_in(self._worker, self._steps.shared)
            self._fabric.run(up_to_a_change(swapping, lambda: self._fabric.generation == began))
        self._has, self._kept = True, consensus.remember(self._steps.model)
        return False

    def _vote(self) -> Program[list[bool]]:
        """Who has the consensus, by rank."""
        # Who counts its own steps offers its own model to a round in which others may wait for their quorum.
        if not self._has:
            yield from self._worker.rest()
        votes = yield from numbers_of_all([self._has], torch.uint8, self._worker.device)
        return [bool(vote) for (vote,) in votes]

    def _take(self, giver: int) -> Program[None]:
        """Copy what a rank has that holds the consensus."""
        tensors = [param.parameter.detach() for param in self._worker.params.values()]
        if self._steps.shared.policy != "local":
            tensors += floats(self._steps.model).values()
        yield from broadcast(tensors, self._worker.device, gives=self._worker.rank == giver)

    def _return(self) -> None:
        """Write back what this rank had; under gossip the models are one average now, since the members have met."""
        if not self._has and self._worker.recipe.schedule.shape.outlasts == "models":
            self._kept = consensus.remember(self._steps.model)
        else:
            consensus.restore(self._steps.model, self._kept)


def up_to_a_change(program: Program[Any], unchanged: Callable[[], bool]) -> Program[Any]:
    """The program, up to its first request after a change of members.

    A rank that was behind has been given the answer that it waited for; those ahead of it begin anew, and so must this one.
    """
    answer, error = None, None
    while True:
        try:
            verb = program.send(answer) if error is None else program.throw(error)
        except StopIteration as end:
            return end.value
        if not unchanged():
            program.close()
            raise MembersChanged("the members have changed before all had the consensus")
        try:
            answer, error = (yield verb), None
        except Exception as failure:
            answer, error = None, failure
