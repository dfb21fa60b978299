"""Rules and routes: other exchanges for some parameters, selected by size or name."""

import ast
import fnmatch
from collections.abc import Callable, Mapping
from dataclasses import replace
from glob import escape
from typing import Any, ClassVar, final

from gossamer.core.constraints import Constrained, agree
from gossamer.core.contracts import Exchange, Memory
from gossamer.core.errors import RecipeError
from gossamer.core.last_layer import last_layer
from gossamer.core.parts import Part, part, require
from gossamer.core.text import shown, term
from gossamer.memories import NoMemory


@final
@part("rule", sample="rule('ndim < 2', allreduce(fp32()))")
class Rule(Part):
    """Parameters for which `when` holds go through another exchange and memory; the first rule that fits wins.

    `when` speaks of `ndim`, `numel` and `name` (a glob): "ndim < 2 or numel < 1000", "name == 'embed*'". `last` is true of the
    last layer, which is the module that holds the last matrix of the model; where training begins its names take the place of
    the word. Where the last matrix is tied to another, or not the one that predicts, name it.

    Use: to keep small and sensitive parameters dense, or to treat embeddings apart; `rule("last", ...)` for the layer that
    predicts, whose gradients lie in few rows.

    >>> from gossamer.codecs import FP32
    >>> from gossamer.exchanges import AllReduced
    >>> Rule("ndim < 2", AllReduced(FP32()))
    rule('ndim < 2', allreduce(fp32()))
    """

    kind: ClassVar[str] = "rule"

    when: str
    exchange: Exchange
    memory: Memory = NoMemory()

    def __post_init__(self) -> None:
        _predicate(self.when)
        agree(self.parties)

    @property
    def parties(self) -> dict[str, Constrained]:
        """The parts that its parameters' gradients pass through, by role."""
        return {"memory": self.memory, "exchange": self.exchange, "rule": self}

    def holds_for(self, name: str, shape: tuple[int, ...]) -> bool:
        numel = 1
        for n in shape:
            numel *= n
        return _predicate(self.when)({"name": name, "ndim": len(shape), "numel": numel, "last": False})

    def bound(self, shapes: Mapping[str, tuple[int, ...]]) -> "Rule":
        """The same rule for a model of these parameters, with the names of the last layer."""
        tree = term(self.when)
        if not any(isinstance(node, ast.Name) and node.id == "last" for node in ast.walk(tree)):
            return self
        named = ast.parse(" or ".join(f"name == {escape(n)!r}" for n in last_layer(shapes)), mode="eval").body
        return replace(self, when=ast.unparse(_Spelt(named).visit(tree)))


class _Spelt(ast.NodeTransformer):
    """Replaces the word `last` by the names of the last layer."""

    def __init__(self, named: ast.expr) -> None:
        self._named = named

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self._named if node.id == "last" else node


@final
@part("route", sample="route(('head.weight',), allreduce(fp32()))")
class Route(Part):
    """Named parameters that a controller sends through another exchange. Rules take precedence.

    Use: to read a controller's choice, in `comm.recipe` and in checkpoints. For a choice of your own take a rule.

    >>> from gossamer.codecs import FP32
    >>> from gossamer.exchanges import AllReduced
    >>> Route(("head.weight",), AllReduced(FP32()))
    route(('head.weight',), allreduce(fp32()))
    """

    kind: ClassVar[str] = "route"

    names: tuple[str, ...]
    exchange: Exchange

    def __post_init__(self) -> None:
        require(bool(self.names), "route: names must hold at least one parameter's name, such as ('head.weight',)")


def _predicate(text: str) -> Callable[[Mapping[str, Any]], bool]:
    """Read a rule's condition; only comparisons of ndim, numel and name, joined by and, or, not."""
    try:
        return _condition(term(text), text)
    except RecipeError:
        raise
    except ValueError as error:
        raise RecipeError(
            f"rule: {shown(text)} cannot be read: {error}; say for instance 'ndim < 2 or numel < 1000'"
        ) from None


_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Lt: lambda a, b: a < b,
    ast.LtE: lambda a, b: a <= b,
    ast.Gt: lambda a, b: a > b,
    ast.GtE: lambda a, b: a >= b,
    ast.Eq: lambda a, b: fnmatch.fnmatchcase(a, b) if isinstance(a, str) else a == b,
    ast.NotEq: lambda a, b: not fnmatch.fnmatchcase(a, b) if isinstance(a, str) else a != b,
}


def _condition(node: ast.expr, text: str) -> Callable[[Mapping[str, Any]], bool]:
    match node:
        case ast.BoolOp(op=op, values=values):
            tests = [_condition(v, text) for v in values]
            combine = all if isinstance(op, ast.And) else any
            return lambda facts: combine(test(facts) for test in tests)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            test = _condition(operand, text)
            return lambda facts: not test(facts)
        case ast.Name(id="last"):
            return lambda facts: facts["last"]
        case ast.Compare(
            left=ast.Name(id="ndim" | "numel" as word), ops=[op], comparators=[ast.Constant(value=int() as n)]
        ) if not isinstance(n, bool):
            compare = _COMPARE.get(type(op))
        case ast.Compare(
            left=ast.Name(id="name" as word),
            ops=[ast.Eq() | ast.NotEq() as op],
            comparators=[ast.Constant(value=str() as n)],
        ):
            compare = _COMPARE[type(op)]
        case _:
            compare, word, n = None, "", 0
    if compare is None:
        raise RecipeError(
            f"rule: {shown(ast.unparse(node))} in {shown(text)} is not a condition; compare ndim or numel with a number, "
            "or name with a glob: 'ndim < 2', \"name == 'embed*'\"; or say 'last', for the last layer"
        )
    return lambda facts: compare(facts[word], n)
