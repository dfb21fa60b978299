"""A lab's network is as slow as it says, its counters are right, and its programs are told where they are."""

from collections.abc import Callable

import pytest

from gossamer.bench.lab import LabError, LabResult, available

pytestmark = pytest.mark.lab
Run = Callable[..., tuple[LabResult, list[list[str]]]]


@pytest.mark.parametrize(
    ("rates", "slowest"),
    [
        ("200mbit", 200e6),
        ("50mbit", 50e6),
        ("1gbit,100mbit/1gbit", 100e6),  # rank 1 sends: its way up counts
        ("1gbit/60mbit,1gbit", 60e6),  # rank 0 receives: its way down counts
    ],
)
def test_bytes_take_as_long_as_the_rate_says(run: Run, rates: str, slowest: float) -> None:
    size, seen = int(slowest / 8 * 0.6), [0.0]
    while max(seen) < 0.85 * slowest and len(seen) < 7:  # other work on the machine can only make it slower
        result, lines = run(2, rates, "sender.py", str(size))
        assert result.exit_code == 0
        seen.append(size * 8 / float(lines[1][0]))
        assert seen[-1] < 1.05 * slowest
    assert max(seen) > 0.85 * slowest, seen


def fastest(run: Run, rates: str | None, size: int, enough: float) -> float:
    """Bits per second, of several tries: other work on the machine can only make it slower."""
    seen = [0.0]
    while max(seen) <= enough and len(seen) < 7:
        _, lines = run(2, rates, "sender.py", str(size))
        seen.append(size * 8 / float(lines[1][0]))
    return max(seen)


def test_the_fast_direction_of_an_uneven_link_is_fast(run: Run) -> None:
    assert fastest(run, "10mbit/1gbit,1gbit/10mbit", 8_000_000, 100e6) > 100e6


def test_counters_match_the_bytes_that_were_sent(run: Run) -> None:
    """Of several tries: where processes have no processor, TCP sends small pieces, and some of them twice."""
    size = 4_000_000
    for _ in range(4):
        result, _ = run(2, "200mbit", "sender.py", str(size))
        receiver, sender = result.hosts
        if sender.sent_bytes <= 1.05 * size:
            break
    assert size <= sender.sent_bytes <= 1.05 * size
    assert size <= receiver.received_bytes <= 1.05 * size
    assert receiver.sent_bytes < 0.05 * size


@pytest.mark.parametrize("rate", ["10kbit", "64.5kbit/100gbit", "100gbit"])
def test_the_slowest_and_the_fastest_rate_can_be_made(run: Run, rate: str) -> None:
    result, _ = run(2, rate, "true")
    assert result.exit_code == 0


def test_a_silent_program_sends_nothing(run: Run) -> None:
    result, _ = run(3, "10mbit", "sleep", "2")  # what a kernel says of its own accord it says within two seconds
    assert [host.sent_bytes + host.received_bytes for host in result.hosts] == [0, 0, 0]


def test_an_unshaped_link_is_not_slowed(run: Run) -> None:
    assert fastest(run, None, 20_000_000, 1e9) > 1e9


def test_each_program_knows_its_place(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT GLOO_SOCKET_IFNAME OMP_NUM_THREADS"
    shown = " ".join(f"${name}" for name in names.split()) + " ${TORCHELASTIC_USE_AGENT_STORE-clean} $MINE"
    result, lines = run(2, "1gbit", "sh", "-c", f"echo {shown}; hostname", env={"MINE": "é ok"})
    assert result.exit_code == 0
    place = "{} 2 0 1 10.0.0.1 29500 lab0 1 clean é ok"
    assert lines == [[place.format(0), "host0"], [place.format(1), "host1"]]


def test_gloo_reduces_over_the_lab(run: Run) -> None:
    size = 500_000
    result, lines = run(2, "200mbit", "reduce.py", str(size))
    assert result.exit_code == 0, lines
    assert [one[-1].split()[0] for one in lines] == ["[3.0]", "[3.0]"]
    for host, own in zip(result.hosts, lines):
        assert size * 4 <= host.sent_bytes < size * 4 * 1.05
        assert int(own[-1].split()[1]) <= host.sent_bytes
    assert not any("hostname" in line for one in lines for line in one)


def test_latency_delays_or_is_refused(run: Run) -> None:
    if available(latency=True) is not None:
        with pytest.raises(LabError, match="netem"):
            run(2, "200mbit", "true", latency="10ms")
        return
    _, lines = run(2, "200mbit", "sender.py", "1", latency="50ms")
    assert 0.09 < float(lines[1][0]) < 5  # other work on the machine may add to it


SHOWN = (
    "tc qdisc show dev lab0 | head -1; until tc qdisc show dev lab0 | grep -q 3Mbit; do sleep 0.1; done; echo changed"
)


def test_rates_change_while_a_lab_runs(run: Run) -> None:
    """Each host waits until its own link has the rate that comes after the second one."""
    result, lines = run(2, "200mbit", "sh", "-c", SHOWN, later=["0.3s:7mbit", "0.6s:3mbit"], timeout=60)
    assert result.exit_code == 0
    assert all("rate 200Mbit" in shown and changed == "changed" for shown, changed in lines)
