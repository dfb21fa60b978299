"""Rates are read strictly, and an error names the nearest correct form."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.bench.lab import (
    LabError,
    LabInputError,
    Link,
    format_rate,
    parse_latency,
    parse_link,
    parse_links,
    parse_rate,
)
from gossamer.core.errors import GossamerError

rates = st.none() | st.integers(10_000, 100_000_000_000)
links = st.builds(Link, rates, rates)


@given(rates)
def test_a_rate_survives_writing_and_reading(rate: int | None) -> None:
    assert parse_rate(format_rate(rate)) == rate


@given(st.lists(links, min_size=1, max_size=8))
def test_links_survive_writing_and_reading(wanted: list[Link]) -> None:
    assert parse_links(",".join(map(str, wanted)), len(wanted)) == tuple(wanted)
    assert parse_links(wanted, len(wanted)) == tuple(wanted)


@given(st.text(max_size=20) | st.text(alphabet="0123456789.kmgbits/ ", max_size=12))
def test_any_text_is_a_rate_or_a_clear_error(text: str) -> None:
    with contextlib.suppress(LabError):
        rate = parse_rate(text)
        assert rate is None or 10_000 <= rate <= 100_000_000_000


@given(st.text(alphabet="0123456789.kmgbits/, ", max_size=12), st.integers(1, 4))
def test_any_text_is_a_list_of_links_or_a_clear_error(text: str, hosts: int) -> None:
    with contextlib.suppress(LabError):
        assert len(parse_links(text, hosts)) == hosts


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ("200", "'200mbit'"),
        ("200m", "'200mbit'"),
        ("200Mbps", "'1600mbit', if you meant bytes"),
        ("25MB/s", "'200mbit', if you meant bytes"),
        ("200mbit/s", "'200mbit'"),
        ("1.5 gbit", "'1.5gbit'"),
        (".5gbit", "'0.5gbit'"),
        ("none", "'unshaped'"),
        ("", "'unshaped'"),
        ("0mbit", "between 10kbit and 100gbit"),
        ("-1mbit", "kbit, mbit or gbit"),
        ("9" * 400 + "mbit", "kbit, mbit or gbit"),
        ("inf", "'unshaped'"),
        ("1/2/3mbit", "3 rates"),
        ("1gbit/", "no rate after its '/'"),
        ("/1gbit", "no rate before its '/'"),
        ("/", "no rate before its '/'"),
    ],
)
def test_nonsense_is_refused_with_the_nearest_correct_form(text: str, nearest: str) -> None:
    with pytest.raises(GossamerError) as caught:
        parse_link(text)
    assert nearest in str(caught.value)


def test_one_rate_serves_all_and_a_wrong_number_is_refused() -> None:
    assert parse_links("200mbit", 3) == (Link(200_000_000, 200_000_000),) * 3
    assert parse_links(None, 2) == (Link(), Link())
    assert parse_links("1gbit, 100mbit/20mbit", 2)[1] == Link(100_000_000, 20_000_000)


def test_one_host_may_have_a_link_of_its_own() -> None:
    usual, slow = Link(200_000_000, 200_000_000), Link(20_000_000, 5_000_000)
    assert parse_links("200mbit, 3:20mbit/5mbit", 4) == (usual, usual, usual, slow)
    assert parse_links("unshaped,0:20mbit/5mbit,2:200mbit", 3) == (slow, Link(), usual)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("200mbit,4:20mbit", "no host 4 among 4, which are numbered from 0"),
        ("200mbit,x:20mbit", "write HOST:RATE, such as '3:20mbit'"),
        ("200mbit,1:20mbit,1:30mbit", "host 1 has two rates"),
        ("200mbit,1:20", "the unit is missing"),
        ("3:20mbit", "is not a rate"),
        ("200mbit,1gbit,3:20mbit", "3 rates for 4 hosts"),
    ],
)
def test_a_host_that_is_not_there_is_refused(text: str, words: str) -> None:
    with pytest.raises(LabError, match=words):
        parse_links(text, 4)
    with pytest.raises(LabInputError, match="3 rates for 4 hosts"):
        parse_links("1gbit,1gbit,1gbit", 4)


@pytest.mark.parametrize(("rates", "place"), [("1gbit,", 2), (",1gbit", 1), (",", 1), ("1gbit, ,", 2)])
def test_a_comma_too_many_is_found(rates: str, place: int) -> None:
    for hosts in (1, 2, 4):
        with pytest.raises(LabInputError, match=f"^rate {place} of ."):
            parse_links(rates, hosts)


@pytest.mark.parametrize("text", ["", "10", "0ms", "-1ms", "1h", "11s", "ms"])
def test_a_wrong_delay_is_refused(text: str) -> None:
    with pytest.raises(LabError, match="delay"):
        parse_latency(text)
