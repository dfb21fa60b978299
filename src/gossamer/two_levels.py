"""Two levels: a recipe between nodes of several ranks, which average uncompressed inside."""

from dataclasses import fields, replace
from typing import Any, ClassVar, TypeVar, final

from gossamer.core.contracts import Exchange
from gossamer.core.parts import Part, part, require
from gossamer.core.schedule import BetweenNodes, Schedule
from gossamer.exchanges import Nodes

R = TypeVar("R")
P = TypeVar("P", bound=Part)


@final
@part("per_node", sample="per_node(2)")
class PerNode(Part):
    """Sets the ranks per node: they average uncompressed inside a node, and the recipe applies between nodes.

    Behind any recipe or preset. It is read as the same recipe with each of its exchanges in `nodes(...)`, those of its rules
    and its controller too, and prints as that. A recipe that gossips goes on between nodes, and gradients are averaged
    inside at every step: `gossip(per_node=...)`.

    Use: several ranks behind one slow network card, in a text; in Python `attach(..., nodes=)` says the same, and can find the
    nodes by itself.

    Not for: `pairwise()`, where ranks of a node would not wait for one another; and what `nodes(...)` is not for.

    >>> from gossamer.recipe import Recipe
    >>> Recipe.of("topk + per_node(4)")
    nodes(gather(topk(scope='block')), 4) + error_feedback()
    >>> Recipe.of("sgp + per_node(8)")
    nodes(allreduce(fp32()), 8) + gossip(per_node=8)
    """

    kind: ClassVar[str] = "per_node"

    ranks: int

    def __post_init__(self) -> None:
        require(
            self.ranks >= 1,
            f"per_node: ranks must be at least 1, got {self.ranks}; it is the number of ranks on a node",
        )


def in_two_levels(recipe: R, per_node: int) -> R:
    """Apply a recipe between nodes: every exchange in it, including those of its rules and controller, and its gossip.

    >>> from gossamer.recipe import Recipe
    >>> in_two_levels(Recipe.of("qsgd + rule('ndim < 2', allreduce(fp32()))"), 4)
    nodes(scatter(qsgd(bucket=128)), 4) + rule('ndim < 2', nodes(allreduce(fp32()), 4))
    """
    given: Any = recipe
    schedule: Schedule = given.schedule
    said: int = given.ranks_per_node
    require(
        said in (1, per_node),
        f"{given} is for nodes of {said} ranks, and here nodes have {per_node}; leave one of both out",
    )
    if said > 1 or per_node == 1:
        return recipe
    return replace(
        given,
        exchange=Nodes(given.exchange, per_node),
        schedule=schedule.between_nodes(per_node) if isinstance(schedule, BetweenNodes) else schedule,
        rules=tuple(_within(rule, per_node) for rule in given.rules),
        controller=_within(given.controller, per_node),
        routes={name: Nodes(exchange, per_node) for name, exchange in given.routes.items()},
    )


def _within(part: P, per_node: int) -> P:
    found: dict[str, Any] = {f.name: getattr(part, f.name) for f in fields(part)}  # pyright: ignore[reportArgumentType]
    changed = {name: Nodes(value, per_node) for name, value in found.items() if isinstance(value, Exchange)}
    return replace(part, **changed)  # pyright: ignore[reportArgumentType, reportCallIssue]
