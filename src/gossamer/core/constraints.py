"""Constraints: what a part requires of the parts it is combined with, in terms of traits instead of part names.

A trait is a promise that some parts make: TRAITS lists all of them, and `tests/laws` has a law for each. A constraint
requires or excludes a trait, and gives the reason in a sentence that refers to the parts by their roles.
"""

from collections.abc import Iterable, Mapping, Sequence
from string import Formatter
from typing import NamedTuple, Protocol

from gossamer.core.errors import RecipeError

TRAITS: dict[str, str] = {
    # of what is sent
    "unbiased": "what gets through is right on average",
    "contracts": "what does not get through is less than what was given",
    "bounds residual": "what error feedback holds back stays bounded, although it can be more than was given",
    "whole": "all parameters must lie in one block",
    "exact": "everything gets through",
    "own size": "what travels is as large as the codec says, whatever the size of the gradients",
    "sparse": "some elements get through as they are, and nothing of the others",
    "votes": "a rank has one vote on each element, whatever the size of what it gives",
    "own feedback": "what is done with the second encoding's error was said, and does not follow from the memory",
    "part feedback": "not all of the second encoding's error is added to a later mean",
    "two levels": "ranks that share a node average among themselves, and nodes among each other",
    # of what is kept
    "memory": "something is kept from one step to the next",
    "mends bias": "what did not get through is sent later",
    "fades": "what did not get through is sent later, and less of it at every step, as a running mean forgets",
    "adds momentum": "what is sent or given has momentum of its own",
    "bias allowed": "bias is let through, on request",
    "wants unbiased": "it is right only around what is right on average",
    "remembers all": "a copy is kept of what every rank has sent on average, so that none may be missing",
    "parts models": "each rank steps with a gradient of its own, so that models part",
    "owes steps": "under plain SGD, a rank's model and 1/N of what it owes add up to the same on all ranks",
    # of when
    "averages gradients": "gradients are averaged before each descent, at every step",
    "mixes": "models are pulled together, and never agree exactly",
    "rank to rank": "models go from rank to rank, whichever nodes these share",
    "counts alike": "models are averaged as if all ranks counted alike, whatever their weights",
    "resyncs": "models that have parted are made equal now and then",
    "meets": "ranks step apart now and then, and what an update makes of their own gradients is agreed on afterwards",
    "is async": "each rank counts steps of its own and waits for nobody, until all do something together",
    "lags": "the mean that a step takes is that of the gradients of the step before",
    "waits for few": "the latest ranks are not waited for; they make up for what they missed",
    "rounds": "models are averaged every so many steps, and it can be told another number: `every`",
    "batch": "it can grow the batch: `micro_batches` and `rate`",
    "accumulates": "several micro-batches make one step",
    "own step": "the model moves otherwise than the optimizer says, by another rate or by a step of its own",
    # of how much, and for whom
    "control": "the recipe may change as training goes",
    "moves schedule": "its schedule may change, and with it what the optimizer does",
    "directs": "what the optimizer is given is made of the mean, and is no mean any more",
    "sends momentum": "a momentum travels in place of the gradient",
    "hears rate": "what it decides may depend on the optimizer's learning rates",
    "follows rate": "it asks for the learning rate of a block",
    "singles out": "some parameters go another way than the rest",
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


def _known(traits: Iterable[str]) -> frozenset[str]:
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
    return _known(name.replace("_", " ") for name, claimed in claims.items() if claimed)


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
