"""Pages that follow from the code, written before each build: one per part, the presets, what recipes refuse, and the API.

A new codec, preset or topology has its page as soon as it is registered; nobody has to remember. The text is the
docstring, the law is the contract's, the bytes are counted by the simulator, and every refusal was provoked just now.
"""

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, Field, fields
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

import api
from api import escaped as _escape

from gossamer.bench import catalogue
from gossamer.bench.catalogue import KINDS, Refusal, example, formulas, parts_of, read, sample, signature
from gossamer.core.contracts import LinearCodec
from gossamer.core.errors import AttachError
from gossamer.core.parts import Part, registry
from gossamer.core.ranges import ranges_of
from gossamer.costs import Bearable
from gossamer.planning import bytes_per_step
from gossamer.recipe import Recipe
from gossamer.recipes import presets

SIDE = 256  # the model that bytes are counted for: one square matrix
RANKS = (4, 16)


# -- docstrings --------------------------------------------------------------------------------------------------------


def law(contract: type) -> str:
    doc = inspect.cleandoc(contract.__dict__.get("__doc__") or "")
    found = re.search(r"^Law:\s*(.*?)(?:\n\n|\Z)", doc, re.S | re.M)
    return _one_line(found.group(1)) if found else ""


def prose(text: str) -> str:
    """A paragraph as Markdown; formulas at its beginning get a line each."""
    lines, rest = formulas(text)
    out = ["```text", *lines, "```", ""] if lines else []
    return "\n".join([*out, _escape(rest)])


def _one_line(text: str) -> str:
    return " ".join(text.split())


# -- bytes -------------------------------------------------------------------------------------------------------------


@cache
def sent(recipe: Recipe, size: int) -> float:
    return bytes_per_step(recipe, {"w": (SIDE, SIDE)}, size)


def dense(size: int) -> float:
    return 2 * (size - 1) / size * 4 * SIDE * SIDE


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
    if get_origin(hint) is tuple:
        return f"a tuple, of {describe(get_args(hint)[0])} each"
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
    lines += [line for text in docs.body for line in (prose(text), "")]
    lines += _advice(docs)
    if docs.wire:
        lines += ["## On the wire", "", _escape(_capital(docs.wire)), ""]
    lines += _bytes(catalogue.showing(sample(name)))
    lines += _laws(part)
    lines += _refused(name)
    if docs.example:
        lines += ["## Example", "", "```pycon", f">>> from {part.__module__} import *", docs.example, "```", ""]
    lines += _used_by(name)
    if docs.paper:
        lines += ["## Paper", "", _escape(docs.paper), ""]
    return "\n".join([*lines, f"Source: `src/{source}`", ""])


def _advice(docs: catalogue.Docs) -> list[str]:
    """When to use it, and when not."""
    use = [f"**Use it** {_escape(docs.use)}", ""] if docs.use else []
    return use + ([f"**Not for** {_escape(docs.not_for)}", ""] if docs.not_for else [])


def _arguments(part: type[Part]) -> list[str]:
    hints, own = get_type_hints(part), fields(part)  # pyright: ignore[reportArgumentType]
    if not own:
        return ["```text", f"{part.name}()", "```", ""]
    tried = ranges_of(part)
    rows = [
        f"| `{f.name}` | {describe(hints[f.name])} | {'*required*' if _required(f) else f'`{f.default!r}`'} "
        f"| {tried.get(f.name, '')} |"
        for f in own
    ]
    return [
        "```text",
        signature(part),
        "```",
        "",
        "| argument | is | default | `gossamer tune` tries |",
        "| --- | --- | --- | --- |",
        *rows,
        "",
    ]


def _required(field: "Field[Any]") -> bool:
    return field.default is MISSING and field.default_factory is MISSING


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
        lines.append(f"| `{recipe}` | {' | '.join(_sent(recipe, n) for n in RANKS)} |")
    return [*lines, ""]


def _sent(recipe: Recipe, ranks: int) -> str:
    try:
        bytes_sent = sent(recipe, ranks)
    except AttachError:  # a graph is of as many ranks as it names
        return "refused"
    return f"{bytes_sent:,.0f} ({_times(dense(ranks) / bytes_sent)})"


def _times(ratio: float) -> str:
    return f"{float(f'{ratio:.3g}'):g} x"  # never in powers of ten


def _laws(part: type[Part]) -> list[str]:
    contracts = [c for c in part.__mro__ if law(c)]
    if not contracts:
        return []
    lines = ["## The law", "", "Tests hold every part of this kind to what its contract promises.", ""]
    for contract in contracts:
        lines += [f"**{contract.__name__}.** {_escape(_capital(law(contract)))}", ""]
    return lines


def _refused(name: str) -> list[str]:
    combos = [r for r in catalogue.pairs() if name in r.about]
    values = catalogue.wrong_values(registry.of()[name])
    if not combos and not values:
        return []
    lines = ["## What is refused", ""]
    if combos:
        lines += [*refusal_table(combos), ""]
    if values:
        lines += ["Values out of range:", "", *(f"- {_escape(v)}" for v in values), ""]
    return lines


def refusal_table(rows: Iterable[Refusal]) -> list[str]:
    cells = [f"| `{r.text}` | {_cell(r.message)} |" for r in rows]
    return ["| you write | the answer |", "| --- | --- |", *cells]


def _cell(text: str) -> str:
    return _escape(_one_line(text)).replace("|", "\\|")


def _used_by(name: str) -> list[str]:
    links = ", ".join(f"[{p}](../presets.md#{slug(p)})" for p in catalogue.users(name))
    return ["## In presets", "", links + ".", ""] if links else []


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
        f"{SIDE} matrix. It is counted, not estimated; `gossamer recipes NAME --workload lm` counts for a real model.",
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
    docs, recipe = read(make), example(name)
    found = {p.name: p for p in parts_of(recipe) if p not in catalogue.defaults()}
    lines = [f"## {name}", "", _escape(docs.summary), "", "```text", signature(make), "```", ""]
    lines += [line for text in docs.body for line in (prose(text), "")]
    lines += _advice(docs)
    note = " (for epochs of 100 steps)" if "epoch" in inspect.signature(make).parameters else ""
    lines += [f"With its defaults{note}: `{recipe}`", ""]
    lines += ["Made of " + ", ".join(f"[{n}]({path_of(p)})" for n, p in found.items()) + ".", ""]
    if (bearable := Bearable.of(sent(recipe, RANKS[0]) / (4 * SIDE * SIDE))) is not None:
        lines += [f"Severity (see *Choosing a recipe*): {bearable}, with {RANKS[0]} ranks.", ""]
    if refused := catalogue.refused_with(recipe, name):
        lines += ["Refused:", "", *refusal_table(refused), ""]
    return [*lines, f"Paper: {_escape(docs.paper)}"] if docs.paper else lines


def refusals_page() -> str:
    intro = (
        "# What recipes refuse\n\n"
        "Some combinations cannot be right: they would train wrongly without a word, or hang. They are refused when the "
        "recipe is made, with the reason and the fix. The table was made by trying every pair when this page was built.\n"
    )
    return "\n".join([intro, *refusal_table(catalogue.pairs()), ""])


def index_page() -> str:
    lines = ["# Parts and presets", "", "A recipe is made of parts. Each has its page, made from its docstring.", ""]
    lines += ["What a program calls is in the [API](api.md).", ""]
    listed = ["api", "presets", "refusals"]
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
    yield "api.md", api.page()
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
