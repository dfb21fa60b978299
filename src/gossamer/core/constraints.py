"""Constraints: what a part requires of the parts it is combined with, in terms of traits instead of part names.

A trait is a promise that some parts make: TRAITS lists all of them, and `tests/laws` has a law for each. A constraint
requires or excludes a trait, and gives the reason in a sentence that refers to the parts by their roles.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from string import Formatter
from typing import NamedTuple, Protocol

from gossamer.core.errors import RecipeError

TRAITS: dict[str, str] = {
    # of what is sent
    "unbiased": "the expected sent value is the input",
    "contracts": "the compression error is smaller than the input",
    "bounds residual": "the residual of error feedback stays bounded, although it can be larger than the input",
    "whole": "all parameters must be in one bucket",
    "exact": "nothing is lost",
    "own size": "the codec sets the magnitude of what is sent, whatever that of the gradients",
    "sparse": "some elements are sent exactly, and the others not at all",
    "votes": "each rank has one vote per element, whatever the magnitude of its gradient",
    "own feedback": "the recipe sets what happens to the second encoding's error, and the memory does not",
    "part feedback": "not all of the second encoding's error is added to a later mean",
    "two levels": "ranks that share a node average among themselves, and nodes among each other",
    # of what is kept
    "memory": "state is kept from one step to the next",
    "mends bias": "the residual is sent later",
    "fades": "the residual is sent later, and decays at every step like a running mean",
    "adds momentum": "the sent or returned gradient has momentum of its own",
    "bias allowed": "bias is allowed, on request",
    "wants unbiased": "it requires an unbiased exchange",
    "remembers all": "the mean of all that ranks have sent is kept, so that no rank may be missing",
    "parts models": "each rank steps with a gradient of its own, so that models diverge",
    "owes steps": "under plain SGD, a rank's model and 1/N of its residual add up to the same on all ranks",
    # of when
    "averages gradients": "gradients are averaged before each optimizer step, at every step",
    "mixes": "models are mixed between ranks, and never agree exactly",
    "rank to rank": "models are sent from rank to rank, whatever nodes they are on",
    "counts alike": "models are averaged with equal weights, whatever the ranks' weights",
    "resyncs": "models that have diverged are made equal now and then",
    "meets": "ranks step with their own gradients now and then, and average the steps of the update afterwards",
    "is async": "each rank counts its own steps and waits for no other, until a request of all ranks",
    "lags": "a step uses the mean gradient of the step before",
    "waits for few": "a step does not wait for the slowest ranks, which apply missed updates later",
    "rounds": "models are averaged every `every` steps, which a controller can change",
    "batch": "it can grow the batch: `micro_batches` and `rate`",
    "accumulates": "several micro-batches make one step",
    "own step": "the model does not move by the optimizer's step alone, but by another rate or a step of the schedule's own",
    # of how much, and for whom
    "control": "the recipe may change during training",
    "moves schedule": "its schedule may change, and with it the optimizer's steps",
    "directs": "the optimizer gets a direction computed from the mean, and not the mean",
    "sends momentum": "a momentum is sent in place of the gradient",
    "hears rate": "its decisions may depend on the optimizer's learning rates",
    "follows rate": "it uses the learning rate of a bucket",
    "singles out": "some parameters use another exchange than the rest",
}


class Constraint(NamedTuple):
    """Requires one of these traits among all parts of a recipe, or excludes all of them."""

    traits: frozenset[str]
    wanted: bool
    because: str

    @property
    def roles(self) -> set[str]:
        """The roles that the sentence names."""
        return {field.partition(".")[0] for _, field, _, _ in Formatter().parse(self.because) if field}


def requires(*traits: str, because: str) -> Constraint:
    """A constraint that requires one of these traits. The reason may name roles: '{exchange} is biased; use ...'.

    >>> requires("unbiased", because="{memory} requires an unbiased exchange, and {exchange} is biased").wanted
    True
    """
    return Constraint(_known(traits), True, because)


def excludes(*traits: str, because: str) -> Constraint:
    """A constraint that allows none of these traits."""
    return Constraint(_known(traits), False, because)


@cache
def _known(traits: tuple[str, ...]) -> frozenset[str]:
    named = frozenset(traits)
    if unknown := named - TRAITS.keys():
        raise ValueError(
            f"there is no trait {min(unknown)!r}; known are {', '.join(TRAITS)}. Add it to TRAITS, and a law"
        )
    return named


def those(**claims: bool) -> frozenset[str]:
    """The traits whose arguments are true, with underscores in place of spaces.

    >>> sorted(those(unbiased=True, wants_unbiased=True, contracts=False))
    ['unbiased', 'wants unbiased']
    """
    return _known(tuple(name.replace("_", " ") for name, claimed in claims.items() if claimed))


class Constrained(Protocol):
    """Anything with traits and constraints: a part, a group of rules, or an integration."""

    @property
    def traits(self) -> frozenset[str]: ...
    @property
    def constraints(self) -> Sequence[Constraint]: ...


def agree(parties: Mapping[str, Constrained]) -> None:
    """Raise RecipeError if a constraint is violated; exclusions are reported before missing traits.

    A constraint that names an absent role is skipped: a rule is made before its schedule is known.

    >>> class Picky(NamedTuple):
    ...     traits: frozenset[str] = frozenset()
    ...     constraints: tuple[Constraint, ...] = (requires("memory", because="{memory} keeps nothing; use error_feedback()"),)
    >>> agree({"memory": Picky(those(memory=True))})
    """
    have = frozenset[str]().union(*(p.traits for p in parties.values()))
    terms = [t for p in parties.values() for t in p.constraints]
    for term in sorted(terms, key=lambda t: t.wanted):
        if bool(term.traits & have) != term.wanted and term.roles <= parties.keys():
            raise RecipeError(term.because.format(**parties))
