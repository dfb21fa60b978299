"""What all pages have in common: one HTML file each, with everything in it, that needs no network to open."""

from importlib import resources
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from gossamer.bench.report import formatting
from gossamer.core import files

PAGE = files.FileKind("report", (b'<meta name="generator" content="gossamer">',))
# What templates call of `formatting`.
FORMS = (
    *("number", "seconds", "size", "times", "rate", "subject", "moment"),
    *("listed", "capital", "glued", "ranks_on", "severe", "seeds_of"),
)


def asset(name: str) -> str:
    """A file that lies beside this one."""
    return resources.files("gossamer.bench.report").joinpath(name).read_text(encoding="utf-8")


ENVIRONMENT = Environment(  # keeps each template that it has compiled
    autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, loader=FunctionLoader(asset)
)
ENVIRONMENT.filters.update({name: getattr(formatting, name) for name in FORMS})


def filled(template: str, **values: Any) -> str:
    """A template's document. It begins with `{% include "head.html" %}`, and says its title first."""
    return ENVIRONMENT.get_template(template).render(css=Markup(asset("page.css")), **values) + "\n"
