"""Pages that follow from the code, written before each build: one per part, the presets, and what recipes refuse.

A new codec, preset or topology has its page as soon as it is registered; nobody has to remember. The text is the
docstring, the law is the contract's, the bytes are counted by the simulator, and every refusal was provoked just now.
"""

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, fields
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple, get_args, get_type_hints

from gossamer.codecs import FP32
from gossamer.controllers import Fixed
from gossamer.core.contracts import Codec, Exchange, LinearCodec, Mixer, Quorum
from gossamer.core.errors import RecipeError
from gossamer.core.parts import Part, registry
from gossamer.exchanges import AllReduced
from gossamer.memories import ErrorFeedback, NoMemory
from gossamer.recipe import Recipe
from gossamer.recipes import presets
from gossamer.schedules import EveryStep, Gossip
from gossamer.simulate import bytes_per_step

KINDS = {
    "codec": ("codecs", "how a block of numbers is written as bytes"),
    "exchange": ("exchanges", "who talks to whom"),
    "memory": ("memories", "what is kept back when a message does not say everything"),
    "schedule": ("schedules", "when there is an exchange"),
    "controller": ("controllers", "how much, as training goes"),
    "topology": ("topologies", "who is whose neighbour"),
    "rule": ("rules", "which parameters go another way"),
    "bucket": ("buckets", "how much travels together"),
}
SIDE = 256  # the model that bytes are counted for: one square matrix
RANKS = (4, 16)
GUESSES: dict[Any, Any] = {
    int: 8,
    float: 6.0,
    str: "ndim < 2",
    Codec: FP32(),
    LinearCodec: FP32(),
    Exchange: AllReduced(FP32()),
}


class Refusal(NamedTuple):
    """Something that was tried and refused, and the parts that it is about."""

    about: frozenset[str]
    text: str
    message: str


# -- docstrings --------------------------------------------------------------------------------------------------------


class Docs(NamedTuple):
    """A docstring, taken apart."""

    summary: str
    body: list[str]
    wire: str
    example: str
    paper: str


def read(subject: Any) -> Docs:
    paragraphs = (inspect.getdoc(subject) or "").split("\n\n")
    body, wire, example, paper = list[str](), "", "", ""
    for text in paragraphs[1:]:
        if text.startswith("Wire:"):
            wire = text.removeprefix("Wire:").strip()
        elif text.startswith("Paper:"):
            paper = text.removeprefix("Paper:").strip()
        elif text.startswith(">>>"):
            example = text
        elif not text.startswith("Law:"):
            body.append(text)
    return Docs(paragraphs[0], body, wire, example, paper)


def law(contract: type) -> str:
    doc = inspect.cleandoc(contract.__dict__.get("__doc__") or "")
    found = re.search(r"^Law:\s*(.*?)(?:\n\n|\Z)", doc, re.S | re.M)
    return _one_line(found.group(1)) if found else ""


def prose(text: str) -> str:
    """A paragraph as Markdown; formulas at its beginning, set apart by two blanks, get a line each."""
    flat = re.sub(r"([;,:.])\n", r"\1\n", text).replace(";\n", ";  ").replace("\n", " ")
    formulas, rest = list[str](), flat
    if re.search(r"[;,:]  ", flat):
        formulas, rest = _formulas([i for i in re.split(r" {2,}", flat) if i])
    out = ["```text", *formulas, "```", ""] if formulas else []
    return "\n".join([*out, _escape(rest)])


def _formulas(items: list[str]) -> tuple[list[str], str]:
    formulas = list[str]()
    while items:
        item = items.pop(0)
        if formulas and formulas[-1].endswith(".") and not re.match(r"^[^=]{1,20}(\+|-)?= ", item):
            return [f.rstrip(";,.:") for f in formulas], " ".join([item, *items])
        head = re.match(r"^(.*?\.) (?=[A-Z`])(.*)$", item)
        if head and not items:
            formulas.append(head.group(1))
            return [f.rstrip(";,.:") for f in formulas], head.group(2)
        formulas.append(item)
    return [f.rstrip(";,.:") for f in formulas], ""


def _escape(text: str) -> str:
    """Keep Markdown from reading stars, brackets and underscores of plain text as its own."""
    pieces = text.split("`")
    return "`".join(p if i % 2 else re.sub(r"([\\*_<>\[\]])", r"\\\1", p) for i, p in enumerate(pieces))


def _one_line(text: str) -> str:
    return " ".join(text.split())


# -- samples, bytes, refusals --------------------------------------------------------------------------------------------


@cache
def sample(name: str) -> Part:
    """The part with every default, and a guess for what has none."""
    part = registry.of()[name]
    hints = get_type_hints(part)
    return part(**{f.name: GUESSES[hints[f.name]] for f in fields(part) if _required(f)})  # pyright: ignore


def _required(field: "Field[Any]") -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def of(kind: str) -> list[Part]:
    return [sample(n) for n in registry.of(kind)]


def attempt(make: Callable[[], Any]) -> tuple[Any, str]:
    try:
        return make(), ""
    except RecipeError as error:
        return None, str(error)


@cache
def _exchanges() -> tuple[tuple[Refusal, ...], dict[str, Any]]:
    """Every exchange around every codec: what is refused, and what works (by its text)."""
    refused, works = list[Refusal](), dict[str, Any]()
    for name, kind in registry.of("exchange").items():
        if "codec" not in {f.name for f in fields(kind)}:  # pyright: ignore[reportArgumentType]
            works[repr(sample(name))] = sample(name)
            continue
        for codec in of("codec"):
            made, message = attempt(lambda: kind(codec))  # pyright: ignore  # noqa: B023
            if made is None:
                refused.append(Refusal(frozenset({name, codec.name}), f"{name}({codec})", message))
            else:
                works[repr(made)] = made
    return tuple(refused), works


def host(exchange: Any) -> tuple[Any, Any]:
    """A memory and a schedule that this exchange works with."""
    schedule = Gossip() if isinstance(exchange, Mixer) else EveryStep()
    feedback = getattr(exchange, "needs_feedback", False) and not isinstance(exchange, Mixer | Quorum)
    return (ErrorFeedback() if feedback else NoMemory()), schedule


@cache
def refusals() -> tuple[Refusal, ...]:
    """Every pair of parts that cannot be right together, found by trying."""
    refused, works = _exchanges()
    out = [*refused]
    first = dict[str, Any]()  # one exchange per codec, and those without a codec
    for exchange in works.values():
        first.setdefault(getattr(exchange, "codec", exchange).name, exchange)
    for exchange in first.values():
        usual = host(exchange)
        about = {exchange.name} if not hasattr(exchange, "codec") else {exchange.codec.name}
        for memory in of("memory"):
            _, message = attempt(lambda: Recipe(exchange, memory, usual[1]))  # noqa: B023
            if message:
                text = f"{exchange}" if memory == NoMemory() else f"{exchange} + {memory}"
                out.append(Refusal(frozenset({*about, memory.name}), text, message))
    dense = [AllReduced(FP32()), *(e for e in works.values() if not hasattr(e, "codec"))]
    for exchange in dense:
        memory, schedule = host(exchange)
        others: list[tuple[Part, Callable[[Part], Recipe]]] = [
            *((s, lambda s, e=exchange, m=memory: Recipe(e, m, s)) for s in of("schedule")),
            *((c, lambda c, e=exchange, m=memory, s=schedule: Recipe(e, m, s, c)) for c in of("controller")),
            *((r, lambda r, e=exchange, m=memory, s=schedule: Recipe(e, m, s, rules=(r,))) for r in of("rule")),
        ]
        for other, make in others:
            if isinstance(other, Fixed) or (isinstance(exchange, Mixer) and isinstance(other, EveryStep)):
                continue
            _, message = attempt(lambda: make(other))  # noqa: B023
            if message:
                out.append(Refusal(frozenset({exchange.name, other.name}), f"{exchange} + {other}", message))
    mixer = next((e for e in dense if isinstance(e, Mixer)), None)
    if mixer is not None:
        _, message = attempt(lambda: Recipe(mixer))
        out.append(Refusal(frozenset({mixer.name, "every_step"}), f"{mixer}", message))
    return tuple(dict.fromkeys(out))


def wrong_values(name: str) -> list[str]:
    """What a part says to arguments out of range."""
    part, out = registry.of()[name], dict[str, None]()
    given = {f.name: getattr(sample(name), f.name) for f in fields(part)}  # pyright: ignore[reportArgumentType]
    hints = get_type_hints(part)
    for field in fields(part):  # pyright: ignore[reportArgumentType]
        numeric = {int, float} & {hints[field.name], *get_args(hints[field.name])}
        for value in (-1, 0, 1, 2, 1000) if numeric else ():
            cast = float(value) if float in numeric else value
            _, message = attempt(lambda: part(**{**given, field.name: cast}))  # noqa: B023
            if message:
                out.setdefault(message)
                break
    return list(out)


@cache
def sent(recipe: Recipe, size: int) -> float:
    return bytes_per_step(recipe, {"w": (SIDE, SIDE)}, size)


def dense(size: int) -> float:
    return 2 * (size - 1) / size * 4 * SIDE * SIDE


def with_part(part: Part) -> Iterator[Recipe]:
    """Recipes that show what a part costs on the wire."""
    match part.kind:
        case "codec":
            yield from (_hosted(e) for e in _exchanges()[1].values() if getattr(e, "codec", None) == part)
        case "exchange":
            found = [e for e in _exchanges()[1].values() if e.name == part.name]
            yield from map(_hosted, found)
        case "schedule":
            mixes = getattr(part, "mixes", False)
            yield Recipe(sample("push_sum") if mixes else AllReduced(FP32()), schedule=part)  # pyright: ignore
        case "topology":
            yield Recipe.of(f"push_sum(topology={part}) + gossip()")
        case _:
            return


def _hosted(exchange: Any) -> Recipe:
    return Recipe(exchange, *host(exchange))


# -- pages -------------------------------------------------------------------------------------------------------------


def path_of(part: Part | type[Part]) -> str:
    """Where a part's page lies, below docs/parts."""
    folder = KINDS.get(part.kind, (f"{part.kind}s", ""))[0]
    return f"{folder}/{part.name}.md"


def describe(hint: Any) -> str:
    if hint is NoneType:
        return "`None`"
    if get_args(hint) and not any(isinstance(a, type) for a in get_args(hint)):
        return ", ".join(f"`{a!r}`" for a in get_args(hint))
    if get_args(hint):
        return " or ".join(describe(a) for a in get_args(hint))
    if isinstance(hint, type) and issubclass(hint, Part):
        return "a codec whose messages add up" if hint is LinearCodec else _article(hint.kind)
    return {int: "whole number", float: "number", bool: "`True` or `False`", str: "text"}.get(hint, f"`{hint}`")


def _article(word: str) -> str:
    return f"an {word}" if word[0] in "aeiou" else f"a {word}"


def _capital(text: str) -> str:
    """A sentence's first letter; a formula such as `ceil(d / 5)` is left alone."""
    return text[:1].upper() + text[1:] if re.match(r"[a-z]+[ ']", text) else text


def part_page(name: str) -> str:
    part = registry.of()[name]
    docs, source = read(part), Path(inspect.getsourcefile(part) or "").as_posix().split("/src/")[-1]
    lines = [f"# {name}", "", f"*{_article(part.kind).capitalize()}.* {_escape(_one_line(docs.summary))}", ""]
    lines += _arguments(part)
    for text in docs.body:
        lines += [prose(text), ""]
    if docs.wire:
        lines += ["## On the wire", "", _escape(_capital(_one_line(docs.wire))), ""]
    lines += _bytes(list(with_part(sample(name))))
    lines += _laws(part)
    lines += _refused(name)
    if docs.example:
        lines += ["## Example", "", "```pycon", f">>> from {part.__module__} import *", docs.example, "```", ""]
    lines += _used_by(name)
    if docs.paper:
        lines += ["## Paper", "", _escape(_one_line(docs.paper)), ""]
    return "\n".join([*lines, f"Source: `src/{source}`", ""])


def _arguments(part: type[Part]) -> list[str]:
    hints, own = get_type_hints(part), fields(part)  # pyright: ignore[reportArgumentType]
    if not own:
        return ["```text", f"{part.name}()", "```", ""]
    shown = ", ".join(f.name if _required(f) else f"{f.name}={f.default!r}" for f in own)
    rows = [
        f"| `{f.name}` | {describe(hints[f.name])} | {'*required*' if _required(f) else f'`{f.default!r}`'} |"
        for f in own
    ]
    return [
        "```text",
        f"{part.name}({shown})",
        "```",
        "",
        "| argument | is | default |",
        "| --- | --- | --- |",
        *rows,
        "",
    ]


def _bytes(recipes: list[Recipe]) -> list[str]:
    if not recipes:
        return []
    head = " | ".join(f"{n} ranks" for n in RANKS)
    lines = [
        f"Bytes that each rank sends per step for one {SIDE} x {SIDE} matrix, as the ledger counts them, and how many "
        "times fewer that is than a dense all-reduce:",
        "",
        f"| recipe | {head} |",
        "| --- |" + " ---: |" * len(RANKS),
    ]
    for recipe in recipes:
        cells = [f"{sent(recipe, n):,.0f} ({_times(dense(n) / sent(recipe, n))})" for n in RANKS]
        lines.append(f"| `{recipe}` | {' | '.join(cells)} |")
    return [*lines, ""]


def _times(ratio: float) -> str:
    return f"{ratio:.3g} x"


def _laws(part: type[Part]) -> list[str]:
    contracts = [c for c in part.__mro__ if law(c)]
    if not contracts:
        return []
    lines = ["## The law", "", "Tests hold every part of this kind to what its contract promises.", ""]
    for contract in contracts:
        lines += [f"**{contract.__name__}.** {_escape(_capital(law(contract)))}", ""]
    return lines


def _refused(name: str) -> list[str]:
    combos = [r for r in refusals() if name in r.about]
    values = wrong_values(name)
    if not combos and not values:
        return []
    lines = ["## What is refused", ""]
    if combos:
        lines += [*refusal_table(combos), ""]
    if values:
        lines += ["Values out of range:", "", *(f"- {_escape(v)}" for v in values), ""]
    return lines


def refusal_table(rows: "list[Refusal] | tuple[Refusal, ...]") -> list[str]:
    cells = [f"| `{r.text}` | {_cell(r.message)} |" for r in rows]
    return ["| you write | the answer |", "| --- | --- |", *cells]


def _cell(text: str) -> str:
    return _escape(_one_line(text)).replace("|", "\\|")


@cache
def example(name: str) -> Recipe:
    """A preset with its defaults; those that must know the length of an epoch get one of 100 steps."""
    make = presets()[name]
    wanted = inspect.signature(make).parameters
    return make(**{n: 100 if n == "epoch" else 8 for n, p in wanted.items() if p.default is p.empty})


def parts_of(value: Any) -> Iterator[Part]:
    if isinstance(value, Recipe):
        kinds = (value.exchange, value.memory, value.schedule, value.controller, *value.rules, value.bucket)
        for v in kinds:
            yield from parts_of(v)
    elif isinstance(value, Part):
        yield value
        for f in fields(value):  # pyright: ignore[reportArgumentType]
            yield from parts_of(getattr(value, f.name))


def _used_by(name: str) -> list[str]:
    users = [p for p in presets() if name in {x.name for x in parts_of(example(p))} - _always()]
    if not users:
        return []
    links = ", ".join(f"[{p}](../presets.md#{slug(p)})" for p in users)
    return ["## In presets", "", links + ".", ""]


def _always() -> set[str]:
    """Parts that every recipe has unless it says otherwise: not worth naming."""
    return {"none", "every_step", "fixed"}


def slug(name: str) -> str:
    return name.lower()


def presets_page() -> str:
    lines = [
        "# Presets",
        "",
        'A preset is a recipe with a name. `gossamer.recipes.terngrad(levels=3)` in Python and `"terngrad(levels=3)"` as '
        'text are the same value. Parts after a preset replace its own: `"slowmo + scatter(qsgd())"`.',
        "",
        f"The ratio says how many times fewer bytes a rank sends per step than with a dense all-reduce, for one {SIDE} x "
        f"{SIDE} matrix. It is counted, not estimated; on your model see `gossamer recipes NAME`.",
        "",
        "| preset | what it does | " + " | ".join(f"{n} ranks" for n in RANKS) + " |",
        "| --- | --- |" + " ---: |" * len(RANKS),
    ]
    for name in presets():
        ratios = " | ".join(_times(dense(n) / sent(example(name), n)) for n in RANKS)
        lines.append(f"| [{name}](#{slug(name)}) | {_cell(read(presets()[name]).summary)} | {ratios} |")
    for name, make in presets().items():
        lines += ["", *_preset(name, make)]
    return "\n".join([*lines, ""])


def _preset(name: str, make: Callable[..., Recipe]) -> list[str]:
    docs, signature = read(make), inspect.signature(make)
    shown = ", ".join(
        p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in signature.parameters.values()
    )
    found = {p.name: p for p in parts_of(example(name)) if p.name not in _always()}
    lines = [f"## {name}", "", _escape(_one_line(docs.summary)), "", "```text", f"{name}({shown})", "```", ""]
    for text in docs.body:
        lines += [prose(text), ""]
    note = " (for epochs of 100 steps)" if "epoch" in signature.parameters else ""
    lines += [f"With its defaults{note}: `{example(name)}`", ""]
    lines += ["Made of " + ", ".join(f"[{n}]({path_of(p)})" for n, p in found.items()) + ".", ""]
    if docs.paper:
        lines += [f"Paper: {_escape(_one_line(docs.paper))}"]
    return lines


def refusals_page() -> str:
    intro = (
        "# What recipes refuse\n\n"
        "Some combinations cannot be right: they would train wrongly without a word, or hang. They are refused when the "
        "recipe is made, with the reason and the fix. The table was made by trying every pair when this page was built.\n"
    )
    return "\n".join([intro, *refusal_table(refusals()), ""])


def index_page() -> str:
    lines = ["# Parts and presets", "", "A recipe is made of parts. Each has its page, made from its docstring.", ""]
    listed = ["presets", "refusals"]
    for kind in [k for k in KINDS if registry.of(k)] + sorted({p.kind for p in registry.of().values()} - KINDS.keys()):
        folder, what = KINDS.get(kind, (f"{kind}s", ""))
        lines += [f"## {folder.capitalize()}: {what}", "", "| name | in short |", "| --- | --- |"]
        for name, part in registry.of(kind).items():
            lines.append(f"| [{name}]({path_of(part)}) | {_cell(read(part).summary)} |")
            listed.append(path_of(part).removesuffix(".md"))
        lines.append("")
    return "\n".join([*lines, "```{toctree}", ":hidden:", "", *listed, "```", ""])


def pages() -> Iterator[tuple[str, str]]:
    """Every generated page: its path below docs/parts, and its text."""
    yield "index.md", index_page()
    yield "presets.md", presets_page()
    yield "refusals.md", refusals_page()
    for name, part in registry.of().items():
        yield path_of(part), part_page(name)


def write(root: Path) -> None:
    """Write what changed, remove what is gone."""
    wanted = {root / name: text for name, text in pages()}
    for path in set(root.rglob("*.md")) - wanted.keys():
        path.unlink()
    for path, text in wanted.items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")


def setup(app: Any) -> dict[str, Any]:
    app.connect("builder-inited", lambda app: write(Path(app.srcdir) / "parts"))
    return {"parallel_read_safe": True, "parallel_write_safe": True}


if __name__ == "__main__":
    write(Path(sys.argv[1]))
