"""The API reference, made from signatures and docstrings: a public name is on the page because it is public."""

import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from types import ModuleType, NoneType
from typing import Any, Union, get_args, get_origin

import gossamer

INTRO = """# API

What a program uses, with the signatures and the words of the code itself. What recipes are made of, each part with its arguments,
has [pages of its own](index.md); so have [presets](presets.md).
"""
MODULES = {  # beside what `gossamer` itself has: what each is for
    "gossamer.simulate": "Whole training runs in one process, on a virtual clock: see {doc}`/simulator`.",
    "gossamer.planning": "What a recipe sends, counted without training.",
    "gossamer.workloads": "Real models on real data: see {doc}`/workloads`.",
}


def page() -> str:
    lines = [INTRO, "## gossamer", "", *_prose(inspect.getdoc(gossamer) or ""), ""]
    for name in sorted(gossamer.__all__, key=lambda name: (name != "attach", name.lower())):
        lines += _entry(f"gossamer.{name}", getattr(gossamer, name))
    for module, what in MODULES.items():
        lines += [f"## {module}", "", what, ""]
        for name, value in public(importlib.import_module(module)):
            lines += _entry(f"{module}.{name}", value)
    return "\n".join(lines)


def public(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """What a module offers; aliases of types are in the signatures that use them."""
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            yield name, value


def members(kind: type) -> Iterator[tuple[str, Any]]:
    """A class's public methods and properties, in the order of its source; those that it inherits are described elsewhere."""
    for name, value in vars(kind).items():
        if not name.startswith("_") and (isinstance(value, property | staticmethod | classmethod) or callable(value)):
            yield name, value


def signature(name: str, call: Callable[..., Any]) -> str:
    """A call as its author wrote it, one argument a line where there are many.

    >>> def join(words: list[str], by: str = ", ") -> str: ...
    >>> signature("join", join)
    "join(words: list[str], by: str = ', ') -> str"
    """
    found = inspect.signature(call)
    said = [p.replace(annotation=Written(p.annotation)) for p in found.parameters.values() if p.name != "self"]
    found = found.replace(return_annotation=Written(found.return_annotation))
    text = f"{name}{_plain(str(found.replace(parameters=said)))}"
    if len(text) <= 100 or not said:
        return text
    head, _, back = text.rpartition(" -> ") if " -> " in text else (text, "", "")
    star = next((i for i, p in enumerate(said) if p.kind is p.KEYWORD_ONLY), None)
    written = [_plain(str(p)) for p in said]
    if star is not None and not any(p.kind is p.VAR_POSITIONAL for p in said):
        written.insert(star, "*")
    return f"{name}(\n" + "".join(f"    {each},\n" for each in written) + ")" + (f" -> {back}" if head and back else "")


class Written:
    """A type as one writes it: what Python shows of a choice is longer."""

    def __new__(cls, hint: Any) -> Any:
        return hint if hint is inspect.Signature.empty else super().__new__(cls)

    def __init__(self, hint: Any) -> None:
        self.hint = hint

    def __repr__(self) -> str:
        if get_origin(self.hint) is Union:
            return " | ".join(repr(Written(each)) for each in get_args(self.hint))
        return "None" if self.hint is NoneType else inspect.formatannotation(self.hint)


def _plain(text: str) -> str:
    """Types by their names, as one writes them."""
    text = re.sub(r"<function .*? at 0x\w+>|<factory>", "...", text)
    text = re.sub(r"\b(?:[a-z_]\w*\.)+(?=[A-Za-z_])", "", text)
    return re.sub(r"(: |-> )'([^']*)'", r"\1\2", text)


def _entry(path: str, value: Any) -> list[str]:
    head = [f"### {path}", ""]
    if isinstance(value, str):
        return [*head, f"The version that is installed, as a text: `{value!r}`.", ""]
    if isinstance(value, ModuleType):
        return [*head, *_module(path, value)]
    if inspect.isclass(value):
        return [*head, *_class(value)]
    return [*head, *_code(signature(path, value)), *_prose(inspect.getdoc(value) or "")]


def _module(path: str, module: ModuleType) -> list[str]:
    lines = _prose(inspect.getdoc(module) or "")
    if path == "gossamer.recipes":
        return [*lines, "Each preset is a function here: [what they are](presets.md).", ""]
    for name, value in _offered(module):
        lines += [f"#### {path}.{name}", ""]
        lines += _class(value) if inspect.isclass(value) else _code(signature(f"{path}.{name}", value))
        lines += [] if inspect.isclass(value) else _prose(inspect.getdoc(value) or "")
    return lines


def _offered(module: ModuleType) -> Iterator[tuple[str, Any]]:
    if hasattr(module, "__all__"):
        yield from public(module)
        return
    for name, value in vars(module).items():
        ours = getattr(value, "__module__", "") == module.__name__ and not name.startswith("_")
        if ours and (inspect.isfunction(value) or name == "Hook"):
            yield name, value


def _class(kind: type) -> list[str]:
    lines = _code(signature(kind.__name__, kind)) if is_dataclass(kind) else []
    lines += _prose(inspect.getdoc(kind) or "")
    for name, value in members(kind):
        call = value.__func__ if isinstance(value, staticmethod | classmethod) else value
        shown = f"{kind.__name__}.{name}" if isinstance(value, staticmethod | classmethod) else name
        words = inspect.getdoc(value) or ""
        lines += [f"**`{shown}`**", ""] if isinstance(value, property) else _code(signature(shown, call))
        lines += _prose(words)
    return lines


def _code(text: str) -> list[str]:
    return ["```python", text, "```", ""]


def _prose(docstring: str) -> list[str]:
    """A docstring as Markdown: lists stay lists, and examples are code."""
    lines = list[str]()
    for text in docstring.split("\n\n"):
        lines += ["```pycon", text, "```", ""] if text.startswith(">>>") else [escaped(text), ""]
    return lines


def escaped(text: str) -> str:
    """Keep Markdown from reading stars, brackets and underscores of plain text as its own."""
    pieces = text.split("`")
    return "`".join(p if i % 2 else re.sub(r"([\\*_<>\[\]])", r"\\\1", p) for i, p in enumerate(pieces))
