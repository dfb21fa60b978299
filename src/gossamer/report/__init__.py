"""What a comparison showed: one HTML page, a Markdown table, figures for papers."""

from gossamer.report.figures import write_figures
from gossamer.report.markdown import write_markdown
from gossamer.report.page import render, write_html

__all__ = ["render", "write_figures", "write_html", "write_markdown"]
