"""Parts: frozen values that are registered by name and print as the text that they are parsed from.

`repr` and `parse` are inverses: `parse("gather(qsgd(bits=4))")` is `Gather(Qsgd(bits=4))`, and prints as that text.
"""

import ast
import difflib
import inspect
import math
import sys
from abc import ABC
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cache
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, TypeVar, Union, dataclass_transform, get_args, get_origin, get_type_hints

from gossamer.core.binding import Binding
from gossamer.core.constraints import Constraint, those
from gossamer.core.errors import RecipeError, UnknownPartError
from gossamer.core.text import cut, shown
from gossamer.core.text import terms as terms_of

P = TypeVar("P", bound="Part")


class Part(ABC):  # noqa: B024  (its contracts below are abstract; what a part must do depends on its kind)
    """A frozen dataclass with a name; the base of codecs, exchanges, memories, schedules, controllers, topologies."""

    kind: ClassVar[str] = "part"
    name: ClassVar[str] = "part"
    sample: ClassVar[str] = ""  # a text with a typical value for every argument that has no default

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(_arguments(self))})"

    @property
    def traits(self) -> frozenset[str]:
        """What this part promises: names from `core.constraints.TRAITS`."""
        return those(follows_rate=self.follows_rate)

    @property
    def constraints(self) -> tuple[Constraint, ...]:
        """What this part requires of the parts it is combined with."""
        return ()

    @property
    def follows_rate(self) -> bool:
        """True if this part uses a bucket's learning rate, so that parameters of two optimizer groups must not share a bucket."""
        return False

    @property
    def ranks_per_node(self) -> int:
        """The number of ranks on each node, numbered node by node; 1 if this part does not depend on it."""
        return max((inner.ranks_per_node for inner in _inside(self)), default=1)

    def groups(self, size: int) -> tuple[tuple[int, ...], ...]:
        """The groups of ranks that this part communicates in, besides the group of all ranks: equal on all ranks, in the same
        order. A fabric makes them before training begins.
        """
        return tuple(dict.fromkeys(g for inner in _inside(self) for g in inner.groups(size)))

    def fits(self, binding: Binding) -> None:
        """Raise AttachError, with the fix, if this part would not work as documented in this binding."""
        for inner in _inside(self):
            inner.fits(binding)


def _inside(part: Part) -> list[Part]:
    """The fields of a part that are parts."""
    return [v for f in fields(part) if isinstance(v := getattr(part, f.name), Part)]  # pyright: ignore[reportArgumentType]


class Registry:
    """All parts, by name."""

    def __init__(self) -> None:
        self._parts: dict[str, type[Part]] = {}

    def add(self, part: type[Part]) -> None:
        if part.name in self._parts:
            raise ValueError(f"two parts have the name {part.name!r}: {self._parts[part.name]} and {part}")
        self._parts[part.name] = part

    def get(self, name: str) -> type[Part] | None:
        return self._parts.get(name)

    def of(self, *kinds: str) -> dict[str, type[Part]]:
        """All parts of these kinds (all parts if none is named), sorted by name."""
        return {n: p for n, p in sorted(self._parts.items()) if not kinds or p.kind in kinds}


registry = Registry()


@dataclass_transform(frozen_default=True)
def part(name: str, sample: str = "") -> Callable[[type[P]], type[P]]:
    """Make a class a part: a frozen dataclass, registered under `name`.

    The `sample` is what documentation shows and laws try; a part with required arguments must give one.
    """

    def register(cls: type[P]) -> type[P]:
        cls.name, cls.sample = name, sample or f"{name}()"
        cls.__post_init__ = _fitting(getattr(cls, "__post_init__", None))  # pyright: ignore[reportAttributeAccessIssue]
        made = dataclass(frozen=True, repr=False)(cls)
        registry.add(made)
        return made

    return register


def _fitting(then: Callable[[Any], None] | None) -> Callable[[Any], None]:
    """Check every field against its annotation, also when a part is made in Python; then run the part's checks, and check that no
    number is infinite.
    """

    def check(self: Part) -> None:
        hints = _hints(type(self))
        for f in _fields(type(self)):
            value = getattr(self, f.name)
            fitting = _fit(value, hints[f.name], f"{self.name}: {f.name}")
            if fitting is not value:  # a whole number for a float
                object.__setattr__(self, f.name, fitting)
        if then is not None:
            then(self)
        for f in _fields(type(self)):  # last, since a part's own message says more
            value = getattr(self, f.name)
            if isinstance(value, float):
                require(math.isfinite(value), f"{self.name}: {f.name} must be finite, got {value}")

    return check


def require(condition: bool, message: str) -> None:
    """Raise RecipeError with `message` unless `condition` holds."""
    if not condition:
        raise RecipeError(message)


def nearest(word: str, known: Sequence[str]) -> str:
    """A hint for a misspelt word: the nearest known one, and all of them."""
    close = difflib.get_close_matches(word, known, n=1)
    hint = f"Did you mean {close[0]!r}? " if close else ""
    return f"{hint}Known: {', '.join(sorted(set(known))) or 'none'}."


def parse(text: str, names: Mapping[str, Callable[..., Any]] | None = None) -> Any:
    """Read a part, or a sum of parts (as a tuple), from text.

    `names` adds names for the terms of the sum, such as presets. Where a name is both, the first term is the preset if
    its arguments fit, and any later term is the part. Nothing is executed: the text is read as a Python expression and
    bound by signature.
    """
    words = names or {}
    alone = {word: make for word, make in words.items() if registry.get(word) is None}
    try:
        first, *others = terms_of(text)
        values = [_read_first(first, words), *(_read(term, alone) for term in others)]
    except RecipeError:
        raise
    except ValueError as error:
        raise RecipeError(
            f"{shown(text)} cannot be read: {error}. A recipe looks like 'gather(qsgd(bits=4))'."
        ) from None
    return values[0] if len(values) == 1 else tuple(values)


def _read_first(node: ast.expr, names: Mapping[str, Callable[..., Any]]) -> Any:
    try:
        return _read(node, names)
    except RecipeError as refusal:
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
            raise
        word = node.func.id
        if word not in names or registry.get(word) is None:
            raise
        try:
            value = _read(node, {})
        except RecipeError:
            accepted = _signature(names[word])
            if len(node.args) <= len(accepted) and all(k.arg in accepted for k in node.keywords):
                raise refusal from None  # the user meant the preset, so show its error
            raise
        if isinstance(value, Part) and [*_signature(names[word])] == [*_signature(type(value))]:
            raise refusal from None  # the part takes the same arguments, and what the preset refuses is no recipe
        return value


def _read(node: ast.expr, names: Mapping[str, Callable[..., Any]]) -> Any:
    match node:
        case ast.Constant(value=bool() | int() | float() | str() | None as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Name(id="inf")):
            return -math.inf
        case ast.Tuple(elts=items) | ast.List(elts=items):
            return tuple(_read(item, {}) for item in items)
        case ast.Name(id="inf" | "nan" as word):
            return float(word)
        case ast.Name(id=word):
            return _call(word, [], [], names)
        case ast.Call(func=ast.Name(id=word), args=args, keywords=keywords):
            return _call(word, args, keywords, names)
        case _:
            raise RecipeError(
                f"{shown(ast.unparse(node))} is not allowed in a recipe: use only numbers, strings, tuples and calls of named parts."
            )


def _call(word: str, args: list[ast.expr], keywords: list[ast.keyword], names: Mapping[str, Callable[..., Any]]) -> Any:
    values = [_read(a, {}) for a in args]
    named = dict[str, Any]()
    for keyword in keywords:
        if keyword.arg is None:
            raise RecipeError(f"{word}: '**' is not allowed in a recipe; write each argument by name")
        if keyword.arg in named:
            raise RecipeError(f"{word}: {shown(keyword.arg)} is given twice")
        named[keyword.arg] = _read(keyword.value, {})
    make = names.get(word) or registry.get(word)
    if make is None:
        raise UnknownPartError(f"there is no part called {shown(word)}. {nearest(word, [*names, *registry.of()])}")
    return _bind(make, word, values, named)


@cache
def _signature(make: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(make).parameters


def _bind(make: Callable[..., Any], word: str, values: list[Any], named: dict[str, Any]) -> Any:
    accepted = [*_signature(make)]
    if len(values) > len(accepted):
        raise RecipeError(f"{word} takes at most {len(accepted)} arguments ({', '.join(accepted)}), got {len(values)}")
    bound = dict(zip(accepted, values))
    for key, value in named.items():
        if key not in accepted:
            raise RecipeError(f"{word} has no argument {shown(key)}. {nearest(key, accepted)}")
        if key in bound:
            raise RecipeError(f"{word}: {shown(key)} is given twice")
        bound[key] = value
    for key, value in bound.items():
        bound[key] = _fit(value, _hints(make).get(key, Any), f"{word}: {key}")
    try:
        return make(**bound)
    except TypeError as error:
        required = [key for key, given in _signature(make).items() if given.default is inspect.Parameter.empty]
        missing = [key for key in required if key not in bound]
        if not missing:
            raise RecipeError(f"{word}: {cut(str(error))}") from None
        instance = f"{word}({'8' if missing[0] == 'every' else '...'})"
        if isinstance(make, type) and issubclass(make, Part):
            instance = make.sample
        raise RecipeError(f"{word} needs {', '.join(missing)}; for instance {instance}") from None


@cache
def _hints(make: Callable[..., Any]) -> dict[str, Any]:
    return get_type_hints(make)


@cache
def _fields(cls: type) -> tuple[Any, ...]:
    return fields(cls)


def _fit(value: Any, hint: Any, where: str) -> Any:
    """Check a value against an annotation; an int is accepted for a float."""
    if hint is Any or matches(value, hint):
        return value
    if type(value) is int and abs(value) <= sys.float_info.max and matches(float(value), hint):
        return float(value)
    one = f"; write ({shown(value)},) for one" if matches((value,), hint) else ""
    raise RecipeError(f"{where} must be {_describe(hint)}, got {shown(value)}{one}")


def matches(value: Any, hint: Any) -> bool:
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return any(matches(value, h) for h in get_args(hint))
    if origin is Literal:
        return value in get_args(hint) and type(value) in {type(a) for a in get_args(hint)}
    if origin is tuple:
        inner = get_args(hint)[0]
        return isinstance(value, tuple) and all(matches(v, inner) for v in value)
    if hint in (int, float):
        return type(value) is hint
    if isinstance(value, Part) and isinstance(hint, type) and issubclass(hint, Part):
        return value.kind == hint.kind  # a wrong subclass of the right kind is refused by the part itself
    return isinstance(hint, type) and isinstance(value, hint)


def _describe(hint: Any) -> str:
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return " or ".join(_describe(h) for h in get_args(hint))
    if origin is Literal:
        return "one of " + ", ".join(repr(a) for a in get_args(hint))
    if origin is tuple:
        return f"a tuple, of {_describe(get_args(hint)[0])} each"
    if isinstance(hint, type) and issubclass(hint, Part):
        known = [n for n, p in registry.of().items() if issubclass(p, hint)]
        one = f"{'an' if hint.kind[0] in 'aeiou' else 'a'} {hint.kind}"
        return f"{one} ({', '.join(known)})" if known else one
    words = {int: "a whole number", float: "a number", str: "a text", bool: "True or False", NoneType: "None"}
    return words.get(hint, str(hint))


def _arguments(value: Part) -> list[str]:
    """A part's arguments as text: required ones first and positional, others by name and only where they differ."""
    out = list[str]()
    for f in _fields(type(value)):
        item = getattr(value, f.name)
        if item is f.default:
            continue
        if f.default is MISSING and f.default_factory is MISSING:
            out.append(_text(item))
        elif not _same(item, _default(f)):
            out.append(f"{f.name}={_text(item)}")
    return out


def _default(field: Any) -> Any:
    return field.default if field.default is not MISSING else field.default_factory()


def _same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and (a == b or (isinstance(a, float) and math.isnan(a) and math.isnan(b)))


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(_text(v) for v in value)}{',' if len(value) == 1 else ''})"
    return repr(value)
