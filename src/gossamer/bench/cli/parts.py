"""Data of the help page of one recipe or one part."""

import json
from typing import Any, NamedTuple

from torch import Tensor

from gossamer.bench import catalogue
from gossamer.bench.cli import help_pages, list_cache
from gossamer.bench.cli.errors import InputError
from gossamer.bench.compare.baselines import BASELINES
from gossamer.bench.lab import parse_rate
from gossamer.bench.workloads import get
from gossamer.core import plugins
from gossamer.core.errors import RecipeError
from gossamer.core.parts import Part, nearest, parse, registry
from gossamer.costs import Bearable
from gossamer.planning import Momenta, bytes_between, bytes_per_step
from gossamer.recipe import Recipe
from gossamer.recipes import presets
from gossamer.runtime.optimizer_state import kept_by

WIDEST = 4096  # side of the square matrices that stand for a model
MODEL = "lm"  # the default of `train` and `compare`


class CostQuery(NamedTuple):
    """The model and the network for which bytes and seconds are computed."""

    model: str
    parameters: dict[str, "tuple[int, ...] | Tensor"]
    dense_bytes: int
    numel: int
    hosts: int
    rate: int | None = None  # bit/s
    momenta: Momenta = 1  # tensors that the optimizer keeps of each parameter

    def sent(self, recipe: Recipe) -> float:
        return bytes_per_step(recipe, self.parameters, self.hosts, momenta=self.momenta)

    def through_card(self, recipe: Recipe) -> float | None:
        """Bytes that the network card of a node sends; None if no ranks share one."""
        per_node = recipe.ranks_per_node
        if per_node == 1:
            return None
        return bytes_between(recipe, self.parameters, self.hosts, per_node, momenta=self.momenta)

    def dense(self) -> float:
        return 2 * (self.hosts - 1) / self.hosts * self.dense_bytes

    def seconds(self, sent: float) -> float | None:
        return None if self.rate is None else 8 * sent / self.rate


def list_parts(as_json: bool) -> None:
    plugins.load_plugins()
    rows = [
        {"kind": p.kind, "name": n, **list_cache.origin(p), **list_cache.words(p)} for n, p in registry.of().items()
    ]
    print(json.dumps(rows, indent=1)) if as_json else help_pages.list_parts(rows)


def show(name: str, subject: Recipe | Part, query: CostQuery, as_json: bool) -> None:
    is_recipe = isinstance(subject, Recipe)
    facts = explain(name, subject, query) if is_recipe else explain_part(subject, query)
    if as_json:
        print(json.dumps(facts, indent=1))
    elif is_recipe:
        help_pages.show_recipe(facts)
    else:
        help_pages.show_part(facts)


# -- find the subject -----------------------------------------------------------------------------------------------------


def subject(name: str, is_part: bool = False) -> Recipe | Part:
    """The recipe or part of a name, an expression or a file; loads plugins if the name is unknown."""
    if not (name in presets() or name in registry.of() or name in BASELINES):
        plugins.load_plugins()
    return _part_called(name) if is_part else _find(name)


def _find(text: str) -> Recipe | Part:
    """The recipe of a text; a part if the text is a part that is not a whole recipe."""
    if text in BASELINES:
        raise RecipeError(
            f"{text!r} is a baseline without gossamer, not a recipe: 'gossamer compare' trains it beside recipes"
        )
    if text in presets():
        return catalogue.example(text)
    if text.isidentifier():
        return _part_called(text)
    value = None if text.strip().endswith(".toml") else parse(text, presets())
    return value if isinstance(value, Part) and value.kind != "exchange" else Recipe.of(text)


def _part_called(text: str) -> Part:
    known = registry.of()
    if text in known:
        return catalogue.sample(text)
    if text in presets():
        raise RecipeError(f"{text!r} is a recipe, not a part; leave out --parts")
    if text.isidentifier():
        raise RecipeError(
            f"there is no recipe {text!r}, and no part. {nearest(text, [*presets(), *known, *BASELINES])}"
        )
    value = parse(text)
    if not isinstance(value, Part):
        raise RecipeError(f"{text!r} is not a single part: 'gossamer recipes --parts' lists the parts")
    return value


def query(workload: str | None, parameters: int | None, hosts: int, rate: str | None) -> CostQuery:
    """Read the model and the network from the options."""
    if workload is not None and parameters is not None:
        raise InputError("--workload and --parameters are two models; give one of them")
    bits = None if rate is None else parse_rate(rate)
    if parameters is not None:
        shapes = _squares(parameters)
        numel = sum(n * m for n, m in shapes.values())
        title = f"{len(shapes)} square matrices"
        return CostQuery(title, {**shapes}, 4 * numel, numel, hosts, bits)
    model = workload or MODEL
    trained = get(model).model()
    named = {n: p.detach() for n, p in trained.named_parameters() if p.requires_grad}
    dense, numel = sum(p.nbytes for p in named.values()), sum(p.numel() for p in named.values())
    return CostQuery(
        f"the model of {model}", {**named}, dense, numel, hosts, bits, lambda: kept_by(get(model).optimizer(trained))
    )


def _squares(parameters: int) -> dict[str, tuple[int, int]]:
    """Shapes of at least four square matrices with so many parameters in total."""
    matrices = max(4, round(parameters / WIDEST**2))
    side = max(int((parameters / matrices) ** 0.5), 1)
    return {f"matrix{i}": (side, side) for i in range(matrices)}


# -- describe it ---------------------------------------------------------------------------------------------


def explain(name: str, recipe: Recipe, query: CostQuery) -> dict[str, Any]:
    """Everything about a recipe, as data."""
    preset = presets().get(name.partition("(")[0].strip()) if "+" not in name else None
    refused = catalogue.refused_with(recipe, name)
    own = [p for p in catalogue.parts_of(recipe) if p not in catalogue.defaults()]
    return {
        "name": name,
        "expression": repr(recipe),
        "signature": catalogue.signature(preset) if preset else "",
        **list_cache.words(preset),
        **list_cache.to_the_end(name),
        "parts": [{"kind": p.kind, "text": repr(p), **list_cache.words(type(p))} for p in own],
        **_model(query),
        **_bytes(recipe, query),
        "refuses": [{"text": r.text, "message": r.message} for r in refused],
        "limits": catalogue.wrong_values(preset) if preset else [],
    }


def explain_part(part: Part, query: CostQuery) -> dict[str, Any]:
    """Everything about a part, as data."""
    kind = type(part)
    return {
        "name": part.name,
        "kind": part.kind,
        "expression": repr(part),
        "signature": catalogue.signature(kind),
        **list_cache.words(kind),
        "details": catalogue.read(kind).body,
        **_model(query),
        "recipes": [{"expression": repr(r), **_bytes(r, query)} for r in catalogue.showing(part)],
        "refuses": [{"text": r.text, "message": r.message} for r in catalogue.pairs() if part.name in r.about],
        "limits": catalogue.wrong_values(kind),
        "presets": catalogue.users(part.name),
    }


def _model(query: CostQuery) -> dict[str, Any]:
    dense = query.dense()
    return {
        "model": query.model,
        "parameters": query.numel,
        "hosts": query.hosts,
        "rate": query.rate,
        "dense_bytes_per_step": round(dense),
        "dense_seconds_per_step": query.seconds(dense),
    }


def _bytes(recipe: Recipe, query: CostQuery) -> dict[str, Any]:
    sent, card = query.sent(recipe), query.through_card(recipe)
    return {
        "sent_bytes_per_step": round(sent),
        "card_bytes_per_step": None if card is None else round(card),
        "seconds_per_step": query.seconds(sent if card is None else card),
        "ratio_to_dense": round(query.dense() / sent, 2) if sent else None,
        "busy_up_to": Bearable.of((sent if card is None else card) / (4 * query.numel)),
    }
