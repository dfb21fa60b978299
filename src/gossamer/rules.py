"""Rules and routes: parameters that go another way than the rest, told by their size or name."""

import ast
import fnmatch
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, final

from gossamer.core.contracts import Exchange, Memory
from gossamer.core.errors import RecipeError
from gossamer.core.parts import Part, part, require
from gossamer.core.terms import Party, agree
from gossamer.core.text import shown, term
from gossamer.memories import NoMemory


@final
@part("rule", sample="rule('ndim < 2', allreduce(fp32()))")
class Rule(Part):
    """Parameters for which `when` holds go through another exchange and memory; the first rule that fits wins.

    `when` speaks of `ndim`, `numel` and `name` (a glob): "ndim < 2 or numel < 1000", "name == 'embed*'".

    Use: to keep small and sensitive parameters dense, or to treat embeddings apart.

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
    def parties(self) -> dict[str, Party]:
        """What the numbers of its parameters go through."""
        return {"memory": self.memory, "exchange": self.exchange, "rule": self}

    def holds_for(self, name: str, shape: tuple[int, ...]) -> bool:
        numel = 1
        for n in shape:
            numel *= n
        return _predicate(self.when)({"name": name, "ndim": len(shape), "numel": numel})


@final
@part("route", sample="route(('head.weight',), allreduce(fp32()))")
class Route(Part):
    """Parameters that go through another exchange for now, by name: a controller's choice. Rules go before.

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
        require(bool(self.names), "route: names must hold one parameter's name at least, such as ('head.weight',)")


def _predicate(text: str) -> Callable[[Mapping[str, Any]], bool]:
    """Read a rule's condition; only comparisons of ndim, numel and name, joined by and, or, not."""
    try:
        return _condition(term(text), text)
    except RecipeError:
        raise
    except (SyntaxError, ValueError) as error:
        why = error.msg if isinstance(error, SyntaxError) else error
        raise RecipeError(
            f"rule: {shown(text)} cannot be read: {why}; say for instance 'ndim < 2 or numel < 1000'"
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
            f"rule: {shown(ast.unparse(node))} in {shown(text)} is no condition; compare ndim or numel with a number, "
            "or name with a glob: 'ndim < 2', \"name == 'embed*'\""
        )
    return lambda facts: compare(facts[word], n)
