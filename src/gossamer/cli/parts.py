"""What `gossamer recipes` says of one recipe or of one part, as data."""

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from gossamer import catalogue
from gossamer.cli import cards, listed
from gossamer.cli.errors import InputError
from gossamer.core import plugins
from gossamer.core.errors import RecipeError
from gossamer.core.parts import Part, nearest, parse, registry
from gossamer.lab import parse_rate
from gossamer.planning import bytes_between, bytes_per_step
from gossamer.recipe import Recipe
from gossamer.recipes import presets
from gossamer.trial.yardsticks import YARDSTICKS
from gossamer.workloads import get

WIDEST = 4096  # of the square matrices that stand for a model
MODEL = "lm"  # what `train` and `compare` train unless told otherwise


class Question(NamedTuple):
    """The model and the network that bytes and seconds are asked for."""

    model: str
    parameters: dict[str, "tuple[int, ...] | Tensor"]
    dense_bytes: int
    numel: int
    hosts: int
    rate: int | None = None  # bit/s

    def sent(self, recipe: Recipe) -> float:
        return bytes_per_step(recipe, self.parameters, self.hosts)

    def through_card(self, recipe: Recipe) -> float | None:
        """What a node's card sends; None where no ranks share one."""
        per_node = recipe.ranks_per_node
        return bytes_between(recipe, self.parameters, self.hosts, per_node) if per_node > 1 else None

    def dense(self) -> float:
        return 2 * (self.hosts - 1) / self.hosts * self.dense_bytes

    def seconds(self, sent: float) -> float | None:
        return None if self.rate is None else 8 * sent / self.rate


def list_parts(as_json: bool) -> None:
    plugins.load_plugins()
    rows = [{"kind": p.kind, "name": n, **listed.origin(p), **listed.words(p)} for n, p in registry.of().items()]
    print(json.dumps(rows, indent=1)) if as_json else cards.list_parts(rows)


def show(name: str, subject: Recipe | Part, question: Question, as_json: bool) -> None:
    facts, card = _facts(name, subject, question)
    print(json.dumps(facts, indent=1)) if as_json else card(facts)


def _is_known(name: str) -> bool:
    return name in presets() or name in registry.of() or name in YARDSTICKS


# -- what is meant -----------------------------------------------------------------------------------------------------


def subject(name: str, is_part: bool = False) -> Recipe | Part:
    """What a name, an expression or a file means; a word that is unknown may be one that an installed package has."""
    if not _is_known(name):
        plugins.load_plugins()
    return _part_called(name) if is_part else _find(name)


def _find(text: str) -> Recipe | Part:
    """The recipe that a text stands for; or the part, where it is none of a recipe's on its own."""
    if text in YARDSTICKS:
        raise RecipeError(f"{text!r} is a yardstick, not a recipe: 'gossamer compare' trains it beside others")
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
            f"there is no recipe {text!r}, and no part. {nearest(text, [*presets(), *known, *YARDSTICKS])}"
        )
    value = parse(text)
    if not isinstance(value, Part):
        raise RecipeError(f"{text!r} is no single part: 'gossamer recipes --parts' lists them")
    return value


def question(workload: str | None, parameters: int | None, hosts: int, rate: str | None) -> Question:
    """The model and the network that are asked for."""
    if workload is not None and parameters is not None:
        raise InputError("--workload and --parameters are two models; give one of them")
    if parameters is not None:
        shapes = _squares(parameters)
        numel = sum(n * m for n, m in shapes.values())
        title = f"{len(shapes)} square matrices"
        return Question(title, {**shapes}, 4 * numel, numel, hosts, _rate(rate))
    model = workload or MODEL
    named = {n: p.detach() for n, p in get(model).model().named_parameters() if p.requires_grad}
    dense, numel = sum(p.nbytes for p in named.values()), sum(p.numel() for p in named.values())
    return Question(f"the model of {model}", {**named}, dense, numel, hosts, _rate(rate))


def _rate(text: str | None) -> int | None:
    return None if text is None else parse_rate(text)


def _squares(parameters: int) -> dict[str, tuple[int, int]]:
    """At least four, so that messages have something to be cut at."""
    matrices = max(4, round(parameters / WIDEST**2))
    side = max(int((parameters / matrices) ** 0.5), 1)
    return {f"matrix{i}": (side, side) for i in range(matrices)}


# -- what is said about it ---------------------------------------------------------------------------------------------


def _facts(
    name: str, subject: Recipe | Part, question: Question
) -> tuple[dict[str, Any], Callable[[dict[str, Any]], None]]:
    if isinstance(subject, Recipe):
        return explain(name, subject, question), cards.show_recipe
    return explain_part(subject, question), cards.show_part


def explain(name: str, recipe: Recipe, question: Question) -> dict[str, Any]:
    """Everything there is to say about a recipe, as data."""
    preset = presets().get(name.partition("(")[0].strip()) if "+" not in name else None
    refused = catalogue.refused_with(recipe, name)
    own = [p for p in catalogue.parts_of(recipe) if p not in catalogue.defaults()]
    return {
        "name": name,
        "expression": repr(recipe),
        "signature": catalogue.signature(preset) if preset else "",
        **listed.words(preset),
        "parts": [{"kind": p.kind, "text": repr(p), **listed.words(type(p))} for p in own],
        **_model(question),
        **_bytes(recipe, question),
        "refuses": [{"text": r.text, "message": r.message} for r in refused],
        "limits": catalogue.wrong_values(preset) if preset else [],
    }


def explain_part(part: Part, question: Question) -> dict[str, Any]:
    """Everything there is to say about a part, as data."""
    kind = type(part)
    return {
        "name": part.name,
        "kind": part.kind,
        "expression": repr(part),
        "signature": catalogue.signature(kind),
        **listed.words(kind),
        "details": catalogue.read(kind).body,
        **_model(question),
        "recipes": [{"expression": repr(r), **_bytes(r, question)} for r in catalogue.showing(part)],
        "refuses": [{"text": r.text, "message": r.message} for r in catalogue.pairs() if part.name in r.about],
        "limits": catalogue.wrong_values(kind),
        "presets": catalogue.users(part.name),
    }


def _model(question: Question) -> dict[str, Any]:
    dense = question.dense()
    return {
        "model": question.model,
        "parameters": question.numel,
        "hosts": question.hosts,
        "rate": question.rate,
        "dense_bytes_per_step": round(dense),
        "dense_seconds_per_step": question.seconds(dense),
    }


def _bytes(recipe: Recipe, question: Question) -> dict[str, Any]:
    sent, card = question.sent(recipe), question.through_card(recipe)
    return {
        "sent_bytes_per_step": round(sent),
        "card_bytes_per_step": None if card is None else round(card),
        "seconds_per_step": question.seconds(sent if card is None else card),
        "ratio_to_dense": round(question.dense() / sent, 2) if sent else None,
    }
