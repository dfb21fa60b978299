"""Docstrings of parts and presets, taken apart."""

import inspect
import re
from collections.abc import Callable
from typing import Any, NamedTuple

LABELS = {"Use:": "use", "Not for:": "not_for", "Wire:": "wire", "Paper:": "paper", ">>>": "example", "Law:": "law"}


class Docs(NamedTuple):
    """One docstring: a line that sums it up, prose and formulas, and paragraphs that say what they are."""

    summary: str
    body: list[str]
    use: str = ""
    not_for: str = ""
    wire: str = ""
    paper: str = ""
    example: str = ""
    law: str = ""


def read(subject: Any) -> Docs:
    """Take the docstring of a part or a preset apart.

    >>> from gossamer.memories import ErrorFeedback
    >>> read(ErrorFeedback).wire
    'that of the exchange. Memory: one copy of the gradient.'
    """
    summary, *paragraphs = (inspect.getdoc(subject) or "").split("\n\n")
    body, found = list[str](), dict[str, str]()
    for text in paragraphs:
        label = next((word for word in LABELS if text.startswith(word)), None)
        if label is None:
            body.append(text)
        else:
            found[LABELS[label]] = text if label == ">>>" else one_line(text.removeprefix(label))
    return Docs(one_line(summary), body, **found)


def formulas(paragraph: str) -> tuple[list[str], str]:
    """A paragraph that begins with formulas, set apart by two blanks: the formulas, and the words after them.

    >>> formulas("a = 1;  b_i = 2\\nand more;  c = 3. Then words.")
    (['a = 1', 'b_i = 2 and more', 'c = 3'], 'Then words.')
    """
    flat = re.sub(r"([;,:.])\n", r"\1\n", paragraph).replace(";\n", ";  ").replace("\n", " ")
    if not re.search(r"[;,:]  ", flat):
        return [], flat
    found, items = list[str](), [i for i in re.split(r" {2,}", flat) if i]
    while items:
        item = items.pop(0)
        if found and found[-1].endswith(".") and not re.match(r"^[^=]{1,20}(\+|-)?= ", item):
            return [f.rstrip(";,.:") for f in found], " ".join([item, *items])
        head = re.match(r"^(.*?\.) (?=[A-Z`])(.*)$", item)
        if head and not items:
            found.append(head.group(1))
            return [f.rstrip(";,.:") for f in found], head.group(2)
        found.append(item)
    return [f.rstrip(";,.:") for f in found], ""


def one_line(text: str) -> str:
    return " ".join(text.split())


def signature(make: Callable[..., Any]) -> str:
    """A part's or a preset's arguments and their defaults, as one writes them.

    >>> from gossamer.codecs import Ternary
    >>> signature(Ternary)
    "ternary(clip=2.5, levels=1, deviation='zero')"
    """
    arguments = inspect.signature(make).parameters.values()
    shown = (a.name if a.default is a.empty else f"{a.name}={a.default!r}" for a in arguments)
    return f"{getattr(make, 'name', make.__name__)}({', '.join(shown)})"
