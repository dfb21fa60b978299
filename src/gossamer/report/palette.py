"""One colour and one mark per run, the same everywhere. Hues that colour-blind eyes tell apart; marks help the rest."""

from typing import NamedTuple

from gossamer.record import Record


class Colour(NamedTuple):
    light: str  # on a white page
    dark: str  # on a dark page


INK = Colour("#1c1e21", "#e8e8e6")  # the baseline: no hue, dashed
HUES = [
    Colour("#0b6fb8", "#5aaef0"),  # blue
    Colour("#d0480a", "#ff8a50"),  # vermilion
    Colour("#00896b", "#3cc9a3"),  # green
    Colour("#a8428f", "#e08ac9"),  # purple
    Colour("#b57f00", "#e6b93c"),  # ochre
    Colour("#3b8fbd", "#9bd7f5"),  # sky
    Colour("#7a5230", "#c79d78"),  # brown
    Colour("#6d5fd0", "#a79cf5"),  # violet
]
PARTS = [
    Colour("#c6ccd4", "#4b525b"),
    Colour("#8a93a1", "#858e9a"),
    Colour("#3f4754", "#d3d8de"),
]  # no hue: those are for runs
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


def styles(record: Record) -> list[Style]:
    """By a run's place in the record. After eight runs the hues come round again, with other marks.

    >>> styles(Record("", "", "", "", "loss", True, 1, 2, "unshaped", 0))
    []
    """
    base = record.run(record.baseline)
    out: list[Style] = []
    place = 0
    for run in record.runs:
        if run is base and len(record.runs) > 1:
            out.append(Style(INK, MARKS[0], True))
        else:
            turn, hue = divmod(place, len(HUES))
            out.append(Style(HUES[hue], MARKS[(hue + turn) % len(MARKS)], False))
            place += 1
    return out
