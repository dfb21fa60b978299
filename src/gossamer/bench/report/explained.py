"""The page of `gossamer explain`: what was said and kept, step by step, in one HTML file."""

from pathlib import Path

from gossamer.bench.explain import Explained
from gossamer.bench.explain.text import given, grouped, model, outcome, title
from gossamer.bench.report.pages import PAGE, filled
from gossamer.core import files


def render(told: Explained, name: str) -> str:
    """The whole page as one HTML document, without a script.

    >>> from gossamer.bench.explain import explain
    >>> render(explain("bf16"), "bf16").startswith("<!doctype html>")
    True
    """
    return filled(
        "explained.html",
        told=told,
        name=name,
        model=model(told),
        steps=[*grouped(told.steps)],  # a step, or a list of steps in which nobody says anything
        title=title,
        given=given,
        outcome=outcome,
    )


def write_html(told: Explained, name: str, path: Path, force: bool = False) -> None:
    """Over nothing but an earlier page of ours, or with `force` any file."""
    files.write(path, render(told, name), PAGE, force)
