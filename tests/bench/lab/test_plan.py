"""What can be checked of a lab without making one: its plan, its counters, its lines, its refusals."""

import resource
from collections.abc import Iterator

import pytest

from gossamer.bench.lab import (
    Counters,
    LabError,
    LabInputError,
    Link,
    access,
    available,
    in_lab,
    own_counters,
    privilege,
    read_counters,
    run_lab,
)
from gossamer.bench.lab.counters import parse_devices
from gossamer.bench.lab.network import buckets, plan_changes, plan_hosts, segment, shape
from gossamer.bench.lab.output import LineSplitter
from gossamer.bench.lab.rates import parse_later


def test_a_shaper_limits_and_a_delay_comes_before_it() -> None:
    assert shape("lab0", None, None) == ""
    assert shape("lab0", 200_000_000, None).startswith("qdisc add dev lab0 root tbf rate 200000000bit")
    delay, rate = shape("lab0", 200_000_000, 10_000).splitlines()
    assert delay.startswith("qdisc add dev lab0 root handle 1: netem delay 10000us")
    assert rate.startswith("qdisc add dev lab0 parent 1:1 handle 10: tbf rate 200000000bit")


@pytest.mark.parametrize("rate", [10_000, 10_000_000, 200_000_000, 1_000_000_000, 100_000_000_000])
def test_a_segment_with_all_its_headers_fits_the_burst_of_the_slowest_link(rate: int) -> None:
    size, burst = segment((Link(rate, None), Link())), buckets(rate)[0]
    assert size + 66 * (size // 1448 + 1) <= burst
    assert burst <= max(9_000, rate // 8 // 1000)


def test_later_rates_are_planned_in_the_order_of_time_for_both_ends_of_each_cable() -> None:
    early, late = plan_changes(parse_later(["9.5s:1gbit", "2:5mbit/7mbit,1:3mbit"], 2), None)
    assert (early["at"], late["at"]) == (2.0, 9.5)
    assert [line.split(" burst")[0] for line in early["hosts"]] == [
        "qdisc replace dev lab0 root tbf rate 5000000bit",
        "qdisc replace dev lab0 root tbf rate 3000000bit",
    ]
    assert [line.split(" burst")[0] for line in early["tc"].splitlines()] == [
        "qdisc replace dev port0 root tbf rate 7000000bit",
        "qdisc replace dev port1 root tbf rate 3000000bit",
    ]
    slow = plan_hosts((Link(), Link()), None, parse_later(["1s:10kbit"], 2))
    assert (
        slow[0]["ip"] == plan_hosts((Link(10_000, None), Link()), None)[0]["ip"]
    )  # segments fit the slowest rate to come


@pytest.mark.parametrize(
    ("later", "why"),
    [
        (["50mbit"], "write when and how much"),
        (["soon:50mbit"], "write when and how much"),
        (["3s:"], "write when and how much"),
        (["3s:50"], "the unit is missing"),
        (["3s:unshaped"], "cannot be lifted while a lab runs"),
        (["3s:1mbit", "3.0:2mbit"], "of the same moment"),
        (["3s:1mbit,2mbit,3mbit"], "3 rates for 2 hosts"),
    ],
)
def test_later_rates_that_are_none_are_refused(later: list[str], why: str) -> None:
    with pytest.raises(LabInputError, match=why):
        run_lab(2, None, ["true"], later=later)


def test_lines_come_whole_however_the_bytes_are_cut() -> None:
    lines = LineSplitter()
    heard = [line for part in (b"one\nt", b"wo\r\n", b"\xff\n\nla", b"st", b"") for line in lines.feed(part)]
    assert heard == ["one", "two", "\ufffd", "", "last"]
    assert list(lines.feed(b"x" * 70_000)) == ["x" * 70_000]


def test_the_table_of_devices_is_read() -> None:
    text = "a\nb\n  lo: 1 2 0 0 0 0 0 0 3 4 0 0 0 0 0 0\nlab0:50 6 0 0 0 0 0 0 70 8 0 0 0 0 0 0\n"
    table = parse_devices(text)
    assert table["lab0"] == Counters(sent_bytes=70, received_bytes=50, sent_packets=8, received_packets=6)
    assert table["lab0"] - Counters(10, 10, 1, 1) == Counters(60, 40, 7, 5)


def test_outside_a_lab_own_counters_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOSSAMER_LAB_IFACE", raising=False)
    assert not in_lab()
    with pytest.raises(LabError, match="not inside a lab"):
        own_counters()
    with pytest.raises(LabError, match="no network interface 'nope0'"):
        read_counters("nope0")


@pytest.fixture
def afresh() -> Iterator[None]:
    """Forget which tools and ways were found, before and after."""
    caches = (access.find_tool, access.find_way)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.mark.usefixtures("afresh")
def test_without_tools_the_reason_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(access, "_ADMIN_PATH", "/nowhere")
    assert "sudo apt install iproute2" in (available() or "")
    with pytest.raises(LabError, match="'ip'"):
        run_lab(2, "200mbit", ["true"])


@pytest.mark.usefixtures("afresh")
@pytest.mark.parametrize(
    ("user", "way", "how"), [(0, "unshare --net", "as root"), (1000, "unshare --user --map-root-user", "in a user")]
)
def test_it_is_known_how_a_lab_is_made(monkeypatch: pytest.MonkeyPatch, user: int, way: str, how: str) -> None:
    monkeypatch.setattr(access, "find_tool", lambda name: name)
    monkeypatch.setattr(access, "_try", lambda way, trial: "")
    monkeypatch.setattr("os.geteuid", lambda: user)
    assert " ".join(access.find_way()).startswith(way)
    assert privilege().startswith(how)


@pytest.mark.usefixtures("afresh")
def test_without_privilege_the_reason_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "find_tool", lambda name: name)
    monkeypatch.setattr(access, "_try", lambda way, trial: "unshare failed: Operation not permitted")
    reason = available() or ""
    assert "Operation not permitted" in reason
    assert any(cure in reason for cure in ("root", "sysctl", "--privileged"))


@pytest.mark.parametrize(
    ("hosts", "command", "options"),
    [(0, ["true"], {}), (251, ["true"], {}), (2, [], {}), (2, "true", {}), (2, ["true"], {"timeout": 0.0})],
)
def test_nonsense_is_refused_before_anything_starts(hosts: int, command: list[str], options: dict[str, float]) -> None:
    with pytest.raises(LabInputError):
        run_lab(hosts, None, command, **options)  # type: ignore[arg-type]


def test_too_few_open_files_are_refused_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 4096))
    with pytest.raises(LabError, match="ulimit -n 450"):
        run_lab(200, None, ["true"])
