"""The page of `gossamer explain`: what was said and kept, step by step, in one HTML file."""

from importlib import resources
from pathlib import Path

import jinja2
from markupsafe import Markup

from gossamer.core import files
from gossamer.explained import Explained
from gossamer.explained.text import given, grouped, model, outcome, title
from gossamer.report.page import PAGE

__all__ = ["PAGE", "render", "write_html"]


def render(told: Explained, name: str) -> str:
    """The whole page as one HTML document, without a script.

    >>> from gossamer.explained import explain
    >>> render(explain("bf16"), "bf16").startswith("<!doctype html>")
    True
    """
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    page = environment.from_string(_asset("explained.html")).render(
        told=told,
        name=name,
        model=model(told),
        steps=[*grouped(told.steps)],  # a step, or a list of steps in which nobody says anything
        title=title,
        given=given,
        outcome=outcome,
        css=Markup(_asset("page.css")),
    )
    return page + "\n"


def write_html(told: Explained, name: str, path: Path, force: bool = False) -> None:
    """Over nothing but an earlier page of ours, or with `force` any file."""
    files.write(path, render(told, name), PAGE, force)


def _asset(name: str) -> str:
    return resources.files("gossamer.report").joinpath(name).read_text(encoding="utf-8")
