"""A recipe: one part of every kind, and rules for parameters that need another."""

import ast
import fnmatch
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, TypeVar, final

from gossamer import codecs, exchanges, topologies
from gossamer.controllers import Fixed
from gossamer.core.contracts import (
    Codec,
    Controller,
    Exchange,
    LinearCodec,
    Memory,
    Mixer,
    Quorum,
    Schedule,
    Topology,
)
from gossamer.core.errors import RecipeError
from gossamer.core.parts import Part, parse, part, require
from gossamer.exchanges import Scatter
from gossamer.memories import DIANA, NoMemory
from gossamer.schedules import EveryStep

presets: dict[str, Callable[..., "Recipe"]] = {}  # by name; gossamer.recipes fills it
PresetT = TypeVar("PresetT", bound=Callable[..., "Recipe"])


def preset(make: PresetT) -> PresetT:
    """Make a function a preset: its name may start any recipe text."""
    presets[make.__name__] = make
    return make


@final
@part("rule")
class Rule(Part):
    """Parameters for which `when` holds go through another exchange and memory; the first rule that fits wins.

    `when` speaks of `ndim`, `numel` and `name` (a glob): "ndim < 2 or numel < 1000", "name == 'embed*'".

    Use: to keep small and sensitive parameters dense, or to treat embeddings apart.

    >>> Rule("ndim < 2", exchanges.AllReduced(codecs.FP32()))
    rule('ndim < 2', allreduce(fp32()))
    """

    kind: ClassVar[str] = "rule"

    when: str
    exchange: Exchange
    memory: Memory = NoMemory()

    def __post_init__(self) -> None:
        _predicate(self.when)
        _check_pair(self.exchange, self.memory)

    def fits(self, name: str, shape: tuple[int, ...]) -> bool:
        numel = 1
        for n in shape:
            numel *= n
        return _predicate(self.when)({"name": name, "ndim": len(shape), "numel": numel})


@final
@part("bucket")
class Bucket(Part):
    """How many megabytes of gradient travel together. Without it, what was measured to be best for the exchange.

    Use: after measuring: fewer megabytes start earlier and overlap more, more of them cost less latency.

    >>> Bucket(6.0)
    bucket(6.0)
    """

    kind: ClassVar[str] = "bucket"

    mb: float

    def __post_init__(self) -> None:
        require(self.mb > 0, f"bucket: mb must be positive, got {self.mb}; 6 to 25 are usual")


@final
@dataclass(frozen=True, repr=False)
class Recipe:
    """Who talks to whom, what is kept back, when, and how much.

    Prints as the text it can be read from: parts joined by `+`.

    >>> Recipe.of("scatter(qsgd(bits=4)) + slowmo(every=12)")
    scatter(qsgd()) + slowmo(12)
    """

    exchange: Exchange | Mixer | Quorum
    memory: Memory = NoMemory()
    schedule: Schedule = EveryStep()
    controller: Controller = Fixed()
    rules: tuple[Rule, ...] = ()
    bucket: Bucket | None = None
    routes: Mapping[str, Exchange] = field(default_factory=dict, hash=False)  # a controller's choice, by parameter

    def __post_init__(self) -> None:
        _check(self)

    def __repr__(self) -> str:
        parts: list[Any] = [self.exchange]
        for f in fields(self)[1:4]:
            value = getattr(self, f.name)
            if value != f.default:
                parts.append(value)
        parts += [*self.rules, *([self.bucket] if self.bucket else [])]
        return " + ".join(map(repr, parts))

    @staticmethod
    def of(source: "str | Path | Recipe | Part") -> "Recipe":
        """Read a recipe: an expression, the name of a preset, a TOML file or its path, or a value that is one already."""
        if isinstance(source, Recipe):
            return source
        if isinstance(source, Path) or (isinstance(source, str) and source.strip().endswith(".toml")):
            return read_toml(Path(str(source).strip()))
        if not isinstance(source, str | Part):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise RecipeError(f"a recipe is a text, a part or the path of a TOML file, not {source!r}")
        value = source if isinstance(source, Part) else parse(source, presets)
        if isinstance(value, Recipe):
            return value
        return _assemble(value if isinstance(value, tuple) else (value,))

    def way(self, name: str, shape: tuple[int, ...]) -> tuple[Exchange | Mixer | Quorum, Memory]:
        """The exchange and the memory that one parameter goes through."""
        for rule in self.rules:
            if rule.fits(name, shape):
                return rule.exchange, rule.memory
        return self.routes.get(name, self.exchange), self.memory

    def route(self, usual: Exchange, other: Exchange, names: list[str]) -> "Recipe":
        """The same recipe with `other` for the parameters named, and `usual` for all else."""
        return replace(self, exchange=usual, routes=dict.fromkeys(names, other) if other != usual else {})

    @cached_property
    def bucket_mb(self) -> float:
        if self.bucket is not None:
            return self.bucket.mb
        return self.exchange.bucket_mb if isinstance(self.exchange, Exchange) else 25.0

    def to_toml(self) -> str:
        """One line per part."""
        lines = [f"exchange = {_quoted(self.exchange)}"]
        for name in ("memory", "schedule", "controller", "bucket"):
            value = getattr(self, name)
            if value != self.__dataclass_fields__[name].default:
                lines.append(f"{name} = {_quoted(value)}")
        if self.rules:
            lines.append("rules = [\n" + "".join(f"  {_quoted(r)},\n" for r in self.rules) + "]")
        return "\n".join(lines) + "\n"


def read_toml(path: Path) -> Recipe:
    """Read a recipe file: `recipe = "terngrad"`, or a line for each part (`exchange`, `memory`, ...)."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecipeError(f"the recipe file {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path} is not valid TOML: {error}") from None
    return from_toml(table, str(path))


def from_toml(table: Mapping[str, Any], where: str = "recipe") -> Recipe:
    known = ["recipe", "exchange", "memory", "schedule", "controller", "bucket", "rules"]
    parts = list[Part | Recipe]()
    for key, value in table.items():
        if key not in known:
            from gossamer.core.parts import nearest

            raise RecipeError(f"{where}: there is no entry {key!r}. {nearest(key, known)}")
        for text in value if isinstance(value, list) else [value]:
            parts += _entry(key, text, where)
    return _assemble(tuple(parts))


def _entry(key: str, text: Any, where: str) -> tuple[Any, ...]:
    """The parts that one entry of a recipe file names: any number after `recipe`, else one of the kind it is called by."""
    if not isinstance(text, str):
        raise RecipeError(f"{where}: {key} must be a text such as 'gather(qsgd(bits=4))', got {text!r}")
    if key == "recipe":
        value = parse(text, presets)
        return value if isinstance(value, tuple) else (value,)
    value, wanted = parse(text), key.removesuffix("s")
    right = isinstance(value, Part) and value.kind in (wanted, "codec")  # a bare codec gets a better hint later
    require(right, f"{where}: {key} must be one {wanted}, got {text!r}")
    return (value,)


def _assemble(values: tuple[Any, ...]) -> Recipe:
    """Put parts together; a preset may come first and be changed by the parts after it."""
    given = dict[str, Any]()
    rules = list[Rule]()
    base: Recipe | None = None
    for value in values:
        if isinstance(value, Recipe):
            require(base is None, "a recipe can start from one preset only")
            base = value
        elif isinstance(value, Rule):
            rules.append(value)
        elif isinstance(value, Part) and value.kind in (
            "exchange",
            "memory",
            "schedule",
            "controller",
            "bucket",
        ):
            require(value.kind not in given, f"two parts say {value.kind}: {given.get(value.kind)} and {value}")
            given[value.kind] = value
        else:
            raise RecipeError(f"{value!r} is no part of a recipe on its own; {_belongs(value)}")
    if base is not None:
        changed = {**given, **({"rules": (*rules, *base.rules)} if rules else {})}
        return replace(base, **changed)
    plain = "push_sum()" if getattr(given.get("schedule"), "mixes", False) else "allreduce(fp32())"
    require("exchange" in given, f"a recipe needs an exchange, such as {plain}, or a preset's name")
    return Recipe(**given, rules=tuple(rules))


def _belongs(value: Any) -> str:
    """Where something belongs that is no part of a recipe on its own."""
    if isinstance(value, Codec | LinearCodec):
        return f"put it in an exchange: {composed(value)}"
    if isinstance(value, Topology):
        return f"put it in an exchange: push_sum(topology={value}) + gossip()"
    return "name an exchange"


def composed(codec: Codec | LinearCodec) -> str:
    """The recipe that is normally meant by a codec.

    >>> composed(codecs.Ternary()), composed(codecs.FP32())
    ('scatter(ternary())', 'allreduce(fp32())')
    >>> composed(codecs.PowerSGD())
    'allreduce(powersgd()) + error_feedback()'
    """
    feedback = " + error_feedback()" if codec.needs_feedback else ""
    if not isinstance(codec, Codec) or isinstance(codec, codecs.FP32):
        return f"allreduce({codec}){feedback}"
    return f"{'gather' if feedback or codec.whole else 'scatter'}({codec}){feedback}"


def _quoted(value: Part) -> str:
    text = repr(value)
    return f"'{text}'" if "'" not in text else '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _check(recipe: Recipe) -> None:
    """Refuse what cannot be right, with the reason and the fix."""
    exchange, memory, schedule = recipe.exchange, recipe.memory, recipe.schedule
    for value, kind in (memory, Memory), (schedule, Schedule), (recipe.controller, Controller):
        require(isinstance(value, kind), f"{value!r} is no {kind.kind}")  # pyright: ignore[reportUnnecessaryIsInstance]
    plain = memory == NoMemory()
    if isinstance(exchange, Mixer):
        require(
            schedule.mixes,
            f"{exchange} mixes parameters and never agrees exactly, so it cannot carry {schedule}; "
            f"use '{exchange} + gossip()', or 'allreduce(fp32()) + slowmo(48, inner={exchange})'",
        )
        require(
            plain,
            f"{memory} around {exchange}: with changing neighbours the error does not vanish, and push-sum conserves mass "
            "per coordinate; drop the memory",
        )
        require(not recipe.rules, f"rules cannot single out parameters under {exchange}: x and w travel as one")
        require(isinstance(recipe.controller, Fixed), f"{recipe.controller} has no knob to turn on {exchange}")
        return
    require(
        isinstance(exchange, Exchange | Quorum),  # pyright: ignore[reportUnnecessaryIsInstance]
        f"{exchange!r} is no exchange; "
        + (f"put it in one: {composed(exchange)}" if isinstance(exchange, Codec | LinearCodec) else "name one first"),
    )
    require(not schedule.mixes, f"{schedule} needs an exchange that mixes: 'push_sum() + {schedule}'")
    if isinstance(exchange, Quorum):
        require(
            schedule.averages_gradients,
            f"{exchange} drops late gradients; dropping a model average under {schedule} is something else: use every_step()",
        )
        require(
            schedule.lr_factor == 1 and not getattr(schedule, "l1", 0.0),
            f"{schedule} under {exchange}: a late rank applies missed updates without it; use every_step() as it is",
        )
        require(plain, f"{memory} around {exchange}: a dropped gradient's residual would be lost; drop the memory")
        require(not recipe.rules, f"rules under {exchange}: one ticket closes the whole step; drop the rules")
        require(
            isinstance(recipe.controller, Fixed),
            f"{recipe.controller} under {exchange}: late ranks decide late",
        )
        return
    _check_pair(exchange, memory)
    require(
        schedule.averages_gradients or getattr(memory, "units", "gradient") == "gradient",
        f"{memory} under {schedule}: differences of parameters already come in units of the update, whatever the learning "
        f"rate; leave units out: {memory.name}()",
    )
    for other in recipe.routes.values():
        _check_pair(other, memory)
    mild = getattr(recipe.controller, "mild", exchange)
    require(
        exchange == mild,
        f"{recipe.controller} starts with its mild exchange; write '{mild} + ...' instead of '{exchange} + ...'",
    )
    for level in (getattr(recipe.controller, n, None) for n in ("mild", "harsh")):
        if isinstance(level, Exchange):
            _check_pair(level, memory)


def _check_pair(exchange: Exchange | Mixer | Quorum, memory: Memory) -> None:
    require(
        isinstance(exchange, Exchange),
        f"{exchange} acts on the whole step; it can be a recipe's exchange, not a rule's or a level's",
    )
    assert isinstance(exchange, Exchange)
    if exchange.needs_feedback and not memory.mends_bias:
        if memory.needs_unbiased:
            raise RecipeError(
                f"{memory} needs an unbiased exchange, and {exchange} is biased; "
                "use error_feedback(), or an unbiased codec such as qsgd() or ternary(clip=0.0)"
            )
        raise RecipeError(
            f"{exchange} is biased, and without error feedback training need not converge; "
            f"use '{exchange} + error_feedback()', or none(allow_biased=True) to insist"
        )
    if memory.needs_unbiased and not exchange.unbiased:
        fix = "ternary(clip=0.0)" if "ternary" in repr(exchange) else "qsgd() or fp32()"
        raise RecipeError(f"{memory} needs an unbiased exchange, and {exchange} is biased; use {fix}")
    if memory.mends_bias and not isinstance(memory, NoMemory) and not exchange.contracts:
        raise RecipeError(
            f"{memory} around {exchange} can diverge: the codec adds more than it leaves out; "
            "it needs no memory, so drop it, or use diana() (with ternary(clip=0.0)), more bits or smaller buckets"
        )
    if isinstance(memory, DIANA) and isinstance(exchange, Scatter):
        require(
            exchange.feedback is None,
            f"{memory} over {exchange}: the second encoding follows DIANA's own rate; leave feedback out",
        )


def _predicate(text: str) -> Callable[[Mapping[str, Any]], bool]:
    """Read a rule's condition; only comparisons of ndim, numel and name, joined by and, or, not."""
    try:
        return _condition(ast.parse(text.strip(), mode="eval").body, text)
    except RecipeError:
        raise
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise RecipeError(f"rule: {text[:200]!r} cannot be read; say for instance 'ndim < 2 or numel < 1000'") from None


FLOORS = codecs, topologies, exchanges  # importing a package registers its parts

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
            f"rule: {ast.unparse(node)!r} in {text!r} is no condition; compare ndim or numel with a number, "
            "or name with a glob: 'ndim < 2', \"name == 'embed*'\""
        )
    return lambda facts: compare(facts[word], n)
