"""Orders: whoever starts a script may name its recipe in the environment, and watch how it fares."""

import os
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist

from gossamer.core.errors import AttachError, RecipeError
from gossamer.fabrics.heartbeat import Patience
from gossamer.recipe import Recipe

if TYPE_CHECKING:
    from gossamer.integrations.metrics import Meter

VARIABLE = "GOSSAMER_RECIPE"
DENSE = "allreduce"
DDP, COMPUTE = "ddp", "compute"  # DistributedDataParallel as it comes; every rank for itself
PLAIN = (DDP, COMPUTE)


class RunObserver(ABC):
    """Runs a script under one recipe after the other. It may refuse what would make its comparison worthless.

    Its law: what it hears changes nothing in the training.
    """

    deadline: float  # seconds; nobody is waited for longer, dead or alive

    @abstractmethod
    def take(self, given: "Recipe | str | None", ordered: str) -> None:
        """The script is about to attach; an error if that is not what was agreed."""

    @abstractmethod
    def begin(self, meter: "Meter", kind: str) -> None:
        """It has attached: `kind` is the recipe, or "ddp" or "compute"."""

    @abstractmethod
    def stepped(self) -> None:
        """The optimizer has stepped."""

    @abstractmethod
    def told(self, name: str, value: float) -> None:
        """The script has told its "loss", or its quality "held_out"."""


class ObserverSlot:
    """Who watches this process, if anybody."""

    overseer: RunObserver | None = None


class Assignment(NamedTuple):
    """What a model is to be given."""

    recipe: Recipe | str
    kind: str  # "ddp", where there is one, and "compute" are no recipes; else empty
    group: Any  # the process group; under "compute" this rank alone
    deadline: float
    patience: Patience


def assignment_of(
    given: "Recipe | str | None", group: Any, deadline: float, patience: Patience, what: str
) -> Assignment:
    """The recipe that was given, or the one that the environment names. `what` it is for stands in the error."""
    ordered, overseer = os.environ.get(VARIABLE, "").strip(), ObserverSlot.overseer
    if overseer is not None:
        overseer.take(given, ordered)
        deadline, patience = min(deadline, overseer.deadline), "work"
    if given is not None:
        return Assignment(given, "", group, deadline, patience)
    if not ordered:
        raise AttachError(
            f"{what} was given no recipe, and the environment names none: give it one, such as 'qsgd', or set {VARIABLE}, as "
            "'gossamer compare --script' does"
        )
    if ordered == COMPUTE:
        return Assignment(DENSE, COMPUTE, _alone(), deadline, patience)
    if ordered == DDP:
        if what == "attach to DDP":  # which goes on averaging; we count steps
            return Assignment(DENSE, DDP, _alone(), deadline, patience)
        return Assignment(DENSE, DDP if what == "register" else "", group, deadline, patience)
    try:
        return Assignment(Recipe.of(ordered), "", group, deadline, patience)
    except RecipeError as error:
        raise RecipeError(f"{VARIABLE}={ordered}: {error}") from None


def _alone() -> Any:
    """A group of this rank only."""
    return dist.new_group([dist.get_rank()], use_local_synchronization=True) if dist.is_initialized() else None
