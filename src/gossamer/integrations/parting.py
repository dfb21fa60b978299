"""Parting: members that were told to leave hand over what they owe, and the others go on without them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from gossamer.core.errors import AttachError
from gossamer.core.schedule import Share
from gossamer.core.verbs import MembersChanged, Program, all_reduce
from gossamer.fabrics.liveness.departure import Departure
from gossamer.integrations.handshake import tell
from gossamer.kernels.finite import all_finite
from gossamer.runtime.debts import Debts, debts_of, let_go, summed, take_on

if TYPE_CHECKING:
    from gossamer.integrations.steps import StepLoop


@final
class Parting:
    """What a rank does about leaving after each step, under recipes that all ranks step together in, or gossip.

    All ranks run one program on the comm thread. Everything that changes is kept until a last sum has come: then it is changed on
    all, for whoever has that sum gives it to those who have not (`fabrics/torch/last_collective.py`). A second sum tells those who
    leave that the others have the first. So what is owed is never on both sides, nor on none.
    """

    def __init__(self, steps: "StepLoop", departure: Departure) -> None:
        self._steps, self._worker, self._fabric = steps, steps.worker, steps.fabric
        self.departure = departure
        self.is_over = False  # True once this rank has nothing left to do but to end
        self.has_left = False  # True if the others go on without it; False where all leave together

    def after_step(self) -> None:
        """Leave, or go on without those who do, if it is agreed that ranks leave after this step."""
        worker, done = self._worker, self._worker.step - 1
        if self.is_over or not self.departure.is_due(done):
            return
        told = self.departure.received is not None
        if worker.size == 1:
            self.is_over = told
            return
        try:
            with self._fabric.during("leaving", done):
                self._fabric.run(worker.quiesce())
            leavers = self._fabric.join(self._fabric.start(self._part(told), "leaving", done))
        except MembersChanged:
            return  # those who are left have met already, and agree anew
        if len(leavers) == worker.size:
            self.is_over = True
        elif told:
            self.is_over = self.has_left = True
            self._fabric.close()
        elif leavers and self._fabric.reunion is not None:
            self._fabric.reunion.part_from([worker.ranks.present.ranks[i] for i in leavers])

    def refuse_after_leaving(self) -> None:
        if self.has_left:
            raise AttachError(
                f"rank {self._fabric.rank} has left the members after step {self._worker.step - 1}, and the others train on without it: end "
                "the loop when `comm.stopping` is true"
            )

    # -- on the comm thread ------------------------------------------------------------------------------------------------

    def _part(self, told: bool) -> Program[list[int]]:
        """Hand over what those who leave owe; returns their places. Nothing is handed over where all leave, who can save together."""
        worker = self._worker
        mine = debts_of(worker) if told else None
        facts = {"leaves": told, "owes": [[*debt] for debt in mine or []]}
        everyone: list[dict[str, Any]] = yield from tell(facts, worker.device)
        leavers = [i for i, each in enumerate(everyone) if each["leaves"]]
        if not leavers or len(leavers) == worker.size:
            return leavers
        models = yield from self._agreed_models()
        keys = zip(*(everyone[i]["owes"] for i in leavers), strict=True)  # by bucket
        owed = yield from summed(worker, mine, [sorted({key for its in each for key in its}) for each in keys])
        yield from all_reduce(torch.ones(1, dtype=torch.float32, device=worker.device))
        self._change(models, owed, leavers, told)
        yield from all_reduce(torch.ones(1, dtype=torch.float32, device=worker.device))
        return leavers

    def _agreed_models(self) -> Program[list[Tensor]]:
        """The mean of all models, by bucket; empty where they are equal already.

        Under rounds anchors stay. So at the end of the round what a rank has learned in it before it left counts as that of each
        other one.
        """
        worker = self._worker
        shares = worker.recipe.schedule.consensus_share(worker.loop)
        if shares is None or worker.recipe.is_synced(worker.step - 1):
            return []
        counts, models = all_finite([share.value for share in shares]), list[Tensor]()
        for share in shares:
            total = yield from all_reduce(_flat(share) if counts else torch.zeros_like(_flat(share)))
            models.append(total[:-1] / total[-1] if float(total[-1]) else share.value)
        return models

    def _change(self, models: Sequence[Tensor], owed: Debts, leavers: Sequence[int], told: bool) -> None:
        worker, members = self._worker, self._fabric.members
        for bucket, model in zip(worker.buckets, models):
            bucket.write(model)
            bucket.states["mixer"].clear()
        if models:
            worker.in_flight.drop_messages()
        if told:
            let_go(worker)
        else:
            take_on(worker, owed, worker.size - len(leavers))
        present = worker.ranks.present
        if members is not None:
            members.owes = 0.0 if told else members.owes
            members.parted |= {(present.ranks[i], present.lives[i]) for i in leavers}


def _flat(share: Share) -> Tensor:
    return torch.cat([share.value, share.weight.to(share.value).view(1)])
