"""Run observer: a parent process may set a script's recipe in the environment, and follow its steps."""

import os
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist

from gossamer.core.errors import AttachError, RecipeError
from gossamer.fabrics.liveness.heartbeat import Patience
from gossamer.recipe import Recipe

if TYPE_CHECKING:
    from gossamer.integrations.metrics import Meter

VARIABLE = "GOSSAMER_RECIPE"
DENSE = "allreduce"
DDP, COMPUTE = "ddp", "compute"  # plain DistributedDataParallel; no averaging
PLAIN = (DDP, COMPUTE)


class RunObserver(ABC):
    """Follows a script that runs under a given recipe; it may refuse a script whose comparison would be meaningless.

    Law: an observer changes nothing in the training.
    """

    deadline: float  # seconds; no rank is waited for longer, dead or alive

    @abstractmethod
    def take(self, given: "Recipe | str | None", ordered: str) -> None:
        """Called before the script attaches; raises an error if the recipe is not the expected one."""

    @abstractmethod
    def begin(self, meter: "Meter", kind: str) -> None:
        """Called when the script has attached; `kind` is "ddp", "compute", or empty for a recipe."""

    @abstractmethod
    def stepped(self) -> None:
        """Called after each optimizer step."""

    @abstractmethod
    def told(self, name: str, value: float) -> None:
        """Called when the script logs its "loss" or "held_out"."""


class ObserverSlot:
    """Holds the observer of this process, if there is one."""

    observer: RunObserver | None = None


class Assignment(NamedTuple):
    """The recipe and options that a model is attached with."""

    recipe: Recipe | str
    kind: str  # "ddp" or "compute" if it is no recipe, else empty
    group: Any  # the process group; under "compute" a group of this rank only
    deadline: float
    patience: Patience


def assignment_of(
    given: "Recipe | str | None", group: Any, deadline: float, patience: Patience, what: str
) -> Assignment:
    """Return the given recipe, or the one that the environment names; errors name the caller, `what`."""
    ordered, observer = os.environ.get(VARIABLE, "").strip(), ObserverSlot.observer
    if observer is not None:
        observer.take(given, ordered)
        deadline, patience = min(deadline, observer.deadline), "work"
    if given is not None:
        return Assignment(given, "", group, deadline, patience)
    if not ordered:
        raise AttachError(
            f"{what} was called without a recipe, and the environment names none: pass one, such as 'qsgd', or set {VARIABLE}, as "
            "'gossamer compare --script' does"
        )
    if ordered == COMPUTE:
        return Assignment(DENSE, COMPUTE, _alone(), deadline, patience)
    if ordered == DDP:
        if what == "attach to DDP":  # DDP goes on averaging; gossamer only counts steps
            return Assignment(DENSE, DDP, _alone(), deadline, patience)
        return Assignment(DENSE, DDP if what == "register" else "", group, deadline, patience)
    try:
        return Assignment(Recipe.of(ordered), "", group, deadline, patience)
    except RecipeError as error:
        raise RecipeError(f"{VARIABLE}={ordered}: {error}") from None


def _alone() -> Any:
    """Make a group of this rank only."""
    return dist.new_group([dist.get_rank()], use_local_synchronization=True) if dist.is_initialized() else None
