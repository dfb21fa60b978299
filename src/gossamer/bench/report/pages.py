"""What all pages have in common: one HTML file each, with everything in it, that needs no network to open."""

from importlib import resources
from typing import Any

import jinja2
from markupsafe import Markup

from gossamer.bench.report import formatting
from gossamer.core import files

PAGE = files.FileKind("report", (b'<meta name="generator" content="gossamer">',))
FORMS = {
    form.__name__: form
    for form in (
        *(formatting.number, formatting.seconds, formatting.size, formatting.times, formatting.rate),
        *(
            formatting.subject,
            formatting.moment,
            formatting.listed,
            formatting.capital,
            formatting.glued,
            formatting.ranks_on,
            formatting.severe,
            formatting.seeds_of,
        ),
    )
}


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
    environment.filters |= FORMS
    return environment.get_template(template).render(css=Markup(asset("page.css")), **values) + "\n"
