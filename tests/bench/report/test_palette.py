"""Colours that can be told apart, also by eyes that lack one of three kinds of cones."""

from itertools import combinations
from math import dist

import pytest

from gossamer.bench.report.palette import HUES, INK, PAGE

Triple = tuple[float, float, float]

# Machado, Oliveira, Fernandes, A Physiologically-based Model for Simulation of Color Vision Deficiency, 2009; linear RGB.
EYES: dict[str, tuple[Triple, Triple, Triple]] = {
    "most": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "no red": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "no green": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.01182, 0.04294, 0.968881)),
    "no blue": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.3039)),
}


def times(rows: tuple[Triple, Triple, Triple], v: Triple) -> Triple:
    a, b, c = (sum(x * y for x, y in zip(row, v, strict=True)) for row in rows)
    return a, b, c


def linear(colour: str) -> Triple:
    a, b, c = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    straight = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in (a, b, c)]
    return straight[0], straight[1], straight[2]


def lab(rgb: Triple) -> Triple:
    """Oklab: distances in it are about how different two colours look."""
    to_cones = (
        (0.4122214708, 0.5363325363, 0.0514459929),
        (0.2119034982, 0.6806995451, 0.1073969566),
        (0.0883024619, 0.2817188376, 0.6299787005),
    )
    to_lab = (
        (0.2104542553, 0.7936177850, -0.0040720468),
        (1.9779984951, -2.4285922050, 0.4505937099),
        (0.0259040371, 0.7827717662, -0.8086757660),
    )
    a, b, c = (max(x, 0.0) ** (1 / 3) for x in times(to_cones, rgb))
    return times(to_lab, (a, b, c))


def seen(colour: str, eyes: str) -> Triple:
    a, b, c = (min(1.0, max(0.0, x)) for x in times(EYES[eyes], linear(colour)))
    return lab((a, b, c))


def luminance(colour: str) -> float:
    return sum(w * x for w, x in zip((0.2126, 0.7152, 0.0722), linear(colour), strict=True))


@pytest.mark.parametrize("page", ["light", "dark"])
@pytest.mark.parametrize(("eyes", "apart"), [("most", 0.14), ("no red", 0.1), ("no green", 0.1), ("no blue", 0.085)])
def test_any_two_runs_look_different(page: str, eyes: str, apart: float) -> None:
    colours = [getattr(colour, page) for colour in (INK, *HUES)]
    pairs = {(a, b): dist(seen(a, eyes), seen(b, eyes)) for a, b in combinations(colours, 2)}
    closest = min(pairs, key=pairs.__getitem__)
    assert pairs[closest] >= apart, closest


@pytest.mark.parametrize("page", ["light", "dark"])
def test_lines_stand_out_from_the_page(page: str) -> None:
    for colour in (INK, *HUES):
        dark, light = sorted((luminance(getattr(colour, page)), luminance(getattr(PAGE, page))))
        assert (light + 0.05) / (dark + 0.05) >= 3.0
