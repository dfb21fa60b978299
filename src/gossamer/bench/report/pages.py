"""What all pages have in common: one HTML file each, with everything in it, that needs no network to open."""

from importlib import resources
from typing import Any

import jinja2
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


def filled(template: str, **values: Any) -> str:
    """A template's document. It begins with `{% include "head.html" %}`, and says its title first."""
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=jinja2.FunctionLoader(asset),
    )
    environment.filters.update({name: getattr(formatting, name) for name in FORMS})
    return environment.get_template(template).render(css=Markup(asset("page.css")), **values) + "\n"
