"""Sphinx: `make docs`, or `sphinx-build -W -b html docs docs/_build/html`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "ext"))

import gossamer

project = "gossamer"
author = "the gossamer authors"
project_copyright = author
release = version = gossamer.__version__

extensions = ["myst_parser", "parts"]
exclude_patterns = ["_build", "ext"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = f"gossamer {release}"
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#1f6f78", "color-brand-content": "#1f6f78"},
    "dark_css_variables": {"color-brand-primary": "#7cc7cf", "color-brand-content": "#7cc7cf"},
}
pygments_style = "friendly"
pygments_dark_style = "native"
