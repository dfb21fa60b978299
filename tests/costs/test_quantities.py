"""Quantities: what is read, and what is refused with the way to write it."""

from math import inf

import pytest

from gossamer import CostError
from gossamer.costs import quantities


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("200mbit", 25e6),
        ("2.5 Gbit/s", 312.5e6),
        ("10Gbps", 1.25e9),
        ("300 GB/s", 300e9),
        ("1 kbit", 125.0),
        ("unshaped", inf),
    ],
)
def test_rates_are_bytes_per_second(text: str, value: float) -> None:
    assert quantities.rate(text) == value


@pytest.mark.parametrize("text", ["", "fast", "200", "200m", "200 mhz", "0mbit", "-1gbit", "nan gbit", "1e999gbit"])
def test_a_rate_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(CostError):
        quantities.rate(text)


def test_a_rate_in_small_b_is_refused_since_it_may_mean_either() -> None:
    with pytest.raises(CostError, match=r"bits or bytes.*10 Gbit/s or 10 GB/s"):
        quantities.rate("10 Gb/s")


@pytest.mark.parametrize("text", ["", "3", "3 parsecs", "-1s", "1:30"])
def test_a_time_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(CostError, match=r"time|negative"):
        quantities.seconds(text)


@pytest.mark.parametrize("text", ["24", "0 GB", "24 Gbit", "-1 GB"])
def test_a_size_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(CostError):
        quantities.size(text)


@pytest.mark.parametrize("text", ["2", "2 USD", "2 USD/GB", "-2 USD/h", "USD/h"])
def test_a_price_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(CostError, match=r"USD/h|price"):
        quantities.price(text, "h")


@pytest.mark.parametrize("value", [1.0, 123.0, 25e6, 3.125e9, 1e15])
def test_what_is_said_of_a_rate_can_be_read_again(value: float) -> None:
    assert quantities.rate(quantities.say_rate(value)) == pytest.approx(value, rel=5e-3)


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (577, "577 parameters"),
        (4_810, "4.81 k parameters"),
        (124_439_808, "124 M parameters"),
        (6_738_415_616, "6738 M parameters"),
    ],
)
def test_a_number_of_parameters_is_said_without_powers_of_ten(count: int, said: str) -> None:
    assert quantities.say_parameters(count) == said
