"""Recipes: one part of each kind, and rules for parameters that need another exchange; and how they are parsed."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property, lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, TypeVar, final

from gossamer import codecs, exchanges, topologies, updates
from gossamer.changes import check_changes
from gossamer.combinations import check, composed
from gossamer.controllers import Fixed
from gossamer.core import files, plugins
from gossamer.core.binding import Binding
from gossamer.core.contracts import Codec, Controller, Exchange, LinearCodec, Memory, Mixer, Topology, Update
from gossamer.core.errors import RecipeError, UnknownPartError
from gossamer.core.parts import Part, nearest, parse, part, require
from gossamer.core.schedule import Schedule
from gossamer.core.text import LONGEST, MOST_TERMS, cut, shown, table
from gossamer.memories import NoMemory
from gossamer.rules import Route, Rule
from gossamer.schedules import EveryStep
from gossamer.two_levels import PerNode, in_two_levels

presets: dict[str, Callable[..., "Recipe"]] = {}  # by name; gossamer.recipes fills it
PresetT = TypeVar("PresetT", bound=Callable[..., "Recipe"])


def preset(make: PresetT) -> PresetT:
    """Make a function a preset: its name may start any recipe text."""
    presets[make.__name__] = make
    return make


@final
@part("bucket", sample="bucket(6.0)")
class BucketSize(Part):
    """The size of a bucket in megabytes of gradient. The default is the best measured size for the exchange.

    Between two ranks `scatter` cuts a model of more than 4 MB into at least two buckets, unless this part is given: one travels
    while backward computes the other. Among more ranks chunks of one bucket are encoded while others travel.

    Use: after measuring: fewer megabytes start earlier and overlap more, more of them cost less latency.

    >>> BucketSize(6.0)
    bucket(6.0)
    """

    kind: ClassVar[str] = "bucket"

    mb: float

    def __post_init__(self) -> None:
        require(self.mb > 0, f"bucket: mb must be positive, got {self.mb}; 6 to 25 are usual")


@final
@dataclass(frozen=True, repr=False)
class Recipe:
    """A complete recipe: the exchange, memory, schedule, controller and other parts of a training.

    Prints as the text it can be read from: parts joined by `+`. Its fields are the table of the kinds of parts there are:
    one part of each kind, called by it, and lists of rules and routes. Texts, files and printing follow them.

    >>> Recipe.of("scatter(qsgd(bits=4)) + slowmo(every=12)")
    scatter(qsgd()) + slowmo(12)
    """

    exchange: Exchange
    memory: Memory = NoMemory()
    schedule: Schedule = EveryStep()
    controller: Controller = Fixed()
    update: Update | None = None
    rules: tuple[Rule, ...] = ()
    bucket: BucketSize | None = None
    # A controller's choice of exchange, by parameter.
    routes: Mapping[str, Exchange] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        try:
            (_refuse if self.routes else _refuse_once)(self)  # equal recipes have equal hashes whatever their routes
        except TypeError:
            _refuse(self)  # something in it has no hash, which may be why it is refused

    def __repr__(self) -> str:
        said, listed = self._said(), self._listed()
        last = [said.pop("bucket")] if "bucket" in said else []
        return " + ".join(map(repr, [*said.values(), *(part for parts in listed.values() for part in parts), *last]))

    @staticmethod
    def of(source: "str | Path | Recipe | Part") -> "Recipe":
        """Read a recipe: an expression, the name of a preset, a TOML file or its path, or a value that is one already."""
        if isinstance(source, Recipe):
            return source
        if isinstance(source, Path) or (isinstance(source, str) and source.strip().endswith(".toml")):
            return read_toml(Path(str(source).strip()))
        if not isinstance(source, str | Part):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise RecipeError(f"a recipe is a text, a part or the path of a TOML file, not {shown(source)}")
        value = source if isinstance(source, Part) else _parsed(source)
        if isinstance(value, Recipe):
            return value
        return _assemble(value if isinstance(value, tuple) else (value,))

    def way(self, name: str, shape: tuple[int, ...]) -> tuple[Exchange, Memory]:
        """The exchange and the memory that one parameter goes through."""
        for rule in self.rules:
            if rule.holds_for(name, shape):
                return rule.exchange, rule.memory
        return self.routes.get(name, self.exchange), self.memory

    def bound(self, shapes: Mapping[str, tuple[int, ...]]) -> "Recipe":
        """The same recipe for a model of these parameters, with the names of the last layer in its rules."""
        if not shapes:
            return self
        rules, controller = tuple(rule.bound(shapes) for rule in self.rules), self.controller.bound(shapes)
        same = (rules, controller) == (self.rules, self.controller)
        return self if same else replace(self, rules=rules, controller=controller)

    def is_routed(self, name: str, shape: tuple[int, ...]) -> bool:
        """True if a controller chose another exchange for this parameter. Rules take precedence."""
        return name in self.routes and not any(rule.holds_for(name, shape) for rule in self.rules)

    def fits(self, binding: Binding) -> None:
        """Raise AttachError if a part would not work as documented in this binding."""
        parts = self.parts()
        binding = binding._replace(traits=frozenset[str]().union(*(one.traits for one in parts)))
        for one in parts:
            one.fits(binding)

    @cached_property
    def follows_rate(self) -> bool:
        """True if any part uses the learning rate of a bucket."""
        return any(one.follows_rate for one in self.parts())

    def is_synced(self, step: int) -> bool:
        """True if all ranks hold equal models after this step."""
        if any("parts models" in one.traits for one in self.parts()):
            return self.schedule.shape.resyncs and step % self.schedule.shape.period == 0
        return self.schedule.is_synced(step)

    @cached_property
    def reached(self) -> list["Recipe"]:
        """All recipes that the controller may apply, without the controller."""
        return [*self.controller.reach(replace(self, controller=Fixed()))]

    def parts(self) -> list[Part]:
        """All parts, including those of the rules."""
        ruled = [one for rule in self.rules for one in (rule.exchange, rule.memory)]
        return [*self._single().values(), *ruled]

    def groups(self, size: int) -> tuple[tuple[int, ...], ...]:
        """The groups of ranks that this recipe, or one that its controller may apply, communicates in."""
        own = (g for one in [*self.parts(), *self.routes.values()] for g in one.groups(size))
        return tuple(dict.fromkeys([*own, *(g for other in self.reached for g in other.groups(size))]))

    @property
    def ranks_per_node(self) -> int:
        """The number of ranks on each node; 1 if no part depends on it."""
        return max(one.ranks_per_node for one in self.parts())

    @property
    def may_average(self) -> bool:
        """True if the recipe averages gradients, now or after a controller's change."""
        return any(one.schedule.shape.averages_gradients for one in (self, *self.reached))

    def _single(self) -> dict[str, Part]:
        """The one part of each kind, by kind."""
        return {kind: value for kind in _kinds() if (value := getattr(self, kind)) is not None}

    def _said(self) -> dict[str, Part]:
        """The parts that differ from the default."""
        defaults = {f.name: f.default for f in fields(self)}
        return {kind: value for kind, value in self._single().items() if value != defaults[kind]}

    def _listed(self) -> dict[str, list[Part]]:
        return {"rules": [*self.rules], "routes": [*_grouped(self.routes)]}

    def route(self, usual: Exchange, other: Exchange, names: list[str]) -> "Recipe":
        """The same recipe with `other` for the parameters named, and `usual` for all else."""
        return replace(self, exchange=usual, routes=dict.fromkeys(names, other) if other != usual else {})

    @cached_property
    def bucket_mb(self) -> float:
        return self.exchange.bucket_mb if self.bucket is None else self.bucket.mb

    def to_toml(self) -> str:
        """One line per part."""
        lines = [f"{kind} = {_quoted(value)}" for kind, value in self._said().items()]
        for name, listed in self._listed().items():
            if listed:
                lines.append(f"{name} = [\n" + "".join(f"  {_quoted(r)},\n" for r in listed) + "]")
        return "\n".join(lines) + "\n"


def _refuse(recipe: Recipe) -> None:
    """Raise RecipeError if the recipe's parts cannot be combined, or could not follow each other in mid-run."""
    if reached := check(recipe):
        check_changes(recipe, reached)


# A controller may reach a hundred recipes, and each is made again for every rank, checkpoint and decision.
_refuse_once = lru_cache(maxsize=4096)(_refuse)

LISTS = ("rules", "routes")


@cache
def _kinds() -> tuple[str, ...]:
    """The kinds of which a recipe has one part each."""
    return tuple(f.name for f in fields(Recipe) if f.name not in LISTS)


def read_toml(path: Path) -> Recipe:
    """Read a recipe file: `recipe = "terngrad"`, or a line for each part (`exchange`, `memory`, ...)."""
    try:
        entries = table(files.read(path, LONGEST))
    except OSError as error:
        raise RecipeError(f"the recipe file {cut(str(path))} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise RecipeError(f"{path} is not valid TOML: {error}") from None
    try:
        return from_toml(entries)
    except RecipeError as error:
        raise RecipeError(f"{path}: {error}") from None


def from_toml(table: Mapping[str, Any]) -> Recipe:
    known = ["recipe", *_kinds(), *LISTS]
    parts = list[Part | Recipe]()
    for key, value in table.items():
        if key not in known:
            raise RecipeError(f"a recipe file has no entry {shown(key)}. {nearest(key, known)}")
        for text in value if isinstance(value, list) else [value]:
            parts += _entry(key, text)
            require(len(parts) <= MOST_TERMS, f"the recipe has more than {MOST_TERMS} parts")
    return _assemble(tuple(parts))


def _entry(key: str, text: Any) -> tuple[Any, ...]:
    """Parse one entry of a recipe file: any number of parts for `recipe`, else one part of the kind of that name."""
    if not isinstance(text, str):
        raise RecipeError(f"{key} must be a text such as 'gather(qsgd(bits=4))', got {shown(text)}")
    if key == "recipe":
        value = parse(text, known_presets())
        return value if isinstance(value, tuple) else (value,)
    value, wanted = parse(text), key.removesuffix("s")
    right = isinstance(value, Part) and value.kind in (wanted, "codec")  # a bare codec gets a better hint later
    require(right, f"{key} must be one {wanted}, got {shown(text)}")
    return (value,)


def _assemble(values: tuple[Any, ...]) -> Recipe:
    """Combine parts into a recipe; a preset may come first, and later parts replace its parts."""
    given = dict[str, Any]()
    rules, routes = list[Rule](), dict[str, Exchange]()
    base: Recipe | None = None
    levels = [value for value in values if isinstance(value, PerNode)]
    require(len(levels) < 2, f"two parts set the ranks per node: {' and '.join(map(repr, levels))}; keep one")
    for value in [value for value in values if value not in levels]:
        if isinstance(value, Recipe):
            require(base is None, "a recipe can start from one preset only")
            base = value
        elif isinstance(value, Rule):
            rules.append(value)
        elif isinstance(value, Route):
            _add(value, routes)
        elif isinstance(value, Part) and value.kind in _kinds():
            require(value.kind not in given, f"two parts say {value.kind}: {given.get(value.kind)} and {value}")
            given[value.kind] = value
        else:
            raise RecipeError(f"{shown(value)} cannot be a part of a recipe on its own; {_belongs(value)}")
    if base is not None:
        made = replace(base, **given, rules=(*rules, *base.rules), routes={**base.routes, **routes})
    else:
        whole = f"; with dense averages it is 'allreduce + {given['schedule']}'" if "schedule" in given else ""
        require(
            "exchange" in given, "a recipe needs an exchange, such as allreduce(fp32()), or a preset's name" + whole
        )
        made = Recipe(**given, rules=tuple(rules), routes=routes)
    return in_two_levels(made, levels[0].ranks) if levels else made


def _add(route: Route, routes: dict[str, Exchange]) -> None:
    for name in route.names:
        other = routes.setdefault(name, route.exchange)
        require(
            other == route.exchange, f"two routes give {name!r} an exchange: {other} and {route.exchange}; keep one"
        )


def _grouped(routes: Mapping[str, Exchange]) -> list[Route]:
    """One route for each exchange."""
    names = dict[Exchange, list[str]]()
    for name, exchange in routes.items():
        names.setdefault(exchange, []).append(name)
    return [Route(tuple(found), exchange) for exchange, found in names.items()]


def _belongs(value: Any) -> str:
    """A hint where to put a part that cannot stand in a recipe on its own."""
    if isinstance(value, Codec | LinearCodec):
        return f"put it in an exchange: {composed(value)}"
    if isinstance(value, Topology):
        return f"put it in a mixer: allreduce(fp32()) + gossip(push_sum({value}))"
    if isinstance(value, Mixer):
        return f"put it in a schedule: allreduce(fp32()) + gossip({value}), or allreduce(fp32()) + slowmo(48, inner={value})"
    return "name an exchange"


def _quoted(value: Part) -> str:
    text = repr(value)
    return f"'{text}'" if "'" not in text else '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _parsed(text: str) -> Any:
    """Parse a text; load plugins and try again if a part is unknown."""
    try:
        return parse(text, known_presets())
    except UnknownPartError:
        if not plugins.load_plugins():
            raise
        return parse(text, known_presets())


def known_presets() -> Mapping[str, Callable[..., Recipe]]:
    """All presets, by name. gossamer's own are imported at the first call, since they use this module."""
    import_module("gossamer.recipes")
    return presets


FLOORS = codecs, topologies, exchanges, updates  # importing a package registers its parts
