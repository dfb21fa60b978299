"""The law of ranges: what is worth trying can be tried; and no argument is without bounds: none may be infinite, or no number."""

from dataclasses import replace
from math import inf, nan
from typing import Any, get_type_hints

import pytest
from tests.laws.samples import plainest

from gossamer.core.errors import RecipeError
from gossamer.core.parts import matches, parse, registry
from gossamer.core.ranges import Choice, LogRange, Range, Values, ranges_of

KNOBS = [(name, knob) for name, part in registry.of().items() for knob in ranges_of(part)]
PLACES = [i / 16 for i in range(17)]


@pytest.mark.parametrize(("name", "knob"), KNOBS, ids=".".join)
def test_every_value_makes_a_legal_part_and_is_read_back(name: str, knob: str) -> None:
    """Of the type that the argument has, too: whole numbers where it takes any would leave out most."""
    part = registry.of()[name]
    values, hint = ranges_of(part)[knob], get_type_hints(part)[knob]
    for value in (*values.ends, *map(values.at, PLACES)):
        changes: dict[str, Any] = {knob: value}
        made = replace(plainest(part), **changes)  # pyright: ignore
        assert matches(value, hint)
        assert getattr(made, knob) == value
        assert parse(repr(made)) == made


NUMBERS = [
    (name, key)
    for name, part in registry.of().items()
    for key, hint in get_type_hints(part).items()
    if matches(1.5, hint)
]


@pytest.mark.parametrize(("name", "key"), NUMBERS, ids=".".join)
def test_what_is_infinite_or_no_number_is_refused_by_name(name: str, key: str) -> None:
    for value in (inf, -inf, nan):
        changes: dict[str, Any] = {key: value}
        with pytest.raises(RecipeError, match=key):
            replace(plainest(registry.of()[name]), **changes)  # pyright: ignore


def test_knobs_of_every_kind_are_there() -> None:
    assert {"topk.ratio", "qsgd.bits", "ternary.clip", "slowmo.beta"} <= {".".join(k) for k in KNOBS}


@pytest.mark.parametrize("values", [Range(0.5, 2.0), Range(-3, 4), LogRange(0.01, 3.0), LogRange(1, 1000)], ids=str)
def test_ends_are_reached_and_nothing_beyond(values: Values) -> None:
    drawn = [values.at(i / 4096) for i in range(4097)]
    assert (drawn[0], drawn[-1]) == values.ends
    assert drawn == sorted(drawn)
    assert {type(v) for v in drawn} == {type(values.ends[0])}


def test_whole_numbers_and_choices_come_equally_often() -> None:
    for values, n in ((Range(2, 8), 7), (Choice("a", "b", "c"), 3)):
        drawn = [values.at((i + 0.5) / (100 * n)) for i in range(100 * n)]
        assert {drawn.count(v) for v in drawn} == {100}


@pytest.mark.parametrize(
    "make",
    [
        lambda: Range(1.0, 1.0),
        lambda: Range(2, 1),
        lambda: Range(1, 2.0),
        lambda: Range(0.0, float("inf")),
        lambda: LogRange(0.0, 1.0),
        lambda: Choice(),
        lambda: Choice(1, 1),
    ],
)
def test_what_is_no_range_is_refused_where_it_is_written(make: Any) -> None:
    with pytest.raises(ValueError):
        make()
