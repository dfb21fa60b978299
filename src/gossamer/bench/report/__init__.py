"""What a comparison showed: one HTML page, a Markdown table, figures for papers."""

from gossamer.bench.report.figures import write_figures
from gossamer.bench.report.markdown import write_markdown
from gossamer.bench.report.page import render, write_html

__all__ = ["render", "write_figures", "write_html", "write_markdown"]
