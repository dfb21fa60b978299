"""Figures for papers: every chart of the page as a file of its own."""

import struct
import zlib
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from gossamer.bench.record import Record
from gossamer.bench.report import svg
from gossamer.bench.report.charts import BarChart, charts
from gossamer.bench.report.palette import styles
from gossamer.bench.report.study import study_of
from gossamer.core import files
from gossamer.core.errors import GossamerError

ZOOM = 3  # pixels per point in PNG: 1440 across, sharp in a column of print
AUTHOR = b"tEXtSoftware\0gossamer"  # a chunk's kind, its keyword and its text
KINDS = {"svg": svg.SVG, "png": files.FileKind("figure", (AUTHOR,))}


class ReportError(GossamerError, RuntimeError):
    """A report that cannot be written the way it was asked for."""


def write_figures(
    record: Record, folder: Path, formats: Sequence[str] = ("svg", "png"), force: bool = False
) -> list[Path]:
    """Write each chart in each format; returns the files. PNG needs the small package `resvg-py`; SVG needs nothing.

    Only earlier figures are written over, unless `force` says otherwise.

    >>> write_figures(Record("", "", "lm", "", "loss", True, 1, 4, "200mbit", 0), Path("nowhere"), ["pdf"])
    Traceback (most recent call last):
    gossamer.bench.report.figures.ReportError: no figures as 'pdf'; there are svg and png
    """
    unknown = [f for f in formats if f not in KINDS]
    if unknown:
        raise ReportError(f"no figures as {unknown[0]!r}; there are svg and png")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    names, look = [run.name for run in record.runs], styles(record)
    drawings = {
        chart.id: svg.bars(chart, names) if isinstance(chart, BarChart) else svg.lines(chart, names, look)
        for chart in charts(study_of(record))
    }
    for name in drawings:  # none is written where one must not be
        for form in formats:
            files.writable(folder / f"{name}.{form}", KINDS[form], force)
    written: list[Path] = []
    for form in sorted(formats, reverse=True):  # SVG first: they are there even if PNG cannot be had
        painter = _painter(written) if form == "png" else None
        for name, drawing in drawings.items():
            path = folder / f"{name}.{form}"
            files.write(path, drawing if form == "svg" else _paint(painter, drawing), KINDS[form], force)
            written.append(path)
    return written


def _painter(written: list[Path]) -> Any:
    try:
        return import_module("resvg_py")
    except ImportError as missing:
        done = f"; the SVG figures are in {written[0].parent}" if written else ""
        raise ReportError(f"PNG figures need the package resvg-py (pip install resvg-py){done}") from missing


def _paint(painter: Any, drawing: str) -> bytes:
    """With our name after the first chunk, which is the header: 8 bytes before it, and 25 of its own."""
    png = bytes(painter.svg_to_bytes(svg_string=drawing, zoom=ZOOM, sans_serif_family="Liberation Sans"))
    length, check = struct.pack(">I", len(AUTHOR) - 4), struct.pack(">I", zlib.crc32(AUTHOR))
    return png[:33] + length + AUTHOR + check + png[33:]
