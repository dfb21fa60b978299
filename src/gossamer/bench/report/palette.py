"""One colour and one mark per run, the same everywhere.

The hues were searched for: any two of them, and the baseline's ink, stay apart in the eyes of most people and of those
who see no red, no green or no blue, on paper and on a dark screen. A test holds it. Marks help the rest.
"""

from typing import NamedTuple

from gossamer.bench.record import Record


class Colour(NamedTuple):
    light: str  # on a white page
    dark: str  # on a dark page


PAGE = Colour("#ffffff", "#16181b")  # what they stand on
INK = Colour("#1c1e21", "#e8e8e6")  # the baseline: no hue, dashed
HUES = [
    Colour("#2163f4", "#5ba4ff"),  # blue
    Colour("#c52608", "#f87c12"),  # vermilion
    Colour("#2f7258", "#86ab7d"),  # green
    Colour("#af15a6", "#b480b8"),  # magenta
    Colour("#aa8e02", "#ebce54"),  # ochre
    Colour("#311b7c", "#8066fa"),  # indigo
    Colour("#752203", "#a46f4a"),  # brown
    Colour("#12a3a8", "#15d1dd"),  # teal
]
# No hue: those are for runs.
PARTS = [Colour("#c6ccd4", "#4b525b"), Colour("#8a93a1", "#858e9a"), Colour("#3f4754", "#d3d8de")]
MARKS = [  # SVG paths around the origin: circle, square, triangle, diamond
    "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z",
    "M-3.5-3.5h7v7h-7z",
    "M0-4.8L4.4 3.2H-4.4z",
    "M0-5L4.5 0L0 5L-4.5 0z",
]


class Style(NamedTuple):
    colour: Colour
    mark: str
    dashed: bool


BASELINE = Style(INK, MARKS[0], True)


def hues(count: int) -> list[Style]:
    """After eight the hues come round again, with other marks."""
    turns = (divmod(place, len(HUES)) for place in range(count))
    return [Style(HUES[hue], MARKS[(hue + turn) % len(MARKS)], False) for turn, hue in turns]


def styles(record: Record) -> list[Style]:
    """By a run's place in the record.

    >>> styles(Record("", "", "", "", "loss", True, 1, 2, "unshaped", 0))
    []
    """
    base = record.run(record.baseline) if len(record.runs) > 1 else None
    others = iter(hues(len(record.runs)))
    return [BASELINE if run is base else next(others) for run in record.runs]
